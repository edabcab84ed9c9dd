"""Free space: who gets which extent, when one is free again, and what the background fill may take."""

from __future__ import annotations

from random import Random

import pytest

from paramstore.core.place import Extent
from paramstore.errors import CatalogError, VolumeError
from paramstore.storage.extents import Space

PAGE = 4096


def space(pages: int = 16, *, written: int = 0, volumes: int = 1, start: int = 0) -> Space:
    """Volumes of `pages` pages; sizes in pages."""
    made = Space()
    for index in range(volumes):
        made.add_volume(
            index, start_bytes=start * PAGE, size_bytes=(start + pages) * PAGE, written_bytes=written * PAGE
        )
    return made


def extent(page: int, pages: int = 1, volume: int = 0) -> Extent:
    return Extent(volume, page * PAGE, pages * PAGE)


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
    with pytest.raises(CatalogError, match=reason):
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


# --- entitlements


def test_an_owner_takes_beyond_its_entitlement_what_nobody_else_is_entitled_to() -> None:
    made = space(10)
    made.entitle("a", 4 * PAGE)
    made.entitle("b", 4 * PAGE)
    assert made.missing_bytes(7, PAGE, owner="a") == PAGE
    assert made.reserve_many(7, PAGE, owner="a") is None
    assert made.held_bytes("a") == 0
    assert made.reserve_many(6, PAGE, owner="a") is not None
    assert made.reserve(PAGE, owner="a") is None
    assert made.reserve(PAGE) is None, "somebody who is entitled to nothing"
    assert made.reserve_many(4, PAGE, owner="b") is not None


def test_what_an_owner_gives_back_is_kept_for_it() -> None:
    made = space(4)
    made.entitle("a", 4 * PAGE)
    extents = made.reserve_many(4, PAGE, owner="a")
    assert extents is not None
    made.release(extents[0])
    assert made.held_bytes("a") == 3 * PAGE
    assert made.reserve(PAGE, owner="b") is None
    assert made.reserve(PAGE, owner="a") == extents[0]


def test_an_entitlement_that_ends_leaves_the_space_to_others() -> None:
    made = space(4)
    made.entitle("a", 4 * PAGE)
    assert made.reserve(PAGE) is None
    made.entitle("a", 0)
    assert made.reserve(PAGE) is not None


def test_occupied_extents_count_for_their_owner() -> None:
    made = space(4)
    made.entitle("a", 2 * PAGE)
    made.occupy(extent(0, 2), owner="a")
    assert made.missing_bytes(2, PAGE, owner="b") == 0, "a has all that it is entitled to"


def test_a_quarantined_extent_counts_for_nobody() -> None:
    made = space(2)
    made.entitle("a", PAGE)
    held = made.reserve(PAGE, owner="a")
    assert held is not None
    made.quarantine(held)
    assert made.held_bytes("a") == 0
    assert made.reserve(PAGE, owner="b") is None, "a may still need the last one"


def test_space_that_is_being_filled_counts_as_free_for_entitlements() -> None:
    made = space(2)
    made.entitle("a", PAGE)
    assert made.next_unwritten(0, PAGE) is not None
    assert made.reserve(PAGE, owner="b") is not None


# --- short of space


def test_whoever_is_short_of_space_keeps_the_fill_from_taking_more() -> None:
    made = space(3)
    filling = made.next_unwritten(0, PAGE)
    assert filling is not None
    assert made.is_prefilling
    assert made.reserve(3 * PAGE) is None
    assert made.next_unwritten(0, PAGE) is None
    made.finish_prefill(filling)
    assert not made.is_prefilling
    assert made.next_unwritten(0, PAGE) is None, "or the one who waits would find the next piece gone"
    assert made.reserve(3 * PAGE) is not None


@pytest.mark.parametrize("relief", ["release", "grow", "entitle"])
def test_the_fill_goes_on_when_space_has_come(relief: str) -> None:
    made = space(4)
    held = made.reserve(PAGE)
    assert held is not None
    assert made.reserve(4 * PAGE) is None
    assert made.next_unwritten(0, PAGE) is None
    {"release": lambda: made.release(held), "grow": lambda: made.grow_volume(0, 5 * PAGE), "entitle": lambda: made.entitle("a", 0)}[
        relief
    ]()
    assert made.next_unwritten(0, PAGE) is not None


