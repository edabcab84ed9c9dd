"""Lru keeps the contract of a policy and orders by last use alone."""

from __future__ import annotations

from collections.abc import Callable, Hashable

from paramstore.policy.lru import Lru
from paramstore.testing.policies import CountingContract, nothing


class TestLru(CountingContract):
    def make(self, capacity: int) -> Lru:
        return Lru()

    def rank(self, uses: list[Hashable], *, capacity: int) -> Callable[[Hashable], tuple[float, ...]]:
        places = {name: place for place, name in enumerate(uses)}
        return lambda name: (places[name],)

    def test_how_often_a_name_was_used_does_not_matter(self) -> None:
        policy = Lru()
        for name in "aaaab":
            policy.record(name)
        assert policy.victims(2, nothing) == ["a", "b"]

    def test_the_name_used_last_is_the_hottest(self) -> None:
        policy = Lru()
        for name in "abc":
            policy.record(name)
        assert [policy.heat(name) for name in "cba"] == [1.0, 1 / 2, 1 / 3]
        policy.forget("c")
        assert policy.heat("c") == 0.0
