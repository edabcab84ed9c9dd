"""The kernel names who holds a store's directory, and nobody whose process has ended."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from paramstore.holder import DAEMON_BYTE, LOCK_NAME, OTHER_BYTE, daemon_of, holder, is_held

HOLD = """
import os, sys
from paramstore.holder import LOCK_NAME, hold
descriptor = os.open(os.path.join(sys.argv[1], LOCK_NAME), os.O_RDWR | os.O_CREAT, 0o600)
hold(descriptor, int(sys.argv[2]))
print("held", flush=True)
sys.stdin.read()
"""
Hold = Callable[[int], subprocess.Popen[bytes]]


@pytest.fixture
def hold(tmp_path: Path) -> Iterator[Hold]:
    """Starts a process that holds a byte."""
    started: list[subprocess.Popen[bytes]] = []

    def start(byte: int) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-c", HOLD, str(tmp_path), str(byte)]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        started.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == b"held\n"
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def test_a_daemon_is_named_until_it_is_killed(tmp_path: Path, hold: Hold) -> None:
    process = hold(DAEMON_BYTE)
    assert daemon_of(tmp_path) == process.pid
    process.kill()
    process.wait()
    assert daemon_of(tmp_path) is None
    assert (tmp_path / LOCK_NAME).read_bytes() == b""


def test_another_program_holds_the_directory_and_is_no_daemon(tmp_path: Path, hold: Hold) -> None:
    process = hold(OTHER_BYTE)
    assert daemon_of(tmp_path) is None
    assert is_held(tmp_path)
    with open(tmp_path / LOCK_NAME, "rb") as file:
        assert holder(file.fileno()) == process.pid


@pytest.mark.parametrize("place", ["none", "file"])
def test_where_no_store_is_nobody_holds_one(tmp_path: Path, place: str) -> None:
    (tmp_path / "file").touch()
    assert daemon_of(tmp_path / place) is None


def test_a_number_that_an_older_version_wrote_names_nobody(tmp_path: Path) -> None:
    (tmp_path / LOCK_NAME).write_text(f"{os.getppid()}\n")
    assert daemon_of(tmp_path) is None


def test_a_link_or_a_fifo_in_its_place_is_not_followed_and_not_waited_for(tmp_path: Path) -> None:
    (tmp_path / LOCK_NAME).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="symbolic links"):
        daemon_of(tmp_path)
    (tmp_path / LOCK_NAME).unlink()
    os.mkfifo(tmp_path / LOCK_NAME)
    assert daemon_of(tmp_path) is None
