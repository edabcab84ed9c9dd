"""Unions and intersections are those of the points: checked against a grid."""

from __future__ import annotations

import random

import pytest

from paramstore_client.training.intervals import Interval, common, length, union


def points(intervals: list[Interval]) -> set[int]:
    return {point for start, end in intervals for point in range(int(start), int(end))}


@pytest.mark.parametrize("seed", range(20))
def test_unions_and_intersections_have_the_points_of_both(seed: int) -> None:
    draw = random.Random(seed)

    def some() -> list[Interval]:
        return [(start, start + draw.randrange(0, 12)) for start in (draw.randrange(0, 60) for _ in range(draw.randrange(0, 12)))]

    one, other = some(), some()
    left, right = union(one), union(other)
    assert points(left) == points(one)
    assert length(left) == len(points(one))
    both = common(left, right)
    assert points(both) == points(one) & points(other)
    assert length(both) == len(points(both))


def test_a_union_is_disjoint_and_in_order() -> None:
    assert union([(3, 4), (0, 1), (1, 2), (0, 0.5)]) == [(0, 2), (3, 4)]
