"""Mappings that Python's `mmap` cannot make: at a 2 MiB-aligned address, advised, populated ahead of use.

A mapping is seen through one ctypes array that lies over it. It is unmapped when the last object that keeps the array
alive (a memoryview, a tensor) is gone, never earlier: no view of it can dangle.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import re
import resource
import weakref
from pathlib import Path

from paramstore.config import SEGMENT_ALIGNMENT_BYTES
from paramstore.errors import CapacityError

POPULATE_PIECE_BYTES = 16 << 20
"""Bytes populated in one call. The kernel holds the process's mapping lock meanwhile, so other threads wait for it."""

MADV_POPULATE_WRITE = 23
MADV_COLLAPSE = 25
PROT_NONE = 0
MAP_FIXED = 0x10
MAP_NORESERVE = 0x4000
MAP_FAILED = ctypes.c_void_p(-1).value
RESERVED = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
IS_PRESENT = bytes(value & 1 for value in range(256))
"""Translates mincore's answer for a page: bit 0 says present, the others are reserved."""
HUGE_FACTS = ("AnonHugePages", "ShmemPmdMapped")
MAPPING_LINE = re.compile(r"([0-9a-f]+)-([0-9a-f]+) ")
MEMORY_FACTS = ("MemAvailable", "CommitLimit", "Committed_AS", "HugePages_Free", "Hugepagesize")

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (
    ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64,
)  # fmt: skip
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_libc.mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)


