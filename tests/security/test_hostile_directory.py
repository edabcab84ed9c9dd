"""A data directory in which somebody has put other things in place of ours: a typed error within bounded work, the right exit
code, and nothing outside of it is written, made or changed.

Damaged bytes are in `tests/faults/test_corruption.py`, damaged and missing files in `tests/end_to_end/test_faults_of_disks.py`.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import stat
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType

import pytest

from paramstore.cli.main import main
from paramstore.config import Config
from paramstore.daemon import server
from paramstore.daemon.server import listen
from paramstore_testkit.processes.daemon_process import DaemonProcess
from paramstore_testkit.processes.other_user import command

pytestmark = pytest.mark.slow

NOBODY = 65534
USER = NOBODY if os.getuid() == 0 else os.getuid()
FILES = ("lock", "catalog/data.mdb", "catalog/lock.mdb", "volume/volume-000.data")
DIRECTORIES = ("catalog", "run", "volume")
SOCKET = "run/paramstore.sock"
PRECIOUS = b"precious" * 1024
SPARSE_BYTES = 1 << 60
LIMIT_S = 20
WORK_S_MAX = 8.0
"""CPU time of this process; opening takes a sixth of a second of it. A busy machine and a full collection of a large pytest process
multiply that; to read through what has no end takes all until LIMIT_S."""
UNREADABLE = {"lock": "ConfigError", "catalog": "CatalogError", "volume": "VolumeError"}
Run = Callable[[Path], tuple[int, str]]


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    """What belongs to somebody else."""
    place = tmp_path / "outside"
    (place / "below").mkdir(parents=True)
    (place / "file").write_bytes(PRECIOUS)
    (place / "below" / "file").write_bytes(PRECIOUS)
    return place


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Run]:
    """Opens the store of a directory and its socket as `paramstore serve` does, and closes both: exit code and last line."""

    async def listen_only(stop: object, store: object, config: Config) -> None:
        listen(config.socket_path).close()

    def hangs(number: int, frame: FrameType | None) -> None:
        raise AssertionError(f"it waits for {LIMIT_S} s")

    def serve(directory: Path) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["paramstore", "serve", "--dir", str(directory), "--log-level", "error"])
        signal.alarm(LIMIT_S)
        try:
            main()
        except SystemExit as ended:
            return int(ended.code or 0), capsys.readouterr().err.strip()
        finally:
            signal.alarm(0)
        return 0, capsys.readouterr().err.strip()

    monkeypatch.setattr(server, "harden", lambda: None)
    monkeypatch.setattr(server, "_serve_until", listen_only)
    for name, value in {"PREFILL": "0", "HOST_BUDGET": "32MiB", "IO_WORKERS": "1", "UPDATE_WORKERS": "1"}.items():
        monkeypatch.setenv(f"PARAMSTORE_{name}", value)
    before = signal.signal(signal.SIGALRM, hangs)
    yield serve
    signal.signal(signal.SIGALRM, before)


def contents(place: Path) -> dict[str, object]:
    """All that could be seen to have changed."""
    found: dict[str, object] = {}
    for path in [place, *sorted(place.rglob("*"))]:
        status = path.lstat()
        data = path.read_bytes() if stat.S_ISREG(status.st_mode) else b""
        found[str(path)] = (status.st_mode, status.st_uid, status.st_size, status.st_mtime_ns if data else 0, data)
    return found


def remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def link(path: Path, outside: Path) -> None:
    path.symlink_to(outside / "file")


def link_into_nothing(path: Path, outside: Path) -> None:
    path.symlink_to(outside / "nothing")


def link_to_a_directory(path: Path, outside: Path) -> None:
    path.symlink_to(outside / "below")


def second_name(path: Path, outside: Path) -> None:
    path.hardlink_to(outside / "file")


def fifo(path: Path, outside: Path) -> None:
    os.mkfifo(path)


def directory_instead(path: Path, outside: Path) -> None:
    path.mkdir()


def file_instead(path: Path, outside: Path) -> None:
    path.write_bytes(PRECIOUS)


def dead_socket(path: Path, outside: Path) -> None:
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(str(path))


def device(path: Path, outside: Path) -> None:
    path.symlink_to("/dev/zero")


IN_PLACE_OF_A_FILE = (link, link_into_nothing, link_to_a_directory, second_name, fifo, directory_instead, dead_socket, device)
IN_PLACE_OF_A_DIRECTORY = (link, link_into_nothing, link_to_a_directory, fifo, file_instead, dead_socket, device)
CASES = [
    *((name, what) for name in FILES for what in IN_PLACE_OF_A_FILE),
    *((name, what) for name in DIRECTORIES for what in IN_PLACE_OF_A_DIRECTORY),
    *((SOCKET, what) for what in IN_PLACE_OF_A_FILE if what is not dead_socket),  # which is what it should be
]
CODES = {"lock": 2, "catalog": 1, "catalog/data.mdb": 1, "catalog/lock.mdb": 1, "run": 2, SOCKET: 2, "volume": 1, FILES[3]: 1}


@pytest.mark.parametrize(("name", "what"), CASES, ids=lambda part: part if isinstance(part, str) else part.__name__)
def test_what_is_not_ours_is_refused_and_not_touched(
    name: str, what: Callable[[Path, Path], None], directory: Path, outside: Path, run: Run
) -> None:
    remove(directory / name)
    what(directory / name, outside)
    before, mode = contents(outside), (directory / name).lstat().st_mode
    started_s = time.process_time()
    code, said = run(directory)
    spent_s = time.process_time() - started_s
    assert code == CODES[name], said
    assert said.startswith("paramstore: ")
    assert name.split("/")[0] in said
    assert "\n" not in said
    assert contents(outside) == before
    assert (directory / name).lstat().st_mode == mode
    assert spent_s < WORK_S_MAX


def test_the_store_that_was_spoilt_here_can_be_served(directory: Path, run: Run) -> None:
    """Else the other tests would prove nothing."""
    assert run(directory) == (0, "")


@pytest.mark.parametrize("name", FILES)
def test_a_file_with_a_hole_without_end_is_not_read_through(name: str, directory: Path, run: Run) -> None:
    """Its first bytes are ours; what comes of it is either the store as it was, or an error with its code."""
    path, size_bytes = directory / name, SPARSE_BYTES
    while True:
        try:
            os.truncate(path, size_bytes)
            break
        except OSError:  # more than this file system has room to count
            size_bytes >>= 1
    blocks = path.stat().st_blocks
    started_s = time.process_time()
    code, said = run(directory)
    spent_s = time.process_time() - started_s
    assert size_bytes > 1 << 40
    assert code == 0 or (code in (1, 2, 4) and said.startswith("paramstore: ")), said
    assert spent_s < WORK_S_MAX
    assert path.stat().st_blocks <= blocks + 2048


@pytest.mark.skipif(os.getuid() != 0, reason="needs another user's file")
@pytest.mark.parametrize("name", FILES)
def test_another_users_file_is_refused(name: str, directory: Path, run: Run) -> None:
    """He could read what the daemon writes into it."""
    os.chown(directory / name, NOBODY, NOBODY)
    before = (directory / name).read_bytes()
    code, said = run(directory)
    assert code == CODES[name]
    assert f"belongs to user {NOBODY}" in said
    assert (directory / name).read_bytes() == before


@pytest.mark.parametrize("name", [*FILES, "catalog", "volume"])
def test_what_cannot_be_read_is_named(name: str, template: Path, common_place: Path) -> None:
    directory = common_place / "store"
    shutil.copytree(template, directory)
    for path in (directory, *directory.rglob("*")):
        os.chown(path, USER, -1)
    (directory / name).chmod(0)
    daemon = DaemonProcess(directory, command=command(USER))
    assert daemon.run() == 1
    last = daemon.stderr.splitlines()[-1]
    assert last.startswith(f"paramstore: {UNREADABLE[name.split('/')[0]]}: ")
    assert "Permission denied" in last
    assert name.split("/")[0] in last
    (directory / name).chmod(0o700)
