"""Slots are free or taken, never both, and a freed slot's old references can be told."""

from __future__ import annotations

import pytest

from paramstore.core.slots import SlotTable


def table(count: int) -> SlotTable:
    made = SlotTable()
    made.grow(count)
    return made


def test_growing_adds_free_slots_with_the_next_numbers() -> None:
    made = table(2)
    assert made.grow(3) == range(2, 5)
    assert (made.count, made.free_count) == (5, 5)


def test_every_slot_is_taken_once() -> None:
    made = table(4)
    assert {made.take() for _ in range(4)} == set(range(4))
    assert made.free_count == 0
    assert all(made.is_taken(slot) for slot in range(4))


def test_the_slot_freed_last_is_taken_first() -> None:
    made = table(4)
    slots = [made.take() for _ in range(4)]
    made.free(slots[2])
    made.free(slots[0])
    assert [made.take(), made.take()] == [slots[0], slots[2]]


def test_freeing_makes_old_references_stale() -> None:
    made = table(1)
    slot = made.take()
    before = made.generation(slot)
    made.free(slot)
    assert not made.is_taken(slot)
    assert made.take() == slot
    assert made.generation(slot) == before + 1


def test_freeing_a_free_slot_is_a_bug_and_changes_nothing() -> None:
    made = table(2)
    slot = made.take()
    made.free(slot)
    with pytest.raises(KeyError):
        made.free(slot)
    assert (made.free_count, made.generation(slot)) == (2, 1)


def test_taking_from_a_full_table_is_a_bug() -> None:
    with pytest.raises(IndexError):
        table(0).take()
