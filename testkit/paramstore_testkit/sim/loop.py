"""An event loop whose time is simulated and whose order a seed decides: the same seed runs the same callbacks in the same order.

- Time stands while callbacks are ready (each turn takes TURN_S) and jumps to the next timer when none is.
- There is no selector: simulated sockets say when they can be read or written (`tell_readable`, `tell_writable`).
- With `shuffles`, callbacks that are ready in one turn run in random order. Only first steps of tasks keep their order: code
  that starts tasks may rely on that, and nobody on the order of what workers, timers and sockets bring.
- Tasks are numbered, and no two are equal: sets of them are iterated in the same order in every process.
"""

from __future__ import annotations

import asyncio
import heapq
from collections import deque
from collections.abc import Callable
from random import Random
from typing import Any

TURN_S = 1e-6
"""Time that one turn of the loop takes."""


class Stalled(Exception):
    """Nothing is ready and no timer is set, so whoever waits would wait for ever."""


class SimTask(asyncio.Task[Any]):
    """A task with a number instead of an address as its hash."""

    serial = 0

    def __hash__(self) -> int:
        return self.serial

    def __eq__(self, other: object) -> bool:
        return self is other


class VirtualLoop(asyncio.BaseEventLoop):
    """Owner of simulated time, of the order of callbacks and of who reads and writes which simulated socket."""

    _ready: deque[asyncio.Handle]
    _scheduled: list[asyncio.TimerHandle]

    def __init__(self, random: Random, *, shuffles: bool) -> None:
        super().__init__()
        self._random = random
        self._shuffles = shuffles
        self._now_s = 0.0
        self._readers: dict[int, tuple[Callable[..., object], tuple[Any, ...]]] = {}
        self._writers: dict[int, tuple[Callable[..., object], tuple[Any, ...]]] = {}
        self._can_read: Callable[[int], bool] = lambda _: False
        self._tasks_made = 0
        self.alive: dict[int, asyncio.Task[Any]] = {}
        """Tasks that are not done, by number, oldest first."""
        self.failure: BaseException | None = None
        """Error that ends the run at the next turn, of a check that failed within a callback: the product would swallow it."""
        self.turns = 0
        self.set_task_factory(self._make_task)
        self.set_exception_handler(self._unhandled)

    def time(self) -> float:
        return self._now_s

    def fail(self, error: BaseException) -> None:
        """Ends the run with `error`, unless something failed before."""
        if self.failure is None:
            self.failure = error

    def _unhandled(self, _: object, context: dict[str, Any]) -> None:
        error = context.get("exception")
        self.fail(AssertionError(f"unhandled in the loop: {context.get('message')}: {error!r}"))

    def _make_task(self, _: asyncio.AbstractEventLoop, coroutine: Any, **options: Any) -> asyncio.Task[Any]:
        """Makes a task of what asyncio hands its factory, which differs between Pythons: a context, in some the name too."""
        self._tasks_made += 1
        task = SimTask.__new__(SimTask)
        task.serial = self._tasks_made  # before `__init__`, which puts the task into sets
        task.__init__(coroutine, loop=self, **options)  # type: ignore[misc]
        self.alive[task.serial] = task
        task.add_done_callback(self._task_done)
        return task

    def _task_done(self, task: asyncio.Task[Any]) -> None:
        self.alive.pop(task.serial, None)  # type: ignore[attr-defined]

    # --- turns

    def _run_once(self) -> None:
        """Runs one turn, as `BaseEventLoop._run_once` does."""
        if self.failure is not None:
            raise self.failure
        ready, scheduled = self._ready, self._scheduled
        self.turns += 1
        self._now_s += TURN_S
        if not ready:
            while scheduled and scheduled[0].cancelled():
                _next_timer(scheduled)
            if scheduled:
                self._now_s = max(self._now_s, scheduled[0].when())
            elif not self._stopping:  # type: ignore[attr-defined]
                raise Stalled(f"at {self._now_s:.6f} s nothing is ready and no timer is set; {len(self.alive)} tasks wait")
        while scheduled and scheduled[0].when() <= self._now_s:
            ready.append(_next_timer(scheduled))
        if self._shuffles and len(ready) > 1:
            self._shuffle(ready)
        for _ in range(len(ready)):
            handle = ready.popleft()
            if not handle._cancelled:
                handle._run()

    def _shuffle(self, ready: deque[asyncio.Handle]) -> None:
        """Puts callbacks into random order; steps of tasks that nothing woke keep theirs among each other."""
        handles = list(ready)
        steps = [handle for handle in handles if _is_step(handle)]
        self._random.shuffle(handles)
        if len(steps) > 1:
            in_order = iter(steps)
            handles = [next(in_order) if _is_step(handle) else handle for handle in handles]
        ready.clear()
        ready.extend(handles)

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """Does nothing: cancelled timers leave when their time comes."""

    def _write_to_self(self) -> None:
        """Does nothing: nobody sleeps in a selector."""

    def forget_timers(self) -> None:
        """Forgets the timers that are set now."""
        for handle in self._scheduled:
            handle.cancel()
        self._scheduled.clear()

    # --- simulated sockets

    def watch_sockets(self, can_read: Callable[[int], bool]) -> None:
        """Registers `can_read`, which says whether a descriptor has something to read now."""
        self._can_read = can_read

    def add_reader(self, fd: Any, callback: Callable[..., object], *args: Any) -> None:  # type: ignore[override]
        self._readers[fd] = (callback, args)
        if self._can_read(fd):
            self.tell_readable(fd)

    def remove_reader(self, fd: Any) -> bool:
        return self._readers.pop(fd, None) is not None

    def add_writer(self, fd: Any, callback: Callable[..., object], *args: Any) -> None:  # type: ignore[override]
        self._writers[fd] = (callback, args)

    def remove_writer(self, fd: Any) -> bool:
        return self._writers.pop(fd, None) is not None

    def tell_readable(self, fd: int) -> None:
        """Calls the reader of `fd` in the next turn, and again while there is more."""
        if fd in self._readers:
            self.call_soon(self._read, fd)

    def _read(self, fd: int) -> None:
        reader = self._readers.get(fd)
        if reader is not None and self._can_read(fd):
            callback, args = reader
            callback(*args)
            if self._can_read(fd):
                self.tell_readable(fd)

    def tell_writable(self, fd: int) -> None:
        """Calls whoever waits to write to `fd` in the next turn."""
        if fd in self._writers:
            self.call_soon(self._write, fd)

    def _write(self, fd: int) -> None:
        writer = self._writers.get(fd)
        if writer is not None:
            callback, args = writer
            callback(*args)


def _next_timer(scheduled: list[asyncio.TimerHandle]) -> asyncio.TimerHandle:
    """Takes the next timer out of the heap."""
    handle = heapq.heappop(scheduled)
    handle._scheduled = False  # type: ignore[attr-defined]
    return handle


def _is_step(handle: asyncio.Handle) -> bool:
    return type(handle._callback).__name__ == "TaskStepMethWrapper"  # type: ignore[attr-defined]
