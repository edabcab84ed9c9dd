"""A client that was given a descriptor of leased memory cannot change a byte of it, nor its size, by any call there is.

`tests/memory/test_arena.py` has the seals as they are made; here is what a client has in its hands, and what the daemon has
after.
"""

from __future__ import annotations

import asyncio
import ctypes
import fcntl
import hashlib
import mmap
import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass

import pytest

import paramstore_client as ps
from paramstore.wire import messages as m
from paramstore_testkit.processes.daemon_process import DaemonProcess
from paramstore_testkit.wire.raw_client import RawClient

pytestmark = pytest.mark.slow

NAME = "moe"
PUNCH_HOLE = 0x02 | 0x01
COLLAPSE, ZERO, INSERT = 0x08, 0x10 | 0x01, 0x20
READ_WRITE = mmap.PROT_READ | mmap.PROT_WRITE
LINE = b"x" * 4096
F_SEAL_EXEC = 0x20


@dataclass(frozen=True, slots=True)
class Held:
    """What a client holds of a lease: the descriptor as it came, its length, and a mapping as the daemon wants it."""

    fd: int
    length_bytes: int
    mapping: mmap.mmap

    def digest(self) -> str:
        return hashlib.sha256(self.mapping).hexdigest()


@pytest.fixture
def held(served: DaemonProcess, clients: list[RawClient]) -> Iterator[Held]:
    async def lease(client: RawClient) -> m.Granted:
        await client.hello()
        opened = await client.request(m.OpenNamespace, NAME, "read")
        granted: m.Granted = await client.request(m.Acquire, opened["handle"], [(0, 0)], "param", 5.0)
        return granted

    clients.append(RawClient.connect(served.socket))
    ((_, length_bytes),) = asyncio.run(lease(clients[0])).segments
    with mmap.mmap(clients[0].fds[0], length_bytes, prot=mmap.PROT_READ) as mapping:
        yield Held(clients[0].fds[0], length_bytes, mapping)


def fallocate(fd: int, mode: int, offset_bytes: int, length_bytes: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    arguments = ctypes.c_int(mode), ctypes.c_long(offset_bytes), ctypes.c_long(length_bytes)
    if libc.fallocate(fd, *arguments) != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def reopened(held: Held, flags: int) -> int:
    return os.open(f"/proc/self/fd/{held.fd}", flags)


def change_protection(held: Held) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
    address = libc.mmap(None, held.length_bytes, mmap.PROT_READ, mmap.MAP_SHARED, held.fd, 0)
    try:
        if libc.mprotect(ctypes.c_void_p(address), ctypes.c_size_t(4096), READ_WRITE) != 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    finally:
        libc.munmap(ctypes.c_void_p(address), ctypes.c_size_t(held.length_bytes))


def map_reopened(held: Held) -> None:
    fd = reopened(held, os.O_RDWR)
    try:
        mmap.mmap(fd, held.length_bytes)
    finally:
        os.close(fd)


def write_reopened(held: Held) -> None:
    fd = reopened(held, os.O_RDWR)
    try:
        os.write(fd, LINE)
    finally:
        os.close(fd)


ATTEMPTS: dict[str, Callable[[Held], object]] = {
    "map for writing": lambda held: mmap.mmap(held.fd, held.length_bytes),
    "make a mapping writable": change_protection,
    "write": lambda held: os.pwrite(held.fd, LINE, 0),
    "append": lambda held: os.pwrite(held.fd, LINE, held.length_bytes),
    "truncate": lambda held: os.ftruncate(held.fd, 0),
    "truncate a page": lambda held: os.ftruncate(held.fd, held.length_bytes - 4096),
    "extend": lambda held: os.ftruncate(held.fd, 2 * held.length_bytes),
    "punch a hole": lambda held: fallocate(held.fd, PUNCH_HOLE, 0, 4096),
    "zero": lambda held: fallocate(held.fd, ZERO, 0, 4096),
    "collapse": lambda held: fallocate(held.fd, COLLAPSE, 0, 4096),
    "insert": lambda held: fallocate(held.fd, INSERT, 0, 4096),
    "allocate more": lambda held: fallocate(held.fd, 0, held.length_bytes, 4096),
    "reopen and map": map_reopened,
    "reopen and write": write_reopened,
    "reopen and cut": lambda held: os.close(reopened(held, os.O_RDWR | os.O_TRUNC)),
    "seal against the daemon": lambda held: fcntl.fcntl(held.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE),
}


@pytest.mark.parametrize("attempt", ATTEMPTS.values(), ids=ATTEMPTS)
def test_nothing_changes_leased_memory(attempt: Callable[[Held], object], held: Held, served: DaemonProcess) -> None:
    before = held.digest()
    with pytest.raises(OSError, match=r"Operation not permitted|Permission denied|Operation not supported"):
        attempt(held)
    assert held.digest() == before
    assert os.fstat(held.fd).st_size == held.length_bytes
    with ps.connect(served.address) as store, store.open_namespace(NAME) as reader, reader.acquire([(0, 0)]) as lease:
        assert lease[0, 0]["w"].unique().tolist() == [1.0]  # what the daemon gives to others


def test_the_seals_are_those_that_the_protocol_names(held: Held) -> None:
    wanted = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | 0x10
    found = fcntl.fcntl(held.fd, fcntl.F_GET_SEALS)
    assert found & ~F_SEAL_EXEC == wanted


def test_what_a_client_leases_cannot_be_executed(held: Held) -> None:
    if not fcntl.fcntl(held.fd, fcntl.F_GET_SEALS) & F_SEAL_EXEC:
        pytest.skip("this kernel, before 6.3, has no seal against it")
    with pytest.raises(PermissionError):
        os.fchmod(held.fd, 0o777)


def test_unsealed_memory_is_changed_by_these_attempts() -> None:
    """Else their failures would prove nothing."""
    changed = set()
    for name, attempt in ATTEMPTS.items():
        fd = os.memfd_create("paramstore", os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, 1 << 20)
            with mmap.mmap(fd, 1 << 20, prot=mmap.PROT_READ) as mapping, suppress(OSError):
                attempt(Held(fd, 1 << 20, mapping))
                changed.add(name)
        finally:
            os.close(fd)
    unknown_to_memory = {"collapse", "insert", "zero"}  # modes of fallocate that memory files may learn one day
    busy = {"seal against the daemon"}  # while it is mapped
    assert set(ATTEMPTS) - changed <= unknown_to_memory | busy
