"""Figures of one process as the kernel counts them: CPU time and private memory. Linux only, read from /proc."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

NANOSECONDS = 1e9


def cpu_s(pid: int) -> float:
    """CPU time of all threads alive in process `pid`, user and system, in seconds.

    Reads the scheduler's nanoseconds where it keeps them, since a load takes only a few clock ticks (10 ms) of CPU; else
    the ticks of /proc/PID/stat. Raises ProcessLookupError if there is no such process.
    """
    try:
        return sum(_scheduled_ns(task) for task in Path(f"/proc/{pid}/task").iterdir()) / NANOSECONDS
    except FileNotFoundError:
        return _ticks_s(pid)


def written_bytes(pid: int) -> int:
    """Bytes that process `pid` has sent to storage so far, by the kernel's count; memory file systems do not count."""
    for line in Path(f"/proc/{pid}/io").read_text().splitlines():
        if line.startswith("write_bytes:"):
            return int(line.split()[1])
    raise ProcessLookupError(f"process {pid}: its io has no write_bytes")


def rss_anon_bytes(pid: int) -> int:
    """Private memory of process `pid` that is resident: neither files nor shared mappings count."""
    return _status_bytes(pid, "RssAnon")


def resident_bytes(pid: int) -> int:
    """Memory of process `pid` that is resident now: private, files and shared mappings."""
    return _status_bytes(pid, "VmRSS")


def reset_peak(pid: int | None = None) -> None:
    """Begins the count of the peak of `pid` (None: this process) anew. Changes nothing where the kernel does not allow it."""
    with contextlib.suppress(OSError):
        Path(f"/proc/{pid or 'self'}/clear_refs").write_text("5")


def peak_bytes(pid: int) -> int:
    """Most memory that was resident since the process began or `reset_peak`: private, files and shared mappings."""
    return _status_bytes(pid, "VmHWM")


def _scheduled_ns(task: Path) -> int:
    return int((task / "schedstat").read_text().split()[0])


def _ticks_s(pid: int) -> float:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError as error:
        raise ProcessLookupError(f"process {pid} is gone") from error
    # The command in brackets may hold spaces; user and system ticks are fields 14 and 15 of the line.
    fields = stat.rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _status_bytes(pid: int, name: str) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise ProcessLookupError(f"process {pid}: its status has no {name}")
