"""Replays the visits of a trace through a slot plan: how many keys find their bytes there, under which policy.

Every load lands before the next visit, so nothing is late. A reader's trace has one acquire for each dispatch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from paramstore.core.key import ExpertKey
from paramstore.core.trace import Trace, TraceEventKind
from paramstore.policy.slot_plan import SlotPlan
from paramstore.policy.slot_visit import SlotCounts
from paramstore.sim.belady import Belady

Ahead = Callable[[int], Sequence[ExpertKey]]
"""(index of the visit that has begun) -> keys to load ahead beside it."""


def visits_of(trace: Trace) -> list[list[ExpertKey]]:
    """The keys of each dispatch, in order."""
    return [event.keys for event in trace.events if event.kind is TraceEventKind.ACQUIRE]


def replay_visits(visits: Sequence[Sequence[ExpertKey]], plan: SlotPlan, *, ahead: Ahead | None = None) -> SlotCounts:
    """Visits in turn, and loads ahead while each is under way. Gives the plan's counts; what does not fit passes by."""
    for index, keys in enumerate(visits):
        visit = plan.visit(keys, may_pass=True)
        for held in visit.loads:
            plan.arrive(held)
        while (passing := plan.let_in(visit)) is not None:
            plan.arrive(passing)
            plan.let_out(visit, passing)
        for held in plan.ahead(ahead(index))[0] if ahead is not None else ():
            plan.arrive(held)
        plan.end_visit(visit)
    return plan.counts


def belady_of(visits: Sequence[Sequence[ExpertKey]]) -> Belady:
    """The optimum's policy for exactly these visits, without loads ahead."""
    return Belady.of(key for keys in visits for key in keys)
