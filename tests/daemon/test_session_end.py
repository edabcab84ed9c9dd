"""The end of a session: what is left when the connection, the client process or the namespace is gone."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from paramstore.daemon.session import Session
from paramstore.wire import messages as m
from paramstore.wire.codec import encode

AtDesk = Callable[..., None]
ADAMW = (1e-3, 0.9, 0.999, 1e-8, 0.01, 1.0)


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_nothing_is_left_of_a_session_that_ended(at_desk: AtDesk) -> None:
    async def scenario(desk: Any) -> None:
        keeper = await desk.client()
        await keeper.request(m.CloseNamespace, await desk.create(keeper))
        before = open_descriptors()
        client = await desk.client()
        handle = (await client.request(m.OpenNamespace, "moe", "write"))["handle"]
        await desk.push(client, handle, [(0, 0), (0, 1)])
        lease = await client.request(m.Acquire, handle, [(0, 0)], "param", 5.0)
        assert lease.slots
        await client.request(m.Evict, handle)
        await client.send(m.Release([client.next_id() - 2]))
        desk.machine.workers.pause()
        await client.send(m.Acquire(700, handle, [(0, 1), (0, 2)], "param", 5.0))
        await client.send(m.Prefetch(701, handle, [(0, 3)], "param"))  # queued: the lease's loads take both workers
        await client.send(m.Commit(702, handle, 2))
        await desk.until(lambda: desk.machine.workers.waiting)
        client.close()
        await desk.until(lambda: len(desk.gone) == 1)
        desk.machine.workers.resume()
        await desk.until(lambda: not desk.sessions[1]._tasks)
        found = desk.figures()
        assert (found["leased_slots"], found["pending_gradients"], found["views"], found["has_writer"]) == (0, 0, 0, False)
        assert desk.param_states()[3] == "absent"
        assert desk.store.uploads.used_bytes == desk.store.uploads.bytes_of(desk.sessions[0])
        assert open_descriptors() == before

    at_desk(scenario)


def test_an_apply_outlives_the_session_that_called_it(at_desk: AtDesk) -> None:
    async def scenario(desk: Any) -> None:
        client = await desk.client()
        handle = await desk.create(client)
        await desk.push(client, handle, [(0, 0), (0, 1)])
        await client.request(m.Evict, handle)
        desk.machine.workers.pause()  # the records are not loaded: the gradients are read after the session's end
        await client.send(m.Apply(700, handle, *ADAMW))
        (session,) = desk.sessions
        await desk.until(lambda: session._tasks)
        client.close()
        await desk.until(lambda: desk.gone)
        desk.machine.workers.resume()
        await desk.until(lambda: not session._tasks)
        assert desk.figures()["records_updated"] == 2
        assert desk.figures()["broken"] is None

    at_desk(scenario)


LISTENER = """
import socket, sys
sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
sock.connect(sys.argv[1])
sock.sendall(bytes.fromhex(sys.argv[2]))
sys.stdin.readline()
sock.shutdown(socket.SHUT_RDWR)
sock.close()
sys.stdin.readline()
"""


@pytest.fixture
def leasing_process(tmp_path: Path) -> Any:
    """Makes a process that connects, leases and waits. Its stdin tells it to hang up, then to end."""
    processes: list[subprocess.Popen[bytes]] = []

    async def start(desk: Any, frames: bytes) -> subprocess.Popen[bytes]:
        import socket

        path = tmp_path / "daemon.sock"
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
            listener.bind(str(path))
            listener.listen()
            listener.setblocking(False)
            command = [sys.executable, "-S", "-c", LISTENER, str(path), frames.hex()]
            processes.append(subprocess.Popen(command, stdin=subprocess.PIPE))  # noqa: ASYNC220 - does not wait
            theirs, _ = await asyncio.get_running_loop().sock_accept(listener)
        desk.sessions.append(Session(desk.service, theirs, on_gone=desk.gone.append))
        return processes[0]

    yield start
    for process in processes:
        process.kill()
        process.wait()
        process.stdin.close()  # type: ignore[union-attr]


def opening_frames(mode: str) -> bytes:
    hello = encode(m.Hello(1, m.MAGIC, m.PROTOCOL_MAJOR, m.PROTOCOL_MINOR, 1))
    return bytes(hello + encode(m.OpenNamespace(2, "moe", mode)))


@pytest.mark.parametrize("hangs_up_first", [False, True])
def test_a_lease_lives_as_long_as_its_process_not_its_connection(
    hangs_up_first: bool, at_desk: AtDesk, leasing_process: Any
) -> None:
    async def scenario(desk: Any) -> None:
        await desk.create(await desk.client())
        process = await leasing_process(desk, opening_frames("read"))
        session = desk.sessions[1]
        assert session.pid == process.pid
        assert session.uid == os.getuid()
        await desk.until(lambda: session._views)
        session._acquire(m.Acquire(3, 1, [(0, 0)], "param", 5.0))
        await desk.until(lambda: desk.figures()["leased_slots"] == 1 and not session._tasks)
        if hangs_up_first:
            process.stdin.write(b"\n")
            process.stdin.flush()
            await desk.until(lambda: session.is_ended)
            assert desk.figures()["leased_slots"] == 1  # its mapping may still be read
            assert desk.figures()["views"] == 2
            assert desk.gone == []
        process.kill()
        await desk.until(lambda: desk.gone)
        assert desk.gone == [session]
        assert desk.figures()["leased_slots"] == 0
        assert desk.figures()["views"] == 1

    at_desk(scenario)


def test_a_writer_that_hung_up_but_lives_writes_no_more(at_desk: AtDesk, leasing_process: Any) -> None:
    async def scenario(desk: Any) -> None:
        keeper = await desk.client()
        await keeper.request(m.CloseNamespace, await desk.create(keeper))
        process = await leasing_process(desk, opening_frames("write"))
        session = desk.sessions[1]
        await desk.until(lambda: session._views)
        session._acquire(m.Acquire(3, 1, [(0, 0)], "param", 5.0))
        await desk.until(lambda: desk.figures()["leased_slots"] == 1)
        process.stdin.write(b"\n")
        process.stdin.flush()
        await desk.until(lambda: session.is_ended)
        assert desk.figures()["has_writer"] is False
        handle = (await keeper.request(m.OpenNamespace, "moe", "write"))["handle"]
        assert (await keeper.request(m.Commit, handle, 2))["step"] == 2

    at_desk(scenario)


def test_waiting_requests_end_with_the_connection_even_if_the_process_lives(at_desk: AtDesk) -> None:
    async def scenario(desk: Any) -> None:
        client = await desk.client()
        handle = await desk.create(client)
        await client.request(m.Evict, handle)
        await client.request(m.Acquire, handle, [(0, 0)], "param", 5.0)
        desk.machine.workers.pause()
        await client.send(m.Acquire(700, handle, [(0, 1)], "param", 5.0))
        (session,) = desk.sessions
        await desk.until(lambda: 700 in session._tasks)
        client.close()
        await desk.until(lambda: session.is_ended)
        desk.machine.workers.resume()
        await desk.until(lambda: not session._tasks)
        assert desk.figures()["leased_slots"] == 1  # the granted one: this process, its owner, lives
        assert desk.gone == []

    at_desk(scenario)


def test_what_opens_after_the_end_is_closed_again(at_desk: AtDesk, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(desk: Any) -> None:
        keeper = await desk.client()
        await keeper.request(m.CloseNamespace, await desk.create(keeper))
        client = await desk.client()
        desk.machine.workers.pause()
        await client.send(m.OpenNamespace(700, "moe", "write"))
        session = desk.sessions[1]
        await desk.until(lambda: session._tasks)
        client.close()
        await desk.until(lambda: session.is_ended)
        desk.machine.workers.resume()
        await desk.until(lambda: not session._tasks)
        assert desk.figures()["views"] == 0
        assert desk.figures()["has_writer"] is False

    at_desk(scenario)


@pytest.mark.parametrize("count", [2, 5])
def test_sessions_of_one_namespace_that_end_together_all_end(count: int, at_desk: AtDesk) -> None:
    async def scenario(desk: Any) -> None:
        trainer = await desk.client()
        await desk.create(trainer)
        readers = [await desk.client() for _ in range(count)]
        for reader in readers:
            await reader.request(m.OpenNamespace, "moe", "read")
            await desk.upload(reader, 4096)
        for client in (trainer, *readers):
            client.close()  # all sockets are dead before the daemon hears of the first
        await desk.until(lambda: len(desk.gone) == 1 + count)
        assert desk.store.namespaces["moe"].views == []
        assert desk.store.uploads.used_bytes == 0

    at_desk(scenario)
