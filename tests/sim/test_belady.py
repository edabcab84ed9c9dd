"""Belady's optimum is the optimum, and knows what a superseded copy is worth."""

from __future__ import annotations

import random
from collections.abc import Callable, Hashable, Sequence
from functools import cache
from math import inf

import pytest

from paramstore.policy.lru import Lru
from paramstore.sim.belady import Belady
from paramstore.testing.policies import PolicyContract, nothing
from paramstore_testkit.oracles.optimum import optimal_hits


def best_hits(uses: Sequence[int], slots: int) -> int:
    """By trying every eviction."""

    @cache
    def best(time: int, held: frozenset[int]) -> int:
        if time == len(uses):
            return 0
        name = uses[time]
        if name in held:
            return 1 + best(time + 1, held)
        if len(held) < slots:
            return best(time + 1, held | {name})
        return max(best(time + 1, held - {victim} | {name}) for victim in held)

    return best(0, frozenset())


@pytest.mark.parametrize("seed", range(30))
def test_no_choice_of_victims_has_more_hits(seed: int) -> None:
    rng = random.Random(seed)
    uses = [rng.randrange(6) for _ in range(14)]
    for slots in (1, 2, 3, 4):
        assert optimal_hits(uses, slots) == best_hits(uses, slots), f"seed {seed}, {slots} slots"


def test_what_is_needed_furthest_in_the_future_goes_first() -> None:
    policy = Belady({"a": [0, 9], "b": [1, 4], "c": [2]})
    policy.record_all("abc")
    assert policy.victims(3, nothing) == ["c", "a", "b"]
    assert [policy.next_use(name) for name in "abc"] == [9, 4, inf]


def test_a_copy_that_is_superseded_before_its_next_use_is_needed_never() -> None:
    policy = Belady({"a": [0, 9], "b": [1, 20]}, {"a": [2]})
    policy.record_all("ab")
    assert policy.next_use("a") == inf
    assert policy.victims(1, nothing) == ["a"]
    policy.forget("a")
    policy.hold("a")
    assert policy.next_use("a") == 9, "this is the copy that came after"


def test_an_apply_is_one_moment() -> None:
    policy = Belady({"a": [1, 3], "b": [1, 2]}, is_waves=True)
    policy.expect("ab")
    policy.record("b")
    assert policy.next_use("a") == 1, "still to come in this one"
    policy.record("a")
    assert [policy.next_use(name) for name in "ab"] == [3, 2]


class TestBelady(PolicyContract):
    """The contract, of names that are never used again: then what was used longest ago goes first."""

    def make(self, capacity: int) -> Belady:
        return Belady({})

    def rank(self, uses: list[Hashable], *, capacity: int) -> Callable[[Hashable], tuple[float, ...]]:
        places = {name: place for place, name in enumerate(uses)}
        return lambda name: (places[name],)

    def test_heat_is_higher_for_what_is_used_and_zero_for_strangers(self) -> None:
        policy = Belady({0: [0], 1: [1, 5]})
        policy.record_all([0, 1])
        assert policy.heat(1) > policy.heat(0) == policy.heat("stranger") == 0.0

    def test_what_is_used_once_and_long_ago_goes_before_what_is_used_often_and_now(self) -> None:
        """The past does not matter."""
        policy = Belady({0: [4], 1: [3]})
        for policy_under_test, first in ((policy, 0), (Lru(), 1)):
            policy_under_test.record_all([1, 1, 0])
            assert policy_under_test.victims(1, nothing) == [first]
