"""Floods of connections, bytes and descriptors: the daemon stays as large as it was, and whoever behaves is served meanwhile.

Of broken frames there are more in `tests/faults/test_frames.py`.
"""

from __future__ import annotations

import array
import asyncio
import os
import re
import socket
import struct
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from random import Random

import pytest
import torch

import paramstore_client as ps
from paramstore.daemon import session as session_module
from paramstore.daemon.server import HALF_OPEN_MAX, Server, listen
from paramstore.wire import messages as m
from paramstore.wire.codec import LENGTH, encode
from paramstore_testkit.disks.machine import Machine
from paramstore_testkit.processes.daemon_process import DaemonProcess
from paramstore_testkit.wire.raw_client import RawClient

NAME = "moe"
SEED = 7
CONNECTIONS = 10_000
KEPT = 700
"""Connections that are kept open at once: two thirds of them stay half open, which is more than the daemon serves at all."""
ROUNDS = 400
FDS_PER_MESSAGE_MAX = 253
"""SCM_MAX_FD: the kernel takes no more in one message."""
GROWTH_BYTES_MAX = 64 << 20
LIMIT_S = 30.0


class Behaved:
    """Two that behave: one that was there before, and one that comes anew each time."""

    def __init__(self, daemon: DaemonProcess) -> None:
        self._address = daemon.address
        self._pid = daemon.pid
        self._store = ps.connect(daemon.address)
        self._reader = self._store.open_namespace(NAME)
        self.served = 0

    def __call__(self) -> None:
        with self._reader.acquire([(0, 1)], timeout_s=5.0) as lease:
            assert lease[0, 1]["w"].unique().tolist() == [2.0]
        with ps.connect(self._address, timeout_s=5.0) as store:
            assert [entry["name"] for entry in store.namespaces()] == [NAME]
        self.served += 1

    def close(self) -> None:
        self._store.close()

    def resident_bytes(self) -> int:
        found = re.search(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{self._pid}/status").read_text())
        assert found is not None
        return int(found[1]) << 10

    def descriptors(self) -> int:
        """A hardened process shows them to root alone."""
        return len(os.listdir(f"/proc/{self._pid}/fd")) if os.getuid() == 0 else 0


@pytest.fixture
def behaved(served: DaemonProcess) -> Iterator[Behaved]:
    torch.set_num_threads(1)
    behaved = Behaved(served)
    behaved()
    yield behaved
    behaved.close()


def connected(path: Path) -> socket.socket:
    """Waits where the daemon's queue is full, which a socket with a timeout would not."""
    sock = socket.socket(socket.AF_UNIX)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", int(LIMIT_S), 0))
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", int(LIMIT_S), 0))
        sock.connect(str(path))
    except OSError:
        sock.close()
        raise
    return sock


def first_words(random: Random) -> bytes:
    """Of somebody who never says a whole hello."""
    hello = bytes(encode(m.Hello(1, m.MAGIC, m.PROTOCOL_MAJOR, m.PROTOCOL_MINOR, 1)))
    others = (LENGTH.pack(4096) + bytes(4000), LENGTH.pack(1 << 31), b"GET / HTTP/1.1\r\n\r\n")
    return random.choice((b"", hello[:1], hello[:-1], *others))


@pytest.fixture
def kept() -> Iterator[deque[socket.socket]]:
    """Connections of strangers; what is left of them is closed."""
    sockets = deque[socket.socket]()
    yield sockets
    for sock in sockets:
        sock.close()


@pytest.mark.slow
def test_ten_thousand_connections_keep_nobody_out_and_take_no_memory(
    served: DaemonProcess, behaved: Behaved, kept: deque[socket.socket]
) -> None:
    random = Random(SEED)
    before_bytes, before_descriptors = behaved.resident_bytes(), behaved.descriptors()
    most_bytes = before_bytes
    for number in range(CONNECTIONS):
        kept.append(connected(served.socket))
        with suppress(OSError):  # he was shown the door already
            kept[-1].send(first_words(random))
        if len(kept) > KEPT:
            kept.popleft().close()
        if number % 500 == 499:
            behaved()
            most_bytes = max(most_bytes, behaved.resident_bytes())
    while kept:
        kept.popleft().close()
    behaved()
    print(f"\nseed {SEED}: grown by {most_bytes - before_bytes} bytes at most")  # noqa: T201
    assert behaved.served >= CONNECTIONS // 500
    assert most_bytes - before_bytes < GROWTH_BYTES_MAX
    assert behaved.descriptors() <= before_descriptors + HALF_OPEN_MAX


@pytest.mark.slow
@pytest.mark.parametrize("is_known", [False, True], ids=["before the hello", "after it"])
def test_a_flood_of_descriptors_leaves_none_in_the_daemon(is_known: bool, served: DaemonProcess, behaved: Behaved) -> None:
    before_bytes, before_descriptors = behaved.resident_bytes(), behaved.descriptors()
    with open(os.devnull, "rb") as null:
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [null.fileno()] * FDS_PER_MESSAGE_MAX))]
        sock = connected(served.socket)
        if is_known:
            sock.sendall(encode(m.Hello(1, m.MAGIC, m.PROTOCOL_MAJOR, m.PROTOCOL_MINOR, os.getpid())))
        sent = 0
        for number in range(ROUNDS):
            frame = encode(m.Namespaces(number + 2)) if is_known else LENGTH.pack(4000)[:1]
            try:
                sent += sock.sendmsg([frame], rights) > 0
                if is_known:
                    sock.recv(1 << 16)
            except OSError:
                sock.close()
                sock = connected(served.socket)
            if number % 100 == 99:
                behaved()
                assert behaved.descriptors() <= before_descriptors + HALF_OPEN_MAX
        sock.close()
    assert sent > ROUNDS // 2
    behaved()
    assert behaved.descriptors() <= before_descriptors + 2  # sessions that end just now
    assert behaved.resident_bytes() - before_bytes < GROWTH_BYTES_MAX


# --- the slow ones; the deadline is shortened, so the daemon is in this process


def test_a_byte_now_and_then_does_not_put_the_deadline_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_module, "HELLO_TIMEOUT_S", 0.05)
    hello = bytes(encode(m.Hello(1, m.MAGIC, m.PROTOCOL_MAJOR, m.PROTOCOL_MINOR, 1, "x" * 4000)))

    async def drip(client: RawClient) -> list[m.Message]:
        """A byte in each turn of the loop that the clock lets pass, until the daemon hangs up."""
        ended = asyncio.ensure_future(client.end())
        for byte in hello[:-1]:
            if ended.done():
                break
            try:
                await client.send_bytes(bytes([byte]))
            except OSError:
                break
            await asyncio.wait([ended], timeout=0.001)
        return await ended

    async def scenario() -> None:
        machine = Machine(seed=SEED)
        machine.start()
        server = Server(machine.service, listen(tmp_path / "run" / "s"))
        slow = [RawClient.connect(tmp_path / "run" / "s") for _ in range(8)]
        good = RawClient.connect(tmp_path / "run" / "s")
        await good.hello()
        for answers in await asyncio.gather(*(drip(client) for client in slow)):
            assert [answer.message for answer in answers if isinstance(answer, m.Failed)] == ["no hello within 0.05 s"]
        assert await good.request(m.Namespaces) == []
        for client in (*slow, good):
            client.close()
        server.close()

    asyncio.run(asyncio.wait_for(scenario(), LIMIT_S))