class AlignedMap:
    """One mapping of this process, at a multiple of SEGMENT_ALIGNMENT_BYTES. Made by `map_aligned`."""

    def __init__(self, address: int, length_bytes: int) -> None:
        self.address = address
        self.length_bytes = length_bytes
        self._array: ctypes.Array[ctypes.c_ubyte] | None = _array_at(address, length_bytes)
        self._unmapping = weakref.finalize(self._array, _libc.munmap, address, length_bytes)
        # Tensors may outlive the interpreter's exit handlers; the end of the process unmaps anyway.
        self._unmapping.atexit = False

    @property
    def array(self) -> ctypes.Array[ctypes.c_ubyte]:
        """The whole mapping as a buffer; whatever refers to it keeps the mapping alive."""
        assert self._array is not None, "used after drop"
        return self._array

    @property
    def is_mapped(self) -> bool:
        """Whether anything still keeps the mapping alive."""
        return self._unmapping.alive

    def drop(self) -> None:
        """Gives up this object's reference: the mapping goes when its last view does. May be called twice."""
        self._array = None

    def advise(self, advice: int) -> bool:
        """Calls madvise for the whole mapping; False where the kernel does not know or allow the advice."""
        return _madvise(self.address, self.length_bytes, advice) == 0

    def populate(self, *, wants_huge: bool) -> int:
        """Makes every page present, contents unchanged; the GIL is free meanwhile. Returns for how many bytes the kernel
        had no huge page.

        wants_huge: asks for each 2 MiB by MADV_COLLAPSE (Linux 6.1). That needs no right and no system setting: it gives
        huge pages to memfds even where `shmem_enabled` is `never`, at the price of the first touch of a huge page.
        Before Linux 5.14 each page's first byte is rewritten instead, so there the call must come before the memory's
        first use. Raises CapacityError.
        """
        missed_bytes = 0
        end = self.address + self.length_bytes
        for start in range(self.address, end, POPULATE_PIECE_BYTES):
            piece_bytes = min(POPULATE_PIECE_BYTES, end - start)
            if wants_huge:
                missed_bytes += _collapse(start, piece_bytes)
            _populate(start, piece_bytes)
        return missed_bytes

    def resident_bytes(self) -> int:
        """Bytes present, by mincore: exact even where the kernel merged neighbouring mappings into one entry of
        /proc/self/smaps. For private memory only, since for a memfd it would count what others touched too. 0 once it is
        unmapped, which may be while a worker counts."""
        answer = ctypes.create_string_buffer(self.length_bytes // mmap.PAGESIZE)
        if _libc.mincore(self.address, self.length_bytes, answer):
            if ctypes.get_errno() == errno.ENOMEM:
                return 0
            raise OSError(ctypes.get_errno(), "mincore of a mapping")
        return answer.raw.translate(IS_PRESENT).count(1) * mmap.PAGESIZE

    def huge_bytes(self) -> int:
        """Bytes that transparent huge pages map here, from /proc/self/smaps. For reports only, since it takes milliseconds. Where
        the kernel merged this mapping with neighbours, theirs may be counted, up to its own length."""
        huge_bytes, is_here, end = 0, False, self.address + self.length_bytes
        for line in _read("/proc/self/smaps").splitlines():
            name, _, value = line.partition(":")
            if name in HUGE_FACTS:
                huge_bytes += int(value.split()[0]) * 1024 if is_here else 0
            elif match := MAPPING_LINE.match(line):
                is_here = int(match[1], 16) < end and self.address < int(match[2], 16)
        return min(huge_bytes, self.length_bytes)


def map_aligned(length_bytes: int, *, protection: int, flags: int, fd: int = -1) -> AlignedMap:
    """Makes a new mapping at an aligned address. Raises CapacityError naming the size and the limits in force."""
    reserved_bytes = length_bytes + SEGMENT_ALIGNMENT_BYTES
    reserved = _libc.mmap(None, reserved_bytes, PROT_NONE, RESERVED, -1, 0)
    if reserved == MAP_FAILED:
        raise _out_of_memory(length_bytes, ctypes.get_errno())
    address = -(-reserved // SEGMENT_ALIGNMENT_BYTES) * SEGMENT_ALIGNMENT_BYTES
    mapped = _libc.mmap(address, length_bytes, protection, flags | MAP_FIXED, fd, 0)
    error = ctypes.get_errno()
    for start, end in ((reserved, address), (address + length_bytes, reserved + reserved_bytes)):
        if end > start:
            _libc.munmap(start, end - start)
    if mapped == MAP_FAILED:
        # The failed call may have unmapped the middle already, and another thread may have mapped there: it is left
        # alone. At worst that keeps addresses, never memory.
        raise _out_of_memory(length_bytes, error)
    return AlignedMap(address, length_bytes)


def limits() -> str:
    """Text for messages that lists the limits on memory here, from /proc and getrlimit."""
    lines = (line.partition(":") for line in _read("/proc/meminfo").splitlines())
    facts = [f"{name} {value.strip()}" for name, _, value in lines if name in MEMORY_FACTS]
    facts += [f"vm.{name} {_read(f'/proc/sys/vm/{name}')}" for name in ("overcommit_memory", "max_map_count")]
    address_space = resource.getrlimit(resource.RLIMIT_AS)[0]
    is_bounded = address_space != resource.RLIM_INFINITY
    facts.append(f"RLIMIT_AS {address_space} B" if is_bounded else "RLIMIT_AS unlimited")
    return "limits: " + ", ".join(facts)


def _read(path: str) -> str:
    try:
        return Path(path).read_text(errors="replace").strip()
    except OSError:
        return "unknown"


def _out_of_memory(length_bytes: int, error: int) -> CapacityError:
    return CapacityError(
        f"cannot map {length_bytes} bytes of memory: {os.strerror(error)}; {limits()}; "
        "lower the budgets (host_budget, gradient_budget) or raise the limit"
    )


def _collapse(address: int, length_bytes: int) -> int:
    """Asks for a huge page for each 2 MiB, whose first small page must be present before; returns the bytes for which
    there was none. EINVAL is not counted: it means that the kernel does not know the call."""
    missed_bytes = 0
    for start in range(address, address + length_bytes, SEGMENT_ALIGNMENT_BYTES):
        _madvise(start, mmap.PAGESIZE, MADV_POPULATE_WRITE)
        if _madvise(start, SEGMENT_ALIGNMENT_BYTES, MADV_COLLAPSE) not in (0, errno.EINVAL):
            missed_bytes += SEGMENT_ALIGNMENT_BYTES
    return missed_bytes


def _populate(address: int, length_bytes: int) -> None:
    error = _madvise(address, length_bytes, MADV_POPULATE_WRITE)
    if error == errno.EINVAL:
        first_bytes = memoryview(_array_at(address, length_bytes)).cast("B")[:: mmap.PAGESIZE]
        first_bytes[:] = first_bytes.tobytes()
    elif error:
        raise CapacityError(f"no memory for {length_bytes} more bytes: {os.strerror(error)}; {limits()}")


def _array_at(address: int, length_bytes: int) -> ctypes.Array[ctypes.c_ubyte]:
    return (ctypes.c_ubyte * length_bytes).from_address(address)


def _madvise(address: int, length_bytes: int, advice: int) -> int:
    """Calls madvise; returns 0, or the error number."""
    return ctypes.get_errno() if _libc.madvise(address, length_bytes, advice) else 0
