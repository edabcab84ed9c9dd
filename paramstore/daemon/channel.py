"""One client's socket: frames in, frames out, file descriptors attached to the frame that names them.

Not an asyncio transport: those cannot attach descriptors. Reads with plain `recv`, so descriptors that a client sends are
dropped by the kernel. Output that the client does not read is bounded; beyond it the channel closes.
"""

from __future__ import annotations

import asyncio
import socket
from collections import deque
from collections.abc import Callable, Sequence

from paramstore.errors import ProtocolError
from paramstore.wire.codec import FIRST_FRAME_BYTES_MAX, FrameDecoder, encode
from paramstore.wire.messages import Failed, Message

READ_BYTES = 64 << 10
"""Size of the one buffer that all channels read into: a buffer for each read would be mapped and unmapped each time."""
READS_MAX = 2
"""Most reads of one call: one more than most need, which finds nothing. A turn of the loop has two calls at most: the selector's,
and one that the turn before has left."""
OUTPUT_BYTES_MAX = 64 << 20


_read_buffer = memoryview(bytearray(READ_BYTES))
"""The buffer in use between one read and the decoding of its bytes, both on the loop's thread."""


class Channel:
    """Calls `on_frame(body)` for each frame and `on_end(reason)` once, at the end of the connection."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, sock: socket.socket, *, on_frame: Callable[[bytes], None],
        on_end: Callable[[Exception | None], None],
    ) -> None:  # fmt: skip
        sock.setblocking(False)
        self._loop = loop
        self._socket = sock
        self._on_frame = on_frame
        self._on_end = on_end
        self._decoder = FrameDecoder(FIRST_FRAME_BYTES_MAX)
        self._output: deque[tuple[memoryview, Sequence[int]]] = deque()
        self._output_bytes = 0
        self._is_closed = False
        self._is_due = False
        """Whether a read is to come in the loop's next turn, whatever the socket says. Were there one for each that found more, a
        client that never stops sending would have two reads more in each turn, and the others ever longer ones."""
        loop.add_reader(sock.fileno(), self._readable)

    def raise_limit(self, limit_bytes: int) -> None:
        """Accepts frames up to `limit_bytes` from now on, since the peer is known."""
        self._decoder.limit_bytes = limit_bytes

    def _readable(self) -> None:
        """Reads until nothing is there, the rest in a later turn: of a client that closed and left answers unread uvloop tells
        once, and never again of what there is to read, nor of the end."""
        for number in range(READS_MAX):
            if self._is_closed or not self._read(may_end=number == 0):
                return
        self._read_soon()

    def _read_soon(self) -> None:
        if not self._is_due:
            self._is_due = True
            self._loop.call_soon(self._read_as_due)

    def _read_as_due(self) -> None:
        self._is_due = False
        self._readable()

    def _read(self, *, may_end: bool) -> bool:
        """Takes what one read brings; False where nothing was there, or nothing comes any more. may_end: else the end, which
        follows requests here, is for a later turn, so that what can be answered at once is."""
        try:
            length_bytes = self._socket.recv_into(_read_buffer)
        except (BlockingIOError, InterruptedError):
            return False
        except OSError as error:
            self.close(error)
            return False
        if not length_bytes:
            if may_end:
                self.close(None)
            else:
                self._read_soon()
            return False
        try:
            for body in self._decoder.feed(_read_buffer[:length_bytes]):
                self._on_frame(body)
                if self._is_closed:
                    return False
        except ProtocolError as error:
            self.refuse(error)
        return True

    def refuse(self, error: ProtocolError) -> None:
        """Tells a peer that does not speak the protocol so, as far as it can be told, and disconnects it."""
        self.send(Failed(0, ProtocolError.__name__, str(error)))
        self.close(error)

    def send(self, message: Message, fds: Sequence[int] = ()) -> None:
        """Queues a frame; most leave at once. On a closed channel it is dropped."""
        if self._is_closed:
            return
        frame = memoryview(encode(message))
        if not self._output:
            sent = self._try_send(frame, fds)
            if sent == len(frame):
                return
            frame, fds = frame[sent:], () if sent else fds
            if self._is_closed:
                return
            self._loop.add_writer(self._socket.fileno(), self._writable)
        self._output.append((frame, tuple(fds)))
        self._output_bytes += len(frame)
        if self._output_bytes > OUTPUT_BYTES_MAX:
            self.close(ProtocolError(f"the client does not read: {self._output_bytes} bytes of answers wait"))

    def _try_send(self, frame: memoryview, fds: Sequence[int]) -> int:
        try:
            return socket.send_fds(self._socket, [frame], list(fds)) if fds else self._socket.send(frame)
        except (BlockingIOError, InterruptedError):
            return 0
        except OSError as error:
            self.close(error)
            return 0

    def _writable(self) -> None:
        while self._output:
            frame, fds = self._output[0]
            sent = self._try_send(frame, fds)
            if self._is_closed or not sent:
                return
            self._output_bytes -= sent
            if sent < len(frame):
                self._output[0] = (frame[sent:], ())
                return
            self._output.popleft()
        self._loop.remove_writer(self._socket.fileno())

    def close(self, reason: Exception | None) -> None:
        """Ends the connection. `on_end` is called once, in a later turn of the loop: so a caller that sends to many clients need
        not expect that one of their sessions is taken down meanwhile."""
        if self._is_closed:
            return
        self._is_closed = True
        self._loop.remove_reader(self._socket.fileno())
        self._loop.remove_writer(self._socket.fileno())
        self._socket.close()
        self._output.clear()
        self._loop.call_soon(self._on_end, reason)
