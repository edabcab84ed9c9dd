"""Gives each rank a share of a processor, by control groups of version 1 or 2, whichever this machine has.

The groups are new ones, named after this process; nothing of those that exist is changed. A guard removes them, with whoever
is still in them, when the owner says so or has ended, however that was.
"""

from __future__ import annotations

import math
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path

PREFIX = "paramstore-rank-"
"""Start of the groups' names; the number of the owning process follows."""
MOUNTS = Path("/proc/self/mounts")
PERIOD_US = 5000
"""Time over which a share is counted: short, or a rank runs ahead of its share and then stands still for long."""
QUOTA_US_MIN = 1000
"""The least that the kernel takes."""
END_S = 20.0
GUARD = """
cat
for group; do
    for attempt in $(seq 100); do
        [ -d "$group" ] || break
        rmdir "$group" 2>/dev/null && break
        kill -KILL $(cat "$group/cgroup.procs") 2>/dev/null
        sleep 0.1
    done
    [ ! -d "$group" ] || exit 1
done
"""
"""It waits until its input is closed."""

_numbers = count()


@dataclass(frozen=True, slots=True)
class Hierarchy:
    """Where groups with a quota can be made."""

    root: Path
    version: int

    def limits(self, share: float) -> dict[str, str]:
        """File -> what is written there, in this order, so that a group gets `share` of one processor."""
        period_us = max(PERIOD_US, math.ceil(QUOTA_US_MIN / share))
        quota_us = round(share * period_us)
        if self.version == 1:
            return {"cpu.cfs_period_us": str(period_us), "cpu.cfs_quota_us": str(quota_us)}
        return {"cpu.max": f"{quota_us} {period_us}"}


@dataclass(frozen=True, slots=True)
class Quota:
    """A group of one rank."""

    group: Path

    def entering(self) -> tuple[str, ...]:
        """Words before a command that run it in the group from its first instruction on."""
        return ("sh", "-c", 'echo $$ > "$0" && exec "$@"', str(self.group / "cgroup.procs"))

    def enter(self) -> None:
        """Has this process be in the group from now on."""
        (self.group / "cgroup.procs").write_text(str(os.getpid()))


def find_hierarchy(mounts: Path = MOUNTS) -> Hierarchy:
    """Finds a hierarchy by which processors are shared out. Raises OSError that says why there is none."""
    without_cpu = []
    for line in mounts.read_text().splitlines():
        _, root, kind, options, *_ = line.split()
        if kind == "cgroup" and "cpu" in options.split(","):
            return Hierarchy(Path(root), version=1)
        if kind == "cgroup2":
            if "cpu" in Path(root, "cgroup.subtree_control").read_text().split():
                return Hierarchy(Path(root), version=2)
            without_cpu.append(root)
    raise OSError(f"no control groups share out processors; without `cpu` in cgroup.subtree_control: {without_cpu}")


@contextmanager
def open_quotas(rank_count: int, *, share: float) -> Iterator[tuple[Quota, ...]]:
    """Makes a group for each rank, with `share` of one processor; at the end they are gone, and so is who was in them.

    Raises OSError where this machine has no such groups, refuses new ones or does not let them go.
    """
    hierarchy = find_hierarchy()
    names = [f"{PREFIX}{os.getpid()}-{next(_numbers)}" for _ in range(rank_count)]
    quotas = tuple(Quota(hierarchy.root / name) for name in names)
    guard = subprocess.Popen(
        ["sh", "-c", GUARD, "sh", *(str(quota.group) for quota in quotas)], stdin=subprocess.PIPE, start_new_session=True
    )
    try:
        for quota in quotas:
            quota.group.mkdir()
            for file, value in hierarchy.limits(share).items():
                (quota.group / file).write_text(value)
        yield quotas
    finally:
        guard.communicate(timeout=END_S)
    if guard.returncode:
        raise OSError(f"{hierarchy.root}: groups {', '.join(names)} stay, as somebody is still in them")


def missing_reason() -> str | None:
    """Says why no rank can have a quota on this machine; None where it can."""
    try:
        hierarchy = find_hierarchy()
        probe = hierarchy.root / f"{PREFIX}{os.getpid()}-probe"
        probe.mkdir()
        absent = [file for file in hierarchy.limits(1) if not (probe / file).exists()]
        probe.rmdir()
    except OSError as error:
        return str(error)
    return f"this kernel has no {', '.join(absent)}" if absent else None
