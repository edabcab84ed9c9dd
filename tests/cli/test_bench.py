"""`paramstore bench tiers`: what it prints where."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from paramstore.bench import tiers
from paramstore.bench.plan import Plan
from paramstore.bench.report.plot import READ
from paramstore.bench.report.rows import Report, Row, decode
from paramstore.cli.bench import app

ROW = Row(
    name=READ, subject="paramstore", value=3.4, unit="GB/s", record_bytes=57 << 20, against="raw", limit=3.7,
    ratio=0.92, ratio_min=0.9, ratio_max=0.94,
)  # fmt: skip


INTERRUPTED = """
import os, signal, sys
from pathlib import Path
from paramstore.bench import context, tiers
from paramstore.bench.service.daemon import serving
from paramstore.cli.main import main

def measure_all(bench):
    with bench.folder("store") as folder, serving(folder, host_budget_bytes=32 << 20) as service:
        (folder / "large").write_bytes(bytes(1 << 20))
        pid.write_text(str(service.pid))
        os.kill(os.getpid(), signal.SIGTERM)
        service.stats()
    raise AssertionError("SIGTERM was not heard")

tiers.measure_all = measure_all
place, pid = sys.argv[1], Path(sys.argv[2])
tiers.machine.check_free_space = lambda *args, **sizes: None
sys.argv[1:] = ["bench", "tiers", "--quick", "--dir", place]
main()
"""
"""The bench with one measurement, which SIGTERM ends while its daemon runs."""


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What `run` was called with; it measures nothing."""
    seen: dict[str, Any] = {}

    def run(plan: Plan, directory: Path, **options: Any) -> Report:
        seen.update(plan=plan, directory=directory, **options)
        return Report(machine={}, commit="c", command=options["command"], date="d", seconds=1, rows=[ROW])

    monkeypatch.setattr(tiers, "run", run)
    return seen


def test_json_is_all_that_stdout_gets(asked: dict[str, Any], tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["tiers", "--json", "--quick", "--dir", str(tmp_path)])
    assert result.exit_code == 0
    assert decode(result.stdout.encode()).rows == [ROW]
    assert asked["plan"] == Plan.quick()
    assert asked["directory"] == tmp_path


@pytest.mark.parametrize("plot", ["ratios", "ratios.txt", "missing/ratios.png", "file/ratios.png", "folder.png"])
def test_a_picture_that_cannot_be_written_is_a_usage_error_before_anything_is_measured(
    plot: str, asked: dict[str, Any], paramstore: Callable[..., int], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "folder.png").mkdir()
    assert paramstore("bench", "tiers", "--plot", str(tmp_path / plot)) == 2
    assert asked == {}
    captured = capsys.readouterr()
    assert captured.out == ""
    assert f"paramstore: ConfigError: --plot {tmp_path / plot}: " in captured.err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "folder.png"]


@pytest.mark.parametrize("place", ["missing", "file", "file/b", "d" * 80])
def test_a_directory_that_is_none_is_a_usage_error(
    place: str, paramstore: Callable[..., int], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    (tmp_path / ("d" * 80)).mkdir()
    assert paramstore("bench", "tiers", "--dir", str(tmp_path / place)) == 2
    assert f"paramstore: ConfigError: --dir {tmp_path / place}: " in capsys.readouterr().err


def test_sigterm_ends_it_as_ctrl_c_does(monkeypatch: pytest.MonkeyPatch, paramstore: Callable[..., int], tmp_path: Path) -> None:
    def run(*args: Any, **options: Any) -> Report:
        try:
            signal.raise_signal(signal.SIGTERM)
        finally:
            signal.raise_signal(signal.SIGTERM)  # a second one does not end the tidying up
            (tmp_path / "tidied").touch()
        raise AssertionError("SIGTERM was not heard")

    monkeypatch.setattr(tiers, "run", run)
    assert paramstore("bench", "tiers", "--dir", str(tmp_path)) == 143
    assert (tmp_path / "tidied").exists()


@pytest.mark.slow
def test_sigterm_leaves_no_daemon_and_no_file(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("b")  # a socket's path is short
    (folder / "here").mkdir()
    command = [sys.executable, "-c", INTERRUPTED, str(folder / "here"), str(folder / "pid")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 143, done.stderr
    assert "nobody waited" not in done.stderr
    pid = int((folder / "pid").read_text())
    assert not is_running(pid)
    assert list((folder / "here").iterdir()) == []


def is_running(pid: int) -> bool:
    """Whether the process lives: one that ended may wait for whoever inherited it to reap it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_table_is_the_default(asked: dict[str, Any]) -> None:
    result = CliRunner().invoke(app, ["tiers"])
    assert result.exit_code == 0
    assert "0.92 (0.90 - 0.94)" in " ".join(result.stdout.split())
    assert asked["plan"] == Plan()


@pytest.mark.slow
def test_plot_is_drawn_into_the_file(asked: dict[str, Any], tmp_path: Path) -> None:
    assert CliRunner().invoke(app, ["tiers", "--json", "--plot", str(tmp_path / "ratios.png")]).exit_code == 0
    assert (tmp_path / "ratios.png").stat().st_size > 0