@pytest.mark.parametrize("length", [5, 7, 8, 9, 15, 16, 17])
@pytest.mark.parametrize("seed", range(20))
def test_as_many_records_fit_as_there_are_lengths_of_them_however_the_fill_goes(length: int, seed: int) -> None:
    random, count = Random(seed), 24
    made = space(length * count + length - 1)
    filling: Extent | None = None
    for number in range(count):
        for _ in range(random.randrange(4)):
            if filling is not None:
                made.finish_prefill(filling)
                filling = None
            elif random.random() < 0.7:
                filling = made.next_unwritten(0, 8 * PAGE)
        if filling is not None and made.missing_bytes(1, length * PAGE):
            made.finish_prefill(filling)  # whoever is short of space waits for it
            filling = None
        assert made.reserve(length * PAGE) is not None, f"seed {seed}: record {number} of {count}"


@pytest.mark.slow
def test_fifteen_thousand_extents_come_and_go() -> None:
    made = space(15_000 * 4, volumes=2)
    extents = made.reserve_many(30_000, 4 * PAGE)
    assert extents is not None
    assert len(set(extents)) == 30_000
    for held in extents[::2]:
        made.release(held)
    assert made.free_bytes == 15_000 * 4 * PAGE
    assert made.missing_bytes(15_001, 4 * PAGE) == 4 * PAGE


# --- fenced volumes


def fence(made: Space, volume: int) -> None:
    made.fences.fail_flush(volume, VolumeError("as planned"))


def test_a_fenced_volume_gives_no_extent_and_the_others_do() -> None:
    made = space(4, volumes=2)
    fence(made, 0)
    assert made.reserve_many(4, PAGE) == [extent(page, volume=1) for page in range(4)]
    assert made.reserve(PAGE) is None
    assert made.missing_bytes(1, PAGE) == PAGE


def test_what_is_free_on_a_fenced_volume_counts_for_nobody() -> None:
    made = space(4, volumes=2)
    fence(made, 0)
    assert (made.free_bytes, made.free_bytes_of(0), made.lost_bytes()) == (4 * PAGE, 0, 4 * PAGE)
    assert [(stats.free_bytes, stats.fenced) for stats in made.stats()] == [(0, "a flush failed: as planned"), (4 * PAGE, None)]
    made.entitle("a", 3 * PAGE)
    assert made.reserve_many(2, PAGE, owner="b") is None, "a's share is on what is left"
    assert made.reserve(PAGE, owner="b") is not None


def test_what_is_missing_counts_nothing_of_a_fenced_volume() -> None:
    made = space(4, volumes=2)
    made.entitle("a", 8 * PAGE)
    fence(made, 0)
    assert made.missing_bytes(8, PAGE, owner="a") == 4 * PAGE


def test_an_extent_of_a_fenced_volume_stays_held_and_is_not_handed_out_again() -> None:
    made = space(2, volumes=2)
    held = made.reserve_many(2, PAGE)
    assert held is not None
    assert {found.volume for found in held} == {0, 1}
    fence(made, 0)
    made.pin(extent(0))
    made.release(extent(0))
    made.unpin(extent(0))
    assert made.freed == 1, "who waits for space looks, and learns that there is none"
    assert made.reserve_many(2, PAGE) is None
    assert made.reserve(PAGE) == extent(1, volume=1)


def test_an_extent_reserved_before_its_volume_was_fenced_is_given_back() -> None:
    made = space(2, volumes=2)
    assert [made.unless_fenced(found) for found in (made.reserve(PAGE, avoid=1), None)] == [extent(0), None]
    fence(made, 0)
    assert made.unless_fenced(extent(0)) is None
    assert made.held_bytes("") == 0


def test_a_fenced_volume_has_nothing_to_fill() -> None:
    made = space(4, volumes=2)
    fence(made, 1)
    assert made.next_unwritten(1, PAGE) is None
    assert made.next_unwritten(0, PAGE) == extent(0)


def test_a_volume_to_avoid_comes_last_but_comes() -> None:
    made = space(2, volumes=2)
    assert [made.reserve(PAGE, avoid=0) for _ in range(3)] == [
        extent(0, volume=1), extent(1, volume=1), extent(0, volume=0)
    ]  # fmt: skip
