"""`paramstore bench tiers`: what it prints where."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from paramstore.bench import tiers
from paramstore.bench.plan import Plan
from paramstore.bench.plot import READ
from paramstore.bench.report import Report, Row, decode
from paramstore.cli.bench import app

ROW = Row(
    name=READ, subject="paramstore", value=3.4, unit="GB/s", record_bytes=57 << 20, against="raw", limit=3.7,
    ratio=0.92, ratio_min=0.9, ratio_max=0.94,
)  # fmt: skip


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


def test_table_is_the_default(asked: dict[str, Any]) -> None:
    result = CliRunner().invoke(app, ["tiers"])
    assert result.exit_code == 0
    assert "0.92 (0.90 - 0.94)" in " ".join(result.stdout.split())
    assert asked["plan"] == Plan()


@pytest.mark.slow
def test_plot_is_drawn_into_the_file(asked: dict[str, Any], tmp_path: Path) -> None:
    assert CliRunner().invoke(app, ["tiers", "--json", "--plot", str(tmp_path / "ratios.png")]).exit_code == 0
    assert (tmp_path / "ratios.png").stat().st_size > 0
