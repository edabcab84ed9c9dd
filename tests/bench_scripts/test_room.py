"""What a training namespace takes of its volumes, at a small size: the figures are those of files, and of a reader."""

from __future__ import annotations

from pathlib import Path

import pytest

from paramstore.bench.context import Bench
from paramstore.bench.plan import MIB, Plan, RecordSize
from paramstore_bench import room


@pytest.mark.slow
def test_steps_are_paired_and_the_volumes_are_those_of_the_file_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "RECORD": RecordSize(256 << 10), "RECORDS": 16, "BUDGETS": {"small": 96 * MIB}, "STEPS": 1, "ROUNDS": 5, "LEAST_STEPS": 24,
    }.items():  # fmt: skip
        monkeypatch.setattr(room, name, value)
    paces, share = (rows := room.measure_room(Bench(Plan.quick(), tmp_path)))[:-1], rows[-1]
    assert [row.case for row in paces] == ["small, back to back", "small, with as long computing"]
    for row in paces:
        assert row.ratio is not None
        assert row.ratio > 0
    assert paces[-1].parts["steps_lost_by_a_reader"] >= 1
    state_bytes = share.parts["state_bytes"]
    assert share.case == "small, 16 records, after 24 steps"
    assert 3 <= share.value <= (3 * state_bytes + 6 * state_bytes / 16 + MIB) / state_bytes
    assert 1.9 <= share.parts["with_held_steps"] - share.value <= 2.3
    assert share.parts["catalog_bytes"] > 0
