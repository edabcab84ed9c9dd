"""Workers without threads: calls run on the loop, in an order that a seed decides, so that a test repeats exactly."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable
from random import Random
from typing import Any

from paramstore.engine.transfers.workers import outcome_of
from paramstore.errors import ParamStoreError


class InlineWorkers:
    """Each call runs in a later turn of the loop. With a seed, calls that wait together run in random order."""

    def __init__(self, loop: asyncio.AbstractEventLoop, *, seed: int | None = None) -> None:
        self._loop = loop
        self._random = Random(seed) if seed is not None else None
        self._calls: list[Callable[[], None]] = []
        self._is_paused = False
        self.ran = 0

    def add_lane(self, lane: Hashable, threads: int, *, prepare: Callable[[], None] | None = None) -> None:
        if prepare is not None:
            prepare()

    def run(
        self, lane: Hashable, function: Callable[[Any], Any], argument: Any, done: Callable[[Any, ParamStoreError | None], None]
    ) -> None:
        def call() -> None:
            self.ran += 1
            done(*outcome_of(function, argument))

        self._calls.append(call)
        if not self._is_paused:
            self._loop.call_soon(self._run_one)

    def _run_one(self) -> None:
        if self._calls and not self._is_paused:
            index = self._random.randrange(len(self._calls)) if self._random is not None else 0
            self._calls.pop(index)()

    def pause(self) -> None:
        """Lets calls pile up from here on: transfers stay under way until `resume`."""
        self._is_paused = True

    def resume(self) -> None:
        self._is_paused = False
        for _ in self._calls:
            self._loop.call_soon(self._run_one)

    @property
    def waiting(self) -> int:
        return len(self._calls)

    def close(self) -> None:
        self._calls.clear()
