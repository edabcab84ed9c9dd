"""Rooflines and targets of training throughput."""

from __future__ import annotations

import pytest

from paramstore.errors import CapacityError, StepMismatch
from paramstore_bench.training import (
    TARGETS,
    TOUCHED,
    PairedStep,
    Phases,
    check_host_peak,
    check_losses,
    row_of,
    target_of,
)


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


def test_where_the_device_is_fast_enough_nothing_is_let_off() -> None:
    assert target_of(1.0, [step(2.0, io_s=0.9)] * 3) == TARGETS[1.0]


def test_a_row_gives_tokens_phases_and_efficiency() -> None:
    row = row_of(0.25, [step(1.25), step(1.25), step(2.0)], tokens=100, record_bytes=7, facts={"optim_slots": 6.0})
    assert (row.value, row.limit, row.ratio) == (80.0, 100.0, 0.8)
    assert (row.ratio_min, row.ratio_max, row.holds) == (0.5, 0.8, True)
    assert row.parts["ours_forward_s"] == 1.25
    assert row.parts["efficiency"] == 0.8
    assert row.parts["roofline_tokens_per_s"] == 100.0
    assert row.parts["optim_slots"] == 6.0
    assert row.case == "host budget 25% of the states"


def test_only_the_rule_that_does_what_memory_does_has_a_target() -> None:
    row = row_of(0.5, [step(2.0)] * 3, tokens=100, record_bytes=7, facts={}, rule=TOUCHED)
    assert (row.case, row.target, row.holds) == ("host budget 50% of the states, touched", None, None)


def test_a_loss_that_differs_in_its_last_bit_ends_the_run() -> None:
    check_losses([5.5, 5.25], [5.5, 5.25], what="round 0")
    with pytest.raises(StepMismatch, match="round 0: the loss of step 1"):
        check_losses([5.5, 5.250000000000001], [5.5, 5.25], what="round 0")


def test_a_host_peak_above_the_budget_ends_the_run() -> None:
    check_host_peak(100, 100, what="import")
    with pytest.raises(CapacityError, match="import: 101 bytes"):
        check_host_peak(101, 100, what="import")
