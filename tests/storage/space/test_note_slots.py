"""Note slots are taken once, and free again only when given back."""

from __future__ import annotations

import pytest

from paramstore.errors import CapacityError, CorruptCatalog
from paramstore.storage.space.note_slots import NoteSlots


def test_the_lowest_free_slot_is_taken() -> None:
    slots = NoteSlots(3)
    assert [slots.take(), slots.take(), slots.take()] == [0, 1, 2]
    slots.free(2)
    slots.free(0)
    assert slots.take() == 0


def test_an_occupied_slot_is_not_taken() -> None:
    slots = NoteSlots(3)
    slots.occupy(1)
    assert [slots.take(), slots.take()] == [0, 2]


def test_without_a_free_slot_the_count_is_named() -> None:
    slots = NoteSlots(1)
    slots.take()
    with pytest.raises(CapacityError, match=r"all 1 commit note slots .* prepared step .*: finalize prepared steps, or drop"):
        slots.take()
    slots.free(0)
    assert slots.free_count == 1


@pytest.mark.parametrize("slot", [-1, 2, 1])
def test_a_slot_that_cannot_be_occupied_is_refused(slot: int) -> None:
    slots = NoteSlots(2)
    slots.occupy(1)
    with pytest.raises(CorruptCatalog, match=f"slot {slot}"):
        slots.occupy(slot)


def test_freeing_a_free_slot_is_a_bug() -> None:
    slots = NoteSlots(2)
    with pytest.raises(KeyError):
        slots.free(0)
    assert slots.free_count == 2
