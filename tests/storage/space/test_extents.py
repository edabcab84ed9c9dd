"""Free space: who gets which extent, when one is free again, and what the background fill may take."""

from __future__ import annotations

import pytest

from paramstore.core.location import Extent
from paramstore.errors import CorruptCatalog
from paramstore.storage.space.extents import Space
from paramstore_testkit.stores.small_space import PAGE, extent, space

# --- reserve


def test_a_length_is_rounded_up_to_whole_blocks() -> None:
    assert space().reserve(PAGE + 1) == extent(0, 2)


def test_extents_start_after_the_volume_s_own_structures() -> None:
    assert space(start=3).reserve(PAGE) == extent(3)


def test_a_space_without_room_gives_none_and_stays_usable() -> None:
    made = space(2)
    assert made.reserve(3 * PAGE) is None
    assert made.reserve(2 * PAGE) == extent(0, 2)


def test_written_space_comes_first_even_if_it_lies_higher() -> None:
    made = space(16)
    held = made.reserve_many(8, PAGE)
    assert held is not None
    made.release(held[6])
    assert made.reserve(PAGE) == held[6]


def test_the_best_fit_comes_first_and_of_equals_the_lowest() -> None:
    made = space(16, written=16)
    held = made.reserve_many(16, PAGE)
    assert held is not None
    for page in (1, 2, 3, 8, 12):
        made.release(extent(page))
    assert [made.reserve(PAGE), made.reserve(PAGE)] == [extent(8), extent(12)]
    assert made.reserve(2 * PAGE) == extent(1, 2)


def test_filling_a_volume_leaves_no_gap_at_the_border_of_written_space() -> None:
    made = space(12, written=5)
    extents = made.reserve_many(4, 3 * PAGE)
    assert extents == [extent(0, 3), extent(3, 3), extent(6, 3), extent(9, 3)]


def test_free_bytes_on_both_sides_of_any_border_make_one_extent() -> None:
    made = space(8)
    made.occupy(extent(1))
    made.occupy(extent(2, 2))
    made.release(extent(2, 2))  # page 0 fresh, 1 taken, 2 and 3 written, 4 to 7 fresh
    assert made.reserve(6 * PAGE) == extent(2, 6)


def test_extents_are_spread_over_volumes_in_turns() -> None:
    made = space(4, volumes=3)
    volumes = [reserved.volume for _ in range(6) if (reserved := made.reserve(PAGE)) is not None]
    assert volumes == [0, 1, 2, 0, 1, 2]


def test_the_volume_with_the_larger_share_of_free_bytes_comes_first() -> None:
    made = Space()
    made.add_volume(0, start_bytes=0, size_bytes=100 * PAGE, written_bytes=0)
    made.add_volume(1, start_bytes=0, size_bytes=10 * PAGE, written_bytes=0)
    extents = made.reserve_many(55, PAGE)
    assert extents is not None
    assert sum(reserved.volume == 1 for reserved in extents) == 5


def test_a_volume_without_a_fit_is_passed_over() -> None:
    made = space(4, volumes=2)
    assert made.reserve(4 * PAGE) == extent(0, 4)
    made.occupy(extent(1, volume=1))
    made.release(extent(0, 4))
    made.occupy(extent(3))
    made.occupy(extent(1))
    assert made.reserve(2 * PAGE) == extent(2, 2, volume=1)


# --- reserve_many, missing_bytes


def test_many_are_reserved_all_or_none() -> None:
    made = space(10, written=3)
    before = made.stats()
    assert made.reserve_many(4, 3 * PAGE) is None
    assert made.stats() == before
    assert made.missing_bytes(4, 3 * PAGE) == 3 * PAGE
    assert made.reserve_many(3, 3 * PAGE) is not None


def test_nothing_is_missing_where_there_is_room() -> None:
    assert space(10).missing_bytes(5, 2 * PAGE) == 0


def test_no_extents_are_a_list_of_none() -> None:
    assert space().reserve_many(0, PAGE) == []


# --- release, pins, quarantine


def test_a_released_extent_is_free_at_once() -> None:
    made = space(1)
    held = made.reserve(PAGE)
    assert held is not None
    made.release(held)
    assert made.reserve(PAGE) == held


def test_a_pinned_extent_is_free_when_its_last_pin_goes() -> None:
    made = space(1)
    held = made.reserve(PAGE)
    assert held is not None
    made.pin(held)
    made.pin(held)
    made.release(held)
    made.unpin(held)
    assert made.reserve(PAGE) is None
    made.unpin(held)
    assert made.reserve(PAGE) == held


def test_an_unpinned_extent_that_was_not_released_stays_taken() -> None:
    made = space(1)
    held = made.reserve(PAGE)
    assert held is not None
    made.pin(held)
    made.unpin(held)
    assert made.reserve(PAGE) is None


