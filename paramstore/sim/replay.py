"""Replays a trace through the planner under given policies; counts hits and bytes.

Calls come in the order of the trace. The replay leaves out: time, so that nothing is late and every prefetch lands before the
next call; commits, so that a record is written only when its slot is needed; reads that share a transfer; and the steps that
records of an exact namespace make without a gradient.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, replace

from paramstore.core.key import ExpertKey
from paramstore.core.optimizers import AdamW
from paramstore.core.trace import Trace, TraceEvent, TraceEventKind
from paramstore.core.visits import Visits
from paramstore.engine.planner.apply_order import absent_ahead, slots_to_clean
from paramstore.engine.planner.schedules import declare_schedule
from paramstore.engine.tables.apply import Claims
from paramstore.engine.tables.requests import SlotRequest, Urgency
from paramstore.policy.base import Policy
from paramstore.sim.belady import Belady
from paramstore.sim.world import World

UPDATE_DEPTH = 6
"""Number of records of an apply that hold a slot at once: two workers and the lookahead of `engine/records/update.py`."""
SLOTS_MIN = 2

Part = tuple[TraceEventKind, list[ExpertKey]]
"""A call, or a part of one: what is asked for at once."""


@dataclass(frozen=True, slots=True)
class Policies:
    """Makes the two arenas' policies for a number of slots. The cycles of visits are declared; policies of the past ignore them."""

    name: str
    param: Callable[[int], Policy]
    working: Callable[[int], Policy]
    param_visits: Visits = ()
    optim_visits: Visits = ()


@dataclass(frozen=True, slots=True)
class Outcome:
    """Counts of one replay. materialised: `param` copies made from a resident record when they were asked for."""

    policy: str
    slots: int
    param_uses: int
    param_loads: int
    materialised: int
    optim_uses: int
    optim_loads: int
    bytes_read: int
    bytes_written: int

    @property
    def param_hits(self) -> int:
        """Number of copies that were there. Copies made when they were asked for do not count, though they read nothing."""
        return self.param_uses - self.param_loads - self.materialised

    @property
    def optim_hits(self) -> int:
        return self.optim_uses - self.optim_loads

    @property
    def hits(self) -> int:
        return self.param_hits + self.optim_hits

    @property
    def bytes_moved(self) -> int:
        return self.bytes_read + self.bytes_written


def slots_of(trace: Trace, share: float) -> int:
    """Number of slots of each arena that may hold `share` of the experts."""
    return max(SLOTS_MIN, round(share * len(trace.header.space)))


def parts_of(trace: Trace, slots: int) -> Iterator[Part]:
    """Splits the trace's calls as an arena of `slots` slots gets them, as `StoredExperts` does: a layer with more active experts
    than half of what may be leased comes in parts, in expert order, and in backward the last part first."""
    most = max(1, (slots - max(1, slots // 16)) // 2)
    events = trace.events
    for index, event in enumerate(events):
        if event.kind is not TraceEventKind.ACQUIRE:
            yield event.kind, event.keys
            continue
        keys = event.keys
        parts = [keys[start : start + most] for start in range(0, len(keys), most)]
        for part in reversed(parts) if _is_backward(events, index) else parts:
            yield event.kind, part


def replay(trace: Trace, slots: int, policies: Policies) -> Outcome:
    """Replays the trace in arenas of `slots` slots each, without its prefetches: demand alone decides what is loaded."""
    schema = replace(trace.schema, updates="touched") if trace.schema.is_trainable else trace.schema
    world = World(
        schema, trace.header.space, param_slots=slots, working_slots=slots, param_policy=policies.param,
        working_policy=policies.working,
    )  # fmt: skip
    view = world.open(is_writer=trace.schema.is_trainable)
    declare_schedule(view, param=policies.param_visits, optim=policies.optim_visits)
    pushed: dict[ExpertKey, None] = {}
    param_uses = optim_uses = 0
    for kind, keys in parts_of(trace, slots):
        if kind is TraceEventKind.ACQUIRE:
            param_uses += len(keys)
            world.lease(view, keys)
        elif kind is TraceEventKind.PUSH:
            pushed.update(dict.fromkeys(keys))
        elif kind is TraceEventKind.APPLY:
            optim_uses += len(pushed)
            _apply(world, list(pushed))
            pushed = {}
    moved = world.moved
    return Outcome(
        policies.name, slots, param_uses, moved.param_loads, moved.materialised, optim_uses, moved.working_loads, moved.bytes_read,
        moved.bytes_written,
    )  # fmt: skip


def _apply(world: World, keys: Sequence[ExpertKey]) -> None:
    """Does what `engine.update.Updater.apply` does, with its workers taking turns."""
    namespace, planner = world.namespace, world.planner
    world.begin_apply(keys)
    world.working_arena.policy.expect(keys)
    claims = Claims(AdamW(), 1.0)
    planner.claims.line_up(namespace, claims, keys, pipeline_slots=UPDATE_DEPTH)
    queue, spared = claims.queue, claims.awaited

    def hold_next() -> SlotRequest:
        key = queue.popleft()
        spared.discard(key)
        return world.hold(key, spared)

    depth = min(UPDATE_DEPTH, world.working_arena.slots.count)
    under_way = deque(hold_next() for _ in range(min(depth, len(queue))))
    while under_way:
        world.update(under_way.popleft())
        wanted = absent_ahead(queue, namespace.residency.resident, depth=UPDATE_DEPTH)
        planner.working.clean(namespace, slots_to_clean(namespace, wanted, spared), Urgency.WRITE_BACK, spared=spared)
        world.finish()
        if queue:
            under_way.append(hold_next())


def belady_policies(trace: Trace, slots: int) -> Policies:
    """Makes the optimum for exactly the uses that `replay` will record in as many slots."""
    param_uses: dict[Hashable, list[int]] = {}
    param_endings: dict[Hashable, list[int]] = {}
    optim_uses: dict[Hashable, list[int]] = {}
    uses = applies = 0
    pushed: dict[ExpertKey, None] = {}
    for kind, keys in parts_of(trace, slots):
        if kind is TraceEventKind.ACQUIRE:
            for key in keys:
                param_uses.setdefault(key, []).append(uses)
                uses += 1
        elif kind is TraceEventKind.PUSH:
            pushed.update(dict.fromkeys(keys))
        elif kind is TraceEventKind.APPLY:
            applies += 1
            for key in pushed:
                param_endings.setdefault(key, []).append(uses)
                optim_uses.setdefault(key, []).append(applies)
            pushed = {}
    return Policies(
        "belady", lambda slots: Belady(param_uses, param_endings),
        lambda slots: Belady(optim_uses, is_waves=True),
    )  # fmt: skip


def _is_backward(events: Sequence[TraceEvent], index: int) -> bool:
    """Whether the acquire is followed by a push of its layer before another acquire."""
    for event in events[index + 1 :]:
        if event.kind is TraceEventKind.PUSH:
            return event.layer == events[index].layer
        if event.kind is not TraceEventKind.PREFETCH:
            return False
    return False
