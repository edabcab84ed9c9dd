"""The order of volumes: whose class comes first, and that one class changes nothing."""

from __future__ import annotations

import random
from typing import cast

import pytest

from paramstore.core.location import Extent
from paramstore.storage.space.extents import Space
from paramstore.storage.volume.base import VolumeError
from paramstore_testkit.stores.small_space import PAGE, space

THREE = {0: 2, 1: 0, 2: 1}
"""Volume 1 is the fastest, volume 0 the slowest."""


def told_apart(classes: dict[int, int], pages: int = 4) -> Space:
    made = space(pages, volumes=len(classes))
    made.preference.set_classes(classes)
    return made


def filled(made: Space, speed_class: int | None) -> list[int]:
    """Volumes in the order in which extents of the class come from them, until all are full."""
    found: list[int] = []
    while (extent := made.reserve(PAGE, speed_class=speed_class)) is not None:
        found.append(extent.volume)
    return found


@pytest.mark.parametrize(("speed_class", "volumes"), [(0, [1, 2, 0]), (1, [2, 0, 1]), (2, [0, 2, 1])])
def test_a_class_is_filled_first_then_slower_ones_then_faster_ones(speed_class: int, volumes: list[int]) -> None:
    assert filled(told_apart(THREE), speed_class) == [volume for volume in volumes for _ in range(4)]


def test_within_a_class_free_share_and_turns_decide_as_ever() -> None:
    made = told_apart({0: 0, 1: 1, 2: 0})
    assert filled(made, 0)[:4] == [0, 2, 0, 2]


def test_a_record_of_which_nothing_is_known_goes_by_free_share_over_all_volumes() -> None:
    assert filled(told_apart(THREE), None)[:6] == [0, 1, 2, 0, 1, 2]


def test_one_class_gives_the_extents_that_no_class_gives() -> None:
    seed = random.randrange(1 << 30)
    draw = random.Random(seed)
    plain, classed = space(64, volumes=3), told_apart({0: 0, 1: 0, 2: 0}, 64)
    held: list[Extent] = []
    for _ in range(300):
        if held and draw.random() < 0.4:
            extent = held.pop(draw.randrange(len(held)))
            plain.release(extent)
            classed.release(extent)
            continue
        pages, wanted = draw.randint(1, 3) * PAGE, [draw.choice([None, 0]) for _ in range(draw.randint(1, 4))]
        found = plain.reserve_many(len(wanted), pages)
        assert classed.reserve_many(len(wanted), pages, speed_classes=wanted) == found, f"seed {seed}"
        held += found or []


def test_a_record_is_never_refused_because_its_class_is_full_or_fenced() -> None:
    made = told_apart({0: 0, 1: 1}, 4)
    made.fences.fail_flush(0, VolumeError("the disk is gone"))
    assert filled(made, 0) == [1, 1, 1, 1]


def test_the_volume_to_avoid_comes_last_whatever_its_class() -> None:
    made = told_apart({0: 0, 1: 1})
    assert cast(Extent, made.reserve(PAGE, avoid=0, speed_class=0)).volume == 1


def test_many_extents_are_each_of_their_class_and_all_or_none() -> None:
    made = told_apart({0: 0, 1: 1})
    found = made.reserve_many(4, PAGE, speed_classes=[1, 0, 1])
    assert found is not None
    assert [extent.volume for extent in found[:3]] == [1, 0, 1]
    before = made.stats()
    assert made.missing_bytes(5, PAGE) == PAGE
    assert made.reserve_many(5, PAGE, speed_classes=[0] * 5) is None
    assert made.stats() == before


def test_an_owner_s_share_of_a_class_is_its_share_of_all_that_is_entitled() -> None:
    made = told_apart(THREE, 12)
    assert made.share_bytes("a") == (12 * PAGE,) * 3
    made.entitle("a", 6 * PAGE)
    made.entitle("b", 12 * PAGE)
    assert made.share_bytes("a") == (4 * PAGE,) * 3
    made.fences.fail_flush(2, VolumeError("the disk is gone"))
    assert made.share_bytes("b") == (8 * PAGE, 0, 8 * PAGE)
