"""Threads that move bytes. A worker gets a function and calls it; it never sees a table.

`ThreadWorkers` is what a daemon uses; `paramstore.testing.workers.InlineWorkers` runs the same calls on the loop itself.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Hashable
from queue import SimpleQueue
from typing import Any, Protocol

from paramstore.errors import ParamStoreError

logger = logging.getLogger(__name__)

Call = tuple[Callable[[Any], Any], Any, Callable[[Any, ParamStoreError | None], None]]


class Workers(Protocol):
    """Runs calls of a lane in that lane's threads."""

    def add_lane(self, lane: Hashable, threads: int, *, prepare: Callable[[], None] | None = None) -> None:
        """Adds a lane with so many threads. prepare: called first in each of them."""
        ...

    def run(
        self, lane: Hashable, function: Callable[[Any], Any], argument: Any, done: Callable[[Any, ParamStoreError | None], None]
    ) -> None:
        """Calls `function(argument)` in a thread of `lane`, and `done(result, error)` on the loop's thread afterwards."""
        ...

    def close(self) -> None:
        """Ends the threads when what they run is done."""
        ...


class ThreadWorkers:
    """Runs calls in threads: one queue and a few threads per lane."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._queues: dict[Hashable, SimpleQueue[Call | None]] = {}
        self._threads: list[tuple[Hashable, threading.Thread]] = []

    def add_lane(self, lane: Hashable, threads: int, *, prepare: Callable[[], None] | None = None) -> None:
        queue: SimpleQueue[Call | None] = SimpleQueue()
        self._queues[lane] = queue
        for index in range(threads):
            thread = threading.Thread(target=self._work, args=(queue, prepare), name=f"paramstore-{lane}-{index}", daemon=True)
            thread.start()
            self._threads.append((lane, thread))

    def run(
        self, lane: Hashable, function: Callable[[Any], Any], argument: Any, done: Callable[[Any, ParamStoreError | None], None]
    ) -> None:
        self._queues[lane].put((function, argument, done))

    def _work(self, queue: SimpleQueue[Call | None], prepare: Callable[[], None] | None) -> None:
        if prepare is not None:
            prepare()
        while (call := queue.get()) is not None:
            function, argument, done = call
            result, error = outcome_of(function, argument)
            try:
                self._loop.call_soon_threadsafe(done, result, error)
            except RuntimeError:
                return  # the loop is closed: nobody waits any more
            del call, function, argument, done, result, error

    def close(self) -> None:
        for lane, _ in self._threads:
            self._queues[lane].put(None)
        for _, thread in self._threads:
            thread.join(timeout=5.0)
        self._threads.clear()


def outcome_of(function: Callable[[Any], Any], argument: Any) -> tuple[Any, ParamStoreError | None]:
    """Makes the call; returns its result and its error. A bug in it must reach whoever waits, not end the thread."""
    try:
        return function(argument), None
    except ParamStoreError as error:
        return None, error
    except Exception as bug:
        logger.exception("worker failed")
        return None, ParamStoreError(f"internal error in a worker: {bug!r}")
