"""Who may take which free space: entitlements, the fill when space is short, and volumes that are fenced."""

from __future__ import annotations

from random import Random

import pytest

from paramstore.core.location import Extent
from paramstore.errors import VolumeError
from paramstore.storage.space.extents import Space
from paramstore_testkit.stores.small_space import PAGE, extent, space

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
