"""A daemon is found by its store or its socket, and only itself is ended."""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from paramstore.errors import StoreUnavailable, VersionMismatch
from paramstore.wire.codec import encode
from paramstore.wire.messages import Done, Failed
from paramstore_client import running
from paramstore_client.connection.address import parse_address
from paramstore_client.running import RunningDaemon, find_daemon
from paramstore_testkit.processes.daemon_process import DaemonProcess


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[DaemonProcess]:
    with DaemonProcess(tmp_path / "store", "--socket", str(tmp_path / "own.sock"), "--host-budget", "32MiB") as daemon:
        yield daemon


@pytest.mark.slow
def test_a_daemon_is_found_by_its_store_and_by_its_socket_wherever_that_is(daemon: DaemonProcess, tmp_path: Path) -> None:
    for address in (daemon.directory, tmp_path / "own.sock"):
        found = find_daemon(parse_address(address))
        assert found is not None
        with found:
            assert found.pid == daemon.pid
            assert not found.has_ended(0.0)
    (tmp_path / "own.sock").unlink()
    assert find_daemon(tmp_path / "own.sock") is None
    found = find_daemon(parse_address(daemon.directory))
    assert found is not None
    with found:
        found.send(signal.SIGTERM)
        assert found.has_ended(30.0)
        daemon.wait()
        found.send(signal.SIGKILL)  # nothing, and to nobody else
    assert find_daemon(parse_address(daemon.directory)) is None


@pytest.mark.slow
def test_a_daemon_that_hangs_is_found_by_its_store_and_doubted_by_a_socket_elsewhere(
    daemon: DaemonProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(running, "CONNECT_TIMEOUT_S", 0.05)
    daemon.signal(signal.SIGSTOP)
    try:
        found = find_daemon(parse_address(daemon.directory))
        assert found is not None
        with found:
            assert found.pid == daemon.pid
        with pytest.raises(StoreUnavailable, match=f"process {daemon.pid} listens .* give its store's directory"):
            find_daemon(tmp_path / "own.sock")
    finally:
        daemon.signal(signal.SIGCONT)


FOREIGN = {
    "silence": None, "end": b"", "text": b"HTTP/1.1 400 Bad Request\r\n\r\n",
    "a daemon behind it": bytes(encode(Done(1, {"major": 1, "minor": 4, "store_uuid": "00", "pid": 1}))),
    "an older protocol": bytes(encode(Failed(1, VersionMismatch.__name__, "the client speaks protocol 1.4, this daemon 0.1"))),
}  # fmt: skip


@pytest.mark.parametrize("answer", FOREIGN.values(), ids=FOREIGN)
@pytest.mark.parametrize("place", ["own.sock", "store/run/paramstore.sock"])
def test_who_listens_and_does_not_say_that_it_is_the_daemon_is_refused(
    answer: bytes | None, place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(running, "CONNECT_TIMEOUT_S", 10.0 if answer is not None else 0.02)
    path = tmp_path / place
    path.parent.mkdir(parents=True, exist_ok=True)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen(1)
        serving = threading.Thread(target=answer_once, args=(listener, answer))
        serving.start()
        wanted = f"process {os.getpid()} listens at unix://{path}, and does not answer as a paramstore daemon does: "
        with pytest.raises(StoreUnavailable, match=wanted):
            find_daemon(path)
        serving.join()


def answer_once(listener: socket.socket, answer: bytes | None) -> None:
    """Hears one client, answers, and hangs up; None: when that has."""
    peer, _ = listener.accept()
    with peer:
        assert peer.recv(4096)
        if answer is None:
            assert peer.recv(4096) == b""
        else:
            peer.sendall(answer)


def test_a_process_that_ended_while_it_was_looked_up_is_not_taken_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = iter([os.getpid(), None])
    monkeypatch.setattr(running, "_find", lambda path: next(answers))
    before = len(os.listdir("/proc/self/fd"))
    assert find_daemon(tmp_path / "p.sock") is None
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_process_that_cannot_be_reached_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running, "_find", lambda path: 0)  # as the kernel names one of another container
    with pytest.raises(StoreUnavailable, match="process 0 cannot be reached from here"):
        find_daemon(tmp_path / "p.sock")


def test_another_user_s_process_is_not_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(descriptor: int, number: int) -> None:
        raise PermissionError

    monkeypatch.setattr("paramstore_client.running.signal.pidfd_send_signal", refuse)
    other = RunningDaemon(77, os.pidfd_open(os.getpid()))
    with other as daemon, pytest.raises(StoreUnavailable, match="process 77 is another user's"):
        daemon.send(signal.SIGTERM)
