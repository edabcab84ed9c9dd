"""Traces through the planner: what is counted, and which policy comes how near to the optimum."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from paramstore.config import PolicyConfig
from paramstore.core.schema import Schema
from paramstore.core.trace import Trace, TraceEvent, TraceEventKind, TraceHeader, unpack_trace
from paramstore.core.visits import apply_visits, ring_visits, training_visits
from paramstore.policy.base import Policy
from paramstore.policy.make import make_policy
from paramstore.sim.replay import Outcome, Policies, belady_policies, parts_of, replay, slots_of

ACQUIRE, PUSH = TraceEventKind.ACQUIRE, TraceEventKind.PUSH
APPLY, STEP = TraceEventKind.APPLY, TraceEventKind.STEP
SCHEMA = Schema.adamw({"w": (3, 5)}, param_dtype="float32")
TRACES = Path(__file__).parents[2] / "bench" / "traces"


def training(*, layers: int = 4, experts: int = 8, steps: int = 6, chance: float = 1.0, seed: int = 0) -> Trace:
    """Each expert is active at a step with `chance`, by itself."""
    rng = random.Random(seed)
    events: list[TraceEvent] = []
    for _ in range(steps):
        active = [tuple(e for e in range(experts) if rng.random() < chance) or (0,) for _ in range(layers)]
        events += [TraceEvent(ACQUIRE, layer, used) for layer, used in enumerate(active)]
        for layer, used in reversed(list(enumerate(active))):
            events += [TraceEvent(ACQUIRE, layer, used), TraceEvent(PUSH, layer, used)]
        events += [TraceEvent(APPLY, 0, ()), TraceEvent(STEP, 0, ())]
    return Trace(TraceHeader("synthetic", SCHEMA.describe(), list(range(layers)), experts, f"seed {seed}"), tuple(events))


def generation(*, layers: int, experts: int, tokens: int) -> Trace:
    """Every expert of every layer, again and again."""
    once = [TraceEvent(ACQUIRE, layer, tuple(range(experts))) for layer in range(layers)]
    header = TraceHeader("scan", SCHEMA.describe(), list(range(layers)), experts, "all of it")
    return Trace(header, (*once, TraceEvent(STEP, 0, ())) * tokens)


def outcomes(trace: Trace, share: float) -> dict[str, Outcome]:
    layers = trace.header.layers
    param, optim = (training_visits(layers), apply_visits(layers)) if trace.has_applies else (ring_visits(layers), ())

    def maker(name: str) -> Callable[[int], Policy]:
        return lambda slots: make_policy(PolicyConfig(name=name), slots)

    names = ("lru", "decayed_lfu", "schedule")
    slots = slots_of(trace, share)
    found = {name: replay(trace, slots, Policies(name, maker(name), maker(name), param, optim)) for name in names}
    return found | {"belady": replay(trace, slots, belady_policies(trace, slots))}


def test_what_fits_is_read_once_and_never_written() -> None:
    trace = training(chance=0.5)
    for outcome in outcomes(trace, 1.0).values():
        names = {key for event in trace.events if event.kind is ACQUIRE for key in event.keys}
        assert outcome.slots == 32
        assert outcome.param_loads == outcome.optim_loads == len(names)
        assert outcome.bytes_written == 0
        assert outcome.hits == outcome.param_uses + outcome.optim_uses - 2 * len(names)


def test_uses_are_those_of_the_trace() -> None:
    trace = training(steps=2)
    found = outcomes(trace, 0.25)
    for outcome in found.values():
        assert (outcome.param_uses, outcome.optim_uses) == (2 * 2 * 32, 2 * 32)
        assert outcome.bytes_read >= outcome.optim_loads * SCHEMA.record_bytes
        assert outcome.bytes_written % SCHEMA.record_bytes == 0


def test_parts_go_up_in_forward_and_down_in_backward() -> None:
    trace = training(layers=1, experts=6, steps=1)
    parts = [keys for kind, keys in parts_of(trace, slots=5) if kind is ACQUIRE]
    up = [[(0, 0), (0, 1)], [(0, 2), (0, 3)], [(0, 4), (0, 5)]]
    assert parts == [*up, *up[::-1]]
    assert [len(keys) for kind, keys in parts_of(trace, slots=30) if kind is ACQUIRE] == [6, 6]


@pytest.mark.parametrize("share", [0.25, 0.5])
def test_nobody_beats_the_optimum_and_the_schedule_comes_near_it(share: float) -> None:
    hits: dict[str, int] = {}
    for seed in range(4):
        for name, outcome in outcomes(training(chance=0.6, seed=seed, steps=8), share).items():
            hits[name] = hits.get(name, 0) + outcome.hits
    assert hits["belady"] >= max(hits.values())
    assert hits["schedule"] >= 0.97 * max(hits["lru"], hits["decayed_lfu"]), "nothing can be learnt of experts that are all alike"


def test_a_scan_larger_than_memory_keeps_a_fixed_share_resident() -> None:
    found = outcomes(generation(layers=8, experts=4, tokens=12), 0.5)
    assert found["lru"].param_hits == 0
    assert found["schedule"].param_hits >= 0.95 * found["belady"].param_hits
    assert found["schedule"].bytes_read <= 0.65 * found["lru"].bytes_read


def test_a_step_of_which_half_fits_moves_no_more_than_the_half_that_does_not() -> None:
    steps = 12
    found = outcomes(training(layers=8, experts=4, steps=steps), 0.5)
    records, slots = 32, slots_of(training(layers=8, experts=4), 0.5)
    for outcome in found.values():
        assert outcome.optim_loads <= records + (steps - 1) * (records - slots)
    assert found["schedule"].bytes_moved <= min(found["lru"].bytes_moved, found["decayed_lfu"].bytes_moved)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["train", "train-small"])
def test_recorded_traces_replay(name: str) -> None:
    whole = unpack_trace((TRACES / f"{name}.trace").read_bytes())
    ends = [index for index, event in enumerate(whole.events) if event.kind is STEP]
    trace = Trace(whole.header, whole.events[: ends[11] + 1])
    found = outcomes(trace, 0.5)
    assert found["schedule"].hits >= max(found["lru"].hits, found["decayed_lfu"].hits)
    assert found["schedule"].hits >= 0.9 * found["belady"].hits, "so early that little is known"
