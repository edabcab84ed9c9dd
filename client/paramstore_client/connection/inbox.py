"""Puts the bytes and file descriptors that come from the socket together to whole answers.

- Descriptors belong to the frame that names their segments, in order; each one is mapped and closed, or just closed.
- Whatever the daemon sends, the outcome is answers or ProtocolError; the end of the stream is StoreUnavailable.
- An interrupt loses nothing, wherever it comes: a read is noted by the call of C that reads, where no handler of a signal runs, and
  an answer is given out again until it is noted as handled. The state is one value, and each step to the next one assignment.
"""

from __future__ import annotations

import array
import socket
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from paramstore.errors import ParamStoreError, ProtocolError, StoreUnavailable, from_wire
from paramstore.wire.codec import LENGTH, decode_answer, first_body
from paramstore.wire.messages import (
    SEGMENTS_PER_FRAME_MAX,
    Answer,
    Done,
    Failed,
    Granted,
    GrantedExtents,
    LeaseSlots,
    Lent,
    Unmap,
    Uploaded,
)
from paramstore_client.connection.segments import Segments, close_all

READ_BYTES = 64 << 10
"""Most bytes of one read; the answer to 64 keys is a fiftieth of it."""
FD_BYTES = array.array("i").itemsize
WAY_ON = "call store.reconnect(), then open the namespaces again"
"""Advice in errors: how a program goes on after the connection was lost."""
ANCILLARY_BYTES = socket.CMSG_SPACE(SEGMENTS_PER_FRAME_MAX * FD_BYTES)

Answered = Done | Granted | GrantedExtents | Lent | Uploaded
"""An answer that is no error."""
Read = tuple[bytes, list[tuple[int, int, bytes]], int, Any]
"""What one `recvmsg` gives: bytes, ancillary data, flags and an address, which is of no use here."""


@dataclass(slots=True, eq=False)
class _Unhandled:
    """What was read and not handled yet. Its deques are written by single calls of C; the rest is replaced as a whole."""

    stream: bytearray
    """What came, in order. It grows in place, so that an answer of many reads is joined once; other states may share it."""
    start: int
    """Where the first answer that was not handled begins in the stream."""
    end: int
    """Where the stream ends. Bytes behind it are those of an interrupted join, which is done again."""
    fds: Sequence[int]
    """Descriptors that came with the stream."""
    reads: deque[Read] = field(default_factory=deque)
    """The read that is not part of the stream yet."""
    taken_in: deque[object] = field(default_factory=deque)
    """Has an item where the memory of the first answer was taken in."""
    handled: deque[object] = field(default_factory=deque)
    """Has an item where the first answer was handled."""
    used_fds: deque[int] = field(default_factory=deque)
    """Descriptors of handled answers, to be closed."""


