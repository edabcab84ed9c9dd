"""RingOrder keeps the contract of a policy: what the ring reaches last goes first."""

from __future__ import annotations

import random

from paramstore.policy.ring_order import RingOrder
from paramstore.testing.policies import HoldingContract, nothing


class TestRingOrder(HoldingContract):
    def make(self, capacity: int) -> RingOrder:
        return RingOrder([0])

    def test_the_layer_that_the_ring_is_at_comes_around_last(self) -> None:
        policy = RingOrder([4, 2, 7])
        policy.record_all([(4, 0), (2, 0), (7, 0)])
        policy.begin_visit([(2, 0)])
        assert policy.victims(3, nothing) == [(2, 0), (4, 0), (7, 0)]
        policy.begin_visit([(7, 0)])
        assert policy.victims(3, nothing) == [(7, 0), (2, 0), (4, 0)]

    def test_within_a_layer_the_one_used_longest_ago_goes_first(self) -> None:
        policy = RingOrder([0, 1])
        policy.record_all([(1, 0), (1, 1), (1, 2), (1, 0)])
        assert policy.victims(3, nothing) == [(1, 1), (1, 2), (1, 0)]

    def test_a_key_of_no_layer_of_the_ring_goes_before_all(self) -> None:
        policy = RingOrder([0, 1])
        policy.record_all([(0, 0), (5, 0), (1, 0)])
        policy.begin_visit([(5, 0)])  # it does not move the ring
        assert policy.victims(2, nothing) == [(5, 0), (0, 0)]

    def test_what_comes_next_is_the_hottest(self) -> None:
        policy = RingOrder([0, 1, 2])
        policy.record_all([(layer, 0) for layer in range(3)])
        policy.begin_visit([(1, 0)])
        assert [policy.heat((layer, 0)) for layer in range(4)] == [1 / 2, 1 / 3, 1.0, 0.0]

    def test_the_order_is_that_of_the_plain_definition_over_long_random_use(self) -> None:
        seed = 22051003
        rng = random.Random(seed)
        layers = [3, 0, 5, 2]
        policy, used = RingOrder(layers), list[tuple[int, int]]()
        for turn in range(1000):
            here = rng.randrange(4)
            visit = [(layers[here], expert) for expert in rng.sample(range(6), 2)]
            policy.begin_visit(visit)
            policy.record_all(visit)
            used = [key for key in used if key not in visit] + visit
            if rng.random() < 0.5:
                policy.forget(used.pop(rng.randrange(len(used))))
            ahead = [*layers[here + 1 :], *layers[: here + 1]]
            expected = [key for layer in reversed(ahead) for key in used if key[0] == layer]
            assert policy.victims(len(used), nothing) == expected, f"seed {seed}, turn {turn}"
