"""Memory of arenas and upload areas, in the largest pages the machine gives without being changed.

- Shared segments are memfds, sealed before anyone can get the fd: nobody else can ever write, shrink or grow
  them.
- Every segment lies at a 2 MiB-aligned address and is left out of core dumps.
- A segment's memory goes back when it is closed and its last view is gone.
"""

from __future__ import annotations

import fcntl
import logging
import mmap
import os
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from paramstore.config import SEGMENT_ALIGNMENT_BYTES
from paramstore.errors import CapacityError
from paramstore.memory.pages import AlignedMap, limits, map_aligned

F_SEAL_FUTURE_WRITE = 0x10
"""Linux 5.1: a mapping made before the seal can still be written through, new ones cannot."""
MFD_NOEXEC_SEAL = 0x08
"""Flag of Linux 6.3: the memory can never be executed."""
FIXED_SIZE_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
SHARED_SEALS = F_SEAL_FUTURE_WRITE | FIXED_SIZE_SEALS

PROBE_BYTES = 2 * SEGMENT_ALIGNMENT_BYTES
TRANSPARENT_SETTINGS = Path("/sys/kernel/mm/transparent_hugepage")
MAP_HUGETLB_2MB = 0x40000 | 21 << 26
READ_WRITE = mmap.PROT_READ | mmap.PROT_WRITE

log = logging.getLogger(__name__)


class PageKind(StrEnum):
    """The kinds of pages that memory is made of."""

    HUGETLB = "hugetlb"
    """Pages of 2 MiB, out of the pool that the administrator reserved."""
    TRANSPARENT = "transparent"
    """Pages of 2 MiB where the kernel finds them, made when the segment is touched."""
    SMALL = "small"
    """Pages of 4 KiB: reads from disk run at 0.73 of their speed, the first touch at a tenth."""


@dataclass(frozen=True, slots=True)
class PageReport:
    """The result of `probe_pages`. advice: the command that gives huge pages where there are none, else ''."""

    shared: PageKind
    private: PageKind
    advice: str


class Segment:
    """Memory of one arena or upload area; the unit it grows by.

    fd: the memfd's, None for private memory; it stays the segment's, since sending it gives the client one of its own.
    page_kind: the kind asked for; `touch` logs where the kernel gave less.
    """

    def __init__(self, mapping: AlignedMap, *, page_kind: PageKind, fd: int | None) -> None:
        self.length_bytes = mapping.length_bytes
        self.page_kind = page_kind
        self.fd = fd
        self._mapping = mapping
        self._bytes = memoryview(mapping.array).cast("B")

    def view(self, offset_bytes: int, length_bytes: int) -> memoryview:
        """Returns these bytes, writable, without a copy. The view stays valid as long as it lives, even after `close`."""
        assert 0 <= offset_bytes <= offset_bytes + length_bytes <= self.length_bytes
        return self._bytes[offset_bytes : offset_bytes + length_bytes]

    def touch(self) -> None:
        """Makes every page present, huge where `page_kind` says so. To be called on a worker thread before the first use; the GIL
        is free meanwhile. Raises CapacityError when memory runs out."""
        missed_bytes = self._mapping.populate(wants_huge=self.page_kind is PageKind.TRANSPARENT)
        if missed_bytes:
            log.warning(
                "%d of %d bytes of a segment got 4 KiB pages: no free 2 MiB pages; %s",
                missed_bytes,
                self.length_bytes,
                limits(),
            )

    def resident_bytes(self) -> int:
        """Bytes of it that take memory now, by the kernel's count; 0 once it is closed, which may be while a worker counts."""
        fd = self.fd
        if fd is None:
            return self._mapping.resident_bytes()
        try:
            return os.fstat(fd).st_blocks * 512
        except OSError:
            return 0

    def huge_bytes(self) -> int:
        """Bytes of it that transparent huge pages map now. For reports: it takes milliseconds."""
        return self._mapping.huge_bytes()

    def close(self) -> None:
        """Gives the memory back as soon as no view is left. May be called twice; only `resident_bytes` may follow."""
        self._bytes = memoryview(b"")
        self._mapping.drop()
        if self.fd is not None:
            os.close(self.fd)
            self.fd = None


def allocate_shared(length_bytes: int, pages: PageReport) -> Segment:
    """Makes a segment that clients may map but only this process can write. Raises CapacityError."""
    return _allocate_memfd(length_bytes, pages, seals=SHARED_SEALS)


def allocate_upload(length_bytes: int, pages: PageReport) -> Segment:
    """Makes an upload area of fixed size, writable by whoever gets its fd; its pages are not touched. Raises CapacityError.

    It never takes the pool of huge pages: who may write may also punch holes, and reading a hole that the pool cannot fill again
    would be a bus error.
    """
    _check_length(length_bytes)
    page_kind = PageKind.TRANSPARENT if pages.shared is PageKind.HUGETLB else pages.shared
    return _memfd_segment(length_bytes, page_kind, seals=FIXED_SIZE_SEALS)


def allocate_words(length_bytes: int) -> Segment:
    """Makes a segment of a few small pages, present at once, that a client may map and only this process can write. Raises
    CapacityError."""
    segment = _memfd_segment(length_bytes, PageKind.SMALL, seals=SHARED_SEALS)
    segment.touch()
    return segment


