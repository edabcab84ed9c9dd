"""Loads ahead of host slots: a ticket a key, whose outcome is told to the plan; what brings nothing gives its slot up."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from paramstore.core.key import ExpertKey
from paramstore.errors import StoreUnavailable
from paramstore.policy.lru import Lru
from paramstore.policy.slot_plan import SlotPlan
from paramstore.policy.slot_visit import Held
from paramstore.testing.memory_namespace import MemoryNamespace
from paramstore_client.device.loads_ahead import LoadsAhead
from paramstore_client.source import LeaseTicket, WeightLease

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
