"""A part of the battery that goes wrong, in whatever way, costs nobody else anything, and what it found is kept."""

from __future__ import annotations

import os
import select
import sys
import time
from pathlib import Path

import msgspec
import pytest

from paramstore.bench.report.rows import Row
from paramstore_bench.device import battery
from paramstore_bench.device.battery import DONE, OUT_OF_TIME, BatteryReport, DeviceRow, PartReport, keep, run_part

ROW = b'{"name":"one","subject":"x","value":1.0,"unit":"ms","on":"somewhere"}\n'


def part(tmp_path: Path, code: str, *, limit_s: float = 30.0) -> PartReport:
    """Runs `code`, in which ROWS is the file of the rows and ROW a row of it."""
    rows = tmp_path / "rows"
    code = f"ROWS, ROW = {str(rows)!r}, {ROW!r}\n{code}"
    return run_part("some", [sys.executable, "-c", code], limit_s=limit_s, rows=rows, log=tmp_path / "log")


def test_a_part_that_ends_gives_its_rows(tmp_path: Path) -> None:
    found = part(tmp_path, "print('told'); open(ROWS, 'ab').write(ROW * 2)")
    assert (found.name, found.outcome, found.error, len(found.rows)) == ("some", DONE, "", 2)
    assert (found.rows[0].name, found.rows[0].on) == ("one", "somewhere")
    assert (tmp_path / "log").read_text() == "\n== some\ntold\n"


def test_a_part_that_raises_leaves_its_traceback_and_its_rows_so_far(tmp_path: Path) -> None:
    (tmp_path / "log").write_text("of the part before\n")
    found = part(tmp_path, "open(ROWS, 'ab').write(ROW)\nraise MemoryError('planted')")
    assert (found.outcome, len(found.rows)) == ("failed with status 1", 1)
    assert "MemoryError: planted" in found.error
    assert "before" not in found.error
    assert (tmp_path / "log").read_text().startswith("of the part before\n\n== some\n")


def test_a_part_that_dies_leaves_its_rows_but_for_the_one_that_was_cut(tmp_path: Path) -> None:
    found = part(tmp_path, "import os; open(ROWS, 'ab').write(ROW + ROW[:20]); os.kill(os.getpid(), 9)")
    assert (found.outcome, len(found.rows)) == ("failed with status -9", 1)


def ends(process_id: int, *, within_s: float) -> bool:
    """Whether a process ends in time, or has ended; it may be one that nobody has taken note of yet."""
    try:
        process = os.pidfd_open(process_id)
    except ProcessLookupError:
        return True
    try:
        poller = select.poll()
        poller.register(process, select.POLLIN)
        return bool(poller.poll(within_s * 1000))
    finally:
        os.close(process)


@pytest.mark.slow
def test_a_part_that_hangs_and_its_children_are_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(battery, "GRACE_S", 0.5)
    hangs = "import signal, subprocess, sys, time; signal.signal(15, signal.SIG_IGN)"
    child = "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])"
    started_s = time.monotonic()
    found = part(tmp_path, f"{hangs}\nopen(ROWS, 'ab').write(ROW)\nprint({child}.pid, flush=True)\ntime.sleep(60)", limit_s=1.5)
    assert (found.outcome, len(found.rows)) == (OUT_OF_TIME, 1)
    assert time.monotonic() - started_s < 30
    assert ends(int(found.error), within_s=20), "it was killed a moment ago, or would sleep longer than this"


def test_a_report_is_replaced_as_a_whole_and_read_again(tmp_path: Path) -> None:
    keep(Row(name="one", subject="x", value=1.0, unit="ms", parts={"bytes": 2.0}), tmp_path / "rows", on="somewhere")
    parts = [PartReport(name="some", outcome=DONE, seconds=1.0, rows=battery.kept(tmp_path / "rows"))]
    report = BatteryReport(machine={}, commit="c", command="x", date="d", seconds=1.0, parts=parts)
    report.write(tmp_path / "report.json")
    report.write(tmp_path / "report.json")
    found = BatteryReport.read(tmp_path / "report.json")
    assert found.parts[0].rows == [DeviceRow(name="one", subject="x", value=1.0, unit="ms", parts={"bytes": 2.0}, on="somewhere")]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["report.json", "rows"]


def test_what_could_not_be_read_again_is_no_row(tmp_path: Path) -> None:
    with pytest.raises(msgspec.ValidationError):
        keep(Row(name="one", subject="x", value=1.0, unit="ms", parts={"is_equal": True}), tmp_path / "rows", on="somewhere")
    assert battery.kept(tmp_path / "rows") == []
