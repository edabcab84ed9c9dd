"""Schedule ranks by expected next use, finds its place in the cycle by itself, and keeps a fixed share of a scan."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Hashable, Iterable
from math import inf

import pytest

from paramstore.core.key import ExpertKey
from paramstore.core.visits import Visit, VisitKind, Visits, apply_visits, ring_visits, training_visits
from paramstore.policy.base import Policy
from paramstore.policy.decayed_lfu import DecayedLfu
from paramstore.policy.layer_uses import BETA, NEVER
from paramstore.policy.lru import Lru
from paramstore.policy.schedule import Schedule
from paramstore.testing.policies import CountingContract, nothing


class TestUndeclared(CountingContract):
    """Without an order it is the other policy."""

    def make(self, capacity: int) -> Schedule:
        return Schedule(Lru)

    def rank(self, uses: list[Hashable], *, capacity: int) -> Callable[[Hashable], tuple[float, ...]]:
        places = {name: place for place, name in enumerate(uses)}
        return lambda name: (places[name],)


class TestUndeclaredCounts(CountingContract):
    """Likewise with the other policy's counts."""

    def make(self, capacity: int) -> Schedule:
        return Schedule(lambda: DecayedLfu(threshold=0.0, beta=1.0, decay_steps=1, capacity=capacity))

    def rank(self, uses: list[Hashable], *, capacity: int) -> Callable[[Hashable], tuple[float, ...]]:
        last, hits = {name: place for place, name in enumerate(uses)}, Counter(uses)
        return lambda name: (hits[name], last[name])


def declared(visits: Visits) -> Schedule:
    policy = Schedule(Lru)
    policy.declare(visits)
    return policy


def ranked(policy: Policy, count: int) -> list[Hashable]:
    victims = policy.victims(count, nothing)
    assert victims is not None
    return victims


# --- the order


