"""Available memory, of machines that are directories: bare, in containers of both kinds, in a group below one that is smaller."""

from __future__ import annotations

from pathlib import Path

import pytest

from paramstore_client.host_memory import available_bytes

GIB = 1 << 30


@pytest.fixture
def root(tmp_path: Path) -> Path:
    write(tmp_path / "proc" / "meminfo", f"MemTotal: {64 << 20} kB\nMemAvailable: {32 << 20} kB\n")
    return tmp_path


def write(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


def test_a_machine_without_groups_has_what_the_kernel_says(root: Path) -> None:
    assert available_bytes(root) == 32 * GIB
    write(root / "proc" / "self" / "cgroup", "0::/gone\n")
    assert available_bytes(root) == 32 * GIB


@pytest.mark.parametrize("place", ["", "a", "a/b"])
def test_the_smallest_of_a_group_and_those_above_counts(root: Path, place: str) -> None:
    write(root / "proc" / "self" / "cgroup", "1:name=systemd:/x\n0::/a/b\n")
    for path in ("", "a", "a/b"):
        group = root / "sys" / "fs" / "cgroup" / path
        write(group / "memory.max", f"{5 * GIB}\n" if path == place else "max\n")
        write(group / "memory.current", f"{2 * GIB}\n")
        write(group / "memory.stat", f"anon {GIB}\ninactive_file {GIB // 2}\n")
    assert available_bytes(root) == 3 * GIB + GIB // 2


def test_a_group_of_the_old_kind_counts_and_one_that_is_full_has_nothing_left(root: Path) -> None:
    write(root / "proc" / "self" / "cgroup", "4:memory:/job\n0::/\n")
    group = root / "sys" / "fs" / "cgroup" / "memory" / "job"
    write(group / "memory.limit_in_bytes", f"{4 * GIB}\n")
    write(group / "memory.usage_in_bytes", f"{GIB}\n")
    write(group / "memory.stat", "total_inactive_file 0\n")
    assert available_bytes(root) == 3 * GIB
    write(group / "memory.usage_in_bytes", f"{5 * GIB}\n")
    assert available_bytes(root) == 0
