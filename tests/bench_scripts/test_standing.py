"""The rows on visits of keys whose leases stand: each number of keys has its bound, silence is counted in bytes, uses are told."""

from __future__ import annotations

from pathlib import Path

import pytest

from paramstore.bench.context import Bench
from paramstore.bench.plan import Plan
from paramstore.bench.report.rows import Row
from paramstore_bench import standing
from paramstore_bench.standing import KEYS_AND_US_MAX, measure_standing
from paramstore_client.device import host_slots

pytestmark = pytest.mark.slow


def rows_of(directory: Path) -> dict[str, Row]:
    return {f"{row.name}: {row.case}": row for row in measure_standing(Bench(Plan.quick(), directory))}


def test_each_number_of_keys_has_its_bound_and_visits_are_silent_but_told(tmp_path: Path) -> None:
    rows = list(rows_of(tmp_path).values())
    times, (silent, told), touched = rows[:-3], rows[-3:-1], rows[-1]
    asked = [bound for _, us_max in KEYS_AND_US_MAX for bound in (us_max, None)]
    assert [(row.parts["ours_us"], row.target and row.target.bound) for row in times] == [
        (row.value, bound) for row, bound in zip(times, asked, strict=True)
    ]
    assert all(row.ratio is not None and row.ratio > 1.0 for row in times), "a visit asks nobody, an acquire does"
    assert (silent.value, silent.holds, told.holds) == (0.0, True, True)
    assert (touched.value, touched.holds) == (1.0, True)
    assert list(tmp_path.iterdir()) == []


def test_a_visit_that_sends_something_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reports five times as often as agreed fall into the silence."""
    monkeypatch.setattr(host_slots, "REPORT_EVERY", standing.REPORT_EVERY // 5)
    silent = rows_of(tmp_path)[f"bytes sent: {standing.VISITS_SILENT} visits between two reports"]
    assert silent.value > 0
    assert silent.holds is False


def test_uses_that_are_not_told_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    report = host_slots.HostSlots._report

    def of_others(slots: host_slots.HostSlots) -> None:
        slots._touched = {(0, standing.EXPERTS - 1): None}
        report(slots)

    monkeypatch.setattr(host_slots.HostSlots, "_report", of_others)
    (touched,) = [row for name, row in rows_of(tmp_path).items() if name.startswith("uses told")]
    assert touched.value < 1.0
    assert touched.holds is False
