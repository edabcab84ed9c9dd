"""The picture of a report."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from paramstore.bench.report.plot import READ, WRITE, check_target, draw, label_of, panels_of
from paramstore.bench.report.rows import Report, Row, Target, judged
from paramstore.errors import ConfigError


def row(name: str, subject: str, ratio: float, *, record_bytes: int = 57 << 20, case: str = "") -> Row:
    target = Target("ratio", ">=", 0.93) if subject == "paramstore" else None
    return judged(
        Row(
            name=name, subject=subject, case=case, value=3.7 * ratio, unit="GB/s", record_bytes=record_bytes, against="raw",
            limit=3.7, ratio=ratio, ratio_min=ratio - 0.05, ratio_max=ratio + 0.05, target=target,
        )
    )  # fmt: skip


def report(rows: list[Row]) -> Report:
    return Report(machine={"cpu": "x"}, commit="c", command="b", date="d", seconds=1, rows=rows)


ROWS = [
    row(WRITE, "LMDB", 0.2), row(WRITE, "paramstore", 0.95),
    row(READ, "LMDB", 0.5), row(READ, "paramstore", 0.94, case="param"), row(READ, "paramstore", 0.9, record_bytes=13 << 20),
]  # fmt: skip


def test_panels_are_reads_then_writes_small_records_first_best_bar_on_top() -> None:
    panels = panels_of(report(ROWS))
    assert list(panels) == [(READ, 13), (READ, 57), (WRITE, 57)]
    assert [found.subject for found in panels[READ, 57]] == ["paramstore", "LMDB"]


def test_records_of_nearly_equal_size_share_a_panel() -> None:
    rows = [row(READ, "a", 0.5, record_bytes=57 << 20), row(READ, "b", 0.5, record_bytes=(57 << 20) + 8192)]
    assert list(panels_of(report(rows))) == [(READ, 57)]


def test_rows_without_a_ratio_or_of_other_work_are_not_drawn() -> None:
    other = Row(name="apply", subject="paramstore", value=1, unit="us", ratio=0.7, record_bytes=57 << 20)
    unpaired = Row(name=READ, subject="paramstore", value=1, unit="GB/s", record_bytes=57 << 20)
    assert panels_of(report([other, unpaired])) == {}


def test_label_names_subject_and_case() -> None:
    assert label_of(row(READ, "paramstore", 0.9, case="param")) == "paramstore: param"
    assert label_of(row(READ, "LMDB", 0.9)) == "LMDB"


def test_report_with_nothing_to_draw_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="nothing to draw"):
        draw(report([]), tmp_path / "plot.png")


def test_without_matplotlib_a_picture_is_refused_before_measuring(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.backends.backend_agg", None)
    with pytest.raises(ConfigError, match="pip install matplotlib"):
        check_target(tmp_path / "plot.png")


@pytest.mark.slow
def test_picture_is_written_in_the_format_of_its_suffix(tmp_path: Path) -> None:
    draw(report(ROWS), tmp_path / "plot.png")
    draw(report(ROWS), tmp_path / "plot.svg")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
    assert b"<svg" in (tmp_path / "plot.svg").read_bytes()
