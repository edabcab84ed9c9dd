"""Slots over segments, and how many segments and slots a number of bytes makes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paramstore.engine.tables.arena import (
    SEGMENT_ALIGNMENT_BYTES,
    SEGMENT_BYTES,
    SEGMENTS_MAX,
    Arena,
    segment_lengths,
    slots_within,
)
from paramstore.policy.lru import Lru
from paramstore.wire.messages import SEGMENTS_PER_FRAME_MAX
from paramstore_testkit.disks.machine import PlainSegment

PAGE = 4096
SLOT_BYTES = st.integers(1, 40).map(lambda pages: pages * PAGE) | st.integers(1, 1 << 20).map(lambda pages: pages * PAGE)


def arena() -> Arena:
    """Slots 0 to 2 in segment 7, slots 3 and 4 in segment 9."""
    made = Arena(slot_bytes=2 * PAGE, planned_slots=5, policy=Lru())
    made.add_segment(7, PlainSegment(8 * PAGE), slots=3)
    made.add_segment(9, PlainSegment(4 * PAGE), slots=2)
    return made


def test_a_slot_is_a_place_in_the_segment_that_brought_it() -> None:
    assert [arena().place(slot) for slot in range(5)] == [(7, 0), (7, 8192), (7, 16384), (9, 0), (9, 8192)]


def test_slots_have_bytes_of_their_own() -> None:
    made = arena()
    for slot in range(5):
        view = made.view(slot)
        assert len(view) == 2 * PAGE
        view[:] = bytes([slot + 1]) * len(view)
    assert [set(made.view(slot)) for slot in range(5)] == [{1}, {2}, {3}, {4}, {5}]


def test_a_segment_makes_only_the_slots_it_was_added_with() -> None:
    made = arena()
    assert (made.slots.count, made.slots.free_count, made.planned_slots) == (5, 5, 5)
    with pytest.raises(IndexError):
        made.view(5)


@given(count=st.integers(0, 5000), slot_bytes=SLOT_BYTES)
def test_segments_hold_all_slots_whole_and_waste_less_than_their_alignment(count: int, slot_bytes: int) -> None:
    lengths = segment_lengths(count, slot_bytes)
    assert all(length % SEGMENT_ALIGNMENT_BYTES == 0 for length in lengths)
    assert sum(length // slot_bytes for length in lengths) >= count
    assert sum(lengths) - count * slot_bytes < len(lengths) * SEGMENT_ALIGNMENT_BYTES or not lengths


@given(count=st.integers(1, 10_000), slot_bytes=SLOT_BYTES)
def test_a_lease_of_a_whole_arena_can_name_its_segments_in_one_message(count: int, slot_bytes: int) -> None:
    assert len(segment_lengths(count, slot_bytes)) <= SEGMENTS_MAX + 1 <= SEGMENTS_PER_FRAME_MAX


def test_segments_are_no_larger_than_they_need_to_be() -> None:
    assert segment_lengths(0, PAGE) == []
    assert segment_lengths(1, PAGE) == [SEGMENT_ALIGNMENT_BYTES]
    assert segment_lengths(2, 3 << 30) == [3 << 30, 3 << 30], "a slot larger than a segment has one to itself"
    assert max(segment_lengths(1000, 12 << 20)) <= SEGMENT_BYTES + (12 << 20)


@given(budget_bytes=st.integers(-5, 1 << 32), slot_bytes=st.integers(4, 1 << 16).map(lambda pages: pages * PAGE))
def test_the_slots_within_a_budget_fit_and_one_more_would_not(budget_bytes: int, slot_bytes: int) -> None:
    count = slots_within(budget_bytes, slot_bytes)
    assert sum(segment_lengths(count, slot_bytes)) <= max(0, budget_bytes)
    assert sum(segment_lengths(count + 1, slot_bytes)) > budget_bytes
