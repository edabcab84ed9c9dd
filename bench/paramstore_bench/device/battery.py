"""Runs the parts of the battery one by one, each in a process of its own with a limit of its own, and keeps what each has found.

A part that fails, is killed, runs out of memory or time, or breaks the device's context leaves its rows so far and the end of its
output; the others go on. The report is written anew after each part, and the log as it comes: a kill loses the part under way.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

from paramstore.bench.report.rows import Row

DONE, OUT_OF_TIME = "done", "out of time"
GRACE_S = 10.0
"""Time between the request to end and the kill of a part that is out of time."""
ERROR_CHARACTERS = 6000


class DeviceRow(Row, frozen=True, kw_only=True):
    """A row that says what it ran on."""

    on: str


class PartReport(msgspec.Struct, frozen=True, kw_only=True):
    """What came of a part. outcome: DONE, OUT_OF_TIME, or how it failed; error: the end of its output then."""

    name: str
    outcome: str
    seconds: float
    rows: list[DeviceRow]
    error: str = ""


class BatteryReport(msgspec.Struct, frozen=True, kw_only=True):
    """A whole run, or as much of it as there is by now."""

    machine: dict[str, object]
    commit: str
    command: str
    date: str
    seconds: float
    parts: list[PartReport]

    def write(self, file: Path) -> None:
        """Replaces `file` at once."""
        new = file.with_name(f"{file.name}.new")
        new.write_bytes(msgspec.json.format(msgspec.json.encode(self), indent=1) + b"\n")
        os.replace(new, file)

    @classmethod
    def read(cls, file: Path) -> BatteryReport:
        return msgspec.json.decode(file.read_bytes(), type=cls)


def keep(row: Row, rows: Path, *, on: str) -> None:
    """Adds a row to those of a part, so that it outlives the part's process. Raises msgspec.ValidationError for what is no row."""
    line = msgspec.json.encode(DeviceRow(**{name: getattr(row, name) for name in row.__struct_fields__}, on=on))
    msgspec.json.decode(line, type=DeviceRow)
    with rows.open("ab") as file:
        file.write(line + b"\n")


def run_part(name: str, command: Sequence[str], *, limit_s: float, rows: Path, log: Path) -> PartReport:
    """Runs `command`, which keeps its rows in `rows`, for `limit_s` and GRACE_S at most. Its output goes to the end of `log`."""
    started_s = time.monotonic()
    with log.open("ab") as output:
        output.write(f"\n== {name}\n".encode())
        output.flush()
        start = output.tell()
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            outcome = DONE if (status := process.wait(limit_s)) == 0 else f"failed with status {status}"
        except subprocess.TimeoutExpired:
            outcome = OUT_OF_TIME
        finally:
            _end(process)
    with log.open("rb") as output:
        output.seek(start)
        error = "" if outcome == DONE else output.read().decode(errors="replace")[-ERROR_CHARACTERS:]
    found = kept(rows)
    return PartReport(name=name, outcome=outcome, seconds=time.monotonic() - started_s, rows=found, error=error)


def kept(rows: Path) -> list[DeviceRow]:
    """The rows that were kept whole: a kill may have cut the last line."""
    lines = rows.read_bytes().split(b"\n")[:-1] if rows.exists() else []
    return [msgspec.json.decode(line, type=DeviceRow) for line in lines]


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ends the process and all that it has started in its group, which may outlive it."""
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            process.wait(GRACE_S)
    with suppress(ProcessLookupError):  # nothing is left of it
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
