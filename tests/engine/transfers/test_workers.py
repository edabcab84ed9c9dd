"""Real threads: results and bugs reach the waiter, a lane has the threads it was given, lanes do not wait for each other."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from paramstore.engine.transfers.workers import ThreadWorkers, Workers
from paramstore.testing.worker_contract import LIMIT_S, WorkersContract


class TestThreadWorkers(WorkersContract):
    def make(self, loop: asyncio.AbstractEventLoop) -> Workers:
        return ThreadWorkers(loop)


def run(scenario: Callable[[ThreadWorkers], Coroutine[Any, Any, None]]) -> None:
    async def with_workers() -> None:
        workers = ThreadWorkers(asyncio.get_running_loop())
        await asyncio.wait_for(scenario(workers), LIMIT_S)

    asyncio.run(with_workers())


def start(workers: ThreadWorkers, lane: str, job: Callable[[], Any]) -> asyncio.Future[Any]:
    future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
    workers.run(lane, lambda _: job(), None, lambda result, error: future.set_result(result if error is None else error))
    return future


def test_a_lane_of_two_threads_runs_two_calls_at_once() -> None:
    async def scenario(workers: ThreadWorkers) -> None:
        workers.add_lane("lane", 2)
        barrier = threading.Barrier(2, timeout=LIMIT_S)
        assert sorted(await asyncio.gather(*(start(workers, "lane", barrier.wait) for _ in range(2)))) == [0, 1]
        workers.close()

    run(scenario)


def test_a_lane_of_one_thread_runs_its_calls_in_order_on_that_thread() -> None:
    async def scenario(workers: ThreadWorkers) -> None:
        workers.add_lane("lane", 1)
        ran: list[int] = []

        def job(number: int) -> int:
            ran.append(number)
            return threading.get_ident()

        idents = await asyncio.gather(*(start(workers, "lane", lambda number=number: job(number)) for number in range(20)))
        assert ran == list(range(20))
        assert len(set(idents)) == 1
        assert idents[0] != threading.get_ident()
        workers.close()

    run(scenario)


def test_a_lane_that_is_busy_holds_up_no_other_and_not_the_loop() -> None:
    async def scenario(workers: ThreadWorkers) -> None:
        workers.add_lane("slow", 1)
        workers.add_lane("quick", 1)
        may_end = threading.Event()
        slow = start(workers, "slow", lambda: may_end.wait(LIMIT_S))
        assert await start(workers, "quick", lambda: "quick") == "quick"
        assert not slow.done()
        may_end.set()
        assert await slow is True
        workers.close()

    run(scenario)


def test_every_thread_of_a_lane_is_prepared() -> None:
    async def scenario(workers: ThreadWorkers) -> None:
        prepared: list[int] = []
        barrier = threading.Barrier(3, timeout=LIMIT_S)
        workers.add_lane("lane", 3, prepare=lambda: prepared.append(threading.get_ident()))
        await asyncio.gather(*(start(workers, "lane", barrier.wait) for _ in range(3)))
        assert len(set(prepared)) == 3
        workers.close()

    run(scenario)


def test_closing_waits_for_what_runs_and_ends_the_threads() -> None:
    async def scenario(workers: ThreadWorkers) -> None:
        workers.add_lane("lane", 2)
        threads = [thread for thread in threading.enumerate() if thread.name.startswith("paramstore-lane")]
        ran: list[int] = []
        for number in range(5):
            workers.run("lane", lambda _, number=number: ran.append(number), None, lambda result, error: None)
        workers.close()
        assert sorted(ran) == list(range(5))
        assert len(threads) == 2
        assert not any(thread.is_alive() for thread in threads)

    run(scenario)


def test_a_thread_whose_loop_is_closed_ends_quietly() -> None:
    loop = asyncio.new_event_loop()
    workers = ThreadWorkers(loop)
    workers.add_lane("orphan", 1)
    loop.close()
    workers.run("orphan", lambda _: None, None, lambda result, error: pytest.fail("nobody is there to be told"))
    (thread,) = [thread for thread in threading.enumerate() if thread.name.startswith("paramstore-orphan")]
    thread.join(LIMIT_S)
    assert not thread.is_alive()
