"""The daemon as a process: what it says, when it ends, whom it refuses, and that nobody looks into it."""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from paramstore.config import Config
from paramstore.daemon import server as server_module
from paramstore.daemon.server import lock_with_retry
from paramstore.errors import StoreLocked
from paramstore.storage.lock import StoreLock
from paramstore.wire import messages as m
from paramstore_testkit.processes.daemon_process import DaemonProcess
from paramstore_testkit.wire.raw_client import RawClient


def locked_by_another(directory: Path) -> StoreLock:
    return StoreLock.take(directory)


def test_a_lock_that_stays_taken_is_reported_with_its_holder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "LOCK_PAUSE_S", 0.001)
    lock = locked_by_another(tmp_path)
    try:
        with pytest.raises(StoreLocked, match="in use by process"):
            asyncio.run(lock_with_retry(Config(dir=tmp_path)))
    finally:
        lock.release()


def test_a_lock_that_comes_free_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "LOCK_PAUSE_S", 0.001)
    lock = locked_by_another(tmp_path)

    async def scenario() -> None:
        asyncio.get_running_loop().call_soon(lock.release)
        (await lock_with_retry(Config(dir=tmp_path))).release()

    asyncio.run(scenario())


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    with DaemonProcess(tmp_path_factory.mktemp("server") / "store") as daemon:
        yield daemon


@pytest.mark.slow
def test_ready_is_all_that_stdout_says(tmp_path: Path) -> None:
    daemon = DaemonProcess(tmp_path / "store")
    with daemon:
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(daemon.socket))
        daemon.signal(signal.SIGTERM)
        assert daemon.wait() == 0
    assert daemon.stdout == f"ready {daemon.address}\n"
    assert f"serving {daemon.address}" in daemon.stderr
    assert daemon.stderr.splitlines()[-1].endswith("stopped")


@contextmanager
def not_ignored(number: signal.Signals) -> Iterator[None]:
    """What is started within does not ignore the signal, though whatever started the tests may, as nohup does."""
    before = signal.signal(number, signal.SIG_DFL)
    yield
    signal.signal(number, before)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_it_ends_on_a_signal_without_waiting_for_its_clients(number: signal.Signals, tmp_path: Path) -> None:
    with not_ignored(number), DaemonProcess(tmp_path / "store") as daemon:
        client = socket.socket(socket.AF_UNIX)
        client.connect(str(daemon.socket))
        with client:
            daemon.signal(number)
            assert daemon.wait(10.0) == 0
        assert not daemon.socket.exists()
        assert "Traceback" not in daemon.stderr


@pytest.mark.slow
def test_a_second_daemon_over_one_directory_is_refused_and_the_first_serves_on(daemon: DaemonProcess) -> None:
    second = DaemonProcess(daemon.directory, "--socket", str(daemon.directory / "run" / "second.sock"))
    assert second.run() == 1
    assert f"StoreLocked: store directory {daemon.directory} is in use by process {daemon.pid}" in second.stderr
    assert second.stdout == ""
    asyncio.run(say_hello(daemon.socket))


@pytest.mark.slow
def test_a_daemon_of_another_store_does_not_take_the_socket_over(daemon: DaemonProcess, tmp_path: Path) -> None:
    other = DaemonProcess(tmp_path / "other", "--socket", str(daemon.socket))
    assert other.run() == 2
    assert "another process listens there" in other.stderr
    asyncio.run(say_hello(daemon.socket))


async def say_hello(path: Path) -> None:
    client = RawClient.connect(path)
    try:
        assert (await client.hello())["major"] == m.PROTOCOL_MAJOR
    finally:
        client.close()


@pytest.mark.slow
def test_it_dumps_no_core(daemon: DaemonProcess) -> None:
    assert resource.prlimit(daemon.pid, resource.RLIMIT_CORE) == (0, 0)


@pytest.mark.slow
def test_a_hardened_process_is_closed_to_others_of_its_user() -> None:
    script = "import ctypes, paramstore.daemon.server as s; s.harden(); print(ctypes.CDLL(None).prctl(3, 0, 0, 0, 0))"
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, timeout=60, check=True)
    assert found.stdout == b"0\n"  # PR_GET_DUMPABLE: no /proc/PID/mem, no ptrace, no pidfd_getfd


@pytest.mark.slow
def test_a_hardened_process_gains_no_rights_by_an_exec() -> None:
    script = "import ctypes, paramstore.daemon.server as s; s.harden(); print(ctypes.CDLL(None).prctl(39, 0, 0, 0, 0))"
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, timeout=60, check=True)
    assert found.stdout == b"1\n"  # PR_GET_NO_NEW_PRIVS


@pytest.mark.slow
def test_a_daemon_without_work_imports_no_torch(daemon: DaemonProcess) -> None:
    maps = Path(f"/proc/{daemon.pid}/maps")
    if os.getuid() != 0:
        pytest.skip("a hardened process shows its mappings to root alone")
    assert "libtorch" not in maps.read_text()
