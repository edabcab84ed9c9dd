"""LifoInactive keeps the contract of a policy: what its layer's last visit left out goes first, then what came last."""

from __future__ import annotations

import random
from collections.abc import Hashable

from paramstore.policy.lifo_inactive import LifoInactive
from paramstore.testing.policies import HoldingContract, nothing

Key = tuple[int, int]


class TestLifoInactive(HoldingContract):
    def make(self, capacity: int) -> LifoInactive:
        return LifoInactive()

    def test_what_the_last_visit_of_its_layer_left_out_goes_first(self) -> None:
        policy = LifoInactive()
        policy.record_all([(0, expert) for expert in range(4)])
        policy.begin_visit([(0, 1), (0, 3)])
        assert policy.victims(4, nothing) == [(0, 2), (0, 0), (0, 3), (0, 1)]
        policy.begin_visit([(0, 0)])
        assert policy.victims(2, nothing) == [(0, 3), (0, 2)]

    def test_a_visit_of_one_layer_says_nothing_about_another(self) -> None:
        policy = LifoInactive()
        policy.begin_visit([(0, 0)])
        policy.record_all([(0, 0), (0, 1)])
        policy.begin_visit([(1, 1)])
        policy.record_all([(1, 0), (1, 1)])
        assert policy.victims(4, nothing) == [(1, 0), (0, 1), (1, 1), (0, 0)]

    def test_a_use_is_no_arrival_and_a_hold_is_one(self) -> None:
        policy = LifoInactive()
        policy.record_all("ab")
        policy.record("a")
        assert policy.victims(1, nothing) == ["b"]
        policy.hold("a")
        assert policy.victims(1, nothing) == ["a"]

    def test_what_is_active_is_hotter(self) -> None:
        policy = LifoInactive()
        policy.record_all([(0, 0), (0, 1)])
        policy.begin_visit([(0, 0)])
        assert [policy.heat((0, expert)) for expert in range(3)] == [1.0, 0.5, 0.0]

    def test_the_order_is_that_of_the_plain_definition_over_long_random_use(self) -> None:
        seed = 20230306
        rng = random.Random(seed)
        policy, order, active = LifoInactive(), list[Key](), dict[int, set[Key]]()
        for turn in range(1000):
            layer = rng.randrange(3)
            visit = [(layer, expert) for expert in rng.sample(range(8), rng.randint(1, 4))]
            policy.begin_visit(visit)
            active[layer] = set(visit)
            policy.record_all(visit)
            order += [key for key in visit if key not in order]
            for key in rng.sample(order, rng.randint(0, min(3, len(order)))):
                policy.forget(key)
                order.remove(key)
            used = [key for key in order if key in active.get(key[0], ())]
            expected: list[Hashable] = [*reversed([key for key in order if key not in used]), *reversed(used)]
            assert policy.victims(len(order), nothing) == expected, f"seed {seed}, turn {turn}"
