"""Volumes and memory of any size that take room only for what is not zero: records of gigabytes, tested in megabytes.

A zero page is not kept. A read that finds zeros writes nothing into memory that is zero already, so that pages which nobody
ever touched stay so. `HoleSegment` is such memory: private, and read as zeros without taking any.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence

from paramstore.core.location import Tier
from paramstore.core.schema import round_up
from paramstore.errors import VolumeError
from paramstore.storage.volume.base import ALIGNMENT_BYTES, check_range
from paramstore_testkit.disks.machine import PlainSegment

BLOCK_BYTES = 256 << 10
"""Size of the blocks that are compared with zeros."""
MAP_NORESERVE = 0x4000
"""Flag of mmap in the kernel's headers, for which Python has no name."""
_ZEROS = bytes(BLOCK_BYTES)


class SparseVolume:
    """Owner of its pages. A write is there at once; nothing is ever lost."""

    tier = Tier.NVME

    def __init__(self, size_bytes: int, *, index: int = 0) -> None:
        self.index = index
        self.size_bytes = size_bytes
        self.pages: dict[int, bytes] = {}
        """Pages that are not zero, by offset."""

    def read(self, offset_bytes: int, into: Sequence[memoryview]) -> None:
        check_range(offset_bytes, into, size_bytes=self.size_bytes, place=self._place)
        for buffer in into:
            view = buffer.cast("B")
            clear(view)
            for at in range(offset_bytes, offset_bytes + view.nbytes, ALIGNMENT_BYTES) if self.pages else ():
                page = self.pages.get(at)
                if page is not None:
                    view[at - offset_bytes : at - offset_bytes + ALIGNMENT_BYTES] = page
            offset_bytes += view.nbytes

    def write(self, offset_bytes: int, data: Sequence[memoryview]) -> None:
        check_range(offset_bytes, data, size_bytes=self.size_bytes, place=self._place)
        for buffer in data:
            for at in range(offset_bytes, offset_bytes + buffer.nbytes, ALIGNMENT_BYTES) if self.pages else ():
                self.pages.pop(at, None)
            for start, block in _blocks(buffer.cast("B")):
                if not _is_zero(block):
                    self._keep(offset_bytes + start, block)
            offset_bytes += buffer.nbytes

    def _keep(self, offset_bytes: int, block: memoryview) -> None:
        for at in range(0, block.nbytes, ALIGNMENT_BYTES):
            page = block[at : at + ALIGNMENT_BYTES]
            if not _is_zero(page):
                self.pages[offset_bytes + at] = bytes(page)

    def flush(self) -> None:
        """Does nothing: nothing is ever lost."""

    def grow(self, size_bytes: int) -> None:
        if size_bytes > 1 << 62:
            raise VolumeError(f"{self._place}: cannot grow to {size_bytes} bytes")
        self.size_bytes = max(self.size_bytes, round_up(size_bytes, ALIGNMENT_BYTES))

    def describe(self) -> dict[str, object]:
        return {
            "index": self.index, "tier": self.tier.value, "path": "", "mode": "sparse", "reason": "", "size_bytes": self.size_bytes,
        }  # fmt: skip

    def close(self) -> None:
        """Does nothing: the pages stay."""

    def corrupt(self, offset_bytes: int) -> None:
        """Flips a bit of one byte, behind everybody's back."""
        at, within = offset_bytes // ALIGNMENT_BYTES * ALIGNMENT_BYTES, offset_bytes % ALIGNMENT_BYTES
        page = bytearray(self.pages.get(at, bytes(ALIGNMENT_BYTES)))
        page[within] ^= 1
        self.pages[at] = bytes(page)

    @property
    def _place(self) -> str:
        return f"volume {self.index} (sparse)"


class HoleSegment(PlainSegment):
    """Private memory of this process that takes room only where somebody wrote."""

    def __init__(self, length_bytes: int) -> None:
        self.length_bytes, self.fd = length_bytes, None
        mapping = mmap.mmap(-1, length_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE)
        mapping.madvise(mmap.MADV_HUGEPAGE)  # then all zeros are one page, mapped 2 MiB at a time
        self._memory = memoryview(mapping)

    def resident_bytes(self) -> int:
        return 0


def clear(view: memoryview) -> None:
    """Fills with zeros; writes nothing where they are."""
    for _, block in _blocks(view):
        if not _is_zero(block):
            block[:] = _ZEROS[: block.nbytes]


def copy(source: memoryview, target: memoryview) -> None:
    """Does `target[:] = source`, but writes nothing where zeros meet zeros."""
    for start, block in _blocks(source):
        under = target[start : start + block.nbytes]
        if not _is_zero(block) or not _is_zero(under):
            under[:] = block


def _blocks(view: memoryview) -> list[tuple[int, memoryview]]:
    return [(start, view[start : start + BLOCK_BYTES]) for start in range(0, view.nbytes, BLOCK_BYTES)]


def _is_zero(view: memoryview) -> bool:
    return bytes(view) == _ZEROS[: view.nbytes]  # two `bytes` are compared ten times as fast as views