class Inbox:
    """Owner of what came and was not handled yet, bytes and descriptors. Used by one thread at a time."""

    def __init__(self, sock: socket.socket, segments: Segments) -> None:
        self.lease_slots: dict[int, int] = {}
        """Slots left to each handle, as a daemon before PROMISE_MINOR tells: there all handles of a namespace share its slots."""
        self._sock = sock
        self._segments = segments
        self._unhandled = _Unhandled(bytearray(), 0, 0, ())
        self._first: tuple[int, int] = 0, 0
        """Bytes and descriptors of the first answer in the stream, once it was decoded."""

    def read(self) -> bool:
        """Takes what one read brings, for `first` to look at; False if there is nothing to read now.

        Raises StoreUnavailable at the end of the stream, ProtocolError at descriptors that no correct daemon sends.
        """
        self._go_on()
        try:
            self._unhandled.reads.extend(
                map(self._sock.recvmsg, (READ_BYTES,), (ANCILLARY_BYTES,), (socket.MSG_CMSG_CLOEXEC,))
            )
        except OSError as error:
            if error.errno is None:  # a signal's handler raised it: TimeoutError, mostly
                raise
            if isinstance(error, BlockingIOError):
                return False
            raise StoreUnavailable(f"the connection to the daemon broke: {error}; {WAY_ON}") from error
        self._go_on()
        return True

    def first(self) -> tuple[int, Answered | ParamStoreError] | None:
        """(request id, its message or error) of the first answer that was not noted as handled; None where the next is not whole.

        Its memory is mapped on return. Raises ProtocolError at a frame that no correct daemon sends; those before it have been
        given out. Raises what `read` raises, where that was interrupted.
        """
        while True:
            self._go_on()
            unhandled = self._unhandled
            body = first_body(unhandled.stream, unhandled.start)
            if body is None:
                if unhandled.fds and unhandled.start == unhandled.end:
                    raise ProtocolError(f"{len(unhandled.fds)} file descriptors came that no message names")
                return None
            answer = decode_answer(body)
            self._first = LENGTH.size + len(body), fd_count(answer)
            if isinstance(answer, Unmap):
                self._segments.ask_back(answer.segments)
            elif isinstance(answer, LeaseSlots):
                self.lease_slots[answer.handle] = answer.slots
            elif isinstance(answer, Failed):
                return answer.id, from_wire(answer.error, answer.message)
            else:
                if not unhandled.taken_in:
                    self._take_in(answer)
                return answer.id, answer
            unhandled.handled.append(None)

    def note_handled(self, forget: Callable[[int, None], object], request_id: int) -> None:
        """Notes that the first answer was handled, and calls `forget(request_id, None)`, a function of C, in the same step."""
        self._unhandled.handled.extend(map(forget, (request_id,), (None,)))

    @property
    def is_behind(self) -> bool:
        """Whether something was read that `first` has not looked at: an interrupt came."""
        unhandled = self._unhandled
        try:
            return bool(unhandled.reads or unhandled.handled) or first_body(unhandled.stream, unhandled.start) is not None
        except ProtocolError:
            return True

    def close(self) -> None:
        """Closes descriptors whose frame never came whole, and drops the rest. Idempotent."""
        unhandled = self._unhandled
        came = [*unhandled.fds, *(fd for read in unhandled.reads for fd in _fds_of(read[1]))]
        self._unhandled = _Unhandled(bytearray(), 0, 0, (), used_fds=deque([*unhandled.used_fds, *came]))
        close_all(self._unhandled.used_fds)

    def _go_on(self) -> None:
        """Takes the first answer off, where it was handled, and joins what was read to the stream."""
        unhandled = self._unhandled
        if unhandled.handled:
            length_bytes, count = self._first
            used_fds = deque([*unhandled.used_fds, *unhandled.fds[:count]])
            self._unhandled = unhandled = _Unhandled(
                unhandled.stream, unhandled.start + length_bytes, unhandled.end, unhandled.fds[count:], unhandled.reads,
                used_fds=used_fds,
            )  # fmt: skip
        if unhandled.used_fds:
            close_all(unhandled.used_fds)
        if not unhandled.reads:
            return
        (data, ancillary, flags, _), *_ = unhandled.reads
        if flags & socket.MSG_CTRUNC:
            raise ProtocolError(f"more than {SEGMENTS_PER_FRAME_MAX} file descriptors came at once, or there is no room here")
        if not data:
            raise StoreUnavailable(f"the daemon went away: it closed the connection; {WAY_ON}")
        stream, start, end = unhandled.stream, unhandled.start, unhandled.end
        if start:  # the rest of one read at most: it begins a stream of its own
            stream, start, end = stream[start:end], 0, end - start
        stream[end:] = data
        fds = (*unhandled.fds, *_fds_of(ancillary)) if ancillary else unhandled.fds
        self._unhandled = _Unhandled(stream, start, end + len(data), fds, taken_in=unhandled.taken_in)

    def _take_in(self, answer: Answered) -> None:
        """Maps the segments that come with the answer, so that its ticket finds the memory there."""
        if isinstance(answer, Done):
            return
        unhandled, (_, count) = self._unhandled, self._first
        if len(unhandled.fds) < count:
            raise ProtocolError(f"a message names {count} new files, {len(unhandled.fds)} file descriptors came with it")
        fds, noted = unhandled.fds[:count], unhandled.taken_in
        if isinstance(answer, Granted):
            self._segments.begin_lease(answer.id, answer.slots, answer.segments, fds, noted=noted)
        elif isinstance(answer, GrantedExtents):
            self._segments.adopt_volumes(answer.volumes, fds, noted=noted)
        elif isinstance(answer, Uploaded):
            self._segments.adopt_upload(answer.segment, answer.length_bytes, *fds, noted=noted)
        elif answer.page_bytes:
            self._segments.adopt_words(answer.page_bytes, *fds, noted=noted)


def fd_count(answer: Answer) -> int:
    """How many file descriptors come with an answer."""
    if isinstance(answer, Granted):
        return len(answer.segments)
    if isinstance(answer, GrantedExtents):
        return len(answer.volumes)
    return int(isinstance(answer, Uploaded) or (isinstance(answer, Lent) and bool(answer.page_bytes)))


def _fds_of(ancillary: Sequence[tuple[int, int, bytes]]) -> list[int]:
    fds = list[int]()
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds += array.array("i", data[: len(data) - len(data) % FD_BYTES])
    return fds
