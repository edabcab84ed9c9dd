"""Whoever was not welcomed gets no descriptor, whatever he asks for in the same breath."""

from __future__ import annotations

import asyncio
import os

import pytest

from paramstore.wire import messages as m
from paramstore.wire.codec import LENGTH, encode
from paramstore_testkit.processes.daemon_process import DaemonProcess
from paramstore_testkit.wire.raw_client import RawClient

pytestmark = pytest.mark.slow

NAME = "moe"
PID = os.getpid()
UPLOAD_BYTES = 4096

FORGED = {
    "another major": m.Hello(1, m.MAGIC, m.PROTOCOL_MAJOR + 1, 0, PID),
    "major 0": m.Hello(1, m.MAGIC, 0, 0, PID),
    "a negative major": m.Hello(1, m.MAGIC, -m.PROTOCOL_MAJOR, 0, PID),
    "a huge major": m.Hello(1, m.MAGIC, 1 << 63, 0, PID),
    "another magic": m.Hello(1, "paramstorf", m.PROTOCOL_MAJOR, m.PROTOCOL_MINOR, PID),
    "no magic": m.Hello(1, "", m.PROTOCOL_MAJOR, m.PROTOCOL_MINOR, PID),
    "upload first": m.OpenUpload(1, UPLOAD_BYTES),
    "open first": m.OpenNamespace(1, NAME, "read"),
    "lease first": m.Acquire(1, 1, [(0, 0)], "param", 1.0),
}
WANTED = (m.OpenNamespace(2, NAME, "read"), m.OpenUpload(3, UPLOAD_BYTES), m.Acquire(4, 1, [(0, 0)], "param", 1.0))


async def forged(daemon: DaemonProcess, client: RawClient, first: bytes) -> list[m.Message]:
    """The daemon's last words to a client that begins with `first` and asks for all there is."""
    await client.send_bytes(first + b"".join(encode(message) for message in WANTED))
    return await client.end()


@pytest.mark.parametrize("first", FORGED.values(), ids=FORGED)
def test_a_forged_beginning_brings_no_descriptor(first: m.Message, served: DaemonProcess, clients: list[RawClient]) -> None:
    clients.append(RawClient.connect(served.socket))
    answers = asyncio.run(forged(served, clients[0], bytes(encode(first))))
    assert [type(answer) for answer in answers] == [m.Failed]
    assert clients[0].fds == []


@pytest.mark.parametrize("damage", ["cut", "longer", "another tag", "nested"])
def test_a_hello_that_is_no_hello_brings_no_descriptor(
    damage: str, served: DaemonProcess, clients: list[RawClient]
) -> None:
    body = bytes(encode(m.Hello(1, m.MAGIC, m.PROTOCOL_MAJOR, m.PROTOCOL_MINOR, PID)))[LENGTH.size :]
    broken = {
        "cut": body[:-1], "longer": body + b"\0", "another tag": body.replace(b"hello", b"hallo"), "nested": b"\x91" + body,
    }[damage]  # fmt: skip
    clients.append(RawClient.connect(served.socket))
    answers = asyncio.run(forged(served, clients[0], LENGTH.pack(len(broken)) + broken))
    assert [(answer.error, answer.id) for answer in answers if isinstance(answer, m.Failed)] == [("ProtocolError", 0)]
    assert clients[0].fds == []


def test_the_same_requests_after_a_true_hello_bring_one_descriptor_for_each_segment(
    served: DaemonProcess, clients: list[RawClient]
) -> None:
    async def scenario(client: RawClient) -> None:
        await client.hello()
        for message in WANTED:
            await client.ask(message)

    clients.append(RawClient.connect(served.socket))
    asyncio.run(scenario(clients[0]))
    assert len(clients[0].fds) == 2
