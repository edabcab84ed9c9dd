"""Segments and upload areas as a client sees them. Imports no torch.

A mapping is made only of memory that cannot shrink under the client (which would be a bus error) and, where it is
read-only, that nobody but the daemon can write. It lives as long as any tensor made from it.
"""

from __future__ import annotations

import fcntl
import mmap
import os

from paramstore.errors import ProtocolError
from paramstore.memory.arena import F_SEAL_FUTURE_WRITE
from paramstore.memory.pages import map_aligned


class Mapping:
    """One segment or upload area, mapped into this process.

    fd: the memfd as received. It stays the caller's, who closes it: the mapping outlives it.
    is_writable: True only for the session's own upload area.
    Raises ProtocolError if the fd is not what a daemon sends, CapacityError if it cannot be mapped.
    """

    def __init__(self, fd: int, length_bytes: int, *, is_writable: bool) -> None:
        _check(fd, length_bytes, is_writable=is_writable)
        protection = mmap.PROT_READ | (mmap.PROT_WRITE if is_writable else 0)
        self._mapping = map_aligned(length_bytes, protection=protection, flags=mmap.MAP_SHARED, fd=fd)
        # Neither is needed to be correct: a kernel without them maps small pages, or a child inherits the mapping.
        self._mapping.advise(mmap.MADV_HUGEPAGE)
        self._mapping.advise(mmap.MADV_DONTFORK)
        self.length_bytes = length_bytes
        self.is_writable = is_writable

    @property
    def address(self) -> int:
        """Its address in this process: a multiple of 2 MiB."""
        return self._mapping.address

    @property
    def buffer(self) -> object:
        """The whole mapping, for `torch.frombuffer` and `memoryview(...).cast("B")`: both keep it alive.

        It calls itself writable so that torch takes it without a warning; a write into a read-only mapping is a memory
        fault, on purpose. Must not be asked for after `close`.
        """
        return self._mapping.array

    @property
    def is_mapped(self) -> bool:
        """Whether it is still mapped. False once it was closed and the last tensor made from it is gone: the memory is free."""
        return self._mapping.is_mapped

    def touch(self) -> None:
        """Populates a writable mapping ahead of use, in huge pages where the kernel has them; otherwise the first write to
        each 4 KiB would be a page fault. Raises CapacityError."""
        assert self.is_writable
        self._mapping.populate(wants_huge=True)

    def close(self) -> None:
        """Gives up this object's reference to the mapping. May be called twice."""
        self._mapping.drop()


def _check(fd: int, length_bytes: int, *, is_writable: bool) -> None:
    wanted = fcntl.F_SEAL_SHRINK | (0 if is_writable else F_SEAL_FUTURE_WRITE)
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError as error:
        if error.errno is None:  # a signal's handler raised it: TimeoutError, mostly
            raise
        raise ProtocolError(f"the daemon sent fd {fd} that is no memfd: {error}") from error
    if seals & wanted != wanted:
        raise ProtocolError(f"the daemon sent a memfd with seals {seals:#x}; {wanted:#x} are needed to map it safely")
    size_bytes = os.fstat(fd).st_size
    if size_bytes != length_bytes:
        raise ProtocolError(f"the daemon sent a memfd of {size_bytes} bytes and called it {length_bytes}")
