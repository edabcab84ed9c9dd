"""Workers without threads keep the contract of real ones, and repeat exactly."""

from __future__ import annotations

import asyncio

from paramstore.engine.transfers.workers import Workers
from paramstore.errors import ParamStoreError
from paramstore.testing.worker_contract import WorkersContract
from paramstore.testing.workers import InlineWorkers


class TestInlineWorkers(WorkersContract):
    def make(self, loop: asyncio.AbstractEventLoop) -> Workers:
        return InlineWorkers(loop)


class TestShuffledInlineWorkers(WorkersContract):
    def make(self, loop: asyncio.AbstractEventLoop) -> Workers:
        return InlineWorkers(loop, seed=3)


def order(seed: int | None, calls: int = 12) -> list[int]:
    """In which order calls that wait together are run."""

    async def scenario() -> list[int]:
        workers = InlineWorkers(asyncio.get_running_loop(), seed=seed)
        ran: list[int] = []
        for number in range(calls):
            workers.run("lane", ran.append, number, lambda result, error: None)
        assert workers.waiting == calls
        while workers.waiting:
            await asyncio.sleep(0)
        assert workers.ran == calls
        return ran

    return asyncio.run(scenario())


def test_without_a_seed_calls_run_in_the_order_they_came() -> None:
    assert order(None) == list(range(12))


def test_a_seed_decides_the_order_and_repeats_it() -> None:
    assert order(1) == order(1)
    assert order(1) != order(2)
    assert sorted(order(1)) == list(range(12))


def test_paused_workers_start_nothing_until_they_are_resumed() -> None:
    async def scenario() -> None:
        workers = InlineWorkers(asyncio.get_running_loop())
        told: list[object] = []

        def done(result: object, error: ParamStoreError | None) -> None:
            told.append(result)

        workers.run("lane", str, 1, done)
        workers.pause()
        workers.run("lane", str, 2, done)
        for _ in range(5):
            await asyncio.sleep(0)
        assert told == []
        assert workers.waiting == 2
        workers.resume()
        for _ in range(5):
            await asyncio.sleep(0)
        assert told == ["1", "2"]

    asyncio.run(scenario())


def test_closed_workers_drop_what_waits() -> None:
    async def scenario() -> None:
        workers = InlineWorkers(asyncio.get_running_loop())
        workers.run("lane", lambda _: 1 / 0, None, lambda result, error: None)
        workers.close()
        for _ in range(3):
            await asyncio.sleep(0)
        assert workers.ran == 0

    asyncio.run(scenario())
