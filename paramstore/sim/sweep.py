"""Replays one trace at several sizes under several policies, beside Belady's optimum: through a reader's slots (`slot_replay.py`),
or through the arenas of a daemon (`replay.py`), whose policies know the visits that the traced program would have declared.

A reader's slots are a plan for bytes that never change, so a trace with applies is replayed in arenas alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass

from paramstore.config import PolicyConfig
from paramstore.core.arguments import choice, number, whole_number
from paramstore.core.trace import Trace, TraceEventKind
from paramstore.core.visits import apply_visits, ring_visits, training_visits
from paramstore.errors import ConfigError
from paramstore.policy.base import Policy
from paramstore.policy.make import SLOT_POLICIES, make_policy, make_slot_policy
from paramstore.policy.slot_plan import SlotPlan
from paramstore.policy.slot_visit import SlotCounts
from paramstore.sim.algorithm2 import Algorithm2
from paramstore.sim.replay import SLOTS_MIN, Outcome, Policies, belady_policies, replay, slots_of
from paramstore.sim.slot_replay import belady_of, replay_visits, visits_of
from paramstore.sim.world import param_read_bytes

READER, DAEMON = "reader", "daemon"
BELADY, ALGORITHM2 = "belady", "algorithm2"
POLICIES = {
    READER: (*SLOT_POLICIES, ALGORITHM2, BELADY),
    DAEMON: ("schedule", "decayed_lfu", "lru", ALGORITHM2, BELADY),
}
"""Place -> the policies that are replayed there. No user can choose `algorithm2`, nor, of course, `belady`."""
USES = {READER: 20_000, DAEMON: 6_000}
"""Place -> uses of experts in which every policy shows what it is, in some half a minute at eight sizes: as much is replayed of a
longer trace where nobody says how much."""
SHARES = (1 / 16, 1 / 8, 3 / 16, 1 / 4, 3 / 8, 1 / 2, 3 / 4, 1.0)
"""Sizes where none are named, as shares of the experts."""


@dataclass(frozen=True, slots=True)
class Point:
    """One replay. slots: the reader's, or those of each arena. uses: experts asked for, by applies too. misses: those of them that
    were not there. bytes_moved: from the volumes and to them. memory_bytes: of all slots, full. counts: all that was counted."""

    place: str
    policy: str
    slots: int
    share: float
    uses: int
    misses: int
    bytes_moved: int
    memory_bytes: int
    counts: dict[str, int | str]

    @property
    def miss_rate(self) -> float:
        return self.misses / self.uses


def sizes_of(trace: Trace, *, slots: Sequence[int] | None = None, shares: Sequence[float] | None = None) -> list[int]:
    """The numbers of slots to replay, ascending: as they are given, or for shares of the experts, or for SHARES.

    Raises ConfigError on a trace that uses no expert, on slots beyond SLOTS_MIN to the number of experts, on a share that is not
    above 0 and at most 1, and where both are given.
    """
    keys = len(trace.header.space)
    if keys < SLOTS_MIN or not any(event.kind is TraceEventKind.ACQUIRE and event.experts for event in trace.events):
        raise ConfigError(f"trace {trace.header.name!r} uses no expert of {keys}: there is nothing to replay")
    if slots is not None and shares is not None:
        raise ConfigError("slots and shares are both given: sizes are named in one way")
    if slots is not None:
        return sorted({whole_number("slots", count, least=SLOTS_MIN, most=keys) for count in slots})
    for share in shares or ():
        if not 0 < number("shares", share) <= 1:
            raise ConfigError(f"shares={share!r}: give shares of the {keys} experts, above 0 and at most 1")
    return sorted({slots_of(trace, share) for share in shares or SHARES})


def beginning(trace: Trace, uses: int) -> Trace:
    """The first whole steps of a trace in which experts are leased at least `uses` times, or all of it."""
    counted = 0
    for index, event in enumerate(trace.events):
        counted += len(event.experts) if event.kind is TraceEventKind.ACQUIRE else 0
        if event.kind is TraceEventKind.STEP and counted >= uses:
            return Trace(trace.header, trace.events[: index + 1])
    return trace


def place_of(trace: Trace, place: str | None = None) -> str:
    """Where the trace is replayed: in `place`, or where a program of its kind keeps experts. Raises ConfigError."""
    if place is None:
        return DAEMON if trace.has_applies else READER
    if choice("place", place, (READER, DAEMON)) == READER and trace.has_applies:
        raise ConfigError(f"place={place!r}: trace {trace.header.name!r} has updates, which a reader's slots know nothing of")
    return place


def policies_named(place: str, names: Sequence[str] = ()) -> list[str]:
    """The policies to replay: all, or those that are named, and Belady's at the end. Raises ConfigError on an unknown name."""
    known = POLICIES[place]
    chosen = {choice(f"policy of a {place}", name, known) for name in names} or set(known)
    return [name for name in known if name in chosen | {BELADY}]


