"""The time line of a pass is what its events say, computed here by hand."""

from __future__ import annotations

import pytest

from paramstore_client.moe.granularity.model import Curve, Estimate, Timeline, passed
from paramstore_client.moe.pipeline_plan import Pipeline


def test_one_part_takes_all_it_does() -> None:
    assert passed(1, there_s=3.0, computing_s=5.0, back_s=2.0) == Timeline(10.0, 5.0, 5.0)


@pytest.mark.parametrize(
    ("there_s", "computing_s", "back_s", "seconds"),
    [
        (1.0, 4.0, 1.0, 1 + 3 * 4 + 1),  # computing never waits: the first rows on their way there, the last on theirs back
        (2.0, 1.0, 2.0, 6 * 2),  # the exchange never waits
        (2.0, 3.0, 2.0, 2 + 3 + 2 + 2 + 3 + 2),  # the third part's rows leave after the first part's: computing waits for them
    ],
)  # fmt: skip
def test_three_parts_take_what_is_busy_longest(there_s: float, computing_s: float, back_s: float, seconds: float) -> None:
    assert passed(3, there_s=there_s, computing_s=computing_s, back_s=back_s).seconds == seconds


def test_a_pass_takes_no_less_than_either_and_no_more_than_both() -> None:
    for parts in (1, 2, 3, 8):
        for there_s, computing_s, back_s in ((1.0, 1.0, 1.0), (0.0, 2.0, 1.0), (5.0, 0.5, 0.0)):
            line = passed(parts, there_s=there_s, computing_s=computing_s, back_s=back_s)
            assert max(line.exchanging_s, line.computing_s) <= line.seconds <= line.exchanging_s + line.computing_s


def test_a_curve_is_straight_between_what_was_measured() -> None:
    curve = Curve(((100, 1.0), (300, 2.0), (400, 4.0)))
    assert [curve.at(size) for size in (0, 100, 200, 300, 350, 400, 800)] == [1.0, 1.0, 1.5, 2.0, 3.0, 4.0, 8.0]


def test_a_curve_covers_sizes_up_to_twice_beyond_it() -> None:
    curve = Curve(((100, 1.0), (400, 4.0)))
    assert curve.covers((800, 50))
    assert not curve.covers((801, 100))
    assert not curve.covers((400, 49))
    assert curve.with_points(Curve(((50, 0.5), (400, 3.0)))).points == ((50, 0.5), (100, 1.0), (400, 3.0))


def test_an_estimate_is_that_of_both_passes() -> None:
    forward, backward = Timeline(3.0, 2.0, 1.0), Timeline(5.0, 1.0, 4.0)
    assert Estimate(Pipeline(), forward).seconds == 3.0
    assert Estimate(Pipeline(), forward).bound == "exchanging"
    assert Estimate(Pipeline(), forward, backward).seconds == 8.0
    assert Estimate(Pipeline(), forward, backward).bound == "computing"
