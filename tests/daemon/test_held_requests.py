"""Requests behind a rank's own call: what waits, in which order it is taken up, and what ends it before."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from random import Random
from typing import Any

from paramstore.daemon.held_requests import HeldRequests
from paramstore.engine.ranks import Gathering
from paramstore.engine.tables.collective import Call, Collective
from paramstore.engine.tables.namespace import View, WriterGroup
from paramstore.errors import ParamStoreError, TicketCancelled, WaitTimeout
from paramstore.wire import messages as m
from paramstore_testkit.sim.loop import VirtualLoop
from paramstore_testkit.stores.small_planner import SmallPlanner

APPLY = Call("apply")


class Site:
    """Rank 0 of two, its held requests, and what became of them. Answers: by request id, None for one that was taken up."""

    def __init__(self) -> None:
        small = SmallPlanner()
        collective = Collective(2, what="g", way_on="")
        group = WriterGroup("g", 2, collective)
        small.namespace.writing.group = group
        self.view: View = small.planner.views.open_rank(small.namespace, group, 0)
        self.calls = Gathering(collective, timeout_s=60.0, tasks=set(), on_settled=lambda _: None)
        self.answers: list[tuple[int, type[ParamStoreError] | None]] = []
        self.taken: list[Any] = []
        self.held = HeldRequests(asyncio.get_running_loop(), run=self.run, fail=self.fail)

    def run(self, request: Any) -> None:
        """As a session would: what is a collective call waits again."""
        assert not self.held.stops(self.view), "what is taken up is not held again"
        self.taken.append(request)
        self.answers.append((request.id, None))
        if isinstance(request, m.GradientNorm):
            self.call()

    def fail(self, request_id: int, error: ParamStoreError) -> None:
        self.answers.append((request_id, type(error)))

    def call(self) -> None:
        self.calls.call(0, APPLY, lambda: None)

    def begin(self) -> None:
        """The other rank has made the call too."""
        self.calls.call(1, APPLY, lambda: None)


def run(scenario: Callable[[Site], Coroutine[Any, Any, None]]) -> None:
    async def main() -> None:
        await scenario(Site())

    with asyncio.Runner(loop_factory=lambda: VirtualLoop(Random(1), shuffles=False)) as runner:
        runner.run(main())


def push(number: int) -> m.Push:
    return m.Push(number, 1, [])


def test_nothing_is_held_while_no_call_of_the_rank_waits() -> None:
    async def scenario(site: Site) -> None:
        assert not site.held.stops(site.view)
        site.calls.call(1, APPLY, lambda: None)
        assert not site.held.stops(site.view), "the other rank's call holds up nobody else"

    run(scenario)


def test_a_request_that_comes_after_the_call_began_waits_for_those_held_before_it() -> None:
    async def scenario(site: Site) -> None:
        site.call()
        assert site.held.stops(site.view)
        site.held.add(site.view, push(1))
        site.begin()
        assert site.held.stops(site.view), "it would overtake the push"
        site.held.add(site.view, push(2))
        site.held.go_on(site.view)
        assert site.answers == [(1, None), (2, None)]
        assert not site.held.stops(site.view)
        assert len(site.held.by_id) == 0

    run(scenario)


def test_what_is_held_is_taken_up_as_far_as_the_next_call_that_waits() -> None:
    async def scenario(site: Site) -> None:
        site.call()
        for request in (push(1), m.GradientNorm(2, 1), push(3)):
            site.held.add(site.view, request)
        site.begin()
        site.held.go_on(site.view)
        assert [number for number, _ in site.answers] == [1, 2]
        site.held.go_on(site.view)
        assert [number for number, _ in site.answers] == [1, 2], "its call still waits"
        assert 3 in site.held.by_id
        site.begin()
        site.held.go_on(site.view)
        assert [number for number, _ in site.answers] == [1, 2, 3]

    run(scenario)


def test_a_lease_is_taken_up_with_the_time_that_it_has_left_and_fails_when_there_is_none() -> None:
    async def scenario(site: Site) -> None:
        site.call()
        for number, timeout_s in ((1, 2.0), (2, 10.0)):
            site.held.add(site.view, m.Acquire(number, 1, [(0, 0)], "param", timeout_s))
        await asyncio.sleep(4.0)
        assert site.answers == [(1, WaitTimeout)]
        site.begin()
        site.held.go_on(site.view)
        assert site.answers == [(1, WaitTimeout), (2, None)]
        assert abs(site.taken[0].timeout_s - 6.0) < 0.01
        await asyncio.sleep(20.0)
        assert len(site.answers) == 2

    run(scenario)


def test_leases_and_prefetches_can_be_cancelled_and_nothing_else() -> None:
    async def scenario(site: Site) -> None:
        site.call()
        for request in (m.Acquire(1, 1, [], "param", 5.0), m.Prefetch(2, 1, [], "param"), push(3)):
            site.held.add(site.view, request)
        assert [site.held.cancel(number) for number in (1, 2, 3, 4)] == [True, True, False, False]
        assert site.answers == [(1, TicketCancelled), (2, TicketCancelled)]
        assert len(site.held.by_id) == 1

    run(scenario)


def test_when_the_session_ends_nobody_is_answered() -> None:
    async def scenario(site: Site) -> None:
        site.call()
        site.held.add(site.view, m.Acquire(1, 1, [], "param", 5.0))
        site.held.clear()
        site.held.go_on(site.view)
        await asyncio.sleep(10.0)
        assert site.answers == []

    run(scenario)


def test_what_a_closed_view_had_held_is_taken_up_to_its_end() -> None:
    async def scenario(site: Site) -> None:
        site.call()
        site.held.add(site.view, push(1))
        site.view.is_closed = True
        site.held.go_on(site.view)
        assert site.answers == [(1, None)]

    run(scenario)
