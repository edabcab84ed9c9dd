"""Joins the scheduler's decisions to the workers' threads: keeps every lane busy, settles what is over."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Hashable, Iterator
from functools import partial
from typing import Any

from paramstore.engine.tables.requests import Urgency
from paramstore.engine.transfers.scheduler import Burst, Outcome, Scheduler, Transfer
from paramstore.engine.transfers.workers import Workers, outcome_of
from paramstore.errors import ParamStoreError, StoreUnavailable, WaitTimeout

CPU_LANE = "cpu"
CATALOG_LANE = "catalog"
"""The catalog's own single thread."""
BACKGROUND_LANE = "background"
"""One thread for what nobody waits for: touching pages, zero-filling volumes."""
SETTLED_AT_ONCE = 64
"""Transfers that are settled in one turn of the loop at most, in 3 to 5 ms."""


def volume_lane(volume: int) -> Hashable:
    return ("volume", volume)


class Runner:
    """Runs transfers in worker threads and settles them on the loop's thread."""

    def __init__(self, workers: Workers) -> None:
        self.workers = workers
        self.scheduler = Scheduler()
        self.under_way: set[Transfer] = set()
        self._over: deque[Transfer] = deque()
        """Transfers that are over, and not settled yet, since others were settled in this turn of the loop."""
        self._has_settled = False
        """Whether transfers were settled in this turn."""
        self.finished = 0
        """Number of bursts that workers have finished, except background ones and scrubs'. While it goes up, waits go on."""
        self._is_closed = False

    def close(self) -> None:
        """Ends the workers. Transfers submitted from now on fail, since nobody would run them and waiting would never end."""
        self.workers.close()
        self._is_closed = True

    def submit(self, transfer: Transfer) -> None:
        if self._is_closed:
            transfer.error, transfer.is_settled = StoreUnavailable("the daemon has stopped"), True
            asyncio.get_running_loop().call_soon(transfer.settle, transfer)
            return
        self.under_way.add(transfer)
        self.scheduler.submit(transfer)
        self._kick(transfer.lane)

    def promote(self, transfer: Transfer, urgency: Urgency) -> None:
        self.scheduler.promote(transfer, urgency)

    def cancel(self, transfer: Transfer, error: ParamStoreError) -> bool:
        """Settles the transfer with `error` if it has not started; True then."""
        if not self.scheduler.cancel(transfer):
            return False
        transfer.error = error
        transfer.is_settled = True
        self.under_way.discard(transfer)
        transfer.settle(transfer)
        return True

    def cancel_waiting(self, urgency: Urgency, error: ParamStoreError) -> None:
        """Settles every transfer of that class that has not started with `error`."""
        for transfer in [transfer for transfer in self.under_way if transfer.urgency is urgency]:
            self.cancel(transfer, error)

    async def call(
        self, lane: Hashable, job: Callable[[], Any], *, urgency: Urgency = Urgency.DEMAND, timeout_s: float | None = None
    ) -> Any:
        """Runs `job` in a worker of `lane` and returns its result. Raises what it raised, and WaitTimeout when it has run for
        `timeout_s`. Neither that nor cancelling this call stops it: it may end at any time."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[None] = loop.create_future()
        started_s: list[float] = []
        work = job if timeout_s is None else partial(_noting_start, started_s, loop.time, job)
        transfer = Transfer(lane=lane, urgency=urgency, run=call, pieces=deque([work]), settle=lambda _: wake(future))
        self.submit(transfer)
        if timeout_s is not None:
            await self._in_time(transfer, future, started_s, timeout_s)
        await asyncio.shield(future)
        if transfer.error is not None:
            raise transfer.error
        return transfer.results[0]

    async def _in_time(self, transfer: Transfer, future: asyncio.Future[None], started_s: list[float], timeout_s: float) -> None:
        """Waits until `future` is done, or soon will be. Raises WaitTimeout when the job has run for `timeout_s`, or waits for its
        turn while no worker has finished anything for that long: on a busy store it may wait for its turn as long as it takes."""
        while not (future.done() or transfer.is_settled):  # once it is over, only its turn to be settled is to come
            finished, left_s = self.finished, timeout_s
            if started_s:
                left_s += started_s[0] - asyncio.get_running_loop().time()
            if left_s > 0:
                await asyncio.wait([future], timeout=left_s)
            if not (future.done() or transfer.is_settled) and (left_s <= 0 or (not started_s and self.finished == finished)):
                raise WaitTimeout(f"it has not returned in {timeout_s} s")

    async def behind(self, lane: Hashable) -> None:
        """Waits until everything submitted before to `lane`, which must have one thread, has run."""
        await self.call(lane, _nothing)

    def _kick(self, lane: Hashable) -> None:
        while (burst := self.scheduler.next_burst(lane)) is not None:
            self.workers.run(lane, _run_burst, burst, partial(self._done, lane, burst))

    def _done(self, lane: Hashable, burst: Burst, outcomes: list[Outcome], bug: ParamStoreError | None) -> None:
        assert bug is None, bug
        self.finished += lane != BACKGROUND_LANE and any(transfer.is_progress for transfer, _ in burst)
        self._over += self.scheduler.finish_burst(lane, burst, outcomes)
        self._kick(lane)  # first of all: the lane must not idle while we settle
        if self._over and not self._has_settled:
            self._settle_some()

    def _settle_some(self) -> None:
        """Settles as many transfers as a burst has. All workers may finish theirs at once, which is too much for one turn."""
        self._has_settled = bool(self._over)
        if self._over:
            asyncio.get_running_loop().call_soon(self._settle_some)
        for _ in range(min(len(self._over), SETTLED_AT_ONCE)):
            transfer = self._over.popleft()
            self.under_way.discard(transfer)
            transfer.settle(transfer)

    @property
    def is_idle(self) -> bool:
        """Whether no transfer is under way, so that background work may use the devices."""
        return not self.under_way


def _run_burst(burst: Burst) -> list[Outcome]:
    """Runs a burst's transfers in turn, in a worker. A failure ends the pieces of its own transfer only."""
    return [outcome_of(partial(_run_all, transfer.run), pieces) for transfer, pieces in burst]


