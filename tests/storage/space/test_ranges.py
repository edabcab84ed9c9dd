"""Ranges merge, split and are found by size."""

from __future__ import annotations

import pytest

from paramstore.storage.space.ranges import RangeSet


def ranges(*pairs: tuple[int, int]) -> RangeSet:
    made = RangeSet()
    for start, end in pairs:
        made.add(start, end)
    return made


def test_neighbours_are_merged_on_both_sides() -> None:
    made = ranges((0, 10), (20, 30))
    made.add(10, 20)
    assert list(made) == [(0, 30)]
    assert made.total_bytes == 30


@pytest.mark.parametrize(
    ("start", "end", "left"),
    [(0, 10, []), (0, 4, [(4, 10)]), (6, 10, [(0, 6)]), (3, 7, [(0, 3), (7, 10)])],
)
def test_removing_leaves_what_is_around(start: int, end: int, left: list[tuple[int, int]]) -> None:
    made = ranges((0, 10))
    made.remove(start, end)
    assert list(made) == left
    assert made.total_bytes == sum(high - low for low, high in left)


def test_the_smallest_range_that_fits_is_taken_and_of_equals_the_lowest() -> None:
    made = ranges((0, 100), (200, 210), (300, 310), (400, 404))
    assert [made.take(8), made.take(8), made.take(8), made.take(200)] == [200, 300, 0, None]


def test_overlap_tells_the_parts_that_are_in() -> None:
    made = ranges((0, 10), (20, 30), (40, 50))
    assert made.overlap(5, 45) == [(5, 10), (20, 30), (40, 45)]
    assert made.overlap(10, 20) == []
    assert made.overlap(22, 24) == [(22, 24)]


def test_a_copy_is_independent() -> None:
    made = ranges((0, 10))
    twin = made.copy()
    twin.take(5)
    assert (list(made), made.total_bytes) == ([(0, 10)], 10)
    assert list(twin) == [(5, 10)]


@pytest.mark.parametrize(("start", "end"), [(0, 10), (5, 15), (9, 10), (-5, 1), (3, 3)])
def test_adding_what_is_there_is_a_bug(start: int, end: int) -> None:
    made = ranges((0, 10))
    with pytest.raises(AssertionError):
        made.add(start, end)
    assert list(made) == [(0, 10)]


@pytest.mark.parametrize(("start", "end"), [(5, 15), (10, 12), (-2, 3), (4, 4)])
def test_removing_what_is_not_there_is_a_bug(start: int, end: int) -> None:
    made = ranges((0, 10))
    with pytest.raises(AssertionError):
        made.remove(start, end)
    assert list(made) == [(0, 10)]


def test_the_last_range_that_is_long_enough_gives_its_end() -> None:
    made = RangeSet()
    for start, end in ((0, 10), (20, 26), (30, 33)):
        made.add(start, end)
    assert made.take_last(5) == 21
    assert made.take_last(5) == 5
    assert made.take_last(3) == 30
    assert made.take_last(6) is None
    assert list(made) == [(0, 5), (20, 21)]
    assert made.total_bytes == 6
