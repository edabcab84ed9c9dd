"""bench/bench_device.py: without a CUDA device it says so; what needs none runs on its CPU twin."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from paramstore.bench.report.rows import Row
from paramstore.clock import MonotonicClock
from paramstore.errors import CapacityError

SCRIPTS = Path(__file__).parents[2] / "bench"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    """(name) -> the module in bench/, imported as the script itself imports it."""
    monkeypatch.syspath_prepend(str(SCRIPTS))

    def load(name: str) -> ModuleType:
        return importlib.import_module(name)

    return load


def test_without_a_device_it_ends_with_2_says_why_and_writes_nothing(
    script: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert script("bench_device").main(["--quick", "--dir", str(tmp_path), "--out", str(tmp_path / "out.json")]) == 2
    captured = capsys.readouterr()
    assert "no CUDA device" in captured.err
    assert captured.out == ""
    assert list(tmp_path.iterdir()) == []


def test_a_measurement_that_fails_is_a_row_that_says_why_and_the_others_go_on(
    script: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    bench = script("bench_device")

    def fail(*arguments: object) -> list[Row]:
        raise CapacityError("no memory left to pin")

    for name in ("measure_pinning", "measure_overlap", "measure_tier_copies", "measure_kvikio", "measure_decoding"):
        monkeypatch.setattr(bench, name, fail)
    plan = script("device_plan").Plan(rounds=1, sync_layers=2, hidden=8)
    rows = bench.measure_all(plan, torch.device("cpu"), MonotonicClock(), tmp_path, tell=lambda _: None)
    assert [row.name for row in rows if not row.note] == ["host sync of a layer"] * 2
    assert [row.note for row in rows if row.note] == ["not measured: CapacityError: no memory left to pin"] * 5


@pytest.mark.slow
def test_decoding_from_the_store_gives_the_resident_models_output(script: Any, tmp_path: Path) -> None:
    plan = script("device_plan").Plan(rounds=1, layers=3, experts=4, hidden=32, inner=48, tokens=4, steps=2, ring_layers=2)
    rows = script("device_layers").measure_decoding(plan, torch.device("cpu"), MonotonicClock(), tmp_path / "store")
    assert [row.case for row in rows] == [
        "DeviceTier, 12 of 12 experts", "DeviceTier, 6 of 12 experts", "RingMemory, 2 of 3 layers",
    ]  # fmt: skip
    for row in rows:
        assert row.note == "output bitwise equal: True"
        assert row.ratio > 0
