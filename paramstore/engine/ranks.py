"""Ranks that write a namespace together: they open it as one group, and their collective calls run once, for all of them.

`Collective` decides; this file waits: a future for each rank's call, a timer for the deadline, and one task for what a call does
once it has begun. A call begins, that is it takes effect in the order of calls, in the very moment in which its last rank makes it.
With one rank nothing here is used.

- A forming group is known by (namespace, group): arrivals of another start of the job never meet it.
- What has begun goes on, whoever leaves; all its ranks get one answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from functools import partial
from typing import Any

from paramstore.engine.collective import MENDING, Call, Collective, Settled, check_rank
from paramstore.engine.namespace import View, WriterGroup
from paramstore.engine.planner import Planner
from paramstore.errors import CapacityError, ParamStoreError, StoreUnavailable, TicketCancelled

WAY_ON = "All ranks call rollback (before the first commit: initialize), or open it again"
FORMING_MAX = 256
"""Groups that form at once."""


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
    """The futures, the deadline and the tasks of one group's calls. tasks: where those under way are kept.

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
        """A future of what `begin`, called by whichever rank comes last, gives or raises; of a coroutine, what that comes to.

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
        """The deadline of a call that waits begins anew."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = asyncio.get_running_loop().call_later(self._timeout_s, self._expire)

    def lose(self, rank: int, reason: str) -> None:
        self._fail(self.collective.lose(rank, reason))

    def end(self, error: ParamStoreError) -> None:
        """Whoever waits fails with `error`."""
        self._fail(self.collective.end(error))

    def withdraw(self, rank: int, error: ParamStoreError) -> None:
        """If `rank` waits it fails with `error`, and the others wait for it again; what has begun goes on."""
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
        """Nobody waits for a task that was stopped, perhaps before it began."""
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
    """Owner of the groups that form, and of the collective calls under way. on_call: told of each call, by name, of each rank."""

    def __init__(self, planner: Planner, *, wait_timeout_s: float, on_call: Callable[[View, str], None]) -> None:
        self._planner = planner
        self._on_call = on_call
        self._wait_timeout_s = wait_timeout_s
        self._forming: dict[tuple[str, str], Gathering] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    # --- opening

    def open(
        self, arrival: Arrival, call: Call, open_first: Callable[[WriterGroup], Coroutine[Any, Any, View]]
    ) -> asyncio.Future[dict[int, View]]:
        """A future of the view of each rank, once all have come with equal calls.

        open_first: the whole opening, once for all; gives rank 0's view. The group before it is fenced by that.
        Raises ConfigError, CapacityError, and StepMismatch for a rank that is there already. The future's errors are those of
        `open_first`, StepMismatch naming who called otherwise or did not come in time; all who wait get them.
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
        group = WriterGroup(arrival.group, arrival.world_size)
        collective = Collective(arrival.world_size, what=arrival.what, way_on=WAY_ON)
        group.calls = Gathering(
            collective, timeout_s=self._wait_timeout_s, tasks=self._tasks, on_settled=partial(self._go_on, group)
        )
        first = await open_first(group)
        namespace, open_rank = first.namespace, self._planner.leases.open_rank
        return {0: first, **{rank: open_rank(namespace, group, rank) for rank in range(1, group.world_size)}}

    def withdraw(self, arrival: Arrival) -> None:
        """The rank waits no longer for the others to open with it."""
        gathering = self._forming.get((arrival.namespace, arrival.group))
        if gathering is not None:
            gathering.withdraw(arrival.rank, TicketCancelled(f"rank {arrival.rank} of {arrival.what} came no further"))

    def _forget_empty(self, key: tuple[str, str]) -> None:
        gathering = self._forming.get(key)
        if gathering is not None and not gathering.collective.waiting:
            del self._forming[key]

    # --- calling

    def call(self, view: View, call: Call, begin: Callable[[View], object]) -> asyncio.Future[Any]:
        """What `begin` comes to, which is called once, with the view of the last rank to come, when all have made `call`.

        Raises LeaseError, WriterFenced, RankLost, StepMismatch; then this rank's call counts as never made.
        """
        group = view.group
        assert group is not None
        assert group.calls is not None
        self._planner.leases.check_view(view)
        future = group.calls.call(view.rank, call, partial(begin, view))
        self._on_call(view, call.name)
        return future

    @staticmethod
    def note_progress(view: View) -> None:
        """A rank is at work on what the others wait for, as on its share of the initial values: their deadline begins anew."""
        if view.group is not None and view.group.calls is not None:
            view.group.calls.put_off()

    @staticmethod
    def _go_on(group: WriterGroup, ranks: tuple[int, ...]) -> None:
        """What these ranks asked for after their call may take effect now."""
        for rank in ranks:
            view = group.members.get(rank)
            if view is not None and view.client is not None:
                view.client.calls_go_on(view)

    @staticmethod
    def leave(view: View, reason: str) -> None:
        """The rank of `view` writes no more: the others learn of it with their next call."""
        if view.is_ranked and view.group is not None and view.group.calls is not None:
            view.group.calls.lose(view.rank, reason)

    async def close(self) -> None:
        """Ends what waits and what is under way."""
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
