"""The contract of every `Workers`, as tests: an implementation's test class inherits them and gives `make`."""

from __future__ import annotations

import asyncio
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from typing import Any

from paramstore.engine.transfers.workers import Workers
from paramstore.errors import ParamStoreError, VolumeError

LIMIT_S = 5.0
Outcome = tuple[Any, ParamStoreError | None]


class WorkersContract(ABC):
    """Subclass it as `TestX`, with `make`."""

    @abstractmethod
    def make(self, loop: asyncio.AbstractEventLoop) -> Workers:
        """Makes new workers without lanes."""

    def outcomes(self, *calls: Callable[[Any], Any], prepare: Callable[[], None] | None = None) -> list[Outcome]:
        """Gives what `done` was told of each call, all of them made at once in one lane of two threads with the argument 21."""

        async def scenario() -> list[Outcome]:
            loop = asyncio.get_running_loop()
            workers = self.make(loop)
            workers.add_lane("lane", 2, prepare=prepare)
            told: dict[int, Outcome] = {}
            all_told = asyncio.Event()

            def done(number: int, result: Any, error: ParamStoreError | None) -> None:
                assert threading.get_ident() == loop_thread, "told on another thread than the loop's"
                assert number not in told, "told twice"
                told[number] = result, error
                if len(told) == len(calls):
                    all_told.set()

            loop_thread = threading.get_ident()
            for number, function in enumerate(calls):
                workers.run("lane", function, 21, partial(done, number))
            assert not told, "told before the caller's turn was over"
            await asyncio.wait_for(all_told.wait(), LIMIT_S)
            workers.close()
            return [told[number] for number in range(len(calls))]

        return asyncio.run(scenario())

    def test_a_result_comes_back_and_no_error(self) -> None:
        assert self.outcomes(lambda argument: argument * 2) == [(42, None)]

    def test_every_call_is_told_once(self) -> None:
        calls = [lambda _, number=number: number for number in range(20)]
        assert self.outcomes(*calls) == [(number, None) for number in range(20)]

    def test_an_error_of_ours_comes_back_as_it_is(self) -> None:
        error = VolumeError("volume 3 is broken")

        def fail(_: object) -> None:
            raise error

        ((result, found),) = self.outcomes(fail)
        assert result is None
        assert found is error

    def test_a_bug_reaches_who_waits_and_the_lane_goes_on(self) -> None:
        def bug(_: object) -> None:
            raise ZeroDivisionError("nobody thought of it")

        *bugs, good = self.outcomes(bug, bug, bug, lambda _: "good")
        for result, error in bugs:
            assert result is None
            assert type(error) is ParamStoreError
            assert "ZeroDivisionError('nobody thought of it')" in str(error)
        assert good == ("good", None)

    def test_a_lane_is_prepared_before_its_first_call(self) -> None:
        seen: list[str] = []
        self.outcomes(lambda _: seen.append("call"), prepare=lambda: seen.append("prepare"))
        assert seen[0] == "prepare"
