"""Loads ahead of host slots: a ticket a key, whose outcome is told to the plan; what brings nothing gives its slot up."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest

from paramstore.core.key import ExpertKey
from paramstore.errors import StoreUnavailable
from paramstore.policy.lru import Lru
from paramstore.policy.slot_plan import SlotPlan
from paramstore.policy.slot_visit import Held
from paramstore.testing.memory_namespace import MemoryNamespace
from paramstore_client.device import loads_ahead
from paramstore_client.device.loads_ahead import KeyTickets, LoadsAhead
from paramstore_client.source import HostTicket, LeaseTicket, WeightLease

KEYS: list[ExpertKey] = [(0, expert) for expert in range(6)]


def begun(keys: Sequence[ExpertKey], *, holds: bool = False) -> tuple[MemoryNamespace, SlotPlan, LoadsAhead, set[Held]]:
    """Loads ahead of `keys`. holds: whether they are held up on their way."""
    namespace, plan, taken = MemoryNamespace.of_swiglu(), SlotPlan(8, Lru()), set[Held]()
    namespace.holds_prefetches = holds
    loads = LoadsAhead(namespace, taken.__contains__)
    loads.begin(plan, plan.ahead(keys)[0])
    return namespace, plan, loads, taken


def test_each_key_is_asked_for_by_itself() -> None:
    namespace, *_ = begun(KEYS)
    assert list(namespace.happened("prefetch")) == [("prefetch", (key,)) for key in KEYS]


def test_the_plan_is_told_what_has_come() -> None:
    _, plan, loads, _ = begun(KEYS[:2])
    assert not any(held.is_ready for held in plan.held)
    loads.note_arrivals(plan)
    assert all(held.is_ready for held in plan.held)


def test_what_is_on_its_way_is_not_waited_for() -> None:
    _, plan, loads, _ = begun(KEYS[:2], holds=True)
    loads.note_arrivals(plan)
    assert not any(held.is_ready for held in plan.held)
    loads.forget()
    loads.note_arrivals(plan)
    assert (loads.unplaced, len(plan.held)) == ([], 2)


class Ticket(HostTicket):
    """A prefetch of one key. waits_s: how long the caller would have waited."""

    def __init__(self, *, is_done: bool, error: StoreUnavailable | None = None) -> None:
        self.is_done = is_done
        self.error = error
        self.waits_s: list[float | None] = []
        self.is_cancelled = False

    def done(self) -> bool:
        return self.is_done

    def wait(self, timeout_s: float | None = None) -> Mapping[str, int]:
        self.waits_s.append(timeout_s)
        if self.error is not None:
            raise self.error
        return {"loaded": 1, "resident": 0, "skipped": 0, "bytes": 7}

    def cancel(self) -> bool:
        self.is_cancelled = True
        return not self.is_done


def test_the_ticket_of_several_keys_is_done_with_the_last_of_them_whichever_that_is() -> None:
    late, done = Ticket(is_done=False), Ticket(is_done=True)
    several = KeyTickets([late, done])
    assert not several.done()
    assert several.wait() == {"loaded": 2, "resident": 0, "skipped": 0, "bytes": 14}
    assert (late.waits_s, done.waits_s) == ([None], [None])
    late.is_done = True
    assert several.done()


def test_the_ticket_of_several_keys_gives_all_of_them_up() -> None:
    tickets = [Ticket(is_done=False), Ticket(is_done=True)]
    assert KeyTickets(tickets).cancel()
    assert all(ticket.is_cancelled for ticket in tickets)
    assert not KeyTickets(tickets[1:]).cancel()


def test_all_keys_are_waited_for_within_one_limit_and_the_first_failure_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([100.0, 101.0, 105.0])
    monkeypatch.setattr(loads_ahead.time, "monotonic", lambda: next(times))
    tickets = [Ticket(is_done=True), Ticket(is_done=False, error=StoreUnavailable("gone"))]
    with pytest.raises(StoreUnavailable, match="gone"):
        KeyTickets(tickets).wait(3.0)
    assert [ticket.waits_s for ticket in tickets] == [[2.0], [0.0]]


def test_where_the_host_refuses_slots_are_given_up_but_for_those_that_demand_has_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    namespace, plan, taken = MemoryNamespace.of_swiglu(), SlotPlan(8, Lru()), set[Held]()
    loads = LoadsAhead(namespace, taken.__contains__)
    wanted = plan.ahead(KEYS[:3])[0]
    taken.add(wanted[1])

    def refuse(keys: Sequence[ExpertKey]) -> None:
        raise StoreUnavailable("the daemon is gone")

    monkeypatch.setattr(namespace, "prefetch", refuse)
    with pytest.raises(StoreUnavailable):
        loads.begin(plan, wanted)
    assert [held.key for held in plan.held] == [KEYS[1]]


class Outcome:
    """An acquire that has failed, or is under way."""

    def __init__(self, error: StoreUnavailable | None) -> None:
        self.error = error
        self.is_abandoned = False

    def done(self) -> bool:
        return self.error is not None

    def wait(self) -> WeightLease:
        assert self.error is not None, "what is under way is not waited for"
        raise self.error

    def abandon(self) -> None:
        self.is_abandoned = True


def test_what_failed_after_its_visit_is_asked_for_anew_and_what_is_under_way_or_in_use_is_not() -> None:
    plan = SlotPlan(8, Lru())
    failed, used, coming = plan.visit([KEYS[0]]), plan.visit([KEYS[1]]), plan.visit([KEYS[2]])
    errors = (StoreUnavailable("on purpose"), StoreUnavailable("on purpose"), None)
    outcomes = [Outcome(error) for error in errors]
    arriving: dict[Held, LeaseTicket] = {
        visit.held[0]: outcome for visit, outcome in zip((failed, used, coming), outcomes, strict=True)
    }
    plan.end_visit(failed)
    plan.end_visit(coming)
    LoadsAhead(MemoryNamespace.of_swiglu(), arriving.__contains__).note_arrivals(plan, arriving)
    assert [held.key for held in arriving] == KEYS[1:3]
    assert (plan.find(KEYS[0]), plan.counts.failed, plan.free) == (None, 1, 6)
    assert [outcome.is_abandoned for outcome in outcomes] == [True, False, False]
