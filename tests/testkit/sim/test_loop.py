"""The simulated loop: time jumps, order repeats, and whoever waits for ever is found out."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from random import Random
from typing import Any

import pytest

from paramstore_testkit.sim.loop import Stalled, VirtualLoop


def run(main: Callable[[VirtualLoop], Coroutine[Any, Any, Any]], *, seed: int = 1, shuffles: bool = False) -> Any:
    loop = VirtualLoop(Random(seed), shuffles=shuffles)
    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        return runner.run(main(loop))


def test_an_hour_is_over_at_once() -> None:
    async def main(loop: VirtualLoop) -> float:
        await asyncio.sleep(3600.0)
        return loop.time()

    assert run(main) == pytest.approx(3600.0, abs=0.01)


def test_timers_go_off_in_order_of_their_times() -> None:
    async def main(loop: VirtualLoop) -> list[int]:
        seen: list[int] = []
        for seconds in (3, 1, 2):
            loop.call_later(seconds, seen.append, seconds)
        await asyncio.sleep(4)
        return seen

    assert run(main) == [1, 2, 3]


def test_a_cancelled_timer_does_not_hold_time_up() -> None:
    async def main(loop: VirtualLoop) -> float:
        loop.call_later(50, print).cancel()
        await asyncio.sleep(1)
        return loop.time()

    assert run(main) < 2


async def callbacks(loop: VirtualLoop) -> list[int]:
    seen: list[int] = []
    for number in range(20):
        loop.call_soon(seen.append, number)
    await asyncio.sleep(1)
    return seen


def test_callbacks_run_in_order_unless_they_are_shuffled_and_a_seed_shuffles_them_always_the_same() -> None:
    assert run(callbacks) == list(range(20))
    shuffled = run(callbacks, shuffles=True)
    assert shuffled != list(range(20))
    assert sorted(shuffled) == list(range(20))
    assert run(callbacks, shuffles=True) == shuffled
    assert run(callbacks, shuffles=True, seed=2) != shuffled


def test_tasks_begin_in_the_order_in_which_they_were_made_even_if_all_else_is_shuffled() -> None:
    async def main(loop: VirtualLoop) -> list[int]:
        seen: list[int] = []

        async def begin(number: int) -> None:
            seen.append(number)

        tasks = [loop.create_task(begin(number)) for number in range(20)]
        for _ in range(20):
            loop.call_soon(lambda: None)
        await asyncio.gather(*tasks)
        return seen

    assert run(main, shuffles=True) == list(range(20))


def test_who_waits_for_what_never_comes_is_found_out() -> None:
    async def main(loop: VirtualLoop) -> None:
        await loop.create_future()

    with pytest.raises(Stalled):
        run(main)


def test_a_failed_check_ends_the_run_although_its_caller_swallows_it() -> None:
    async def main(loop: VirtualLoop) -> None:
        loop.fail(ValueError("first"))
        loop.fail(ValueError("second"))
        await asyncio.sleep(10)

    with pytest.raises(ValueError, match="first"):
        run(main)


def test_an_exception_that_nobody_handles_ends_the_run() -> None:
    async def main(loop: VirtualLoop) -> None:
        loop.call_soon(lambda: 1 // 0)
        await asyncio.sleep(10)

    with pytest.raises(AssertionError, match="ZeroDivisionError"):
        run(main)


def test_tasks_are_known_until_they_are_done_and_forgotten_timers_stay_silent() -> None:
    async def main(loop: VirtualLoop) -> tuple[int, int, list[int]]:
        seen: list[int] = []
        task = loop.create_task(asyncio.sleep(1))
        before = len(loop.alive)
        await task
        loop.call_later(1, seen.append, 1)
        loop.forget_timers()
        await asyncio.sleep(5)
        return before, len(loop.alive), seen

    assert run(main) == (2, 1, [])
