"""The demo finds, ends and outlives its daemon, whoever started it."""

import os
import signal
import subprocess
import sys

import pytest

from paramstore.demo.service import DemoDaemon
from paramstore_client.connection.address import parse_address
from paramstore_client.running import find_daemon

LISTENER = """
import os, signal, socket, sys
from pathlib import Path
from paramstore.holder import DAEMON_BYTE, LOCK_NAME, hold
path = Path(sys.argv[1])
hold(os.open(path.parents[1] / LOCK_NAME, os.O_RDWR | os.O_CREAT), DAEMON_BYTE)
if sys.argv[2] == "stubborn":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
server = socket.socket(socket.AF_UNIX)
server.bind(str(path))
server.listen(8)
print("ready", flush=True)
signal.pause()
"""


@pytest.fixture
def daemon(tmp_path):
    return DemoDaemon(tmp_path / "store", host_budget_bytes=4 << 20)


@pytest.fixture
def listen(daemon):
    """Starts a process that holds the store and listens where its daemon would, as one that an earlier demo left behind."""
    started = []

    def start(kind: str = "meek") -> subprocess.Popen:
        (daemon.directory / "run").mkdir(parents=True)
        path = daemon.directory / "run" / "paramstore.sock"
        process = subprocess.Popen([sys.executable, "-c", LISTENER, str(path), kind], stdout=subprocess.PIPE)
        started.append(process)
        assert process.stdout.readline() == b"ready\n"
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()
        process.stdout.close()


def test_no_daemon_is_no_process(daemon):
    assert pid_of(daemon) is None
    daemon.stop()
    daemon.kill()


def test_listening_process_is_found(daemon, listen):
    process = listen()
    assert pid_of(daemon) == process.pid


def test_kill_returns_when_the_process_is_gone(daemon, listen):
    process = listen("stubborn")
    daemon.kill()
    assert process.wait(0) == -signal.SIGKILL
    assert pid_of(daemon) is None


def test_stop_ends_what_an_earlier_demo_left(daemon, listen):
    process = listen()
    with daemon:
        assert process.wait(0) == -signal.SIGTERM


def test_stop_kills_what_does_not_end(daemon, listen, monkeypatch):
    monkeypatch.setattr("paramstore.demo.service.STOP_TIMEOUT_S", 0.05)
    process = listen("stubborn")
    daemon.stop()
    assert process.wait(0) == -signal.SIGKILL


def test_leaving_the_context_stops_unless_kept(daemon, listen):
    with daemon:
        process = listen()
        daemon.keep()
    assert process.poll() is None
    os.kill(process.pid, 0)


def test_an_error_stops_the_daemon(daemon, listen):
    processes = []

    def fail() -> None:
        with daemon:
            processes.append(listen())
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail()
    assert processes[0].wait(0) == -signal.SIGTERM


def pid_of(daemon):
    """The process over the demo's store, if any."""
    found = find_daemon(parse_address(daemon.directory))
    if found is None:
        return None
    with found:
        return found.pid
