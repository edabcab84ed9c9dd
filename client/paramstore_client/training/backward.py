"""Says once, at its very end, that a backward is over.

`torch.autograd.backward` runs as a *graph task* with a number that is never used again. Callbacks queued in a task run after all of
its nodes, DDP's and FSDP2's among them (that is how both end a backward), in the thread that called backward.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

NO_TASK = -1


class BackwardEnd:
    """Calls `fn` at the end of each graph task in which `watch` was called, once. What `fn` raises, the backward raises."""

    def __init__(self, fn: Callable[[], None]) -> None:
        self._fn = fn
        self._watched: set[int] = set()

    def watch(self) -> bool:
        """True within a backward, whose end is watched from here on; False outside of any."""
        task = torch._C._current_graph_task_id()
        if task == NO_TASK:
            self._watched.clear()  # a backward that raised never came to its end
            return False
        if task not in self._watched:
            self._watched.add(task)
            torch.autograd.Variable._execution_engine.queue_callback(lambda: self._ended(task))
        return True

    def _ended(self, task: int) -> None:
        if task in self._watched:
            self._watched.discard(task)
            with torch.no_grad():
                self._fn()
