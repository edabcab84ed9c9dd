"""Ranks that write a namespace together: they open it as one group, and their collective calls run once, for all of them.

`Collective` decides; this file waits: it has a future for each rank's call, a timer for the deadline, and a task for each call that
has begun. A call begins, and so takes its place in the order of calls, at the moment in which its last rank makes it. Nothing here
is used where a namespace has one rank.

- A group that is forming is identified by (namespace, group), so that ranks of another start of the job never join it.
- A call that has begun goes on, whoever leaves; all its ranks get the same answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from functools import partial
from typing import Any

from paramstore.engine.tables.collective import MENDING, Call, Collective, Settled, check_rank
from paramstore.engine.tables.namespace import View, WriterGroup, fenced_error
from paramstore.engine.transfers.transfers import Transfers
from paramstore.errors import CapacityError, ParamStoreError, StoreUnavailable, TicketCancelled

WAY_ON = "All ranks call rollback (before the first commit: initialize), or open it again"
FORMING_MAX = 256
"""Groups that may be forming at once."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """A rank that comes to open `namespace` as one of `world_size`; `group` names this start of the job."""

    namespace: str
    group: str
    rank: int
    world_size: int

    @property
    def what(self) -> str:
        return f"group {self.group!r} on namespace {self.namespace!r}"


class Gathering:
    """Waits for the collective calls of one group: owns their futures and their deadline. tasks: the set that keeps running calls.

    on_settled: called with the ranks whose call has begun, or was refused.
    """

    def __init__(
        self, collective: Collective, *, timeout_s: float, tasks: set[asyncio.Task[None]],
        on_settled: Callable[[tuple[int, ...]], None],
    ) -> None:  # fmt: skip
        self.collective = collective
        self._timeout_s = timeout_s
        self._tasks = tasks
        self._on_settled = on_settled
        self._futures: dict[int, asyncio.Future[Any]] = {}
        self._timer: asyncio.TimerHandle | None = None

    def call(self, rank: int, call: Call, begin: Callable[[], object]) -> asyncio.Future[Any]:
        """Makes `rank`'s call; returns a future of what `begin`, called when the last rank comes, returns or raises. Where `begin`
        returns a coroutine, it is run, and the future has its result.

        Raises as `Collective.arrive`, and nothing has changed.
        """
        settled = self.collective.arrive(rank, call)
        loop = asyncio.get_running_loop()
        future = self._futures[rank] = loop.create_future()
        if settled is None:
            if self._timer is None:
                self._timer = loop.call_later(self._timeout_s, self._expire)
        elif settled.error is not None:
            self._fail(settled)
        else:
            self._begin(settled, call, begin)
        return future

    def put_off(self) -> None:
        """Starts the deadline of a call that waits anew."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = asyncio.get_running_loop().call_later(self._timeout_s, self._expire)

    def lose(self, rank: int, reason: str) -> None:
        self._fail(self.collective.lose(rank, reason))

    def end(self, error: ParamStoreError) -> None:
        """Fails every call that waits with `error`."""
        self._fail(self.collective.end(error))

    def withdraw(self, rank: int, error: ParamStoreError) -> None:
        """Fails the call of `rank` with `error` if it still waits; the others then wait for that rank again."""
        if self.collective.withdraw(rank):
            _refuse([self._futures.pop(rank)], error)
            if not self.collective.waiting:
                self._stop_timer()
            self._on_settled((rank,))

    def _expire(self) -> None:
        self._timer = None
        self._fail(self.collective.expire())

    def _fail(self, settled: Settled) -> None:
        assert settled.error is not None
        _refuse(self._taken(settled.ranks), settled.error)
        self._on_settled(settled.ranks)

    def _begin(self, settled: Settled, call: Call, begin: Callable[[], object]) -> None:
        futures, refusal = self._taken(settled.ranks), self.collective.refusal
        try:
            result = begin()
        except Exception as error:  # noqa: BLE001 - belongs to the ranks, each of which is told
            _refuse(futures, error)
        else:
            if asyncio.iscoroutine(result):
                task = asyncio.get_running_loop().create_task(self._run(call, result, futures, refusal))
                self._tasks.add(task)
                task.add_done_callback(partial(self._over, coroutine=result, futures=futures))
            else:
                _give(futures, result)
        self._on_settled(settled.ranks)

    async def _run(
        self, call: Call, coroutine: Coroutine[Any, Any, object], futures: list[asyncio.Future[Any]], refusal: str | None
    ) -> None:
        try:
            result = await coroutine
        except Exception as error:  # noqa: BLE001 - as in `_begin`
            _refuse(futures, error)
            return
        if call.name in MENDING:
            self.collective.mend(refusal)
        _give(futures, result)

    def _over(
        self, task: asyncio.Task[None], *, coroutine: Coroutine[Any, Any, object], futures: list[asyncio.Future[Any]]
    ) -> None:
        """Cleans up after a task that is over or was stopped, perhaps before it began: nobody goes on waiting for it."""
        self._tasks.discard(task)
        coroutine.close()
        for future in futures:
            future.cancel()

    def _taken(self, ranks: tuple[int, ...]) -> list[asyncio.Future[Any]]:
        self._stop_timer()
        return [self._futures.pop(rank) for rank in ranks]

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class Ranks:
    """Forms groups of ranks and makes their collective calls; owns both. on_call: told of each rank's call, by its name."""

    def __init__(self, transfers: Transfers, *, wait_timeout_s: float, on_call: Callable[[View, str], None]) -> None:
        self._transfers = transfers
        self._on_call = on_call
        self._wait_timeout_s = wait_timeout_s
        self._forming: dict[tuple[str, str], Gathering] = {}
        self._gatherings: dict[WriterGroup, Gathering] = {}
        """Of every group that has opened a namespace, until its last rank leaves."""
        self._tasks: set[asyncio.Task[None]] = set()

    # --- opening

    def open(
        self, arrival: Arrival, call: Call, open_first: Callable[[WriterGroup], Coroutine[Any, Any, View]]
    ) -> asyncio.Future[dict[int, View]]:
        """Lets a rank come to open a namespace; returns a future of {rank: view}, set once all ranks have come with equal calls.

        open_first: opens the namespace once, for all ranks, which fences the group before; returns rank 0's view.
        Raises ConfigError, CapacityError, and StepMismatch for a rank that has come already. The future fails with the errors of
        `open_first`, or StepMismatch naming the ranks that called otherwise or did not come in time; all who wait get the same.
        """
        check_rank(arrival.rank, arrival.world_size, arrival.group)
        key = arrival.namespace, arrival.group
        gathering = self._forming.get(key)
        if gathering is None:
            if len(self._forming) >= FORMING_MAX:
                raise CapacityError(f"{FORMING_MAX} groups are forming, which is the limit: let them come together first")
            collective = Collective(arrival.world_size, what=arrival.what, way_on="All ranks open it again")
            gathering = Gathering(
                collective, timeout_s=self._wait_timeout_s, tasks=self._tasks, on_settled=lambda _: self._forget_empty(key)
            )
            self._forming[key] = gathering
        return gathering.call(arrival.rank, call, lambda: self._open(arrival, open_first))

    async def _open(
        self, arrival: Arrival, open_first: Callable[[WriterGroup], Coroutine[Any, Any, View]]
    ) -> dict[int, View]:
        collective = Collective(arrival.world_size, what=arrival.what, way_on=WAY_ON)
        group = WriterGroup(arrival.group, arrival.world_size, collective)
        first = await open_first(group)
        self._gatherings[group] = Gathering(
            collective, timeout_s=self._wait_timeout_s, tasks=self._tasks, on_settled=partial(self._go_on, group)
        )
        with self._transfers.deciding() as planner:
            others = {rank: planner.views.open_rank(first.namespace, group, rank) for rank in range(1, group.world_size)}
        return {0: first, **others}

    def withdraw(self, arrival: Arrival) -> None:
        """Takes back a rank's arrival: it waits no longer for the others to open with it."""
        gathering = self._forming.get((arrival.namespace, arrival.group))
        if gathering is not None:
            gathering.withdraw(arrival.rank, TicketCancelled(f"rank {arrival.rank} of {arrival.what} came no further"))

    def _forget_empty(self, key: tuple[str, str]) -> None:
        gathering = self._forming.get(key)
        if gathering is not None and not gathering.collective.waiting:
            del self._forming[key]

    # --- calling

    def call(self, view: View, call: Call, begin: Callable[[View], object]) -> asyncio.Future[Any]:
        """Makes a rank's collective call; returns a future of its result. When all ranks have made `call`, `begin` is called once,
        with the view of the last rank.

        Raises LeaseError, WriterFenced, RankLost, StepMismatch; then this rank's call counts as never made.
        """
        view.check_open()
        assert view.group is not None
        future = self._gatherings[view.group].call(view.rank, call, partial(begin, view))
        self._on_call(view, call.name)
        return future

    def fence(self, group: WriterGroup) -> None:
        """Fences the views of `group`, since another writer opened the namespace; calls that wait for other ranks fail."""
        with self._transfers.deciding() as planner:
            planner.views.fence(group)
        if group in self._gatherings:
            self._gatherings[group].end(fenced_error(group.first.namespace))

    def note_progress(self, view: View) -> None:
        """Restarts the deadline of waiting ranks, since this rank is at work on what they wait for (such as initial values)."""
        if view.group in self._gatherings:
            self._gatherings[view.group].put_off()

    @staticmethod
    def _go_on(group: WriterGroup, ranks: tuple[int, ...]) -> None:
        """Tells the clients of these ranks that what they asked for after their call may take effect now."""
        for rank in ranks:
            view = group.members.get(rank)
            if view is not None and view.client is not None:
                view.client.calls_go_on(view)

    def leave(self, view: View, reason: str) -> None:
        """Breaks the group, because the rank of `view` writes no more; the others learn of it with their next call."""
        group = view.group
        if group is None or group not in self._gatherings:
            return
        self._gatherings[group].lose(view.rank, reason)
        if not group.members.keys() - {view.rank}:
            del self._gatherings[group]

    async def close(self) -> None:
        """Fails groups that are forming, and stops collective calls under way."""
        for gathering in list(self._forming.values()):
            gathering.end(StoreUnavailable("the daemon is stopping"))
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _give(futures: list[asyncio.Future[Any]], result: object) -> None:
    for future in futures:
        if not future.done():
            future.set_result(result)


def _refuse(futures: list[asyncio.Future[Any]], error: Exception) -> None:
    for future in futures:
        if not future.done():
            future.set_exception(error)
