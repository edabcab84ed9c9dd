"""The table people see."""

from __future__ import annotations

import io

import msgspec
import pytest
from rich.console import Console

from paramstore.bench.report.rows import Report, Row, Target, judged
from paramstore.bench.report.table import render

ROW = Row(
    name="volume to host", case="param", subject="paramstore", record_bytes=57 << 20, value=3.4, unit="GB/s",
    against="raw", limit=3.7, ratio=0.90, ratio_min=0.88, ratio_max=0.92, target=Target("ratio", ">=", 0.93),
    parts={"checksum_s": 0.0123}, note="a busy machine",
)  # fmt: skip


def shown(*rows: Row, width: int = 200) -> str:
    machine = {"cpu": "x", "memory_bytes": 1 << 30}
    report = Report(machine=machine, commit="c", command="b", date="d", seconds=9, rows=list(rows))
    console = Console(file=io.StringIO(), width=width)
    render(report, console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_row_shows_value_limit_ratio_with_spread_and_target() -> None:
    text = shown(judged(ROW))
    for wanted in ("57 MiB", "3.4 GB/s", "3.7  raw", "0.90 (0.88 - 0.92)", "ratio >= 0.93", "short"):
        assert wanted in text


def test_where_a_table_has_no_room_each_row_is_a_paragraph_with_all_its_figures() -> None:
    text = " ".join(shown(judged(ROW), width=80).split())
    for wanted in (
        "volume to host, param of 57 MiB: ratio 0.90 (0.88 - 0.92)", "paramstore: 3.4 GB/s, raw 3.7, target ratio >= 0.93: short",
    ):  # fmt: skip
        assert wanted in text


def test_row_that_falls_short_says_what_it_is_made_of() -> None:
    text = shown(judged(ROW))
    assert "checksum_s" in text
    assert "0.0123" in text
    assert "a busy machine" in text


@pytest.mark.parametrize("width", [80, 200])
def test_the_end_says_how_many_targets_hold_are_within_spread_or_short(width: int) -> None:
    holds = judged(msgspec.structs.replace(ROW, ratio=0.95))
    close = judged(msgspec.structs.replace(ROW, ratio=0.92, ratio_max=0.94))
    without = msgspec.structs.replace(ROW, target=None)
    text = shown(holds, holds, holds, close, close, judged(ROW), without, width=width)
    assert "6 targets: 3 hold, 2 within spread, 1 short" in text.splitlines()[-3:]


def test_a_figure_without_ratio_has_its_unit_in_the_headline() -> None:
    row = msgspec.structs.replace(ROW, ratio=None, limit=None, value=42.0, unit="us", target=Target("value", "<=", 40.0))
    assert "short: volume to host, param of 57 MiB: 42 us, made of" in shown(judged(row), width=80)


def test_row_that_holds_keeps_its_parts_to_itself() -> None:
    assert "checksum_s" not in shown(judged(msgspec.structs.replace(ROW, ratio=0.95)))
