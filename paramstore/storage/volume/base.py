"""The interface of every volume: reads, writes and flushes of aligned byte ranges, called from worker threads.

A volume knows nothing of records. Offsets, lengths and buffers are multiples of `alignment_bytes`; several calls may be
under way at once on disjoint ranges. A call either does all of its work or raises VolumeError, and then the range (of a
read: the buffer) holds garbage and the volume stays usable. Nothing here retries.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from enum import IntEnum
from typing import Protocol, runtime_checkable

from paramstore.core.location import Tier
from paramstore.errors import VolumeError

ALIGNMENT_BYTES = 4096


class Granularity(IntEnum):
    """The step that makes written bytes durable; the numbers are those of the superblock.

    FILE: transfers through the file, and a flush. PAGE: stores into a mapping of an ordinary file, and a flush. CACHE_LINE, BYTE:
    stores into a mapping of persistent memory, durable when `write` returns.
    """

    FILE = 0
    PAGE = 1
    CACHE_LINE = 2
    BYTE = 3

    @property
    def persists_writes(self) -> bool:
        """Whether `write` itself makes its bytes durable; else only `flush` does."""
        return self >= Granularity.CACHE_LINE

    @property
    def label(self) -> str:
        """Its name in `describe` and in the setting `pmem_granularity`."""
        return self.name.lower()


def check_range(offset_bytes: int, buffers: Sequence[memoryview], *, size_bytes: int, place: str) -> int:
    """Checks the range that the buffers cover from `offset_bytes` on, as every volume does; returns its length in bytes.

    An unaligned range is a bug. Raises VolumeError if the range leaves the volume. place: names the volume.
    """
    length_bytes = sum([buffer.nbytes for buffer in buffers])
    is_aligned = (offset_bytes | length_bytes) % ALIGNMENT_BYTES == 0
    assert is_aligned, f"{place}: {length_bytes} bytes at offset {offset_bytes}"
    if not 0 <= offset_bytes <= size_bytes - length_bytes:
        raise VolumeError(
            f"{place}: {length_bytes} bytes at offset {offset_bytes} are outside its {size_bytes} bytes"
        )
    return length_bytes


class Volume(Protocol):
    """A file, block device or PMem region that holds extents."""

    @property
    def index(self) -> int:
        """Number of the volume in its store; what `Extent.volume` names."""
        ...

    @property
    def tier(self) -> Tier:
        """NVME or PMEM."""
        ...

    @property
    def size_bytes(self) -> int:
        """Usable size now; `grow` raises it."""
        ...

    def read(self, offset_bytes: int, into: Sequence[memoryview]) -> None:
        """Fills the buffers, one after the other, from `offset_bytes` on. Raises VolumeError (short reads too)."""
        ...

    def write(self, offset_bytes: int, data: Sequence[memoryview]) -> None:
        """Writes the buffers, one after the other. Durable only after `flush`. Raises VolumeError."""
        ...

    def flush(self) -> None:
        """Makes everything written before the call durable. Raises VolumeError; then nothing since the last
        successful flush may be trusted, and the caller must not call again in the hope that it works."""
        ...

    def grow(self, size_bytes: int) -> None:
        """Makes the volume at least that large, space allocated on the device. Raises VolumeError naming the bytes missing;
        the size is then as before."""
        ...

    def describe(self) -> dict[str, object]:
        """Figures for status and benchmarks: path, mode ("direct", "buffered", "pmem"), why a fallback was taken, sizes; for a
        mapped volume its `granularity`."""
        ...

    def close(self) -> None:
        """Closes the file and the mapping. No other call may follow."""
        ...


@runtime_checkable
class HasFile(Protocol):
    """A volume whose extents a client may read from its file."""

    def open_to_read(self) -> int:
        """Opens the file once more, read-only; whoever calls owns the descriptor. Raises VolumeError."""
        ...


def directory_of(volume: Volume) -> str:
    """The directory of a volume, for messages; "" for one without a path."""
    path = str(volume.describe().get("path", ""))
    return os.path.dirname(os.path.abspath(path)).encode(errors="replace").decode() if path else ""


def granularity_of(volume: Volume) -> Granularity:
    """The granularity that the volume describes itself with; FILE if it gives none."""
    return Granularity[str(volume.describe().get("granularity", Granularity.FILE.label)).upper()]
