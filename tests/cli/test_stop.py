"""`paramstore stop`: the daemon is gone when it returns; the exit code says whether there was one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from paramstore_testkit.processes.daemon_process import DaemonProcess
from paramstore_testkit.processes.forked_daemon import ForkedDaemon

Run = Callable[..., int]

STUBBORN = """
import signal, sys
from pathlib import Path
from paramstore.storage.lock import StoreLock
signal.signal(signal.SIGTERM, signal.SIG_IGN)
lock = StoreLock.take(Path(sys.argv[1]))
print("held", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[DaemonProcess]:
    with ForkedDaemon(tmp_path / "store", "--host-budget", "32MiB") as daemon:
        yield daemon


@pytest.mark.slow
@pytest.mark.parametrize("name", ["directory", "address", "variable"])
def test_it_returns_when_the_daemon_is_gone(
    name: str, daemon: DaemonProcess, paramstore: Run, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if name == "variable":
        monkeypatch.setenv("PARAMSTORE_ADDRESS", str(daemon.directory))
    words = {"directory": [str(daemon.directory)], "address": [daemon.address], "variable": []}[name]
    assert paramstore("stop", *words) == 0
    assert daemon.wait(0.5) == 0
    assert capsys.readouterr().out == f"stopped daemon {daemon.pid} at {daemon.address}\n"
    assert (daemon.directory / "lock").read_bytes() == b""
    assert paramstore("stop", *words) == 3
    assert "StoreUnavailable: no daemon listens at" in capsys.readouterr().err


@pytest.mark.slow
def test_a_daemon_whose_socket_was_removed_is_said_and_stopped(
    daemon: DaemonProcess, paramstore: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    daemon.socket.unlink()
    assert paramstore("status", str(daemon.directory)) == 3
    said = capsys.readouterr().err
    assert f"daemon {daemon.pid} holds {daemon.directory}, and nobody listens at {daemon.address}" in said
    assert f"`paramstore stop {daemon.directory}`, then serve again" in said
    second = ForkedDaemon(daemon.directory)
    assert second.run() == 1
    assert f"is in use by process {daemon.pid}: " in second.stderr
    assert f"`paramstore stop {daemon.directory}`, which finds it where its socket is gone too" in second.stderr
    assert paramstore("stop", str(daemon.directory)) == 0
    assert daemon.wait(0.5) == 0
    with ForkedDaemon(daemon.directory, "--host-budget", "32MiB"):
        pass


def test_where_none_runs_the_exit_code_is_3(paramstore: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "lock").write_text(f"{os.getppid()}\n")  # as an older version left it
    for place, why in ((tmp_path, ""), (tmp_path / "none", ", where there is neither a store's directory nor a socket")):
        assert paramstore("stop", str(place)) == 3
        assert f"{why}, and none holds its store: there is nothing to stop" in capsys.readouterr().err


LISTENER = """
import socket, sys
server = socket.socket(socket.AF_UNIX)
server.bind(sys.argv[1])
server.listen()
print("ready", flush=True)
server.accept()[0].recv(4096)  # and hangs up
sys.stdin.read()
"""


@pytest.mark.slow
def test_whoever_else_listens_there_is_not_ended(paramstore: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "other.sock"
    with subprocess.Popen([sys.executable, "-c", LISTENER, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        assert paramstore("stop", str(path)) == 3
        assert f"StoreUnavailable: process {process.pid} listens at unix://{path}, and does not" in capsys.readouterr().err
        assert process.poll() is None
        process.communicate(timeout=30.0)
    assert process.returncode == 0


@pytest.mark.slow
def test_a_daemon_that_does_not_end_in_time_is_named_with_what_to_do(
    paramstore: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = [sys.executable, "-c", STUBBORN, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"held\n"
        assert paramstore("stop", "--timeout", "0.05", str(tmp_path)) == 1
        assert f"WaitTimeout: daemon {process.pid} at " in (said := capsys.readouterr().err)
        assert f"has not within 0.05 s: wait longer with --timeout, or `kill -9 {process.pid}`" in said
        process.send_signal(signal.SIGKILL)


@pytest.mark.parametrize("seconds", ["-1", "nan", "soon"])
def test_a_timeout_that_is_none_is_a_usage_error(paramstore: Run, tmp_path: Path, seconds: str) -> None:
    assert paramstore("stop", "--timeout", seconds, str(tmp_path)) == 2