def _run_all(run: Callable[[Any], Any], pieces: list[Any]) -> list[Any]:
    return [run(piece) for piece in pieces]


def call(job: Callable[[], Any]) -> Any:
    """Runs a piece of a compute transfer: the piece is the job itself."""
    return job()


def _noting_start(started_s: list[float], now_s: Callable[[], float], job: Callable[[], Any]) -> Any:
    """Runs `job` in a worker, and notes before when that was."""
    started_s.append(now_s())
    return job()


def _nothing() -> None:
    """Job of `behind`: when it runs, the thread has done everything that was submitted before."""


def wake(future: object) -> None:
    """Lets whoever awaits `future` go on; they look up themselves what has become of it."""
    if isinstance(future, asyncio.Future) and not future.done():
        future.set_result(None)


async def until_woken(future: asyncio.Future[None], runner: Runner, *, stall_s: float, what: str) -> None:
    """Waits until `future` is done. Raises WaitTimeout, saying `what` was waited for; the future is left as it is.

    A commit of a large model takes as long as its bytes take, and so does whatever waits behind it: a fixed bound would break a
    healthy namespace. So this fails when no worker of the store has finished anything for `stall_s`: a device hangs, or there is a
    bug.
    """
    while not future.done():
        finished = runner.finished
        await asyncio.wait([future], timeout=stall_s)
        if not future.done() and runner.finished == finished:
            raise WaitTimeout(f"{what}: nothing in the store has moved for {stall_s} s")


async def in_slices(work: Iterator[None]) -> None:
    """Does `work` to its end, and lets the loop turn wherever it yields. What it changes is whole at its end only, so a
    cancellation is raised there."""
    cancelled: asyncio.CancelledError | None = None
    for _ in work:
        try:
            await asyncio.sleep(0)
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled
