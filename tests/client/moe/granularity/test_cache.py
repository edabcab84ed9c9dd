"""What was found for some numbers of rows bounds the search for others, and ends it between two that are alike."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from paramstore_client.moe.granularity.cache import STEPS, GranularityCache, rows_class
from paramstore_client.moe.pipeline_plan import Pipeline


def test_a_number_between_two_alike_needs_no_search() -> None:
    cache = GranularityCache()
    assert cache.known(100) is None
    cache.learn(100, Pipeline(2))
    assert cache.known(100) == Pipeline(2)
    assert cache.known(150) is None
    cache.learn(200, Pipeline(2))
    assert cache.known(150) == Pipeline(2)
    assert cache.known(201) is None


def test_parts_are_searched_between_those_of_the_neighbours() -> None:
    cache = GranularityCache()
    assert cache.bounds(100, most=8) == (1, 8)
    cache.learn(400, Pipeline(4))
    assert cache.bounds(100, most=8) == (1, 4)
    assert cache.bounds(500, most=8) == (4, 8)
    cache.learn(100, Pipeline(2))
    assert cache.bounds(200, most=8) == (2, 4)
    cache.learn(800, Pipeline(1))  # by a clock that was disturbed
    assert cache.bounds(500, most=8) == (4, 4)


@given(st.integers(0, 1 << 40))
def test_a_class_is_at_most_an_eighth_smaller_and_its_own(rows: int) -> None:
    found = rows_class(rows)
    assert rows - rows / STEPS <= found <= rows
    assert rows_class(found) == found
