"""bench/bench_versions.py: pairs become ratios that say which of two checkouts is better, and by how much it may be worse."""

from __future__ import annotations

import argparse
import importlib
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import paramstore as ps
from paramstore.bench.report.rows import Row, Target, decode


@pytest.fixture
def versions(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "bench"))
    return importlib.import_module("bench_versions")


def rate(value: float, ratio: float | None = None) -> Row:
    return Row(name="load", subject="paramstore", value=value, unit="GB/s", ratio=ratio)


def seconds(value: float) -> Row:
    return Row(name="load", subject="paramstore", value=value, unit="s", ratio=7.0)


def compare(versions: Any, pairs: list[tuple[Row, Row]]) -> Row:
    (row,) = versions.compared({("load", "", None, ""): pairs})
    assert isinstance(row, Row)
    return row


def test_a_rate_is_compared_by_its_ratio_to_the_limit_of_its_own_run(versions: Any) -> None:
    row = compare(versions, [(rate(1.0, 0.9), rate(4.0, 0.6))] * 3)
    assert row.ratio == pytest.approx(1.5)
    assert row.holds


def test_a_time_that_grew_is_worse(versions: Any) -> None:
    row = compare(versions, [(seconds(2.0), seconds(1.0))] * 3)
    assert row.ratio == 0.5
    assert row.holds is False


def test_what_a_target_is_about_decides_which_way_is_better(versions: Any) -> None:
    cpu = Row(name="load", subject="paramstore", value=0.05, unit="core-s/GB", target=Target("value", "<=", 0.06))
    less = Row(name="load", subject="paramstore", value=0.04, unit="core-s/GB", target=Target("value", "<=", 0.06))
    assert compare(versions, [(cpu, less)] * 3).ratio == pytest.approx(0.8)


def test_a_median_may_lose_three_percent_or_half_the_range_between_the_quartiles(versions: Any) -> None:
    steady = [(rate(0.96), rate(1.0))] * 4
    assert compare(versions, steady).holds is False
    wide = [(rate(value), rate(1.0)) for value in (0.7, 0.9, 0.96, 1.1, 1.3)]
    assert compare(versions, wide).holds


def test_a_figure_that_a_run_lacks_or_that_is_zero_is_left_out(versions: Any) -> None:
    whole = [(rate(1.0), rate(1.0))] * 3
    rows = list(versions.compared({("load", "", None, ""): whole, ("load", "other", None, ""): whole[:2]}))
    assert [row.case for row in rows] == [""]
    assert not list(versions.compared({("load", "", None, ""): [(rate(0.0), rate(1.0))] * 3}))


def test_a_base_without_an_environment_ends_with_1_and_says_so(
    versions: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["bench_versions", str(tmp_path), "--bench", "commits", "--out", str(tmp_path / "out.json")])
    assert versions.main() == 1
    assert "bench_versions: " in capsys.readouterr().err


def test_a_run_that_fails_keeps_the_pairs_before(versions: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = iter([rate(1.0), rate(1.0), rate(1.0), rate(1.0), rate(1.0)])  # the sixth, of the third pair, fails

    def run(*_: object, is_full: bool) -> dict[tuple[str, str, None, str], Row]:
        return {("load", "", None, ""): next(runs)}

    monkeypatch.setattr(versions, "run", run)
    monkeypatch.setattr(versions, "_commit", lambda _: "base")
    arguments = argparse.Namespace(base=tmp_path / "base", dir=tmp_path, pairs=15, full=False, bench="tiers")
    with pytest.raises(RuntimeError, match="StopIteration"):
        versions.measure(tmp_path / "versions.json", ["tiers"], arguments)
    (row,) = decode((tmp_path / "versions.json").read_bytes()).rows
    assert row.parts["pairs"] == 2
    assert [path.name for path in tmp_path.iterdir()] == ["versions.json"]


@pytest.mark.slow
def test_an_interrupted_run_waits_until_the_bench_has_ended_what_it_started(tmp_path: Path) -> None:
    base, here = tmp_path / "base", Path(__file__).parents[2]
    (base / ".venv/bin").mkdir(parents=True)
    (base / ".venv/bin/python").symlink_to(sys.executable)
    (base / "bench").mkdir()
    (base / "bench/bench_commits.py").write_text(
        "import pathlib, signal, sys, time\n"
        "def end(*_):\n    time.sleep(1)\n    pathlib.Path('ended').touch()\n    sys.exit(130)\n"
        "signal.signal(signal.SIGTERM, end)\npathlib.Path('begun').touch()\ntime.sleep(60)\n"
    )
    call = f"run('commits', pathlib.Path({str(base)!r}), pathlib.Path({str(tmp_path)!r}), is_full=False)"
    script = f"import bench_versions, pathlib; bench_versions.{call}"
    child = subprocess.Popen([sys.executable, "-c", script], cwd=here / "bench", stderr=subprocess.DEVNULL)
    while not (base / "begun").exists():
        assert child.poll() is None
    child.send_signal(signal.SIGINT)
    assert child.wait(60) != 0
    assert (base / "ended").exists()


def test_a_quarter_of_the_states_is_what_short_training_holds(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The script runs the checkout's own bench, with a model whose quarter is more than the least host budget."""
    bench = tmp_path / "bench"
    bench.mkdir()
    (bench / "training_models.py").write_text("QUICK, Shape = None, dict\n")
    told = "(sys.argv[1:], training_models.QUICK['experts'])"
    imports = "import sys, pathlib, training_models"
    (bench / "bench_training.py").write_text(f"{imports}\npathlib.Path('seen').write_text(repr({told}))\n")
    script = Path(__file__).parents[2] / "bench/quarter_training.py"
    subprocess.run([sys.executable, str(script), "--out", "x.json"], cwd=tmp_path, check=True)
    assert (tmp_path / "seen").read_text() == repr((["--quick", "--budgets", "0.25", "--rules", "exact", "--out", "x.json"], 32))


@pytest.mark.slow
def test_the_model_of_short_training_holds_a_quarter_within_its_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "bench"))
    models, training = importlib.import_module("training_models"), importlib.import_module("bench_training")
    shape = models.Shape(**importlib.import_module("quarter_training").SHAPE)
    fields = {"gate_up_proj": (2 * shape.inner, shape.hidden), "down_proj": (shape.hidden, shape.inner)}
    quarter_bytes = shape.states_bytes // 4
    schema = ps.adamw_schema(fields, updates="exact", param_dtype="bfloat16")
    assert training.budget_of(quarter_bytes, schema).size_bytes == quarter_bytes
