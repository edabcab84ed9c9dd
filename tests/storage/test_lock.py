"""One holder per store directory."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from paramstore.errors import CatalogError, ConfigError, StoreLocked
from paramstore.holder import daemon_of
from paramstore.storage.lock import StoreLock

TAKE = """
import sys
from pathlib import Path
from paramstore.storage.lock import StoreLock
lock = StoreLock.take(Path(sys.argv[1]))
print("held", flush=True)
input()
"""


def test_a_second_holder_is_refused_and_told_the_first_one_s_process(tmp_path: Path) -> None:
    program = [sys.executable, "-c", TAKE, str(tmp_path)]
    with subprocess.Popen(program, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as first:
        assert first.stdout is not None
        first.stdout.readline()
        with pytest.raises(StoreLocked, match=f"in use by process {first.pid}: .*`paramstore stop {tmp_path}`"):
            StoreLock.take(tmp_path)
        assert daemon_of(tmp_path) == first.pid
        first.communicate(b"\n")
    StoreLock.take(tmp_path).release()


def test_a_released_lock_can_be_taken(tmp_path: Path) -> None:
    StoreLock.take(tmp_path).release()
    lock = StoreLock.take(tmp_path)
    lock.release()
    lock.release()


def test_a_process_id_that_an_older_version_wrote_is_gone_once_the_lock_is_held(tmp_path: Path) -> None:
    (tmp_path / "lock").write_text("9" * 30)
    lock = StoreLock.take(tmp_path)
    assert lock.path.read_bytes() == b""
    lock.release()


def test_a_program_that_is_started_does_not_inherit_the_lock(tmp_path: Path) -> None:
    lock = StoreLock.take(tmp_path)
    program = [sys.executable, "-c", "print('started', flush=True); input()"]
    with subprocess.Popen(program, stdin=subprocess.PIPE, stdout=subprocess.PIPE, close_fds=False) as child:
        assert child.stdout is not None
        child.stdout.readline()  # descriptors are closed a moment after the parent goes on
        lock.release()
        StoreLock.take(tmp_path).release()
        child.communicate(b"\n")


def test_a_link_in_place_of_the_lock_file_is_refused(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (tmp_path / "lock").symlink_to(victim)
    with pytest.raises(ConfigError, match="cannot open its lock file"):
        StoreLock.take(tmp_path)
    assert victim.read_text() == "precious"


def test_another_name_of_a_file_is_not_taken_for_the_lock_file(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (tmp_path / "lock").hardlink_to(victim)
    with pytest.raises(ConfigError, match="2 names"):
        StoreLock.take(tmp_path)
    assert victim.read_text() == "precious"


def test_a_fifo_in_place_of_the_lock_file_is_refused_without_waiting(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "lock")
    with pytest.raises(ConfigError, match="not a regular file"):
        StoreLock.take(tmp_path)


def test_a_lock_file_that_cannot_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(descriptor: int, length_bytes: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    before = len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr("paramstore.storage.lock.os.ftruncate", refuse)
    with pytest.raises(CatalogError, match=r"lock: cannot be written: .*No space"):
        StoreLock.take(tmp_path)
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_missing_directory_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nowhere"):
        StoreLock.take(tmp_path / "nowhere")
