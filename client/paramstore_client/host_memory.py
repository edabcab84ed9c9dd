"""How much host memory this process can have: what the kernel has left, and what its control groups allow.

A container is a control group: /proc/meminfo shows the whole machine's memory there.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

MEMINFO, GROUPS, GROUP_FILES = Path("proc/meminfo"), Path("proc/self/cgroup"), Path("sys/fs/cgroup")
UNIFIED = ("memory.max", "memory.current", "inactive_file")
LEGACY = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
"""Limit and use of a group, and what of its use are pages of files that the kernel takes back first (kubelet's working set leaves
them out too). Names of cgroup v2 and v1."""


def available_bytes(root: Path = Path("/")) -> int:
    """Bytes of host memory that can be had without swapping, as the kernel estimates, and at most what this process's control group
    and those above it have left. root: where proc and sys are mounted."""
    lines = dict(line.split(":") for line in (root / MEMINFO).read_text().splitlines())
    return max(0, min((int(lines["MemAvailable"].split()[0]) << 10, *_left(root))))


def _left(root: Path) -> Iterator[int]:
    """Bytes that each group has left whose limit can be read."""
    groups = (root / GROUPS).read_text().splitlines() if (root / GROUPS).exists() else []
    for _, controllers, path in (line.split(":", 2) for line in groups):
        if controllers in ("", "memory"):
            top, names = root / GROUP_FILES / controllers, LEGACY if controllers else UNIFIED
            place = top / path.lstrip("/")
            for group in (place, *place.parents):
                if group.is_relative_to(top):
                    with suppress(OSError, ValueError, KeyError):  # no such group here, or one without a limit ("max")
                        yield _left_in(group, *names)


def _left_in(group: Path, limit: str, used: str, inactive: str) -> int:
    stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    return int((group / limit).read_text()) - int((group / used).read_text()) + int(stat[inactive])
