from __future__ import annotations

import array
import os
import socket
import tracemalloc
from collections.abc import Iterator

import pytest

from paramstore.errors import ParamStoreError, ProtocolError, StepDropped, StoreUnavailable
from paramstore.memory.pages import SEGMENT_ALIGNMENT_BYTES
from paramstore.wire import messages as m
from paramstore.wire.codec import encode
from paramstore_client.connection.inbox import READ_BYTES, Inbox
from paramstore_client.connection.segments import Segments
from paramstore_testkit.wire.fake_namespace import FakeMemory

LENGTH = SEGMENT_ALIGNMENT_BYTES


class Peer:
    """The daemon's end of a socket whose other end an inbox reads."""

    def __init__(self) -> None:
        self.sock, self.client = socket.socketpair()
        self.client.setblocking(False)
        self.segments = Segments()
        self.inbox = Inbox(self.client, self.segments)
        self.memory = FakeMemory()

    def send(self, data: bytes, fds: list[int] | None = None) -> None:
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        self.sock.sendmsg([data], rights)

    def fd(self) -> int:
        fd = self.memory.segments[self.memory.add_shared(LENGTH)].fd
        assert fd is not None
        return fd

    def receive(self) -> list[tuple[int, object]]:
        answers: list[tuple[int, object]] = []
        while self.inbox.read():
            while (first := self.inbox.first()) is not None:
                answers.append(first)
                self.inbox.note_handled(dict[int, None]().pop, first[0])
        return answers

    def close(self) -> None:
        self.inbox.close()
        self.segments.clear()
        self.memory.close()
        self.sock.close()
        self.client.close()


@pytest.fixture
def peer() -> Iterator[Peer]:
    peer = Peer()
    yield peer
    peer.close()


def test_nothing_to_read_is_said_without_blocking(peer: Peer) -> None:
    assert not peer.inbox.read()


def test_answers_come_in_order_however_the_stream_is_cut(peer: Peer) -> None:
    stream = bytes(encode(m.Done(1, "a")) + encode(m.Done(2, "b")) + encode(m.Done(3, "c")))
    answers = []
    for start in range(0, len(stream), 5):
        peer.send(stream[start : start + 5])
        answers += peer.receive()
    assert answers == [(1, m.Done(1, "a")), (2, m.Done(2, "b")), (3, m.Done(3, "c"))]


def test_an_answer_of_many_reads_is_not_joined_anew_at_each_of_them(peer: Peer) -> None:
    frame = bytes(encode(m.Done(1, bytes(16 * READ_BYTES))))
    made_bytes = []
    peer.send(bytes(encode(m.Done(0))) + frame[:READ_BYTES])
    assert peer.receive() == [(0, m.Done(0))]
    tracemalloc.start()
    try:
        for start in range(READ_BYTES, 16 * READ_BYTES, READ_BYTES):
            peer.send(frame[start : start + READ_BYTES])
            before, _ = tracemalloc.get_traced_memory()
            tracemalloc.reset_peak()
            assert peer.receive() == []
            made_bytes.append(tracemalloc.get_traced_memory()[1] - before)
    finally:
        tracemalloc.stop()
    assert max(made_bytes) < 6 * READ_BYTES, made_bytes  # what was read, and now and then room for more
    peer.send(frame[16 * READ_BYTES :])
    assert peer.receive() == [(1, m.Done(1, bytes(16 * READ_BYTES)))]


def test_failed_becomes_the_error_of_that_name(peer: Peer) -> None:
    peer.send(bytes(encode(m.Failed(4, "StepDropped", "step 2 is gone"))))
    ((request_id, error),) = peer.receive()
    assert request_id == 4
    assert isinstance(error, StepDropped)
    assert str(error) == "step 2 is gone"


def test_error_of_a_name_that_is_unknown_keeps_it(peer: Peer) -> None:
    peer.send(bytes(encode(m.Failed(4, "FutureError", "what is this"))))
    ((_, error),) = peer.receive()
    assert type(error) is ParamStoreError
    assert "FutureError: what is this" in str(error)


