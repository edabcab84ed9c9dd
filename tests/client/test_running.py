"""A daemon is found by its store or its socket, and only itself is ended."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from paramstore.errors import StoreUnavailable
from paramstore.testing.daemon_process import DaemonProcess
from paramstore_client import running
from paramstore_client.address import parse_address
from paramstore_client.running import RunningDaemon, find_daemon


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
