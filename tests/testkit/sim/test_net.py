"""Simulated sockets, processes and segments behave as those of the kernel, as far as a session can tell."""

from __future__ import annotations

import array
import asyncio
import socket
from collections.abc import Coroutine, Iterator
from random import Random
from typing import Any

import pytest

from paramstore_testkit.sim.loop import VirtualLoop
from paramstore_testkit.sim.net import CLOSED_BYTE, Network, SimListener, SimMemory, SimPeer, SimProcess, SimSocket


def run(coroutine: Coroutine[Any, Any, None], loop: VirtualLoop) -> None:
    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        runner.run(coroutine)


class Desk:
    """A socket and who reads it."""

    def __init__(self) -> None:
        self.loop = VirtualLoop(Random(1), shuffles=False)
        self.network = Network(self.loop)
        self.process = SimProcess(self.loop, 77)
        self.sock = SimSocket(self.network, self.process)
        self.read: list[bytes] = []

    def readable(self) -> None:
        buffer = memoryview(bytearray(4))
        self.read.append(bytes(buffer[: self.sock.recv_into(buffer)]))
        if not self.read[-1]:
            self.loop.remove_reader(self.sock.fileno())


@pytest.fixture
def desk() -> Iterator[Desk]:
    made = Desk()
    yield made
    made.loop.close()


def test_what_is_delivered_is_read_in_order_and_a_frame_arrives_right_before_its_end_is_read(desk: Desk) -> None:

    async def main() -> None:
        desk.loop.add_reader(desk.sock.fileno(), desk.readable)
        desk.sock.deliver(b"ab", None)
        desk.sock.deliver(b"cdefgh", lambda: desk.read.append(b"!"))
        await asyncio.sleep(1)

    run(main(), desk.loop)
    assert desk.read == [b"ab", b"cdef", b"!", b"gh"]
    assert desk.network.frames_read == 1


def test_who_hangs_up_takes_what_was_not_read_with_him(desk: Desk) -> None:

    async def main() -> None:
        desk.sock.deliver(b"lost", None)
        desk.sock.hang_up(b"fr")
        desk.loop.add_reader(desk.sock.fileno(), desk.readable)
        await asyncio.sleep(1)

    run(main(), desk.loop)
    assert desk.read == [b"fr", b""]
    assert desk.network.frames_read == 0
    with pytest.raises(BrokenPipeError):
        desk.sock.send(memoryview(b"x"))


def test_descriptors_go_with_what_is_sent(desk: Desk) -> None:
    sent: list[tuple[bytes, list[int]]] = []
    desk.sock.on_sent = lambda data, fds: sent.append((bytes(data), list(fds)))
    socket.send_fds(desk.sock, [memoryview(b"frame")], [5, 6])  # type: ignore[arg-type]
    assert desk.sock.send(memoryview(b"next")) == 4
    assert sent == [(b"frame", [5, 6]), (b"next", [])]
    assert array.array("i", [5, 6]).itemsize == 4


def test_a_client_that_does_not_read_blocks_who_sends_until_it_reads_again(desk: Desk) -> None:
    told: list[str] = []

    async def main() -> None:
        desk.sock.is_reading = False
        with pytest.raises(BlockingIOError):
            desk.sock.send(memoryview(b"x"))
        desk.loop.add_writer(desk.sock.fileno(), told.append, "writable")
        desk.sock.read_again()
        await asyncio.sleep(1)

    run(main(), desk.loop)
    assert told == ["writable"]


def test_the_end_of_a_process_is_told_once_to_each_that_watches_it_also_to_who_comes_late(desk: Desk) -> None:
    ended: list[str] = []

    async def main() -> None:
        SimPeer(desk.loop, desk.sock, on_ended=lambda: ended.append("watching"))
        SimPeer(desk.loop, desk.sock, on_ended=lambda: ended.append("closed")).close()
        desk.process.kill()
        await asyncio.sleep(1)
        late = SimPeer(desk.loop, desk.sock, on_ended=lambda: ended.append("late"))
        assert late.is_watched
        await asyncio.sleep(1)
        assert not late.is_watched

    run(main(), desk.loop)
    assert ended == ["watching", "late"]


def test_a_listener_hands_out_who_connected_and_closes_the_others(desk: Desk) -> None:
    listener = SimListener(desk.network)
    other = SimSocket(desk.network, desk.process)
    listener.connect(desk.sock)
    listener.connect(other)
    assert listener.accept()[0] is desk.sock
    listener.close()
    assert other.is_closed
    assert not desk.sock.is_closed


def test_a_closed_segment_is_overwritten_and_gone_and_is_closed_once() -> None:
    memory = SimMemory()
    segment = memory.shared(8)
    view = segment.view(2, 4)
    view[:] = b"data"
    assert memory.segments[segment.fd or 0] is segment
    segment.close()
    assert bytes(view) == bytes([CLOSED_BYTE]) * 4
    assert not memory.segments
    with pytest.raises(AssertionError):
        segment.close()
