"""The process at the other end of a socket, as the kernel names it: its ids, and the moment it ends.

A client cannot lie about these. The end is that of the very process that connected, never of a later one with its number.
"""

from __future__ import annotations

import asyncio
import os
import socket
import struct
from collections.abc import Callable

PEER_CREDENTIALS = struct.Struct("3i")


class Peer:
    """Owner of a descriptor that becomes readable when the process ends. on_ended: called once, unless closed before."""

    def __init__(self, loop: asyncio.AbstractEventLoop, sock: socket.socket, *, on_ended: Callable[[], None]) -> None:
        credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, PEER_CREDENTIALS.size)
        self.pid: int
        self.uid: int
        self.pid, self.uid, _ = PEER_CREDENTIALS.unpack(credentials)
        self._loop = loop
        self._on_ended = on_ended
        self._descriptor = _open_process(self.pid)
        if self._descriptor is not None:
            loop.add_reader(self._descriptor, self._ended)

    @property
    def is_watched(self) -> bool:
        """Whether its end will be told."""
        return self._descriptor is not None

    def close(self) -> None:
        """Its end matters no more. Idempotent."""
        if self._descriptor is not None:
            self._loop.remove_reader(self._descriptor)
            os.close(self._descriptor)
            self._descriptor = None

    def _ended(self) -> None:
        self.close()
        self._on_ended()


def _open_process(pid: int) -> int | None:
    """A descriptor of the process; None where there is none to be had."""
    try:
        return os.pidfd_open(pid)
    except OSError:
        return None