@pytest.mark.parametrize("release_first", [True, False])
def test_a_quarantined_extent_is_never_handed_out_again(release_first: bool) -> None:
    made = space(1)
    held = made.reserve(PAGE)
    assert held is not None
    made.pin(held)
    if release_first:
        made.release(held)
    made.quarantine(held)
    made.quarantine(held)
    made.unpin(held)
    made.release(held)
    assert made.reserve(PAGE) is None
    assert made.stats()[0].quarantined_bytes == PAGE


@pytest.mark.parametrize("operation", ["release", "pin", "quarantine"])
def test_an_extent_that_nobody_holds_is_a_bug(operation: str) -> None:
    made = space()
    held = made.reserve(PAGE)
    assert held is not None
    made.release(held)
    before = made.stats()
    with pytest.raises(AssertionError):
        getattr(made, operation)(held)
    assert made.stats() == before


def test_releasing_twice_under_a_pin_is_a_bug() -> None:
    made = space()
    held = made.reserve(PAGE)
    assert held is not None
    made.pin(held)
    made.release(held)
    with pytest.raises(AssertionError):
        made.release(held)


# --- occupy


def test_an_occupied_extent_is_not_handed_out_and_can_be_released() -> None:
    made = space(3)
    made.occupy(extent(1))
    assert made.reserve_many(3, PAGE) is None
    made.release(extent(1))
    assert made.reserve_many(3, PAGE) is not None


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        (extent(4, 2), "overlaps"),
        (extent(3, 2), "overlaps"),
        (extent(5, 2), "overlaps"),
        (extent(0), "outside"),
        (extent(16, 2), "outside"),
        (extent(5, volume=7), "no such volume"),
        (Extent(0, 5 * PAGE + 512, PAGE), "whole"),
        (Extent(0, 5 * PAGE, 100), "whole"),
        (Extent(0, 5 * PAGE, 0), "whole"),
    ],
)
def test_a_catalog_that_cannot_be_true_is_refused_and_changes_nothing(wrong: Extent, reason: str) -> None:
    made = space(16, start=1)
    made.occupy(extent(4, 2))
    before = made.stats()
    with pytest.raises(CorruptCatalog, match=reason):
        made.occupy(wrong)
    assert made.stats() == before


def test_occupying_may_cross_the_border_of_written_space() -> None:
    made = space(8, written=4)
    made.occupy(extent(3, 2))
    assert made.free_bytes == 6 * PAGE
    assert made.written_bytes(0) == 5 * PAGE


# --- written space and background fill


def test_filled_space_becomes_written_from_the_start() -> None:
    made = space(10, written=2)
    first = made.next_unwritten(0, 3 * PAGE)
    assert first == extent(2, 3)
    assert made.written_bytes(0) == 2 * PAGE
    made.finish_prefill(first)
    assert made.written_bytes(0) == 5 * PAGE


def test_space_being_filled_is_not_free_and_then_is() -> None:
    made = space(4)
    filling = made.next_unwritten(0, 3 * PAGE)
    assert filling is not None
    assert made.free_bytes_of(0) == PAGE
    assert made.stats()[0].prefilling_bytes == 3 * PAGE
    assert made.reserve(2 * PAGE) is None
    made.finish_prefill(filling)
    assert made.reserve(4 * PAGE) == extent(0, 4)


def test_fills_that_end_out_of_order_do_not_hide_the_lower_one() -> None:
    made = space(10)
    first, second = made.next_unwritten(0, PAGE), made.next_unwritten(0, PAGE)
    assert first is not None
    assert second is not None
    made.finish_prefill(second)
    assert made.written_bytes(0) == 0
    made.finish_prefill(first)
    assert made.written_bytes(0) == 2 * PAGE


def test_the_fill_passes_over_extents_in_use() -> None:
    made = space(4)
    made.occupy(extent(1))
    assert [made.next_unwritten(0, 8 * PAGE) for _ in range(3)] == [extent(0), extent(2, 2), None]


def test_a_full_volume_is_written_and_growing_adds_unwritten_space() -> None:
    made = space(4, written=4)
    assert (made.next_unwritten(0, PAGE), made.written_bytes(0)) == (None, 4 * PAGE)
    made.grow_volume(0, 6 * PAGE + 100)
    assert made.written_bytes(0) == 4 * PAGE
    assert made.free_bytes == 6 * PAGE
    assert made.next_unwritten(0, 8 * PAGE) == extent(4, 2)


def test_growing_merges_with_the_free_space_before() -> None:
    made = space(4)
    made.grow_volume(0, 8 * PAGE)
    assert made.reserve(8 * PAGE) == extent(0, 8)


def test_a_failed_fill_is_quarantined() -> None:
    made = space(2)
    filling = made.next_unwritten(0, PAGE)
    assert filling is not None
    made.quarantine(filling)
    assert made.reserve_many(2, PAGE) is None
    assert made.stats()[0].prefilling_bytes == 0
