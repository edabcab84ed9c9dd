"""What is measured decides, and where nothing is known to win the flat exchange stays."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paramstore_client.moe.hops.choice import MARGIN, Crossing, ExchangeChoice, Line, Speeds
from paramstore_client.moe.hops.nodes import Nodes

NODES = Nodes.named("aabb")
MIB = 1 << 20
LINES = st.builds(Line, st.floats(0, 0.01), st.floats(0, 1e-6), st.just(MIB))


def line(ms: float, ms_per_mib: float) -> Line:
    return Line(ms / 1e3, ms_per_mib / 1e3 / MIB, MIB)


SLOW_SPINE = Speeds(flat=line(1, 160), two_hops=line(4, 60), inside=line(1, 2))
SHARED_LINK = Speeds(flat=line(1, 40), two_hops=line(4, 44), inside=line(1, 2))
LOOPBACK = Speeds(flat=line(1, 2), two_hops=line(4, 4), inside=line(1, 1.5))


def test_a_line_goes_through_the_smallest_and_the_largest_size() -> None:
    found = Line.through({1000: 0.002, 2000: 0.9, 3000: 0.004})
    assert found.at(0) == pytest.approx(0.001)
    assert found.at(5000) == pytest.approx(0.006)
    assert found.measured_bytes == 3000


def test_larger_messages_that_were_quicker_are_no_reason_to_hope() -> None:
    assert Line.through({1000: 0.004, 3000: 0.002}).at(1e9) == pytest.approx(0.004)


def test_two_hops_win_where_the_spine_is_slow_and_messages_are_long() -> None:
    choice = ExchangeChoice.measured(NODES, SLOW_SPINE)
    assert not choice.hops(10_000)
    assert choice.hops(2 * MIB)
    assert "two hops win from" in choice.why
    assert "0,1 | 2,3" in choice.why


@pytest.mark.parametrize("speeds", [SHARED_LINK, LOOPBACK])
def test_two_hops_are_left_alone_where_they_lose(speeds: Speeds) -> None:
    choice = ExchangeChoice.measured(NODES, speeds)
    assert "two_hops" not in choice.ways
    assert not choice.hops(1 << 40)
    assert "two hops win nowhere" in choice.why


def test_a_size_far_beyond_what_was_measured_is_not_believed_in() -> None:
    speeds = Speeds(flat=line(1, 10), two_hops=line(1000, 8.69), inside=line(1, 1))
    assert speeds.two_hops_from_bytes is None


@given(flat=LINES, hops=LINES, size=st.integers(0, 1 << 32))
def test_two_hops_are_taken_only_where_they_are_quicker_by_the_margin(flat: Line, hops: Line, size: int) -> None:
    if ExchangeChoice.measured(NODES, Speeds(flat, hops, flat)).hops(size):
        assert flat.at(size) * (1 + 1e-9) >= MARGIN * hops.at(size)


def test_tokens_go_once_where_links_are_slow_and_enough_rows_are_copies() -> None:
    choice = ExchangeChoice.measured(NODES, SHARED_LINK)
    assert choice.ways == ("row_per_node",)
    assert choice.sends_once(Crossing(row_bytes=4 * MIB, token_bytes=MIB, spread_bytes=8 * MIB))
    assert not choice.sends_once(Crossing(row_bytes=4 * MIB, token_bytes=4 * MIB, spread_bytes=8 * MIB))
    assert not choice.sends_once(Crossing(row_bytes=4000, token_bytes=1000, spread_bytes=8000))


def test_tokens_go_row_by_row_where_links_are_fast() -> None:
    assert ExchangeChoice.measured(NODES, LOOPBACK).ways == ()
    assert not ExchangeChoice.measured(NODES, LOOPBACK).sends_once(Crossing(4 * MIB, MIB, 8 * MIB))


@pytest.mark.parametrize(
    ("ways", "hops", "once"), [((), False, False), (("two_hops",), True, False), (("row_per_node",), False, True)]
)
def test_what_was_asked_for_is_done_unmeasured(ways: tuple[str, ...], hops: bool, once: bool) -> None:
    choice = ExchangeChoice(ways, "as told", NODES)
    assert choice.hops(1) is hops
    assert choice.sends_once(Crossing(1, 1, 1)) is once
