"""What a result says of its machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from paramstore.bench.report import machine
from paramstore.errors import CapacityError


def test_description_has_the_facts_that_explain_a_ratio(tmp_path: Path) -> None:
    facts = machine.describe(tmp_path)
    named = {"cpu", "instructions", "cores", "memory_bytes", "kernel", "file_system", "page_kinds", "huge_pages", "packages"}
    assert named <= set(facts)
    assert facts["instructions"] == sorted(machine.INSTRUCTIONS & set(Path("/proc/cpuinfo").read_text().split()))
    assert facts["page_kinds"]
    assert str(tmp_path) not in repr(facts)


def test_file_system_is_that_of_the_longest_mount(tmp_path: Path) -> None:
    assert machine.file_system(Path("/proc/self")) == "proc"
    assert machine.file_system(tmp_path) not in ("proc", "unknown")


def test_directory_without_room_is_refused_by_name_and_size(tmp_path: Path) -> None:
    machine.check_free_space(tmp_path, 1)
    with pytest.raises(CapacityError, match=r"TiB for a while.*--dir$"):
        machine.check_free_space(tmp_path, 1 << 60)


@pytest.mark.parametrize(
    ("quick_bytes", "advice"), [(1, r"--dir, or run it with --quick$"), (1 << 60, r"--dir$"), (None, r"--dir$")]
)
def test_a_quick_run_is_advised_only_where_it_would_fit(tmp_path: Path, quick_bytes: int | None, advice: str) -> None:
    with pytest.raises(CapacityError, match=advice):
        machine.check_free_space(tmp_path, 1 << 60, quick_bytes=quick_bytes)


def test_commit_is_one_word() -> None:
    assert machine.commit()
    assert machine.commit().removeprefix("paramstore ").split() != []
