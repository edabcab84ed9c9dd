"""Processes that die, on either side of the socket, and a second daemon: what was acknowledged stays, nobody else waits."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import paramstore_client as ps
from paramstore.core.key import ExpertKey
from paramstore_testkit.processes.daemon_process import DaemonProcess

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("in_time")]

CLIENT = """
import signal, sys
import paramstore_client as ps
from paramstore.wire import messages as m
from paramstore.wire.codec import encode
from paramstore_client.connection import answers

store = ps.connect(sys.argv[1])
ns = store.open_namespace("moe", mode=sys.argv[2])
lease = ns.acquire([(0, 0), (0, 1)])
if sys.argv[2] == "write":
    connection, length = store._connection, ns.schema.gradient_bytes
    places = store._area.take(2, length, most_bytes=2 * length)
    first, second = (
        m.Push(connection.next_id(), ns._handle, [(0, expert, place.segment, place.offset_bytes)])
        for expert, place in enumerate(places)
    )
    connection.request(first, what="push", convert=answers.nothing).wait()
    half = encode(second)
    connection._sock.send(half[: len(half) // 2])
print("ready", flush=True)
signal.pause()
"""

BUFFER = """
import signal, sys
import paramstore_client as ps

store = ps.connect(sys.argv[1])
ns = store.open_namespace("moe", min_lease_slots=3)
buffer = ps.ExpertBuffer(ns, 2)
buffer.acquire([(0, 0), (0, 1)]).release()
print("ready", flush=True)
signal.pause()
"""

LIMIT_S = 20.0

Until = Callable[[Callable[[], object]], None]
Serve = Callable[..., DaemonProcess]
ValueOf = Callable[[ExpertKey], dict[str, torch.Tensor]]


@pytest.fixture
def client_process(daemon: DaemonProcess) -> Iterator[Callable[[str], subprocess.Popen[bytes]]]:
    """A client in a process of its own: it leases two keys and, as writer, has one push done and one half sent."""
    processes = []

    def start(mode: str, program: str = CLIENT) -> subprocess.Popen[bytes]:
        process = subprocess.Popen([sys.executable, "-c", program, daemon.address, mode], stdout=subprocess.PIPE)
        processes.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        return process

    yield start
    for process in processes:
        process.kill()
        process.wait()
        process.stdout.close()  # type: ignore[union-attr]


def figures(store: ps.Store) -> dict[str, Any]:
    found: dict[str, Any] = store.stats()["namespaces"]["moe"]
    return found


def test_a_killed_client_leaves_no_lease_no_gradient_and_no_upload_area(
    store: ps.Store, client_process: Any, until: Until
) -> None:
    before, upload_bytes = figures(store), store.stats()["tiers"]["host"]["upload_bytes"]
    process = client_process("write")
    during = figures(store)
    assert during["leased_slots"] == before["leased_slots"] + 2
    assert (during["pending_gradients"], during["has_writer"]) == (1, True)
    process.kill()
    until(lambda: figures(store)["leased_slots"] == before["leased_slots"])
    after = figures(store)
    assert (after["pending_gradients"], after["has_writer"], after["views"]) == (0, False, before["views"])
    assert store.stats()["tiers"]["host"]["upload_bytes"] == upload_bytes


def test_what_stands_in_a_killed_clients_buffer_comes_back(store: ps.Store, client_process: Any, until: Until) -> None:
    before = figures(store)["leased_slots"]
    process = client_process("read", BUFFER)
    assert figures(store)["leased_slots"] == before + 2, "they stand, though no visit uses them"
    process.kill()
    until(lambda: figures(store)["leased_slots"] == before)


def test_what_a_killed_writer_pushed_is_forgotten(
    store: ps.Store, client_process: Any, value_of: ValueOf
) -> None:
    client_process("write").kill()
    with store.open_namespace("moe", mode="write") as writer:
        assert writer.gradient_norm() == 0.0
        with writer.acquire([(0, 0)]) as lease:
            assert torch.equal(lease[0, 0]["w"], value_of((0, 0))["w"])


def test_a_stopped_client_keeps_its_leases_and_nobody_waits_for_it(
    store: ps.Store, client_process: Any, until: Until
) -> None:
    before = figures(store)["leased_slots"]
    process = client_process("read")
    process.send_signal(signal.SIGSTOP)
    with store.open_namespace("moe", min_lease_slots=2) as reader, reader.acquire([(0, 0), (1, 1)], timeout_s=5.0):
        assert figures(store)["leased_slots"] == before + 3
    process.kill()
    until(lambda: figures(store)["leased_slots"] == before)


@pytest.fixture
def own(directory: Path, serve: Serve) -> DaemonProcess:
    """A daemon for this test alone."""
    return serve(directory).start()


def test_a_killed_daemon_is_unavailable_until_reconnect_and_keeps_what_it_acknowledged(
    own: DaemonProcess, value_of: ValueOf
) -> None:
    with ps.connect(own.address, timeout_s=5.0) as store:
        writer = store.open_namespace("moe", mode="write")
        lease = writer.acquire([(0, 0)])
        writer.commit(2, b"second").wait()
        own.signal(signal.SIGSTOP)
        ticket = writer.prefetch([(1, 1)])  # under way when it dies
        own.kill()
        with pytest.raises(ps.StoreUnavailable):
            ticket.wait()
        for call in (writer.steps, store.stats, lambda: writer.acquire([(0, 1)]), lambda: writer.commit(3)):
            with pytest.raises(ps.StoreUnavailable, match=r"reconnect\(\)"):
                call()
        assert torch.equal(lease[0, 0]["w"], value_of((0, 0))["w"])  # what was leased stays readable
        with pytest.raises(ps.StoreUnavailable, match="no daemon listens"):
            store.reconnect(timeout_s=1.0)

        own.start()
        store.reconnect()
        with pytest.raises(ps.StoreUnavailable):
            writer.steps()
        with store.open_namespace("moe", mode="write") as again:
            assert again.steps() == [1, 2]
            assert again.extra(2) == b"second"
            with again.acquire([(0, 0)]) as lease:
                assert torch.equal(lease[0, 0]["w"], value_of((0, 0))["w"])
            assert again.commit(3).wait()["step"] == 3


def test_a_daemon_that_ends_on_request_tells_its_clients(own: DaemonProcess) -> None:
    with ps.connect(own.address) as store:
        store.open_namespace("moe")
        own.stop()
        with pytest.raises(ps.StoreUnavailable):
            store.stats()
    assert own.wait() == 0


def test_a_daemon_told_to_end_amid_a_commit_ends_in_time_at_a_whole_step(own: DaemonProcess, value_of: ValueOf) -> None:
    with ps.connect(own.address) as store:
        writer = store.open_namespace("moe", mode="write")
        writer.push({key: {"w": torch.ones(64, 64)} for key in writer.space})
        under_way = [writer.apply(ps.AdamW(lr=0.1)), writer.commit(2)]
        own.signal(signal.SIGTERM)
        assert own.wait(LIMIT_S) == 0
        for ticket in under_way:
            assert ticket.settled_within(5.0)
        is_acknowledged = under_way[1].error is None
    assert under_way[0].error is None or isinstance(under_way[0].error, ps.StoreUnavailable | ps.StepFailed)
    own.start()
    with ps.connect(own.address) as store, store.open_namespace("moe") as reader:
        assert reader.committed_step == 2 or not is_acknowledged
        for key in reader.space:
            with reader.acquire([key]) as lease:
                assert torch.equal(lease[key]["w"], value_of(key)["w"]) == (reader.committed_step == 1)


def test_a_daemon_that_does_not_answer_is_given_up_at_the_deadline(own: DaemonProcess) -> None:
    with ps.connect(own.address) as store, store.open_namespace("moe") as reader:
        own.signal(signal.SIGSTOP)
        ticket = reader.begin_acquire([(0, 0)], timeout_s=0.05)
        with pytest.raises(ps.WaitTimeout, match="no answer within"):
            ticket.wait(timeout_s=0.1)
        with pytest.raises(ps.StoreUnavailable, match="did not answer the hello"):
            ps.connect(own.address, timeout_s=0.1)
        own.signal(signal.SIGCONT)
        with ticket.wait(timeout_s=5.0) as lease:
            assert lease.keys()


def test_a_second_daemon_is_refused_and_the_first_serves_on(store: ps.Store, daemon: DaemonProcess, serve: Serve) -> None:
    second = serve(daemon.directory, "--socket", str(daemon.directory / "run" / "second.sock"))
    assert second.run() == 1
    assert f"in use by process {daemon.pid}" in second.stderr
    assert store.stats()["daemon"]["pid"] == daemon.pid


def test_a_copied_store_serves_beside_its_original(directory: Path, tmp_path: Path, serve: Serve) -> None:
    shutil.copytree(directory, tmp_path / "copy")
    addresses = [serve(place).start().address for place in (directory, tmp_path / "copy")]
    for address in addresses:
        with ps.connect(address) as store, store.open_namespace("moe", mode="write") as writer:
            writer.commit(2).wait()
            assert writer.steps() == [1, 2]
