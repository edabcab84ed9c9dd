"""The process at the other end: who it is by the kernel's word, and its end, told once."""

from __future__ import annotations

import asyncio
import errno
import os
import resource
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from paramstore.daemon import peer as peer_module
from paramstore.daemon.peer import Peer

CONNECT = "import socket, sys; s = socket.socket(socket.AF_UNIX); s.connect(sys.argv[1]); sys.stdin.read()"
LIMIT_S = 20.0


def test_a_process_is_named_and_its_end_told_once(tmp_path: Path) -> None:
    async def scenario() -> None:
        loop, ended = asyncio.get_running_loop(), asyncio.Event()
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(tmp_path / "s"))
            listener.listen()
            listener.setblocking(False)
            process = subprocess.Popen(  # noqa: ASYNC220 - does not wait
                [sys.executable, "-S", "-c", CONNECT, str(tmp_path / "s")], stdin=subprocess.PIPE
            )
            with process:
                accepted, _ = await loop.sock_accept(listener)
                with accepted:
                    peer = Peer(loop, accepted, on_ended=ended.set)
                    assert (peer.pid, peer.uid, peer.is_watched) == (process.pid, os.getuid(), True)
                    process.kill()
                    await ended.wait()
                    assert not peer.is_watched
                    peer.close()

    asyncio.run(asyncio.wait_for(scenario(), LIMIT_S))


def test_a_closed_peer_keeps_no_descriptor() -> None:
    async def scenario() -> None:
        ours, theirs = socket.socketpair()
        with ours, theirs:
            before = len(os.listdir("/proc/self/fd"))
            peer = Peer(asyncio.get_running_loop(), ours, on_ended=pytest.fail)
            peer.close()
            peer.close()
            assert len(os.listdir("/proc/self/fd")) == before

    asyncio.run(scenario())


class OldKernel:
    """A socket of a kernel before 6.5, which does not name the process that connected by a descriptor."""

    def __init__(self, inner: socket.socket, number: int = errno.ENOPROTOOPT) -> None:
        self.inner = inner
        self.number = number

    def getsockopt(self, level: int, option: int, *size: int) -> object:
        if option == peer_module.SO_PEERPIDFD:
            raise OSError(self.number, os.strerror(self.number))
        return self.inner.getsockopt(level, option, *size)

    def fileno(self) -> int:
        return self.inner.fileno()


def peer_of(sock: OldKernel) -> Peer:
    return Peer(asyncio.get_running_loop(), sock, on_ended=pytest.fail)  # type: ignore[arg-type]


def test_an_older_kernel_is_asked_by_the_number() -> None:
    async def scenario() -> None:
        ours, theirs = socket.socketpair()
        with ours, theirs:
            peer = peer_of(OldKernel(ours))
            assert peer.is_watched
            peer.close()

    asyncio.run(scenario())


def test_a_number_is_not_trusted_once_the_connection_is_gone() -> None:
    async def scenario() -> None:
        ours, theirs = socket.socketpair()
        with ours:
            theirs.close()
            before = len(os.listdir("/proc/self/fd"))
            assert not peer_of(OldKernel(ours)).is_watched
            assert len(os.listdir("/proc/self/fd")) == before

    asyncio.run(scenario())


def test_a_process_that_is_gone_is_not_looked_for_by_its_number() -> None:
    async def scenario() -> None:
        ours, theirs = socket.socketpair()
        with ours, theirs:
            assert not peer_of(OldKernel(ours, errno.ESRCH)).is_watched

    asyncio.run(scenario())


def test_a_process_that_cannot_be_watched_is_known_to_be_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(pid: int) -> int:
        raise ProcessLookupError

    monkeypatch.setattr(peer_module.os, "pidfd_open", refuse)

    async def scenario() -> None:
        ours, theirs = socket.socketpair()
        with ours, theirs:
            assert not peer_of(OldKernel(ours)).is_watched

    asyncio.run(scenario())


def test_a_process_is_not_taken_for_gone_because_no_descriptor_is_left() -> None:
    async def scenario() -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX)
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        taken = []
        with ours, theirs:
            resource.setrlimit(resource.RLIMIT_NOFILE, (theirs.fileno() + 16, hard))
            try:
                while True:
                    try:
                        taken.append(os.dup(0))
                    except OSError:
                        break
                with pytest.raises(OSError, match="Too many open files"):
                    Peer(asyncio.get_running_loop(), ours, on_ended=lambda: None)
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
                for descriptor in taken:
                    os.close(descriptor)

    asyncio.run(scenario())
