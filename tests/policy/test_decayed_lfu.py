"""DecayedLfu keeps the contract of a policy and does what Algorithm 2 says."""

from __future__ import annotations

from collections.abc import Callable, Hashable

import pytest

from paramstore.policy import decayed_lfu
from paramstore.policy.decayed_lfu import DecayedLfu
from paramstore.testing.policies import CountingContract, nothing

DECAY_STEPS = 3


class DecayedLfuContract(CountingContract):
    threshold = 1.0
    beta = 0.5

    def make(self, capacity: int) -> DecayedLfu:
        return DecayedLfu(threshold=self.threshold, beta=self.beta, decay_steps=DECAY_STEPS, capacity=max(1, capacity))

    def rank(self, uses: list[Hashable], *, capacity: int) -> Callable[[Hashable], tuple[float, ...]]:
        hits: dict[Hashable, float] = {}
        ranks: dict[Hashable, tuple[float, ...]] = {}
        last_use = {name: access for access, name in enumerate(uses)}
        for access, name in enumerate(uses):
            if access and access % (DECAY_STEPS * capacity) == 0:
                before = hits
                hits = {known: count * self.beta for known, count in hits.items()}
                for known in hits:
                    if hits[known] < self.threshold <= before[known]:
                        ranks[known] = (0, access - 0.5, before[known])
            hits[name] = hits.get(name, 0.0) + 1
            ranks[name] = (0, access) if hits[name] < self.threshold else (1,)
        return lambda name: (*ranks[name], *([hits[name]] if ranks[name] == (1,) else []), last_use[name])


class TestDecayedLfu(DecayedLfuContract):
    pass


class TestDecayedLfuWithAHighThreshold(DecayedLfuContract):
    threshold = 2.5
    beta = 0.9


class TestDecayedLfuWithoutAThreshold(DecayedLfuContract):
    threshold = 0.0
    beta = 0.3


class TestDecayedLfuThatForgetsAll(DecayedLfuContract):
    beta = 0.0


class TestDecayedLfuThatForgetsNothing(DecayedLfuContract):
    beta = 1.0


def test_the_least_often_used_goes_first() -> None:
    policy = DecayedLfu(threshold=1.0, beta=0.5, decay_steps=100, capacity=10)
    for name in "aaabbc":
        policy.record(name)
    for name in "cba":
        assert policy.heat(name) == 4 - (ord(name) - ord("a") + 1)
    assert policy.victims(3, nothing) == ["c", "b", "a"]


def test_counts_are_multiplied_by_beta_every_k_steps_of_capacity_accesses() -> None:
    policy = DecayedLfu(threshold=1.0, beta=0.25, decay_steps=2, capacity=4)
    for _ in range(8):
        policy.record("a")
    assert policy.heat("a") == 8.0
    policy.record("b")
    assert policy.heat("a") == 2.0
    assert policy.heat("b") == 1.0


def test_below_the_threshold_the_least_recently_used_goes_first_whatever_its_count() -> None:
    policy = DecayedLfu(threshold=4.0, beta=1.0, decay_steps=100, capacity=10)
    for name in "aaabcccc":
        policy.record(name)
    assert policy.victims(3, nothing) == ["a", "b", "c"]


def test_what_fell_below_the_threshold_earlier_goes_first() -> None:
    policy = DecayedLfu(threshold=2.0, beta=0.5, decay_steps=1, capacity=8)
    for name in "aaabbbbb" + "bbbbbbbb" + "c":
        policy.record(name)
    assert policy.heat("a") == 0.75
    assert policy.victims(3, nothing) == ["a", "c", "b"]


def test_counts_outlive_eviction() -> None:
    policy = DecayedLfu(threshold=1.0, beta=0.5, decay_steps=100, capacity=10)
    for name in "aabb":
        policy.record(name)
    policy.forget("a")
    policy.record("c")
    policy.record("a")
    assert policy.heat("a") == 3.0
    assert policy.victims(3, nothing) == ["c", "b", "a"]


def test_counts_survive_when_weights_are_scaled_back(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = DecayedLfu(threshold=1.0, beta=0.5, decay_steps=1, capacity=4)
    scaled = DecayedLfu(threshold=1.0, beta=0.5, decay_steps=1, capacity=4)
    for name in "aaabaacabbadbacbdaccc" * 20:
        plain.record(name)
    monkeypatch.setattr(decayed_lfu, "UNIT_MAX", 16.0)
    for name in "aaabaacabbadbacbdaccc" * 20:
        scaled.record(name)
    assert scaled._unit <= 16.0 < plain._unit
    assert [scaled.heat(name) for name in "abcd"] == [plain.heat(name) for name in "abcd"]
    assert scaled.victims(4, nothing) == plain.victims(4, nothing)


def test_a_warm_policy_of_fewer_slots_decays_at_its_next_access() -> None:
    earlier = DecayedLfu(threshold=1.0, beta=0.5, decay_steps=1, capacity=100)
    warm = DecayedLfu(threshold=1.0, beta=0.5, decay_steps=1, capacity=4)
    for _ in range(50):
        earlier.record("a")
    warm.warm(["a"], earlier.counts(["a"]))
    assert warm.heat("a") == 50.0
    warm.record("b")
    assert warm.heat("a") == 25.0
