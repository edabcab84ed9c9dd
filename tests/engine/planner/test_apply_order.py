"""An apply mixes what is resident with what is absent, each part in backward order."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest

from paramstore.core.apply_log import MISSED_MAX
from paramstore.core.key import ExpertKey
from paramstore.core.location import Identity
from paramstore.engine.planner.apply_order import (
    LATE_AFTER,
    LOOKAHEAD_DEPTHS,
    absent_ahead,
    backward_order,
    due_keys,
    missed_steps,
    slots_to_clean,
    update_order,
)
from paramstore_testkit.stores.small_planner import OPTIONS, SCHEMA, SmallPlanner


def test_both_parts_are_in_backward_order() -> None:
    keys = [(0, 1), (2, 0), (1, 1), (0, 0), (1, 0)]
    assert backward_order(keys, {(0, 0), (1, 1)}) == ([(1, 1), (0, 0)], [(2, 0), (1, 0), (0, 1)])
    assert backward_order([], {}) == ([], [])


def test_those_that_give_their_slots_up_come_first_and_the_others_are_kept_until_their_turn() -> None:
    keys = [(0, expert) for expert in range(8)]
    resident = set(keys[:4])
    order, kept = update_order(keys, resident, given_up=2)
    assert order[:2] == [(0, 3), (0, 2)], "so many slots come free, as soon as these are updated and written"
    assert kept == [(0, 1), (0, 0)]
    assert order[2:] == [(0, 7), (0, 1), (0, 6), (0, 5), (0, 0), (0, 4)], "residents evenly among the absent"


def test_where_slots_are_free_nobody_gives_one_up() -> None:
    keys = [(0, expert) for expert in range(4)]
    order, kept = update_order(keys, set(keys[:2]), given_up=0)
    assert order == [(0, 3), (0, 1), (0, 2), (0, 0)]
    assert kept == keys[1::-1]


def test_a_pipeline_that_takes_all_slots_keeps_nothing() -> None:
    keys = [(0, expert) for expert in range(4)]
    assert update_order(keys, set(keys[:2]), given_up=6) == ([(0, 1), (0, 0), (0, 3), (0, 2)], [])


def test_with_all_in_memory_or_nothing_there_is_one_part() -> None:
    keys: list[ExpertKey] = [(0, 0), (1, 0)]
    assert update_order(keys, set(keys), given_up=1) == ([(1, 0), (0, 0)], []), "nothing has to be kept from anybody"
    assert update_order(keys, {}, given_up=1) == ([(1, 0), (0, 0)], [])
    assert update_order([], {}, given_up=1) == ([], [])


def test_slots_are_wanted_for_absent_keys_near_and_far_ahead_but_not_at_any_distance() -> None:
    resident = {(0, expert) for expert in range(100)}
    queue = [*sorted(resident), (1, 0), (1, 1), (1, 2)]
    assert absent_ahead(queue[100:], resident, depth=2) == 2
    assert absent_ahead(queue[98:], resident, depth=4) == 3
    assert absent_ahead(queue[100 - 2 * LOOKAHEAD_DEPTHS + 1 :], resident, depth=2) == 1
    assert absent_ahead(queue[100 - 2 * LOOKAHEAD_DEPTHS :], resident, depth=2) == 0


def test_only_what_is_neither_free_nor_clean_must_be_cleaned() -> None:
    small = SmallPlanner(working_slots=3)
    small.update((0, 0))
    small.unhold(small.held((0, 1)))
    assert [slots_to_clean(small.namespace, wanted) for wanted in (0, 1, 2, 3, 4)] == [0, 0, 0, 1, 2]
    assert slots_to_clean(small.namespace, 2, {(0, 1)}) == 1, "what is spared frees no slot"
    small.begin_write((0, 0))
    assert slots_to_clean(small.namespace, 3) == 0
    assert slots_to_clean(small.namespace, 3, {(0, 0)}) == 1


EXACT = replace(SCHEMA, updates="exact")


def desk(experts: int) -> SmallPlanner:
    return SmallPlanner(schema=EXACT, experts=experts, extents=3 * experts)


def ages(small: SmallPlanner) -> list[int]:
    """How many steps each record will have missed once the applies called so far have run."""
    targets = [working.target for working in small.namespace.residency.working.values()]
    return [small.namespace.writing.log.last - target.version for target in targets if target is not None]


@pytest.mark.parametrize("experts", [1, 3, 63, 64, 65, 200])
def test_a_record_that_is_never_asked_for_catches_up_in_time_and_few_do_at_once(experts: int) -> None:
    small, most = desk(experts), -(-experts // LATE_AFTER)
    for _ in range(5 * MISSED_MAX):
        claimed = small.planner.claims.begin(small.namespace, OPTIONS)
        small.namespace.writing.applies += 1
        assert len(claimed) <= most
        assert max(ages(small)) <= MISSED_MAX
        assert len(small.namespace.writing.log.entries) <= MISSED_MAX + 1


@pytest.mark.parametrize("seed", range(5))
def test_the_bound_holds_over_random_gradients_and_rollbacks(seed: int) -> None:
    source, small = Random(seed), desk(40)
    for step in range(1, 12):
        for _ in range(source.randint(1, 2 * MISSED_MAX)):
            chosen = source.sample(small.keys, source.choice((0, 0, 1, 5)))
            claimed = {**small.planner.claims.begin(small.namespace, OPTIONS), **dict.fromkeys(chosen)}
            small.namespace.writing.applies += 1
            for key in claimed:
                working = small.namespace.residency.working[key]
                working.target = working.identity = Identity(small.namespace.epoch, small.namespace.writing.log.last)
            assert max(ages(small)) <= MISSED_MAX, f"seed {seed}, step {step}"


def test_what_has_a_gradient_often_is_never_taken_along() -> None:
    small = desk(8)
    for number in range(4 * MISSED_MAX):
        small.begin_apply(*([] if number % LATE_AFTER else small.keys))
        small.namespace.writing.applies += 1
        assert due_keys(small.namespace) == []


def test_an_apply_makes_the_steps_before_its_own_and_without_a_gradient_its_own_too() -> None:
    small = desk(4)
    for _ in range(3):
        small.begin_apply()
        small.namespace.writing.applies += 1
    working = small.namespace.residency.working[small.keys[0]]
    assert len(missed_steps(small.namespace, working, has_gradient=True)) == 2
    assert len(missed_steps(small.namespace, working, has_gradient=False)) == 3


def test_where_idle_records_miss_nothing_nobody_catches_up() -> None:
    small = SmallPlanner()
    small.update(small.keys[0])
    working = small.namespace.residency.working[small.keys[1]]
    assert missed_steps(small.namespace, working, has_gradient=True) == ()
    assert small.namespace.writing.log.entries == ()


def test_an_apply_before_there_are_values_takes_nothing_along() -> None:
    small = SmallPlanner(schema=EXACT, is_committed=False)
    for _ in range(2 * LATE_AFTER):
        assert small.planner.claims.begin(small.namespace, OPTIONS) == {}
        small.namespace.writing.applies += 1
