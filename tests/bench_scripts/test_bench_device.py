"""bench/bench_device.py: without a CUDA device it says so; on the twin every part runs, and what it asks holds there."""

from __future__ import annotations

import importlib
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch

from paramstore.bench.report.rows import Row
from paramstore_bench.device.battery import DONE, GRACE_S, BatteryReport
from paramstore_bench.device.place import SIMULATED, TWIN, Place
from paramstore_bench.device.plan import Plan

SCRIPTS = Path(__file__).parents[2] / "bench"
Measure = Callable[[str], list[Row]]


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script, imported as it imports others itself."""
    monkeypatch.syspath_prepend(str(SCRIPTS))
    return importlib.import_module("bench_device")


@pytest.fixture
def measure(bench: ModuleType, tmp_path: Path) -> Measure:
    """(part) -> its rows on the twin."""
    return lambda part: list(bench.PARTS[part].measure(Place(is_twin=True), Plan.twin(), tmp_path))


def test_without_a_device_it_ends_with_2_says_why_and_writes_nothing(
    bench: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert bench.main(["--quick", "--dir", str(tmp_path), "--out", str(tmp_path / "out.json")]) == 2
    captured = capsys.readouterr()
    assert "no CUDA device" in captured.err
    assert captured.out == ""
    assert list(tmp_path.iterdir()) == []


def test_every_part_has_its_time_within_eight_minutes(bench: ModuleType) -> None:
    assert sum(part.limit_s for part in bench.PARTS.values()) <= bench.LIMIT_S
    assert bench.LIMIT_S + GRACE_S <= 480


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("part", ["registration", "waits", "memory", "streams"])
def test_answers_are_yes_on_the_twin(measure: Measure, part: str) -> None:
    rows = measure(part)
    assert [(row.name, row.case) for row in rows if row.value != 1.0] == []
    assert rows


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")
def test_logits_are_those_of_the_unmodified_model_on_the_twin(measure: Measure) -> None:
    rows = measure("logits")
    logits, generated = ([row for row in rows if row.name == name] for name in ("logits, bf16", "tokens of generate"))
    assert [row.case for row in logits if (row.value, row.parts["largest_difference"]) != (3.0, 0.0)] == []
    assert len(logits) == 4 * 3 * 3, "families, kernels, slots"
    assert [row.case for row in generated if (row.value, row.parts["tokens"]) != (1.0, 8.0)] == []
    assert len(generated) == 4 * 3


@pytest.mark.slow
def test_ring_finds_nothing_absent_on_the_twin(measure: Measure) -> None:
    rows = measure("ring")
    assert [row.case for row in rows if not row.holds] == []
    assert all(row.parts["copies"] == row.parts["counted_copies"] for row in rows), "counted is what was copied"


def test_groups_without_rows_change_no_bit_on_the_cpu(measure: Measure) -> None:
    rows = measure("groups")
    assert [row.case for row in rows if row.parts["bits_equal"] != 1.0] == []
    assert {row.case for row in rows} >= {"16 slots", "31 slots"}


def test_copies_and_sums_are_measured_on_the_twin(measure: Measure) -> None:
    assert [row.name for row in measure("copies")] == ["copy to the device", "copy to the host", "matmul, bf16"]
    assert [row.case for row in measure("tier copies")] == ["as the tier does, host"]
    assert [row.note for row in measure("sums")] == ["equal to those of the host: True"]
    for part in ("fp8", "kvikio"):
        (row,) = measure(part)
        assert row.note.startswith("not measured: ")


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")
def test_model_in_slots_is_timed_beside_the_unmodified_one_with_its_logits(measure: Measure) -> None:
    rows = measure("speed")
    assert [row.case for row in rows[::2]] == [f"{share} of the experts in slots" for share in ("100%", "50%", "25%", "10%")]
    assert [row.note for row in rows if not row.note.startswith("logits bitwise equal: 1 of 1 ")] == []
    assert [row.parts["misses"] > 0 for row in rows[::2]] == [False, True, True, True]
    assert all(row.ratio > 0 for row in rows)


@pytest.mark.slow
@pytest.mark.parametrize("only", ["registration,tests,sums,kvikio", pytest.param("", marks=pytest.mark.soak)])
def test_run_writes_what_each_part_found_and_what_it_ran_on(
    bench: ModuleType, tmp_path_factory: pytest.TempPathFactory, only: str
) -> None:
    directory = tmp_path_factory.mktemp("b")  # a socket's path is short
    out, names = directory / "device.json", only or ",".join(bench.PARTS)
    command = [sys.executable, str(SCRIPTS / "bench_device.py"), "--twin", "--only", names, "--commit", "abc", "--out", out.name]
    done = subprocess.run(command, cwd=directory, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    report = BatteryReport.read(out)
    assert (report.commit, [part.name for part in report.parts]) == ("abc", names.split(","))
    assert [part.outcome for part in report.parts] == [DONE] * len(report.parts)
    for part in report.parts:
        on = SIMULATED if bench.PARTS[part.name].uses_streams else TWIN
        assert {row.on for row in part.rows} == {on}
    assert sorted(path.name for path in directory.iterdir()) == ["device.json", "device.log"]
