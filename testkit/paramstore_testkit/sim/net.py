"""Simulates sockets, client processes and shared memory: what a session sees of its client, without a descriptor of the kernel.

The daemon's own `Server`, `Session` and `Channel` run on these. A frame that a client sends can arrive in parts; what the
daemon sends reaches the client at once, unless the client does not read (`is_reading`): then it waits in the daemon.
Descriptors are numbers that name segments; a closed segment is overwritten, so that whoever still reads it finds out.
"""

from __future__ import annotations

import array
import itertools
import os
import socket
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from paramstore.daemon.peer import PEER_CREDENTIALS
from paramstore_testkit.sim.loop import VirtualLoop

CLOSED_BYTE = 0xDB


class Network:
    """Owner of descriptors: sockets by number. No number is used twice, whatever life of the daemon had it."""

    def __init__(self, loop: VirtualLoop) -> None:
        self.loop = loop
        self._fds = itertools.count(1000)
        self.sockets: dict[int, Any] = {}
        self.frames_read = 0
        """Number of requests that reached the core."""
        loop.watch_sockets(self._can_read)

    def add(self, sock: Any) -> int:
        fd = next(self._fds)
        self.sockets[fd] = sock
        return fd

    def _can_read(self, fd: int) -> bool:
        sock = self.sockets.get(fd)
        return sock is not None and sock.can_read()


class SimProcess:
    """A client process. Those who watch it are told of its end."""

    def __init__(self, loop: VirtualLoop, pid: int) -> None:
        self._loop = loop
        self.pid = pid
        self.is_alive = True
        self._watchers: dict[int, Callable[[], None]] = {}
        self._numbers = itertools.count()

    def watch(self, on_ended: Callable[[], None]) -> int:
        number = next(self._numbers)
        self._watchers[number] = on_ended
        return number

    def unwatch(self, number: int) -> None:
        self._watchers.pop(number, None)

    def kill(self) -> None:
        """Ends the process; its watchers are told in a later turn."""
        self.is_alive = False
        for number in list(self._watchers):
            self._loop.call_soon(self._tell, number)

    def _tell(self, number: int) -> None:
        watcher = self._watchers.pop(number, None)
        if watcher is not None:
            watcher()


class SimSocket:
    """The daemon's end of a connection. The client's end calls `deliver`, `hang_up` and `read_again`; `on_sent(data, fds)` is
    called with what the daemon sent, `on_closed()` when it hangs up."""

    def __init__(self, network: Network, process: SimProcess) -> None:
        self._network = network
        self.process = process
        self._inbox: deque[tuple[bytes, Callable[[], None] | None]] = deque()
        self._is_over = False
        self.is_closed = False
        self.is_reading = True
        self.on_sent: Callable[[memoryview, Sequence[int]], None] = lambda data, fds: None
        self.on_closed: Callable[[], None] = lambda: None
        self.fd = network.add(self)

    # --- the client's side

    def deliver(self, data: bytes, arrived: Callable[[], None] | None) -> None:
        """Delivers `data`, which is read in one piece, after what came before. arrived: called right before the core sees the
        end of a frame; None where none ends."""
        self._inbox.append((data, arrived))
        self._network.loop.tell_readable(self.fd)

    def hang_up(self, tail: bytes = b"") -> None:
        """Hangs up: what has not been read is lost, and nothing comes after `tail`, the beginning of a frame."""
        self._inbox.clear()
        if tail:
            self._inbox.append((tail, None))
        self._is_over = True
        self._network.loop.tell_readable(self.fd)

    def read_again(self) -> None:
        self.is_reading = True
        self._network.loop.tell_writable(self.fd)

    # --- the daemon's side, as of a non-blocking `socket.socket`

    def can_read(self) -> bool:
        return not self.is_closed and (bool(self._inbox) or self._is_over)

    def setblocking(self, flag: bool) -> None:
        """Does nothing: this socket never blocks."""

    def fileno(self) -> int:
        return -1 if self.is_closed else self.fd

    def getsockopt(self, level: int, option: int, length: int) -> bytes:
        assert (level, option) == (socket.SOL_SOCKET, socket.SO_PEERCRED)
        return PEER_CREDENTIALS.pack(self.process.pid, os.getuid(), os.getgid())

    def recv_into(self, buffer: memoryview) -> int:
        if not self._inbox:
            if self._is_over:
                return 0
            raise BlockingIOError
        data, arrived = self._inbox.popleft()
        length = min(len(data), len(buffer))
        if length < len(data):
            self._inbox.appendleft((data[length:], arrived))
        elif arrived is not None:
            self._network.frames_read += 1
            arrived()
        buffer[:length] = data[:length]
        return length

    def send(self, data: memoryview) -> int:
        return self._sent(data, ())

    def sendmsg(self, buffers: Sequence[memoryview], ancillary: Sequence[tuple[int, int, Any]]) -> int:
        fds = array.array("i")
        for _, _, content in ancillary:
            fds.frombytes(bytes(content))
        return self._sent(buffers[0], fds)

    def _sent(self, data: memoryview, fds: Sequence[int]) -> int:
        if self._is_over:
            raise BrokenPipeError
        if not self.is_reading:
            raise BlockingIOError
        self.on_sent(data, fds)
        return len(data)

    def close(self) -> None:
        if not self.is_closed:
            self.is_closed = True
            self._network.sockets.pop(self.fd, None)
            self._network.loop.call_soon(self.on_closed)


