"""The runner keeps every lane busy, settles each transfer once, and lets callers wait without being able to stop a worker."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine, Hashable
from itertools import pairwise
from typing import Any, cast

import pytest

from paramstore.engine.tables.requests import Urgency
from paramstore.engine.transfers import runner as module
from paramstore.engine.transfers.runner import BACKGROUND_LANE, Runner, call, until_woken, volume_lane, wake
from paramstore.engine.transfers.scheduler import Transfer
from paramstore.errors import StoreUnavailable, TicketCancelled, VolumeError, WaitTimeout
from paramstore.testing.workers import InlineWorkers
from paramstore_testkit.stores.small_store import run as run_watched


class Bench:
    """A runner on workers of the loop; what ran, and what was settled, in order."""

    def __init__(self, **lanes: int) -> None:
        self.workers = InlineWorkers(asyncio.get_running_loop())
        self.runner = Runner(self.workers)
        for lane, count in lanes.items():
            self.runner.scheduler.add_lane(lane, count)
        self.ran: list[object] = []
        self.settled: list[Transfer] = []

    def submit(
        self, *pieces: object, lane: Hashable = "disk", urgency: Urgency = Urgency.DEMAND, final: object = None,
        run: Callable[[Any], Any] | None = None,
    ) -> Transfer:  # fmt: skip
        transfer = Transfer(
            lane=lane, urgency=urgency, run=run or self.ran.append, pieces=deque(pieces), settle=self.settled.append, final=final
        )
        self.runner.submit(transfer)
        return transfer

    async def finish(self) -> None:
        while not self.runner.is_idle:
            await asyncio.sleep(0)


def run(scenario: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(scenario(), 5))


def fail(_: object) -> None:
    raise VolumeError("broken")


def test_a_transfer_is_settled_once_when_all_its_pieces_have_run() -> None:
    async def scenario() -> None:
        bench = Bench(disk=2)
        transfer = bench.submit(1, 2, 3, final="last")
        assert not bench.runner.is_idle
        await bench.finish()
        assert bench.ran == [1, 2, 3, "last"]
        assert bench.settled == [transfer]
        assert transfer.is_settled
        assert transfer.error is None

    run(scenario)


def test_no_lane_has_more_under_way_than_its_workers_and_each_goes_on_when_one_is_free() -> None:
    async def scenario() -> None:
        bench = Bench(disk=2, cpu=1)
        for number in range(5):
            bench.submit(number)
        bench.submit("cpu", lane="cpu")
        assert bench.workers.waiting == 3
        await bench.finish()
        assert len(bench.settled) == 6
        assert bench.workers.ran == 6

    run(scenario)


def test_a_failed_transfer_settles_with_its_error_and_the_lane_goes_on() -> None:
    async def scenario() -> None:
        bench = Bench(disk=1)
        bad, good = bench.submit(1, 2, run=fail), bench.submit("good")
        await bench.finish()
        assert isinstance(bad.error, VolumeError)
        assert bench.settled == [bad, good]
        assert bench.ran == ["good"]

    run(scenario)


def test_the_next_transfer_starts_before_the_one_that_is_over_is_settled() -> None:
    async def scenario() -> None:
        bench = Bench(disk=1)
        seen: list[int] = []
        first = Transfer(
            lane="disk", urgency=Urgency.DEMAND, run=bench.ran.append, pieces=deque([1]),
            settle=lambda _: seen.append(bench.workers.waiting),
        )  # fmt: skip
        bench.runner.submit(first)
        bench.submit(2)
        await bench.finish()
        assert seen == [1], "a worker had the second one already"

    run(scenario)


def test_what_all_workers_finish_at_once_is_settled_in_several_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        monkeypatch.setattr(module, "SETTLED_AT_ONCE", 3)
        bench = Bench(disk=8)
        transfers = [bench.submit(number) for number in range(8)]
        counts = [0]
        while not bench.runner.is_idle:
            await asyncio.sleep(0)
            counts.append(len(bench.settled))
        assert bench.settled == transfers, "in the order in which they ended"
        assert max(after - before for before, after in pairwise(counts)) == 3
        assert bench.ran == list(range(8))
        last = bench.submit("last")
        await bench.finish()
        assert bench.settled[-1] is last

    run(scenario)


def test_a_call_that_is_over_in_time_is_not_late_because_others_are_settled_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        monkeypatch.setattr(module, "SETTLED_AT_ONCE", 1)
        bench = Bench(disk=51)
        for number in range(50):
            bench.submit(number)
        assert await bench.runner.call("disk", lambda: "done", timeout_s=1e-9) == "done"
        assert len(bench.settled) == 50

    run(scenario)


def test_a_cancelled_transfer_settles_at_once_with_the_reason() -> None:
    async def scenario() -> None:
        bench = Bench(disk=1)
        first, second = bench.submit(1), bench.submit(2)
        error = TicketCancelled("not wanted")
        assert not bench.runner.cancel(first, error), "a worker has it"
        assert bench.runner.cancel(second, error)
        assert bench.settled == [second]
        assert second.error is error
        assert not bench.runner.cancel(second, error)
        await bench.finish()
        assert bench.ran == [1]
        assert bench.settled == [second, first]

    run(scenario)


def test_what_waits_of_one_class_can_be_cancelled_together() -> None:
    async def scenario() -> None:
        bench = Bench(disk=1)
        bench.submit("running")
        bench.submit("prefetch 1", urgency=Urgency.PREFETCH)
        bench.submit("demand")
        bench.submit("prefetch 2", urgency=Urgency.PREFETCH)
        bench.runner.cancel_waiting(Urgency.PREFETCH, TicketCancelled("stopping"))
        assert len(bench.settled) == 2
        await bench.finish()
        assert bench.ran == ["running", "demand"]

    run(scenario)


def test_a_promoted_transfer_overtakes_those_of_its_old_class() -> None:
    async def scenario() -> None:
        bench = Bench(disk=1)
        bench.submit("running")
        bench.submit("earlier", urgency=Urgency.WRITE_BACK)
        later = bench.submit("later", urgency=Urgency.WRITE_BACK)
        bench.runner.promote(later, Urgency.DEMAND)
        await bench.finish()
        assert bench.ran == ["running", "later", "earlier"]

    run(scenario)


def test_a_call_gives_what_the_job_gives_and_raises_what_it_raises() -> None:
    async def scenario() -> None:
        bench = Bench(cpu=1)
        assert await bench.runner.call("cpu", lambda: 42) == 42
        with pytest.raises(VolumeError, match="broken"):
            await bench.runner.call("cpu", lambda: fail(None))
        assert bench.runner.is_idle

    run(scenario)


def test_what_is_asked_for_after_the_end_fails_and_nobody_waits_for_ever() -> None:
    async def scenario() -> None:
        bench = Bench(disk=1)
        bench.runner.close()
        with pytest.raises(StoreUnavailable, match="the daemon has stopped"):
            await bench.runner.call("disk", lambda: None)
        transfer = bench.submit(1)
        await asyncio.sleep(0)
        assert (bench.settled, bench.ran, bench.runner.is_idle) == ([transfer], [], True)

    run(scenario)


def test_a_caller_that_is_cancelled_does_not_stop_the_job() -> None:
    async def scenario() -> None:
        bench = Bench(cpu=1)
        bench.workers.pause()
        task = asyncio.ensure_future(bench.runner.call("cpu", lambda: bench.ran.append("job")))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        bench.workers.resume()
        await bench.finish()
        assert bench.ran == ["job"]

    run(scenario)


def test_calls_of_a_one_worker_lane_run_in_the_order_they_were_made() -> None:
    async def scenario() -> None:
        bench = Bench(cpu=1)
        jobs = [bench.runner.call("cpu", lambda number=number: bench.ran.append(number)) for number in range(9)]
        await asyncio.gather(*jobs)
        assert bench.ran == list(range(9))

    run(scenario)


def test_waking_is_for_futures_that_wait_and_harmless_for_all_else() -> None:
    async def scenario() -> None:
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        for waiter in (future, future, None, "no future"):
            wake(waiter)
        assert future.done()
        gone: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        gone.cancel()
        wake(gone)

    run(scenario)


def test_a_compute_piece_is_the_job_itself_and_volumes_have_lanes_of_their_own() -> None:
    assert call(lambda: "job") == "job"
    assert volume_lane(1) == volume_lane(1) != volume_lane(2)


def test_finished_bursts_are_counted_for_those_who_wait_but_not_those_of_the_background() -> None:
    async def scenario() -> None:
        bench = Bench(disk=1, background=1)
        for _ in range(3):
            bench.submit("read")
        bench.submit("broken", run=fail)
        for _ in range(5):
            bench.submit("page", lane=BACKGROUND_LANE)
        await bench.finish()
        assert bench.runner.finished == 4
        await bench.runner.behind(BACKGROUND_LANE)
        assert bench.runner.finished == 4

    run(scenario)


def test_what_looks_at_the_volumes_beside_all_work_keeps_nobody_waiting() -> None:
    async def scenario() -> None:
        bench = Bench(disk=1)
        transfer = Transfer(
            lane="disk", urgency=Urgency.WRITE_BACK, run=bench.ran.append, pieces=deque("ab"), settle=bench.settled.append,
            is_progress=False,
        )  # fmt: skip
        bench.runner.submit(transfer)
        await bench.finish()
        assert bench.ran == ["a", "b"]
        assert bench.runner.finished == 0

    run(scenario)


class Moving:
    """Stands in for a runner that, at the n-th look, has finished so many bursts. At the last look `future` is woken."""

    def __init__(self, counts: list[int], future: asyncio.Future[None] | None = None) -> None:
        self.counts = counts
        self.future = future

    @property
    def finished(self) -> int:
        if len(self.counts) > 1:
            return self.counts.pop(0)
        if self.future is not None and not self.future.done():
            self.future.set_result(None)
        return self.counts[0]


def test_who_is_woken_already_does_not_wait() -> None:
    async def scenario() -> None:
        future = asyncio.get_running_loop().create_future()
        future.set_result(None)
        await until_woken(future, cast("Runner", Moving([0])), stall_s=0, what="x")

    run_watched(scenario())


def test_a_wait_lasts_as_long_as_something_moves() -> None:
    async def scenario() -> None:
        future = asyncio.get_running_loop().create_future()
        moving = Moving([0, 1, 1, 2, 2, 3, 3], future)
        await until_woken(future, cast("Runner", moving), stall_s=0, what="x")
        assert moving.counts == [3]

    run_watched(scenario())


def test_a_wait_ends_when_nothing_has_moved_for_the_time() -> None:
    async def scenario() -> None:
        future = asyncio.get_running_loop().create_future()
        with pytest.raises(WaitTimeout, match=r"the commit under way: nothing in the store has moved for 0 s"):
            await until_woken(future, cast("Runner", Moving([0, 1, 1, 1])), stall_s=0, what="the commit under way")
        assert not future.done()

    run_watched(scenario())
