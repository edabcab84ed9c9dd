"""A channel over a socket pair: frames whole and in order, descriptors with their frame, bounded output, one end."""

from __future__ import annotations

import asyncio
import os
import socket
import struct
from collections.abc import Callable, Coroutine
from itertools import pairwise
from typing import Any

import pytest
import uvloop

from paramstore.daemon import channel as channel_module
from paramstore.daemon.channel import Channel
from paramstore.errors import ProtocolError
from paramstore.wire import messages as m
from paramstore.wire.codec import FIRST_FRAME_BYTES_MAX, encode
from paramstore_testkit.wire.raw_client import RawClient

LIMIT_S = 10.0


class Peer:
    """A channel and the raw client at the other end of it. frames, ends: what the channel told its owner."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        self.client = RawClient(ours)
        self.frames: list[bytes] = []
        self.ends: list[Exception | None] = []
        self.came = asyncio.Event()
        self.ended = asyncio.Event()
        self.on_frame: Callable[[bytes], None] = lambda body: None
        self.channel = Channel(asyncio.get_running_loop(), theirs, on_frame=self._frame, on_end=self._end)

    def _frame(self, body: bytes) -> None:
        self.frames.append(body)
        self.came.set()
        self.on_frame(body)

    def _end(self, reason: Exception | None) -> None:
        self.ends.append(reason)
        self.ended.set()

    async def next_frame(self) -> bytes:
        await self.came.wait()
        self.came.clear()
        return self.frames[-1]


def run(
    scenario: Callable[[Peer], Coroutine[Any, Any, None]], *, loop: Callable[[], asyncio.AbstractEventLoop] | None = None
) -> None:
    async def main() -> None:
        peer = Peer()
        try:
            await asyncio.wait_for(scenario(peer), LIMIT_S)
        finally:
            peer.channel.close(None)
            peer.client.close()

    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(main())


def frame(body: bytes) -> bytes:
    return struct.pack("<I", len(body)) + body


def test_a_frame_in_pieces_comes_once_and_whole() -> None:
    async def scenario(peer: Peer) -> None:
        for byte in frame(b"whole"):
            await peer.client.send_bytes(bytes([byte]))
            await asyncio.sleep(0)
        assert await peer.next_frame() == b"whole"
        assert peer.frames == [b"whole"]

    run(scenario)


def test_frames_of_one_read_come_in_order() -> None:
    async def scenario(peer: Peer) -> None:
        await peer.client.send_bytes(b"".join(frame(b"%d" % number) for number in range(100)) + frame(b"end"))
        while not peer.frames or peer.frames[-1] != b"end":
            await peer.next_frame()
        assert peer.frames == [b"%d" % number for number in range(100)] + [b"end"]

    run(scenario)


def test_a_frame_above_the_limit_ends_the_channel_before_its_body_is_kept() -> None:
    async def scenario(peer: Peer) -> None:
        await peer.client.send_bytes(struct.pack("<I", FIRST_FRAME_BYTES_MAX + 1))
        (told,) = await peer.client.end()
        (reason,) = peer.ends
        assert isinstance(reason, ProtocolError)
        assert str(FIRST_FRAME_BYTES_MAX) in str(reason)
        assert told == m.Failed(0, "ProtocolError", str(reason))

    run(scenario)


def test_a_raised_limit_lets_larger_frames_in() -> None:
    async def scenario(peer: Peer) -> None:
        body = bytes(FIRST_FRAME_BYTES_MAX + 1)
        peer.channel.raise_limit(len(body))
        await peer.client.send_bytes(frame(body))
        assert await peer.next_frame() == body
        await peer.client.send_bytes(struct.pack("<I", len(body) + 1))
        await peer.ended.wait()

    run(scenario)


def test_the_end_is_told_once() -> None:
    async def scenario(peer: Peer) -> None:
        peer.client.close()
        await peer.ended.wait()
        peer.channel.close(ProtocolError("again"))
        peer.channel.send(m.Done(1))
        assert peer.ends == [None]

    run(scenario)


def test_nothing_is_read_after_the_owner_closed_it() -> None:
    async def scenario(peer: Peer) -> None:
        peer.on_frame = lambda body: peer.channel.close(None)
        await peer.client.send_bytes(frame(b"first") + frame(b"second"))
        await peer.ended.wait()
        assert peer.frames == [b"first"]

    run(scenario)


def test_an_answer_larger_than_the_socket_arrives_whole() -> None:
    async def scenario(peer: Peer) -> None:
        data = os.urandom(4 << 20)
        peer.channel.send(m.Done(1, data))
        peer.channel.send(m.Done(2, b"after"))
        assert await peer.client.answer() == m.Done(1, data)
        assert await peer.client.answer() == m.Done(2, b"after")

    run(scenario)


def test_descriptors_arrive_with_their_frame() -> None:
    async def scenario(peer: Peer) -> None:
        named = os.memfd_create("named")
        try:
            peer.channel.send(m.Done(1))
            peer.channel.send(m.Granted(2, [], [(7, 4096)]), [named])
            assert await peer.client.answer() == m.Done(1)
            assert isinstance(await peer.client.answer(), m.Granted)
            (received,) = peer.client.fds
            assert os.fstat(received).st_ino == os.fstat(named).st_ino
        finally:
            os.close(named)

    run(scenario)


def test_descriptors_wait_behind_what_the_client_has_not_read() -> None:
    async def scenario(peer: Peer) -> None:
        named = os.memfd_create("named")
        try:
            peer.channel.send(m.Done(1, bytes(4 << 20)))
            peer.channel.send(m.Uploaded(2, 7, 4096), [named])
            peer.channel.send(m.Done(3))
            assert not peer.client.fds
            assert [(await peer.client.answer()).id for _ in range(3)] == [1, 2, 3]  # type: ignore[attr-defined]
            assert len(peer.client.fds) == 1
        finally:
            os.close(named)

    run(scenario)


@pytest.mark.parametrize("is_behind_another", [False, True])
def test_a_frame_that_leaves_in_pieces_brings_its_descriptors_once(is_behind_another: bool) -> None:
    async def scenario(peer: Peer) -> None:
        named = os.memfd_create("named")
        granted = m.Granted(2, [(1, 1 << 40, 1, 1)] * 200_000, [(7, 4096)])
        try:
            if is_behind_another:
                peer.channel.send(m.Done(1, bytes(4 << 20)))
            peer.channel.send(granted, [named])
            if is_behind_another:
                assert isinstance(await peer.client.answer(), m.Done)
            assert await peer.client.answer() == granted
            assert len(peer.client.fds) == 1
        finally:
            os.close(named)

    run(scenario)


def test_descriptors_of_the_client_are_not_taken() -> None:
    async def scenario(peer: Peer) -> None:
        before = len(os.listdir("/proc/self/fd"))
        data = frame(b"with fds")
        socket.send_fds(peer.client.sock, [data], [0, 1, 2])
        assert await peer.next_frame() == b"with fds"
        assert len(os.listdir("/proc/self/fd")) == before

    run(scenario)


def test_a_client_that_does_not_read_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel_module, "OUTPUT_BYTES_MAX", 1 << 20)

    async def scenario(peer: Peer) -> None:
        answer = m.Done(1, bytes(100_000))
        for _ in range(100):
            peer.channel.send(answer)
        await asyncio.sleep(0)
        (reason,) = peer.ends
        assert "does not read" in str(reason)
        assert peer.channel._output_bytes <= (1 << 20) + len(encode(answer))

    run(scenario)


def test_what_was_sent_before_the_end_is_read_before_it() -> None:
    async def scenario(peer: Peer) -> None:
        peer.channel.send(m.Failed(0, "ProtocolError", "why"))
        peer.channel.close(None)
        assert await peer.client.end() == [m.Failed(0, "ProtocolError", "why")]

    run(scenario)


@pytest.mark.parametrize("count", [1, 30_000])
@pytest.mark.parametrize("loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_the_end_of_a_client_that_left_answers_unread_is_told(
    loop: Callable[[], asyncio.AbstractEventLoop], count: int
) -> None:
    """uvloop tells of a socket that is in error once: behind that the last frames are read, and the end."""

    async def scenario(peer: Peer) -> None:
        peer.channel.send(m.Done(1, None))
        theirs = peer.client.sock
        theirs.setblocking(True)
        theirs.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 8 << 20)
        theirs.sendall(frame(b"last") * count)
        theirs.close()
        await peer.ended.wait()
        assert peer.frames == [b"last"] * count

    run(scenario, loop=loop)


def test_what_is_asked_for_right_before_the_end_is_answered() -> None:
    async def scenario(peer: Peer) -> None:
        peer.on_frame = lambda body: asyncio.get_running_loop().call_soon(peer.channel.send, m.Done(1))
        await peer.client.send_bytes(frame(b"ask"))
        peer.client.sock.shutdown(socket.SHUT_WR)
        assert await peer.client.end() == [m.Done(1)]

    run(scenario)


@pytest.mark.parametrize("loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_a_client_that_never_stops_sending_is_read_equally_often_in_each_turn(
    loop: Callable[[], asyncio.AbstractEventLoop], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both what was read last time and the selector say that there is more: were each of them followed by a read of its own, there
    would be more of them in each turn than in the one before."""

    async def scenario(peer: Peer) -> None:
        reads, counts, read = 0, [], Channel._read

        def read_and_send_more(channel: Channel, *, may_end: bool) -> bool:
            nonlocal reads
            reads += 1
            found = read(channel, may_end=may_end)
            peer.client.sock.send(frame(b"more"))  # there is always something to read, when the selector looks too
            return found

        monkeypatch.setattr(Channel, "_read", read_and_send_more)
        await peer.client.send_bytes(frame(b"first"))
        for _ in range(50):
            await asyncio.sleep(0)
            counts.append(reads)
        turns = [later - earlier for earlier, later in pairwise(counts)][5:]
        assert turns == [2 * channel_module.READS_MAX] * len(turns)

    run(scenario, loop=loop)
