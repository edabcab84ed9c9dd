"""Replays of visits: nobody has more hits than Belady, and a ring that loads all ahead misses nothing."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from paramstore.core.key import ExpertKey
from paramstore.core.schema import Schema
from paramstore.core.trace import Trace, TraceEvent, TraceEventKind, TraceHeader
from paramstore.policy.base import Policy
from paramstore.policy.lifo_inactive import LifoInactive
from paramstore.policy.lru import Lru
from paramstore.policy.ring_order import RingOrder
from paramstore.policy.slot_plan import SlotPlan
from paramstore.sim.slot_replay import belady_of, replay_visits, visits_of
from paramstore_testkit.oracles.optimum import optimal_hits

POLICIES: list[Callable[[], Policy]] = [Lru, LifoInactive, lambda: RingOrder(range(4))]


def random_visits(seed: int, *, layers: int = 4, experts: int = 8, top: int = 2, tokens: int = 60) -> list[list[ExpertKey]]:
    rng = random.Random(seed)
    weights = [1.0 / (1 + place) for place in range(experts)]
    return [
        sorted({(layer, expert) for expert in rng.choices(range(experts), weights, k=top)})
        for _ in range(tokens) for layer in range(layers)
    ]  # fmt: skip


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("slots", [3, 8, 20])
def test_nobody_has_more_hits_than_the_optimum(seed: int, slots: int) -> None:
    visits = random_visits(seed)
    best = replay_visits(visits, SlotPlan(slots, belady_of(visits))).hits
    for make in POLICIES:
        assert replay_visits(visits, SlotPlan(slots, make())).hits <= best, f"seed {seed}, {make}"


def test_one_key_a_visit_is_the_optimum_of_single_uses() -> None:
    visits = [visit[:1] for visit in random_visits(7)]
    counts = replay_visits(visits, SlotPlan(5, belady_of(visits)))
    assert counts.hits == optimal_hits([key for (key,) in visits], 5)


@pytest.mark.parametrize("slots_of_layers", [2, 3, 4])
def test_a_ring_that_loads_all_ahead_finds_all_there_and_copies_each_key_once_a_turn(slots_of_layers: int) -> None:
    layers, experts, tokens = 8, 4, 20
    keys = [[(layer, expert) for expert in range(experts)] for layer in range(layers)]
    visits = [keys[layer] for _ in range(tokens) for layer in range(layers)]
    plan = SlotPlan(slots_of_layers * experts, RingOrder(range(layers)))

    def following(index: int) -> list[ExpertKey]:
        return [key for ahead in range(1, slots_of_layers) for key in keys[(index + ahead) % layers]]

    counts = replay_visits(visits, plan, ahead=following)
    assert counts.misses == experts  # those of the first visit
    assert counts.hits == len(visits) * experts - experts
    assert counts.loads <= 1.06 * len(visits) * experts
    assert counts.wasted == 0


def test_the_visits_of_a_trace_are_its_acquires() -> None:
    schema = Schema.param({"w": ((2, 2), "float32")})
    header = TraceHeader("t", schema.describe(), [0, 3], 4, "by hand")
    events = (
        TraceEvent(TraceEventKind.ACQUIRE, 0, (0, 2)), TraceEvent(TraceEventKind.PREFETCH, 3, (1,)),
        TraceEvent(TraceEventKind.ACQUIRE, 3, (1,)), TraceEvent(TraceEventKind.STEP, 0, ()),
    )  # fmt: skip
    assert visits_of(Trace(header, events)) == [[(0, 0), (0, 2)], [(3, 1)]]
