"""The contract of every policy, as tests: a policy's test class inherits them and gives `make`.

`HoldingContract` is what all keep; `PolicyContract` adds what those keep that rank by use, and `CountingContract` what those of a
daemon's arenas keep.
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable
from math import isclose

from paramstore.core.counts import Counts
from paramstore.policy.base import CountingPolicy, Policy


def nothing(name: Hashable) -> bool:
    """Protects no name."""
    return False


class HoldingContract(ABC):
    """Subclass it as `TestX`, with `make`; the names below stand for (layer, expert) keys."""

    @abstractmethod
    def make(self, capacity: int) -> Policy:
        """Makes a policy for an arena of `capacity` slots."""

    def filled(self, count: int) -> Policy:
        policy = self.make(count)
        for name in range(count):
            policy.record(name)
        return policy

    def test_victims_are_exactly_as_many_as_asked_all_held_and_different(self) -> None:
        policy = self.filled(10)
        for count in range(11):
            victims = policy.victims(count, nothing)
            assert victims is not None
            assert len(set(victims)) == len(victims) == count
            assert set(victims) <= set(range(10))

    def test_there_are_none_if_there_are_not_so_many(self) -> None:
        assert self.make(4).victims(1, nothing) is None
        assert self.filled(4).victims(5, nothing) is None
        assert self.filled(4).victims(3, {0, 1}.__contains__) is None

    def test_no_victims_is_always_possible(self) -> None:
        assert self.make(4).victims(0, nothing) == []

    def test_a_protected_name_is_never_a_victim(self) -> None:
        policy = self.filled(10)
        worst = policy.victims(10, nothing)
        assert worst is not None
        assert policy.victims(7, {worst[0], worst[2], worst[5]}.__contains__) == [worst[i] for i in (1, 3, 4, 6, 7, 8, 9)]

    def test_asking_for_victims_changes_nothing(self) -> None:
        policy = self.filled(10)
        assert policy.victims(4, nothing) == policy.victims(4, nothing)

    def test_more_victims_begin_with_the_same_ones(self) -> None:
        policy = self.filled(10)
        worst = policy.victims(10, nothing)
        assert worst is not None
        assert policy.victims(3, nothing) == worst[:3]

    def test_a_forgotten_name_is_no_victim_until_it_is_recorded_again(self) -> None:
        policy = self.filled(3)
        policy.forget(1)
        assert policy.victims(3, nothing) is None
        assert set(policy.victims(2, nothing) or ()) == {0, 2}
        policy.record(1)
        assert set(policy.victims(3, nothing) or ()) == {0, 1, 2}

    def test_forgetting_an_unknown_name_is_ignored(self) -> None:
        policy = self.filled(2)
        policy.forget("stranger")
        policy.forget("stranger")
        assert set(policy.victims(2, nothing) or ()) == {0, 1}

    def test_a_name_held_ahead_of_its_use_is_held(self) -> None:
        policy = self.filled(3)
        policy.hold("ahead")
        assert set(policy.victims(4, nothing) or ()) == {0, 1, 2, "ahead"}
        policy.forget("ahead")
        assert policy.victims(4, nothing) is None

    def test_what_is_expected_is_not_held_by_that(self) -> None:
        policy = self.filled(3)
        policy.expect([1, "stranger"])
        assert set(policy.victims(3, nothing) or ()) == {0, 1, 2}
        assert policy.victims(4, nothing) is None

    def test_a_stranger_is_cold(self) -> None:
        assert self.filled(2).heat("stranger") == 0.0


class PolicyContract(HoldingContract):
    """The contract of a policy that ranks by use: `rank` is its definition."""

    def test_what_is_used_once_and_long_ago_goes_before_what_is_used_often_and_now(self) -> None:
        policy = self.filled(4)
        for _ in range(3):
            for name in (0, 1, 3):
                policy.record(name)
        assert policy.victims(1, nothing) == [2]

    def test_among_equals_the_least_recently_used_goes_first(self) -> None:
        policy = self.filled(4)
        for name in (2, 0, 3, 1):
            policy.record(name)
        assert policy.victims(4, nothing) == [2, 0, 3, 1]

    def test_heat_is_higher_for_what_is_used_and_zero_for_strangers(self) -> None:
        policy = self.filled(2)
        policy.record(1)
        assert policy.heat(1) > policy.heat(0) > policy.heat("stranger") == 0.0

    def test_the_order_is_that_of_the_plain_definition_over_long_random_use(self) -> None:
        seed = 20221034
        rng = random.Random(seed)
        policy, uses, held = self.make(8), list[Hashable](), set[Hashable]()
        for turn in range(2000):
            name = min(rng.randrange(24), rng.randrange(24))
            if rng.random() < 0.2:
                policy.forget(name)
                held.discard(name)
            else:
                policy.record(name)
                uses.append(name)
                held.add(name)
            if turn % 40 == 0:
                expected = sorted(held, key=self.rank(uses, capacity=8))
                assert policy.victims(len(held), nothing) == expected, f"seed {seed}, turn {turn}"

    @abstractmethod
    def rank(self, uses: list[Hashable], *, capacity: int) -> Callable[[Hashable], tuple[float, ...]]:
        """Gives the policy's definition in plain, slow code: a sort key that puts held names after `uses` in
        the order in which they are given up."""


class CountingContract(PolicyContract):
    """The contract of a policy whose counts may outlive it."""

    @abstractmethod
    def make(self, capacity: int) -> CountingPolicy:
        """Makes a policy for an arena of `capacity` slots, which has counted nothing."""

    def test_a_warm_policy_ranks_as_the_earlier_one_had_that_forgotten_what_it_held(self) -> None:
        seed = 20221035
        rng, names = random.Random(seed), range(24)
        for turn in range(20):
            earlier, warm = self.make(8), self.make(8)
            for _ in range(rng.randrange(300)):
                earlier.record(min(rng.choice(names), rng.choice(names)))
            for part in (names[:10], names[10:]):
                warm.warm(part, earlier.counts(part))
            assert warm.counts(names) == earlier.counts(names), f"seed {seed}, turn {turn}"
            for name in names:
                earlier.forget(name)
            held = set[Hashable]()
            for use in range(200):
                name = rng.choice(names)
                is_forgotten = rng.random() < 0.2
                for policy in (earlier, warm):
                    (policy.forget if is_forgotten else policy.record)(name)
                held = held - {name} if is_forgotten else held | {name}
                assert isclose(warm.heat(name), earlier.heat(name)), f"seed {seed}, turn {turn}, use {use}"
                if use % 20 == 0:
                    victims = earlier.victims(len(held), nothing)
                    assert warm.victims(len(held), nothing) == victims, f"seed {seed}, turn {turn}, use {use}"

    def test_a_warm_policy_holds_nothing(self) -> None:
        earlier, warm = self.make(4), self.make(4)
        earlier.record_all(range(4))
        warm.warm(range(4), earlier.counts(range(4)))
        assert warm.victims(1, nothing) is None

    def test_a_policy_without_uses_has_counted_nothing_and_warms_nothing(self) -> None:
        assert self.make(4).counts(range(4)) == Counts()
        policy = self.make(4)
        policy.warm(range(4), Counts())
        assert policy.counts(range(4)) == Counts()
        assert [policy.heat(name) for name in range(4)] == [0.0] * 4
