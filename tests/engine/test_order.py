"""An apply mixes what is resident with what is absent, each part in backward order."""

from __future__ import annotations

from paramstore.core.key import ExpertKey
from paramstore.engine.order import LOOKAHEAD_DEPTHS, absent_ahead, backward_order, slots_to_clean, update_order
from paramstore_testkit.stores.small_planner import SmallPlanner


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