def sweep(trace: Trace, sizes: Sequence[int], *, place: str, policies: Sequence[str]) -> Iterator[Point]:
    """Replays the trace at each size with each policy; yields each replay when it is over."""
    run = _in_slots if place == READER else _in_arenas
    for slots in sizes:
        for policy in policies:
            yield run(trace, slots, policy)


def arena_policies(name: str, trace: Trace, slots: int) -> Policies:
    """Makes one policy for both arenas, and the order of visits that the trace's program would have declared."""
    if name == BELADY:
        return belady_policies(trace, slots)
    layers = trace.header.layers

    def make(count: int) -> Policy:
        return algorithm2(count) if name == ALGORITHM2 else make_policy(PolicyConfig(name=name), count)

    if trace.has_applies:
        return Policies(name, make, make, training_visits(layers, micro_batches=micro_batches_of(trace)), apply_visits(layers))
    return Policies(name, make, make, ring_visits(layers))


def micro_batches_of(trace: Trace) -> int:
    """How often the first step pushes gradients of a layer: of the one pushed least often, since large layers come in parts."""
    pushed: Counter[int] = Counter()
    for event in trace.events:
        if event.kind is TraceEventKind.APPLY and pushed:
            break
        pushed[event.layer] += event.kind is TraceEventKind.PUSH
    return min((count for count in pushed.values() if count), default=1)


def slot_counts(trace: Trace, slots: int, policy: str) -> SlotCounts:
    """What is counted in a reader's slots: nothing is loaded ahead, and what does not fit passes by."""
    visits = visits_of(trace)
    make: dict[str, Callable[[], Policy]] = {BELADY: lambda: belady_of(visits), ALGORITHM2: lambda: algorithm2(slots)}
    chosen = make[policy]() if policy in make else make_slot_policy(policy, slots, trace.header.layers)
    return replay_visits(visits, SlotPlan(slots, chosen))


def algorithm2(slots: int) -> Algorithm2:
    """The paper's policy with the settings that `decayed_lfu` has by default."""
    config = PolicyConfig()
    return Algorithm2(threshold=config.threshold, beta=config.beta, decay_steps=config.decay_steps, capacity=max(1, slots))


def _in_slots(trace: Trace, slots: int, policy: str) -> Point:
    counts, schema = slot_counts(trace, slots, policy), trace.schema
    return Point(
        READER, policy, slots, slots / len(trace.header.space), counts.hits + counts.loads, counts.loads,
        counts.loads * param_read_bytes(schema), slots * schema.part("param").image_bytes, asdict(counts),
    )  # fmt: skip


def _in_arenas(trace: Trace, slots: int, policy: str) -> Point:
    found: Outcome = replay(trace, slots, arena_policies(policy, trace, slots))
    schema, uses = trace.schema, found.param_uses + found.optim_uses
    slot_bytes = schema.part("param").image_bytes + (schema.record_bytes if trace.has_applies else 0)
    return Point(
        DAEMON, policy, slots, slots / len(trace.header.space), uses, uses - found.hits, found.bytes_moved, slots * slot_bytes,
        asdict(found),
    )  # fmt: skip