class PlainModel:
    """Expected next use by its definition, out of the whole history; whoever drives it says where in the cycle it is."""

    def __init__(self, visits: Visits) -> None:
        self.visits = visits
        self.position = 0
        self.held: dict[ExpertKey, int] = {}
        self.routed: dict[int, list[set[ExpertKey]]] = {visit.layer: [] for visit in visits}
        self.begun: dict[int, int] = dict.fromkeys(self.routed, 0)
        self.touched: set[ExpertKey] = set()
        self.fresh: dict[ExpertKey, int] = {}
        self.done: set[ExpertKey] = set()
        self.number = 0

    def begin(self, position: int) -> None:
        self.position = position
        visit = self.visits[position]
        self.done = set()
        self.begun[visit.layer] += 1
        if visit.kind is VisitKind.ROUTED:
            self.routed[visit.layer].append(set())

    def use(self, key: ExpertKey) -> None:
        visit = self.visits[self.position]
        if visit.kind is VisitKind.ROUTED:
            self.routed[visit.layer][-1].add(key)
        self.done.add(key)
        self.touched.add(key)
        self.fresh.pop(key, None)
        self.number += 1
        self.held[key] = self.number

    def hold(self, key: ExpertKey) -> None:
        self.touched.discard(key)
        self.fresh[key] = self.begun[key[0]]
        self.number += 1
        self.held[key] = self.number

    def forget(self, key: ExpertKey) -> None:
        self.held.pop(key, None)
        self.fresh.pop(key, None)
        self.touched.discard(key)

    def chance(self, key: ExpertKey) -> float:
        history = self.routed[key[0]][::-1]
        weights = [BETA**age for age in range(len(history))]
        used = [weight for weight, keys in zip(weights, history, strict=True) if key in keys]
        return sum(used) / sum(weights) if used else 0.0

    def by_chance(self, key: ExpertKey, distance: int) -> float:
        gap = len(self.visits) / sum(visit == Visit(key[0], VisitKind.ROUTED) for visit in self.visits)
        chance = self.chance(key)
        return distance + (1 / chance - 1) * gap if chance else NEVER

    def next_use(self, key: ExpertKey) -> float:
        layer, here = key[0], self.visits[self.position]
        last = self.routed[layer][-1] if self.routed[layer] else set()
        if here.layer == layer and key not in self.done:
            if here.kind is VisitKind.REPEATED and key in last:
                return 0
            if here.kind is VisitKind.ROUTED:
                return 0 if self.fresh.get(key, -2) >= self.begun[layer] - 1 else self.by_chance(key, 0)
        has_ended = False
        for distance in range(1, len(self.visits) + 1):
            visit = self.visits[(self.position + distance) % len(self.visits)]
            if visit.layer != layer:
                continue
            is_fresh = self.fresh.get(key) == self.begun[layer]
            if visit.kind in (VisitKind.UPDATED, VisitKind.REPLACED):
                has_ended = has_ended or visit.kind is VisitKind.REPLACED or key in self.touched
            elif is_fresh or (visit.kind is VisitKind.REPEATED and key in last and not has_ended):
                return distance
            elif visit.kind is VisitKind.ROUTED:
                return inf if has_ended else self.by_chance(key, distance)
        raise AssertionError("every layer is routed once a cycle")

    def worst_first(self) -> list[ExpertKey]:
        return sorted(self.held, key=lambda key: (-round(self.next_use(key), 6), self.held[key]))


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("is_exact", [False, True])
@pytest.mark.parametrize("micro_batches", [1, 3])
def test_the_order_is_that_of_the_expected_next_use(seed: int, is_exact: bool, micro_batches: int) -> None:
    rng = random.Random(seed)
    layers, experts = rng.randint(2, 5), rng.randint(2, 6)
    visits = training_visits(range(layers), micro_batches=micro_batches, is_exact=is_exact)
    policy, model = declared(visits), PlainModel(visits)
    for _ in range(6):
        for position, (layer, kind) in enumerate(visits):
            if kind is VisitKind.ROUTED:
                used = {expert for expert in range(experts) if rng.random() < 0.6} or {0}
            elif kind is VisitKind.REPEATED:
                used = {expert for _, expert in model.routed[layer][-1]}
            else:
                finish_layer(model, policy, layer, experts, kind, rng)
                continue
            model.begin(position)
            for expert in sorted(used):
                model.use((layer, expert))
                policy.record((layer, expert))
            for key in list(model.held):
                if rng.random() < 0.1:
                    model.forget(key)
                    policy.forget(key)
            ahead = rng.randrange(layers), rng.randrange(experts)
            if ahead not in model.held and ahead[0] != layer:
                model.hold(ahead)
                policy.hold(ahead)
            assert ranked(policy, len(model.held)) == model.worst_first(), f"seed {seed}, position {position}"


def finish_layer(model: PlainModel, policy: Schedule, layer: int, experts: int, kind: VisitKind, rng: random.Random) -> None:
    """An apply supersedes the layer's copies, and makes some of them anew."""
    for key in [(layer, expert) for expert in range(experts)]:
        is_without_gradient = rng.random() < 0.2  # used, by an evaluation perhaps, and not updated
        if key in model.held and (kind is VisitKind.REPLACED or (key in model.touched and not is_without_gradient)):
            model.forget(key)
            policy.forget(key)
            if rng.random() < 0.5:
                model.hold(key)
                policy.hold(key)
    model.touched = {key for key in model.touched if key[0] != layer}


def test_protected_names_are_passed_over_and_few_are_looked_at() -> None:
    policy = declared(training_visits(range(8)))
    for layer in range(8):
        policy.record_all((layer, expert) for expert in range(100))
    asked: list[Hashable] = []

    def protected(name: Hashable) -> bool:
        asked.append(name)
        return name == (0, 1)

    assert policy.victims(3, protected) == [(0, 0), (0, 2), (0, 3)], "layer 0 comes last in backward"
    assert len(asked) == 4
    assert policy.victims(801, nothing) is None


# --- where now is