def allocate_private(length_bytes: int, pages: PageReport) -> Segment:
    """Makes a segment that this process alone sees; a forked child does not inherit it. Raises CapacityError."""
    _check_length(length_bytes)
    page_kind = pages.private
    if page_kind is PageKind.HUGETLB:
        try:
            return _private_segment(length_bytes, page_kind)
        except CapacityError as error:
            page_kind = PageKind.SMALL
            log.warning("the pool of huge pages has no room, private memory takes %s pages: %s", page_kind, error)
    return _private_segment(length_bytes, page_kind)


def _private_segment(length_bytes: int, page_kind: PageKind) -> Segment:
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    if page_kind is PageKind.HUGETLB:
        flags |= MAP_HUGETLB_2MB
    mapping = map_aligned(length_bytes, protection=READ_WRITE, flags=flags)
    if page_kind is PageKind.TRANSPARENT:
        mapping.advise(mmap.MADV_HUGEPAGE)
    mapping.advise(mmap.MADV_DONTDUMP)
    mapping.advise(mmap.MADV_DONTFORK)
    return Segment(mapping, page_kind=page_kind, fd=None)


def _allocate_memfd(length_bytes: int, pages: PageReport, *, seals: int) -> Segment:
    _check_length(length_bytes)
    page_kind = pages.shared
    if page_kind is PageKind.HUGETLB:
        try:
            return _memfd_segment(length_bytes, page_kind, seals=seals)
        except CapacityError as error:
            page_kind = _shared_kind_without_pool()
            log.warning("the pool of huge pages has no room, shared memory takes %s pages: %s", page_kind, error)
    return _memfd_segment(length_bytes, page_kind, seals=seals)


def _memfd_segment(length_bytes: int, page_kind: PageKind, *, seals: int) -> Segment:
    fd = _create_memfd(page_kind)
    try:
        os.ftruncate(fd, length_bytes)
        mapping = map_aligned(length_bytes, protection=READ_WRITE, flags=mmap.MAP_SHARED, fd=fd)
        # Sealed after mapping, so that this mapping can be written through and no later one can.
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    except BaseException:
        os.close(fd)
        raise
    if page_kind is PageKind.TRANSPARENT:
        mapping.advise(mmap.MADV_HUGEPAGE)
    mapping.advise(mmap.MADV_DONTDUMP)
    return Segment(mapping, page_kind=page_kind, fd=fd)


def _create_memfd(page_kind: PageKind) -> int:
    flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
    if page_kind is PageKind.HUGETLB:
        flags |= os.MFD_HUGETLB | os.MFD_HUGE_2MB
    with suppress(OSError):
        return os.memfd_create("paramstore", flags | MFD_NOEXEC_SEAL)
    try:
        # Kernels before 6.3 do not know the flag; everything else is the same without it.
        return os.memfd_create("paramstore", flags)
    except OSError as error:
        raise CapacityError(f"cannot make shared memory of {page_kind} pages: {error}; {limits()}") from error


def _check_length(length_bytes: int) -> None:
    assert length_bytes > 0
    assert length_bytes % SEGMENT_ALIGNMENT_BYTES == 0


def probe_pages() -> PageReport:
    """Finds out which pages this process gets on this machine now, by taking 4 MiB of each kind. Changes no
    setting.

    Shared memory takes the pool of huge pages where that has room. Private memory leaves the pool to shared memory where
    it can, since the kernel gives transparent huge pages to private memory more readily.
    """
    shared = _shared_kind()
    private = _private_kind()
    return PageReport(shared=shared, private=private, advice=_advice(shared, private))


def _shared_kind() -> PageKind:
    with suppress(CapacityError):
        return _found_kind(_memfd_segment(PROBE_BYTES, PageKind.HUGETLB, seals=SHARED_SEALS))
    return _shared_kind_without_pool()


def _shared_kind_without_pool() -> PageKind:
    return _found_kind(_memfd_segment(PROBE_BYTES, PageKind.TRANSPARENT, seals=SHARED_SEALS))


def _private_kind() -> PageKind:
    kind = _found_kind(_private_segment(PROBE_BYTES, PageKind.TRANSPARENT))
    if kind is PageKind.SMALL:
        with suppress(CapacityError):
            return _found_kind(_private_segment(PROBE_BYTES, PageKind.HUGETLB))
    return kind


def _found_kind(segment: Segment) -> PageKind:
    """Touches `segment` and returns the kind that it is really made of. Closes it."""
    try:
        segment.touch()
        is_huge = segment.page_kind is PageKind.HUGETLB or segment.huge_bytes() >= segment.length_bytes
        return segment.page_kind if is_huge else PageKind.SMALL
    finally:
        segment.close()


def _advice(shared: PageKind, private: PageKind) -> str:
    settings = []
    if shared is PageKind.SMALL:
        settings.append(("advise", TRANSPARENT_SETTINGS / "shmem_enabled"))
    if private is PageKind.SMALL:
        settings.append(("madvise", TRANSPARENT_SETTINGS / "enabled"))
    if settings and not TRANSPARENT_SETTINGS.exists():
        return "sudo sysctl vm.nr_hugepages=$((HOST_BUDGET_BYTES / 2097152))"
    return " && ".join(f"echo {value} | sudo tee {path}" for value, path in settings)
