"""Turns: so many threads do something at a time, and the others wait, about in the order in which they came."""

from __future__ import annotations

from queue import SimpleQueue


class Turns:
    """A turn lasts for a `with` block, and ends with it, whatever happens there. Waits are as long as others' turns."""

    def __init__(self, at_once: int) -> None:
        """at_once: how many may have a turn at the same time, 1 or more."""
        assert at_once >= 1
        self._free: SimpleQueue[None] = SimpleQueue()
        for _ in range(at_once):
            self._free.put(None)

    def __enter__(self) -> None:
        self._free.get()

    def __exit__(self, *_: object) -> None:
        self._free.put(None)