def position_after(visits: Visits, uses: Iterable[ExpertKey]) -> int:
    policy = declared(visits)
    policy.record_all(uses)
    return policy._cursor


STEP = training_visits(range(3))
"""0 1 2 up, 2 1 0 down: positions 0 to 5; the update is 6 to 8."""
UP = [(0, 0), (1, 0), (2, 0)]


@pytest.mark.parametrize(
    ("uses", "position"),
    [
        (UP[:1], 0),
        ([(1, 4)], 1),
        (UP, 2),
        ([*UP[:2], (2, 0), (2, 1)], 2),  # parts of one visit
        ([*UP, UP[2]], 3),  # the same name again: backward
        ([*UP, UP[2], UP[1]], 4),
        ([*UP, *UP[::-1], *UP], 2),  # a second step
        ([*UP, UP[2], UP[2], UP[1], UP[1], UP[0]], 5),  # recomputed before each backward
        ([*UP, UP[2], UP[2], UP[1], UP[1], UP[0], UP[0], *UP[:2]], 1),  # the last of them too
        ([*UP, *UP[::-1], (0, 1)], 0),  # not one that backward repeats: the next step
        ([*UP, (7, 0)], 2),  # a layer that is in no order
    ],
)
def test_the_position_follows_from_the_uses(uses: list[ExpertKey], position: int) -> None:
    assert position_after(STEP, uses) == position


def test_micro_batches_follow_each_other() -> None:
    visits = training_visits(range(3), micro_batches=2)
    assert position_after(visits, [*UP, *UP[::-1], *UP]) == 8
    assert position_after(visits, [*UP, *UP[::-1], *UP, *UP[::-1], *UP]) == 2


def test_the_first_use_after_a_stray_one_moves_the_position_back() -> None:
    uses = [(layer, 0) for layer in range(8)]
    visits = training_visits(range(8))
    assert position_after(visits, [*uses[:5], (1, 0), uses[5]]) == 5
    assert position_after(visits, [*uses, *uses[:3:-1], (0, 3), (3, 0), (2, 0)]) == 13


def test_a_rank_that_is_a_little_late_moves_nothing() -> None:
    uses = [(layer, expert) for layer in range(8) for expert in range(2)]
    late = [uses[0], uses[2], uses[1], uses[4], uses[3], uses[6]]
    assert position_after(training_visits(range(8)), late) == 3


def test_what_is_held_ahead_moves_nothing() -> None:
    policy = declared(STEP)
    policy.record_all(UP[:2])
    policy.hold((0, 5))
    assert policy._cursor == 1


# --- what it is for


def hits_of(policy: Policy, scan: Iterable[ExpertKey], slots: int) -> int:
    held, hits = set[Hashable](), 0
    for key in scan:
        if key in held:
            hits += 1
        elif len(held) == slots:
            (victim,) = policy.victims(1, nothing) or ()
            policy.forget(victim)
            held.discard(victim)
        held.add(key)
        policy.record(key)
    return hits


@pytest.mark.parametrize("seed", range(8))
def test_a_cyclic_scan_larger_than_the_arena_keeps_a_fixed_share(seed: int) -> None:
    rng = random.Random(seed)
    layers, experts, rounds = rng.randint(4, 12), rng.randint(1, 8), 12
    slots = rng.randint(experts + 1, layers * experts - 1)
    scan = [(layer, expert) for _ in range(rounds) for layer in range(layers) for expert in range(experts)]
    hits = hits_of(declared(ring_visits(range(layers))), scan, slots)
    assert hits >= (slots - experts) * (rounds - 1), f"seed {seed}"
    assert hits_of(Lru(), scan, slots) == 0


