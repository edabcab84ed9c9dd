"""Algorithm2 does what the paper's text says, and differs from `DecayedLfu` where that says so."""

from __future__ import annotations

import random
from collections.abc import Hashable

from paramstore.policy.decayed_lfu import DecayedLfu
from paramstore.sim.algorithm2 import Algorithm2
from paramstore.testing.policies import HoldingContract, nothing


def make(*, threshold: float = 1.0, beta: float = 0.5, decay_steps: int = 100, capacity: int = 10) -> Algorithm2:
    return Algorithm2(threshold=threshold, beta=beta, decay_steps=decay_steps, capacity=capacity)


class TestAlgorithm2(HoldingContract):
    def make(self, capacity: int) -> Algorithm2:
        return make(capacity=max(1, capacity))


def test_the_fewest_hits_at_or_above_the_threshold_go_first_and_those_below_it_stay() -> None:
    policy, ours = make(threshold=2.0), DecayedLfu(threshold=2.0, beta=0.5, decay_steps=100, capacity=10)
    for name in "abbcccdddd":
        policy.record(name)
        ours.record(name)
    assert policy.victims(4, nothing) == ["b", "c", "d", "a"]
    assert ours.victims(4, nothing) == ["a", "b", "c", "d"]


def test_the_hits_of_what_is_evicted_are_deleted() -> None:
    policy, ours = make(), DecayedLfu(threshold=1.0, beta=0.5, decay_steps=100, capacity=10)
    for either in (policy, ours):
        either.record_all("aaabb")
        either.forget("a")
        either.record("a")
    assert policy.victims(1, nothing) == ["a"]
    assert ours.victims(1, nothing) == ["b"]


def test_counts_decay_when_the_kth_step_is_full_before_the_next_access_is_counted() -> None:
    policy = make(decay_steps=2, capacity=2, threshold=0.0)
    policy.record_all("aaab")
    assert policy.heat("a") == 3.0
    policy.record("b")
    assert (policy.heat("a"), policy.heat("b")) == (1.5, 1.5)


def test_the_order_is_that_of_the_plain_definition_over_long_random_use() -> None:
    seed = 220510034
    rng = random.Random(seed)
    policy = make(threshold=1.5, beta=0.7, decay_steps=2, capacity=8)
    hits, last = dict[Hashable, float](), dict[Hashable, int]()
    accesses = checked = 0
    for turn in range(2000):
        name = min(rng.randrange(24), rng.randrange(24))
        if rng.random() < 0.2:
            policy.forget(name)
            hits.pop(name, None)
            continue
        if accesses and accesses % 16 == 0:
            hits = {known: count * 0.7 for known, count in hits.items()}
        policy.record(name)
        accesses += 1
        hits[name] = hits.get(name, 0.0) + 1
        last[name] = accesses
        if turn % 40 == 0:
            above = sorted((known for known in hits if hits[known] >= 1.5), key=lambda known: (hits[known], last[known]))
            below = sorted((known for known in hits if hits[known] < 1.5), key=lambda known: (hits[known], last[known]))
            assert policy.victims(len(hits), nothing) == above + below, f"seed {seed}, turn {turn}"
            checked += bool(above and below)
    assert checked > 5
