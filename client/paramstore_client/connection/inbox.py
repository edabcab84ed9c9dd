"""Puts the bytes and file descriptors that come from the socket together to whole answers.

- Descriptors belong to the frame that names their segments, in order; each one is mapped and closed, or just closed.
- Whatever the daemon sends, the outcome is answers or ProtocolError; the end of the stream is StoreUnavailable.
"""

from __future__ import annotations

import array
import socket
from collections import deque
from collections.abc import Iterable, Iterator

from paramstore.errors import ParamStoreError, ProtocolError, StoreUnavailable, from_wire
from paramstore.wire.codec import FrameDecoder, decode_answer
from paramstore.wire.messages import SEGMENTS_PER_FRAME_MAX, Done, Failed, Granted, LeaseSlots, Lent, Unmap, Uploaded
from paramstore_client.connection.segments import Segments, close_all

READ_BYTES = 64 << 10
"""Most bytes of one read; the answer to 64 keys is a fiftieth of it."""
FD_BYTES = array.array("i").itemsize
WAY_ON = "call store.reconnect(), then open the namespaces again"
"""Advice in errors: how a program goes on after the connection was lost."""
ANCILLARY_BYTES = socket.CMSG_SPACE(SEGMENTS_PER_FRAME_MAX * FD_BYTES)

Answered = Done | Granted | Lent | Uploaded
"""An answer that is no error."""


class Inbox:
    """Owner of the unfinished frame and of descriptors whose frame is unfinished. Used by one thread at a time."""

    def __init__(self, sock: socket.socket, segments: Segments) -> None:
        self.given_up: list[int] = []
        """Segments the daemon asked back since the connection last looked."""
        self.lease_slots: dict[int, int] = {}
        """Slots left to each handle, as a daemon before PROMISE_MINOR tells: there all handles of a namespace share its slots."""
        self._sock = sock
        self._segments = segments
        self._frames = FrameDecoder()
        self._buffer = bytearray(READ_BYTES)
        self._view = memoryview(self._buffer)
        self._length_bytes = 0
        self._fds: deque[int] = deque()

    def read(self) -> bool:
        """Takes what one read brings, for `answers` to go through; False if there is nothing to read now.

        Raises StoreUnavailable at the end of the stream, ProtocolError at descriptors that no correct daemon sends.
        """
        try:
            self._length_bytes, ancillary, flags, _ = self._sock.recvmsg_into(
                (self._buffer,), ANCILLARY_BYTES, socket.MSG_CMSG_CLOEXEC
            )
        except BlockingIOError:
            return False
        except OSError as error:
            raise StoreUnavailable(f"the connection to the daemon broke: {error}; {WAY_ON}") from error
        if ancillary or flags & socket.MSG_CTRUNC:
            self._keep_fds(ancillary, is_cut=bool(flags & socket.MSG_CTRUNC))
        if self._length_bytes == 0:
            raise StoreUnavailable(f"the daemon went away: it closed the connection; {WAY_ON}")
        return True

    def answers(self) -> Iterator[tuple[int, Answered | ParamStoreError]]:
        """(request id, its message or error) of each answer that the last `read` completed, in the order they came.

        Raises ProtocolError at the first frame that no correct daemon sends; those before it have been given out.
        """
        for body in self._frames.feed(self._view[: self._length_bytes]):
            answer = decode_answer(body)
            if isinstance(answer, Unmap):
                self.given_up += answer.segments
            elif isinstance(answer, Failed):
                yield answer.id, from_wire(answer.error, answer.message)
            elif isinstance(answer, LeaseSlots):
                self.lease_slots[answer.handle] = answer.slots
            else:
                self._map_segments(answer)
                yield answer.id, answer
        if self._fds and self._frames.pending_bytes == 0:
            raise ProtocolError(f"{len(self._fds)} file descriptors came that no message names")

    def close(self) -> None:
        """Closes descriptors whose frame never came whole. Idempotent."""
        close_all(self._fds)
        self._fds.clear()

    def _keep_fds(self, ancillary: Iterable[tuple[int, int, bytes]], *, is_cut: bool) -> None:
        for level, kind, data in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                whole = data[: len(data) - len(data) % FD_BYTES]
                self._fds.extend(array.array("i", whole))
        if is_cut:
            raise ProtocolError(f"more than {SEGMENTS_PER_FRAME_MAX} file descriptors came at once, or there is no room here")

    def _map_segments(self, answer: Answered) -> None:
        """Maps the segments that come with the answer, so that its ticket finds the memory there."""
        if isinstance(answer, Granted):
            if answer.segments:
                self._segments.adopt_leased(answer.segments, self._take_fds(len(answer.segments)))
            self._segments.begin_lease(answer.id, answer.slots)
        elif isinstance(answer, Uploaded):
            (fd,) = self._take_fds(1)
            self._segments.adopt_upload(answer.segment, answer.length_bytes, fd)
        elif isinstance(answer, Lent) and answer.page_bytes:
            (fd,) = self._take_fds(1)
            self._segments.adopt_words(answer.page_bytes, fd)

    def _take_fds(self, count: int) -> list[int]:
        if len(self._fds) < count:
            raise ProtocolError(f"a message names {count} new segments, {len(self._fds)} file descriptors came with it")
        return [self._fds.popleft() for _ in range(count)]