@pytest.mark.parametrize("seed", range(8))
def test_a_random_cyclic_scan_is_never_served_worse_than_by_lru(seed: int) -> None:
    rng = random.Random(100 + seed)
    layers, experts = rng.randint(4, 10), 16
    likely = {(layer, expert): rng.random() ** 2 for layer in range(layers) for expert in range(experts)}
    scan = [key for _ in range(60) for key, chance in likely.items() if rng.random() < chance]
    for slots in (layers * experts // 8, layers * experts // 4, layers * experts // 2):
        hits = hits_of(declared(ring_visits(range(layers))), scan, slots)
        assert hits >= hits_of(Lru(), scan, slots), f"seed {seed}, {slots} slots"


def test_what_an_apply_awaits_goes_last_and_counts_once() -> None:
    policy = declared(apply_visits(range(2)))
    keys = [(layer, expert) for layer in range(2) for expert in range(3)]
    policy.record_all(keys)
    policy.expect([(0, 0), (1, 1)])
    assert ranked(policy, 6)[4:] == sorted([(0, 0), (1, 1)], key=ranked(policy, 6).index)
    assert set(ranked(policy, 6)[4:]) == {(0, 0), (1, 1)}
    policy.record_all([(1, 1), (0, 0)])
    assert policy.heat((0, 0)) == 1.0
    policy.expect([(0, 0), (0, 1)])
    policy.record_all([(0, 0), (1, 0), (0, 1)])
    assert policy.heat((0, 0)) == 1.0
    assert policy.heat((0, 1)) < policy.heat((0, 0)), "the same apply, taken in two passes, is one visit of the layer"


# --- declaring


def test_declaring_keeps_what_is_held_and_what_was_counted() -> None:
    policy = Schedule(Lru)
    policy.record_all([(1, 0), (0, 0)])
    policy.declare(STEP)
    assert policy.visits == STEP
    assert set(ranked(policy, 2)) == {(0, 0), (1, 0)}
    policy.record_all([*UP, UP[2]])
    assert policy.heat((2, 0)) == 1.0
    policy.declare(ring_visits(range(3)))
    assert policy.heat((2, 0)) == 1.0
    assert len(ranked(policy, 3)) == 3
    policy.declare(())
    assert ranked(policy, 3)[-1] == (2, 0), "as the other policy has it: what was used last goes last"


def test_declaring_the_same_again_forgets_no_position() -> None:
    policy = declared(STEP)
    policy.record_all(UP)
    policy.declare(training_visits(range(3)))
    assert policy._cursor == 2


def test_counts_of_forgotten_names_stay_and_are_as_many_as_there_are_names() -> None:
    policy = declared(ring_visits(range(2)))
    for turn in range(50):
        for key in ((0, turn % 5), (1, turn % 3)):
            policy.record(key)
            policy.forget(key)
    assert policy.heat((0, 4)) > 0.0
    assert [len(layer.counts._weights) for layer in policy._layers.values()] == [5, 3]
    assert policy.victims(1, nothing) is None


def test_a_warm_schedule_expects_what_the_earlier_one_would_once_an_order_is_declared() -> None:
    seed, visits = 20221036, ring_visits(range(2))
    rng = random.Random(seed)
    keys = [[(layer, expert) for expert in range(6)] for layer in range(2)]

    def pass_by(*policies: Schedule) -> None:
        for layer in keys:
            used = [key for key in layer if rng.random() < 1 / (1 + key[1])]
            for policy in policies:
                policy.record_all(used)

    for turn in range(20):
        earlier, warm = declared(visits), Schedule(Lru)
        for _ in range(rng.randrange(40)):
            pass_by(earlier)
        for key in keys[0] + keys[1]:
            earlier.forget(key)
        earlier.declare(())  # its client left; counts stay
        for layer in keys:
            warm.warm(layer, earlier.counts(layer))
        for policy in (earlier, warm):
            policy.declare(visits)
        for visit in range(10):
            pass_by(earlier, warm)
            assert [warm.heat(key) for key in keys[0]] == pytest.approx([earlier.heat(key) for key in keys[0]])
            held = sum(len(layer.held) for layer in warm._layers.values())
            assert ranked(warm, held) == ranked(earlier, held), f"seed {seed}, turn {turn}, visit {visit}"
