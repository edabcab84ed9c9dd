"""What is left of runs that are no more is found by its name and removed, and nothing else; refusals name the call."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from paramstore_testkit.blocks.mounts import PREFIX, LoopDevice, make_file_system, make_image, mount, sweep


@pytest.fixture
def dead() -> int:
    """The number of a process that lives no more."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def test_directories_of_processes_that_are_no_more_are_removed_with_what_they_hold(tmp_path: Path, dead: int) -> None:
    left = tmp_path / f"{PREFIX}{dead}-abc"
    (left / "mounted0").mkdir(parents=True)
    (left / "log").write_text("log")
    assert sweep(tmp_path, blocks=tmp_path / "none") == [left.name]
    assert not left.exists()


def test_directories_of_the_living_and_of_others_stay(tmp_path: Path) -> None:
    names = [f"{PREFIX}{os.getpid()}-abc", f"{PREFIX}nobody", "other"]
    for name in names:
        (tmp_path / name).mkdir()
    assert sweep(tmp_path, blocks=tmp_path / "none") == []
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(names)


def test_a_loop_device_of_a_process_that_is_no_more_is_detached(tmp_path: Path, dead: int) -> None:
    image = make_image(1 << 20, owner=dead)
    try:
        loop = LoopDevice(image)
    except OSError as error:
        os.close(image)
        pytest.skip(f"no loop device can be had here: {error}")
    name = Path(loop.path).name
    assert name in sweep(tmp_path)
    loop.close()
    os.close(image)
    assert not Path(f"/sys/block/{name}/loop/backing_file").exists()


def test_a_mount_that_is_refused_says_what_was_to_be_mounted_where(tmp_path: Path) -> None:
    with pytest.raises(OSError, match=r"mount none on .*missing as tmpfs"):
        mount("none", tmp_path / "missing", "tmpfs")


def test_a_tool_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(OSError, match=r"mkfs\.xfs is not installed"):
        make_file_system("xfs", "/dev/null")


def test_what_mkfs_says_is_in_the_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "mkfs.ext4"
    tool.write_text("#!/bin/sh\necho too small >&2\nexit 1\n")
    tool.chmod(0o700)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with pytest.raises(OSError, match="too small"):
        make_file_system("ext4", "/dev/null")
