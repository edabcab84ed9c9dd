"""A lease of extents against a real daemon: what it says, how it ends, and what a daemon that lies is told."""

from __future__ import annotations

import gc
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import paramstore_client as ps
from paramstore.wire.messages import EXTENT_KEYS_MAX, GrantedExtents
from paramstore_client.connection.shared_socket import Connection
from paramstore_client.handle.extent_lease import ExtentLease
from paramstore_client.namespace import acquire_extents, close_when_dropped
from paramstore_testkit.processes.daemon_process import QUIET, DaemonProcess
from paramstore_testkit.processes.forked_daemon import ForkedDaemon

EXPERTS, LEASES, LIMIT_S = 4, 4, 20.0
SETTINGS = {**QUIET, "PARAMSTORE_EXTENT_LEASES": str(LEASES)}
CLIENT = """
import sys, time
import paramstore_client as ps
from paramstore_client.namespace import acquire_extents
reader = ps.connect(sys.argv[1]).open_namespace("m")
lease = acquire_extents(reader, reader.keys())
print("leased", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[DaemonProcess]:
    with ForkedDaemon(tmp_path / "store", "--host-budget", "64MiB", environment=SETTINGS) as served:
        with ps.connect(served.address) as store:
            made = store.create_namespace("m", ps.param_schema({"w": ((64, 64), torch.float32)}), layers=1, experts=EXPERTS)
            made.initialize(lambda key: {"w": torch.full((64, 64), float(key[1]))})
            made.commit(1).wait()
        yield served


@pytest.fixture
def store(daemon: DaemonProcess) -> Iterator[ps.Store]:
    with ps.connect(daemon.address) as connected:
        yield connected


def is_free(reader: ps.Namespace) -> bool:
    """Whether all extents that the daemon leases can be had."""
    try:
        acquire_extents(reader, reader.keys()).release()
    except ps.CapacityError:
        return False
    return True


def test_a_killed_client_leaves_no_extent_leased(daemon: DaemonProcess, store: ps.Store) -> None:
    reader = store.open_namespace("m")
    client = subprocess.Popen(
        [sys.executable, "-c", CLIENT, daemon.address], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with client:
        assert client.stdout is not None
        assert client.stdout.readline() == "leased\n"
        assert not is_free(reader)
        client.kill()
        client.wait(LIMIT_S)
    deadline_s = time.monotonic() + LIMIT_S
    while not is_free(reader):
        assert time.monotonic() < deadline_s, "the killed client's extents stay leased"


def test_a_lease_ends_by_release_and_with_its_last_user(store: ps.Store) -> None:
    reader = store.open_namespace("m")
    with acquire_extents(reader, reader.keys()) as lease:
        assert lease.keys() == reader.keys()
        assert not is_free(reader)
        with pytest.raises(ps.UnknownKey, match=r"\(9, 9\)"):
            lease[9, 9]
    assert is_free(reader)
    dropped = acquire_extents(reader, reader.keys())
    del dropped
    gc.collect()
    assert is_free(reader)


def test_a_lease_ends_with_its_handle(store: ps.Store) -> None:
    reader = store.open_namespace("m")
    lease = acquire_extents(reader, reader.keys())
    reader.close()
    with pytest.raises(ps.LeaseError, match="was released"):
        lease[0, 0]
    assert is_free(store.open_namespace("m"))


def test_a_handle_that_nobody_has_is_closed_once_its_last_lease_of_extents_has_gone(store: ps.Store) -> None:
    def open_count() -> int:
        return int(store.stats()["namespaces"]["m"]["views"])

    reader = store.open_namespace("m")
    close_when_dropped(reader)
    lease = acquire_extents(reader, reader.keys())
    del reader
    gc.collect()
    assert open_count() == 1, "the lease is in use"
    lease.release()
    del lease
    gc.collect()
    assert open_count() == 0


def test_a_release_that_is_interrupted_is_done_by_the_next(store: ps.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    reader, post = store.open_namespace("m"), Connection.post
    lease = acquire_extents(reader, reader.keys())

    def interrupted(connection: Connection, *message: Any) -> None:
        monkeypatch.setattr(Connection, "post", post)
        raise KeyboardInterrupt

    monkeypatch.setattr(Connection, "post", interrupted)
    with pytest.raises(KeyboardInterrupt):
        lease.release()
    with pytest.raises(ps.LeaseError, match="was released"):
        lease[0, 0]
    lease.release()
    assert is_free(reader)


def test_sums_survive_a_restart_and_a_damaged_file_is_made_anew(daemon: DaemonProcess) -> None:
    def sums_and_reads() -> tuple[list[bytes], int]:
        with ps.connect(daemon.address) as store:
            reader = store.open_namespace("m")
            with acquire_extents(reader, reader.keys()) as lease:
                sums = [lease[key].sums for key in lease.keys()]  # noqa: SIM118 - a lease is no mapping
            return sums, int(store.stats()["namespaces"]["m"]["records_read_for_sums"])

    def restart() -> None:
        daemon.stop()
        daemon.start()

    first = sums_and_reads()
    assert first[1] == EXPERTS
    restart()
    assert sums_and_reads() == (first[0], 0)
    daemon.stop()
    path = daemon.directory / "device_sums"
    path.write_bytes(path.read_bytes()[:-1] + b"\xee")
    daemon.start()
    assert sums_and_reads() == first
    assert f"{path} is not used" in daemon.stderr


def test_more_keys_than_a_request_may_have_are_refused_here(store: ps.Store) -> None:
    with pytest.raises(ps.CapacityError, match=str(EXTENT_KEYS_MAX)):
        acquire_extents(store.open_namespace("m"), [(0, 0)] * (EXTENT_KEYS_MAX + 1))


def test_a_daemon_that_is_too_old_is_named(store: ps.Store) -> None:
    reader = store.open_namespace("m")
    reader._connection.minor = 9
    with pytest.raises(ps.VersionMismatch, match=r"1\.10"):
        acquire_extents(reader, [(0, 0)])


@pytest.mark.parametrize("answer", [
    None, GrantedExtents(1, [], [], []), GrantedExtents(1, [(0, 0, 4096, 1, 1, 1)], [bytes(8)], []),
    GrantedExtents(1, [(0, 0, 1 << 20, 1, 1, 1)], [bytes(16)], []), GrantedExtents(1, [(7, 0, 1 << 20, 1, 1, 1)], [bytes(8)], []),
])  # fmt: skip
def test_an_answer_that_is_none_is_a_protocol_error(store: ps.Store, answer: Any) -> None:
    reader = store.open_namespace("m")
    with pytest.raises(ps.ProtocolError):
        ExtentLease(reader._connection, answer, namespace="m", part=reader.schema.stored, keys=[(0, 0)], all_held=reader._leases)
