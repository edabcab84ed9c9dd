"""Rooflines and targets of training throughput."""

from __future__ import annotations

import pytest

from paramstore.bench.training import PairedStep, Phases, row_of, target_of


def step(ours_s: float, *, memory_s: float = 1.0, io_s: float = 0.5) -> PairedStep:
    return PairedStep(Phases(ours_s, 0.0, 0.0), Phases(0.0, memory_s, 0.0), io_s=io_s, moved_bytes=8.0)


def test_phases_add_up() -> None:
    assert Phases(1.0, 2.0, 0.5).seconds == 3.5


def test_the_roofline_is_the_slower_of_memory_and_device() -> None:
    assert step(2.0, io_s=0.5).roofline_ratio == 1.0
    assert step(2.0, io_s=2.0).roofline_ratio == 0.5
    assert step(2.0, io_s=2.0).efficiency == 1.0
    assert step(4.0, io_s=2.0).efficiency == 0.5


@pytest.mark.parametrize(("io_s", "expected"), [(0.5, 0.60), (1.0, 0.60), (2.0, 0.425)])
def test_the_lower_of_share_and_roofline_is_asked_for(io_s: float, expected: float) -> None:
    assert target_of(0.1, [step(2.0, io_s=io_s)] * 3) == pytest.approx(expected)


def test_a_row_gives_tokens_phases_and_efficiency() -> None:
    row = row_of(0.25, [step(1.25), step(1.25), step(2.0)], tokens=100, record_bytes=7, facts={"optim_slots": 6.0})
    assert (row.value, row.limit, row.ratio) == (80.0, 100.0, 0.8)
    assert (row.ratio_min, row.ratio_max, row.holds) == (0.5, 0.8, True)
    assert row.parts["ours_forward_s"] == 1.25
    assert row.parts["efficiency"] == 0.8
    assert row.parts["roofline_tokens_per_s"] == 100.0
    assert row.parts["optim_slots"] == 6.0
    assert row.case == "host budget 25% of the states"