class SimListener:
    """The daemon's listening socket."""

    def __init__(self, network: Network) -> None:
        self._network = network
        self._waiting: deque[SimSocket] = deque()
        self.is_closed = False
        self.fd = network.add(self)

    def connect(self, sock: SimSocket) -> None:
        self._waiting.append(sock)
        self._network.loop.tell_readable(self.fd)

    def can_read(self) -> bool:
        return bool(self._waiting)

    def fileno(self) -> int:
        return -1 if self.is_closed else self.fd

    def accept(self) -> tuple[SimSocket, str]:
        if not self._waiting:
            raise BlockingIOError
        return self._waiting.popleft(), ""

    def close(self) -> None:
        self.is_closed = True
        self._network.sockets.pop(self.fd, None)
        for sock in self._waiting:
            sock.close()


class SimPeer:
    """Takes the place of `paramstore.daemon.peer.Peer` for a simulated process."""

    def __init__(self, loop: VirtualLoop, sock: SimSocket, *, on_ended: Callable[[], None]) -> None:
        credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, PEER_CREDENTIALS.size)
        self.pid, self.uid, _ = PEER_CREDENTIALS.unpack(credentials)
        self._process = sock.process
        self._on_ended = on_ended
        self._number: int | None = self._process.watch(self._ended)
        if not self._process.is_alive:
            loop.call_soon(self._process._tell, self._number)

    @property
    def is_watched(self) -> bool:
        return self._number is not None

    def close(self) -> None:
        if self._number is not None:
            self._process.unwatch(self._number)
            self._number = None

    def _ended(self) -> None:
        self._number = None
        self._on_ended()


class SimSegment:
    """Memory with a number as its descriptor. It is overwritten when it is closed."""

    def __init__(self, memory: SimMemory, length_bytes: int) -> None:
        self._memory = memory
        self.length_bytes = length_bytes
        self.fd: int | None = memory.add(self)
        self._view = memoryview(bytearray(length_bytes))
        self.is_closed = False

    def view(self, offset_bytes: int, length_bytes: int) -> memoryview:
        return self._view[offset_bytes : offset_bytes + length_bytes]

    def touch(self) -> None:
        """Does nothing: its pages are there."""

    def resident_bytes(self) -> int:
        return self.length_bytes

    def close(self) -> None:
        assert not self.is_closed, "a segment is closed twice"
        self.is_closed = True
        self._view[:] = bytes([CLOSED_BYTE]) * self.length_bytes
        assert self.fd is not None
        self._memory.segments.pop(self.fd, None)


class SimMemory:
    """Makes segments for every purpose; `segments` holds the open ones by descriptor."""

    def __init__(self) -> None:
        self._fds = itertools.count(1)
        self.segments: dict[int, SimSegment] = {}

    def add(self, segment: SimSegment) -> int:
        fd = next(self._fds)
        self.segments[fd] = segment
        return fd

    def shared(self, length_bytes: int) -> SimSegment:
        return SimSegment(self, length_bytes)

    private = upload = shared

    def describe(self) -> dict[str, object]:
        return {"shared_pages": "simulated", "private_pages": "simulated", "page_advice": ""}
