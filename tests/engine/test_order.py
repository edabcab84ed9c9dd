"""An apply takes what is resident first, each part in backward order."""

from __future__ import annotations

from paramstore.engine.order import slots_to_clean, update_order
from paramstore.testing.small_planner import SmallPlanner


def test_resident_records_come_first_and_both_parts_in_backward_order() -> None:
    keys = [(0, 1), (2, 0), (1, 1), (0, 0), (1, 0)]
    assert update_order(keys, {(0, 0), (1, 1)}) == [(1, 1), (0, 0), (2, 0), (1, 0), (0, 1)]
    assert update_order([], {}) == []


def test_only_what_is_neither_free_nor_clean_must_be_cleaned() -> None:
    small = SmallPlanner(working_slots=3)
    small.update((0, 0))
    small.unhold(small.held((0, 1)))
    assert [slots_to_clean(small.namespace, wanted) for wanted in (0, 1, 2, 3, 4)] == [0, 0, 0, 1, 2]
    small.begin_write((0, 0))
    assert slots_to_clean(small.namespace, 3) == 0