def test_descriptors_go_to_the_frame_that_names_their_segments(peer: Peer) -> None:
    first, second, third = peer.fd(), peer.fd(), peer.fd()
    peer.send(bytes(encode(m.Granted(1, [(5, 0, 1, 0), (6, 0, 1, 0)], [(5, LENGTH), (6, LENGTH)]))), [first, second])
    peer.send(bytes(encode(m.Done(2))))
    peer.send(bytes(encode(m.Granted(3, [(7, 0, 1, 0)], [(7, LENGTH)]))), [third])
    assert [request_id for request_id, _ in peer.receive()] == [1, 2, 3]
    assert {peer.segments.leased(segment).length_bytes for segment in (5, 6, 7)} == {LENGTH}


def test_descriptors_wait_for_the_rest_of_their_frame(peer: Peer) -> None:
    frame = bytes(encode(m.Granted(1, [(5, 0, 1, 0)], [(5, LENGTH)])))
    peer.send(frame[:3], [peer.fd()])
    assert peer.receive() == []
    peer.send(frame[3:])
    assert [request_id for request_id, _ in peer.receive()] == [1]


def test_received_descriptors_are_not_inherited(peer: Peer) -> None:
    peer.send(bytes(encode(m.Granted(1, [(5, 0, 1, 0)], [(5, LENGTH)])))[:3], [peer.fd()])
    peer.receive()
    assert [os.get_inheritable(fd) for fd in peer.inbox._unhandled.fds] == [False]


def test_received_descriptors_are_closed_once_mapped(peer: Peer) -> None:
    fd = peer.fd()
    before = len(os.listdir("/proc/self/fd"))
    peer.send(bytes(encode(m.Granted(1, [(5, 0, 1, 0)], [(5, LENGTH)]))), [fd])
    peer.receive()
    assert len(os.listdir("/proc/self/fd")) == before


def test_frame_without_its_descriptors_is_a_protocol_error(peer: Peer) -> None:
    peer.send(bytes(encode(m.Granted(1, [(5, 0, 1, 0)], [(5, LENGTH)]))))
    with pytest.raises(ProtocolError, match="names 1 new files, 0 file descriptors"):
        peer.receive()


def test_descriptors_that_no_frame_names_are_a_protocol_error_and_closed(peer: Peer) -> None:
    fd = peer.fd()
    before = len(os.listdir("/proc/self/fd"))
    peer.send(bytes(encode(m.Done(1))), [fd])
    with pytest.raises(ProtocolError, match="that no message names"):
        peer.receive()
    peer.inbox.close()
    assert len(os.listdir("/proc/self/fd")) == before


def test_more_descriptors_than_there_is_room_for_are_a_protocol_error_and_closed(peer: Peer) -> None:
    fd = peer.fd()
    before = len(os.listdir("/proc/self/fd"))
    peer.send(bytes(encode(m.Done(1))), [fd] * (m.SEGMENTS_PER_FRAME_MAX + 2))
    with pytest.raises(ProtocolError, match="more than 64"):
        peer.receive()
    peer.inbox.close()
    assert len(os.listdir("/proc/self/fd")) == before


def test_segments_asked_back_are_told_to_who_has_them_mapped(peer: Peer) -> None:
    peer.send(bytes(encode(m.Unmap([3, 4]))))
    assert peer.receive() == []
    assert peer.segments.unmapped() == [3, 4]


def test_end_of_the_stream_is_the_daemon_gone(peer: Peer) -> None:
    peer.sock.shutdown(socket.SHUT_RDWR)
    with pytest.raises(StoreUnavailable, match=r"closed the connection; call store\.reconnect\(\), then open"):
        peer.inbox.read()


def test_answers_before_a_broken_frame_are_given_out(peer: Peer) -> None:
    peer.send(bytes(encode(m.Done(1))) + b"\x01\x00\x00\x00\xc1")
    assert peer.inbox.read()
    assert (peer.inbox.first() or [0])[0] == 1
    peer.inbox.note_handled(dict[int, None]().pop, 1)
    with pytest.raises(ProtocolError):
        peer.inbox.first()


def test_what_an_older_daemon_says_of_lease_slots_is_kept_and_answers_nobody(peer: Peer) -> None:
    peer.send(bytes(encode(m.LeaseSlots(1, 2))) + bytes(encode(m.LeaseSlots(1, 3))) + bytes(encode(m.Done(7, 3))))
    assert peer.receive() == [(7, m.Done(7, 3))]
    assert peer.inbox.lease_slots == {1: 3}
