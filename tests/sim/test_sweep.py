"""Sweeps: which sizes and policies are replayed, and that all of them count the same uses and none beats the optimum."""

from __future__ import annotations

from dataclasses import replace

import pytest

from paramstore.core.schema import Schema
from paramstore.core.trace import Trace, TraceEvent, TraceEventKind, TraceHeader
from paramstore.errors import ConfigError
from paramstore.sim.sweep import (
    BELADY,
    DAEMON,
    POLICIES,
    READER,
    SHARES,
    Point,
    beginning,
    micro_batches_of,
    place_of,
    policies_named,
    sizes_of,
    sweep,
)

A, U, APPLY, STEP = TraceEventKind.ACQUIRE, TraceEventKind.PUSH, TraceEventKind.APPLY, TraceEventKind.STEP
LAYERS, EXPERTS = [0, 1, 2], 8


def served(*, schema: Schema | None = None, tokens: int = 12) -> Trace:
    """Two experts of each layer at each token, in a turn of their own."""
    schema = schema or Schema.param({"w": ((4, 4), "float32")})
    events: list[TraceEvent] = []
    for token in range(tokens):
        events += [TraceEvent(A, layer, tuple(sorted({token * 3 % 8, token % 5}))) for layer in LAYERS]
        events.append(TraceEvent(STEP, 0, ()))
    return Trace(TraceHeader("served", schema.describe(), LAYERS, EXPERTS, "by hand"), tuple(events))


def trained(*, steps: int = 3, micro_batches: int = 2) -> Trace:
    schema = Schema.adamw({"w": (4, 4)}, param_dtype="float32")
    once = [TraceEvent(A, layer, (0, 1 + layer)) for layer in LAYERS]
    back = [TraceEvent(kind, layer, (0, 1 + layer)) for layer in reversed(LAYERS) for kind in (A, U)]
    step = (*(once + back) * micro_batches, TraceEvent(APPLY, 0, ()), TraceEvent(STEP, 0, ()))
    return Trace(TraceHeader("trained", schema.describe(), LAYERS, EXPERTS, "by hand"), step * steps)


def points_of(trace: Trace, place: str, sizes: list[int]) -> list[Point]:
    return list(sweep(trace, sizes, place=place, policies=POLICIES[place]))


@pytest.mark.parametrize(("trace", "place"), [(served(), READER), (served(), DAEMON), (trained(), DAEMON)])
def test_every_policy_counts_the_uses_of_the_trace_and_none_misses_less_than_the_optimum(trace: Trace, place: str) -> None:
    points = points_of(trace, place, [4, 12, 24])
    uses = sum(len(event.experts) for event in trace.events if event.kind is A)
    for size in (4, 12, 24):
        found = {point.policy: point for point in points if point.slots == size}
        assert list(found) == list(POLICIES[place])
        assert {point.uses for point in found.values()} == {uses + (6 * trace.steps if trace.has_applies else 0)}
        best = min(point.misses for name, point in found.items() if name != BELADY)
        assert found[BELADY].misses <= best
        assert all(0 < point.miss_rate <= 1 and point.bytes_moved > 0 for point in found.values())
    assert [point.share for point in points[:: len(POLICIES[place])]] == [4 / 24, 12 / 24, 1.0]


def test_where_all_fits_each_expert_misses_once_and_its_record_is_moved_once() -> None:
    trace = served()
    keys = {key for event in trace.events for key in event.keys}
    for point in points_of(trace, READER, [24]):
        assert point.misses == len(keys)
        assert point.bytes_moved == len(keys) * trace.schema.record_bytes
        assert point.memory_bytes == 24 * trace.schema.part("param").image_bytes


def test_arenas_of_a_trainer_hold_weights_and_records() -> None:
    (point, *_) = points_of(trained(), DAEMON, [24])
    schema = trained().schema
    assert point.memory_bytes == 24 * (schema.record_bytes + schema.part("param").image_bytes)


def test_an_exact_trace_replays_the_records_that_have_gradients() -> None:
    schema = Schema.trained("adamw", {"w": (4, 4)}, param_dtype="float32", updates="exact")
    trace = trained()
    exact = Trace(replace(trace.header, schema=schema.describe()), trace.events)
    assert [point.misses for point in points_of(exact, DAEMON, [6])] == [point.misses for point in points_of(trace, DAEMON, [6])]


def test_sizes_are_counts_or_shares_of_the_experts() -> None:
    trace = served()
    assert sizes_of(trace, slots=[24, 2, 9, 2]) == [2, 9, 24]
    assert sizes_of(trace, shares=[0.5, 1.0, 1e-9]) == [2, 12, 24]
    assert sizes_of(trace) == sorted({max(2, round(24 * share)) for share in SHARES})


@pytest.mark.parametrize("slots", [0, 1, 25, -1])
def test_slots_that_no_arena_has_are_refused(slots: int) -> None:
    with pytest.raises(ConfigError, match=rf"slots={slots}: give a whole number from 2 to 24"):
        sizes_of(served(), slots=[4, slots])


@pytest.mark.parametrize("share", [0.0, 1.01, -0.5, float("nan"), float("inf")])
def test_shares_that_are_none_are_refused(share: float) -> None:
    with pytest.raises(ConfigError, match="shares="):
        sizes_of(served(), shares=[share])


def test_sizes_are_named_in_one_way() -> None:
    with pytest.raises(ConfigError, match="both given"):
        sizes_of(served(), slots=[4], shares=[0.5])


@pytest.mark.parametrize("events", [(), (TraceEvent(STEP, 0, ()),), (TraceEvent(A, 0, ()),)])
def test_a_trace_that_uses_nothing_is_refused(events: tuple[TraceEvent, ...]) -> None:
    with pytest.raises(ConfigError, match="trace 'served' uses no expert of 24: there is nothing to replay"):
        sizes_of(Trace(served().header, events))


def test_a_trace_with_updates_is_replayed_in_arenas_alone() -> None:
    assert (place_of(served()), place_of(served(), DAEMON), place_of(trained())) == (READER, DAEMON, DAEMON)
    with pytest.raises(ConfigError, match="trace 'trained' has updates"):
        place_of(trained(), READER)
    with pytest.raises(ConfigError, match="'reader' or 'daemon'"):
        place_of(served(), "gpu")


def test_named_policies_stand_beside_the_optimum_and_an_unknown_one_names_those_there_are() -> None:
    assert policies_named(READER, ["ring", "lru"]) == ["lru", "ring", BELADY]
    assert policies_named(DAEMON) == list(POLICIES[DAEMON])
    with pytest.raises(ConfigError) as refused:
        policies_named(DAEMON, ["lru", "ring"])
    assert all(repr(name) in str(refused.value) for name in POLICIES[DAEMON])


def test_micro_batches_are_those_of_the_first_step() -> None:
    assert [micro_batches_of(trained(micro_batches=count)) for count in (1, 2, 4)] == [1, 2, 4]
    assert micro_batches_of(served()) == 1


def test_a_beginning_is_of_whole_steps() -> None:
    events = [TraceEvent(A, 0, (0, 1)), TraceEvent(STEP, 0, ())] * 3
    trace = Trace(served().header, tuple(events))
    assert [len(beginning(trace, uses).events) for uses in (1, 2, 3, 4, 7)] == [2, 2, 4, 4, 6]
