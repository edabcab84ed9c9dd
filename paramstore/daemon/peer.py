"""The process at the other end of a socket, as the kernel names it: its ids, and the moment it ends.

A client cannot lie about these. The end is that of the process that connected, never of a later one with the same number.
"""

from __future__ import annotations

import asyncio
import errno
import os
import select
import socket
import struct
from collections.abc import Callable

PEER_CREDENTIALS = struct.Struct("3i")
OUT_OF_DESCRIPTORS = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)
SO_PEERPIDFD = 77
"""Socket option of Linux 6.5 that opens the very process that connected, whoever has its number by now."""


class Peer:
    """Watches the process for its end, through a descriptor that it owns. on_ended: called once, unless closed before."""

    def __init__(self, loop: asyncio.AbstractEventLoop, sock: socket.socket, *, on_ended: Callable[[], None]) -> None:
        credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, PEER_CREDENTIALS.size)
        self.pid: int
        self.uid: int
        self.pid, self.uid, _ = PEER_CREDENTIALS.unpack(credentials)
        self._loop = loop
        self._on_ended = on_ended
        self._descriptor = _open_process(sock, self.pid)
        if self._descriptor is not None:
            loop.add_reader(self._descriptor, self._ended)

    @property
    def is_watched(self) -> bool:
        """Whether `on_ended` will be called when the process ends."""
        return self._descriptor is not None

    def close(self) -> None:
        """Stops watching the process. Idempotent."""
        if self._descriptor is not None:
            self._loop.remove_reader(self._descriptor)
            os.close(self._descriptor)
            self._descriptor = None

    def _ended(self) -> None:
        self.close()
        self._on_ended()


def _open_process(sock: socket.socket, pid: int) -> int | None:
    """Opens a descriptor of the process that connected; None if it is gone. Raises OSError where no descriptor is left: a process
    that lives must not be served unwatched, since its leases would end with the connection."""
    try:
        return sock.getsockopt(socket.SOL_SOCKET, SO_PEERPIDFD)
    except OSError as error:
        if error.errno in OUT_OF_DESCRIPTORS:
            raise
        if error.errno != errno.ENOPROTOOPT:
            return None  # the kernel knows the option, so it is the process that is gone
    try:
        descriptor = os.pidfd_open(pid)
    except OSError as error:
        if error.errno in OUT_OF_DESCRIPTORS:
            raise
        return None
    if _is_hung_up(sock):
        # The process that connected may have ended before the call, and another may have its number now.
        os.close(descriptor)
        return None
    return descriptor


def _is_hung_up(sock: socket.socket) -> bool:
    poll = select.poll()
    poll.register(sock, select.POLLRDHUP)
    return bool(poll.poll(0))
