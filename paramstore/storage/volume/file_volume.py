"""A volume in a file: uses O_DIRECT where the file system really supports it, else the page cache.

O_DIRECT is proven, not assumed: the file system is asked (statx), then a page is transferred. The fallback costs half the
speed of a disk, so the log warns of it, `describe` gives the reason, and it can be refused.
"""

from __future__ import annotations

import logging
import mmap
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from paramstore.core.location import Tier
from paramstore.errors import VolumeError
from paramstore.storage.volume.backing_file import BackingFile
from paramstore.storage.volume.base import ALIGNMENT_BYTES
from paramstore.turns import Turns
from paramstore_native.statx import direct_io_alignment

logger = logging.getLogger(__name__)

UNTOLD = "the file system does not tell what O_DIRECT does; some, like tmpfs, take it and use the page cache"
LARGE_READ_BYTES = 1 << 20
LARGE_READS_AT_ONCE = 2
"""Direct reads of a megabyte and more under way at once: the kernel cuts each into as many requests as a disk takes. Others wait
here for their turn, so that a worker that checks what it has read leaves no gap, and the first read ends before the last."""

PROBE = bytes(range(256)) * (ALIGNMENT_BYTES // 256)


class FileVolume:
    """A regular file as a volume. Safe for calls from several threads on disjoint ranges; use `create` or `open`."""

    tier = Tier.NVME

    def __init__(
        self, file: BackingFile, *, index: int, mode: str, reason: str, large_reads: Turns | None = None
    ) -> None:  # fmt: skip
        """large_reads: turns of large reads in mode "direct"; default `LARGE_READS_AT_ONCE`."""
        self.index = index
        self._file = file
        self._mode = mode
        self._reason = reason
        self._large_reads = Turns(LARGE_READS_AT_ONCE) if large_reads is None else large_reads
        self._growing = threading.Lock()

    @classmethod
    def create(cls, path: Path, *, index: int, size_bytes: int, allow_buffered: bool = True) -> FileVolume:
        """Makes a new volume of zeros in the directory `path`, its space allocated and its name durable.

        Raises VolumeError if the file exists, space is missing, or O_DIRECT is refused and `allow_buffered`
        is off; then no file is left behind.
        """
        file = BackingFile.create(path, index=index, size_bytes=size_bytes)
        try:
            return cls._choose_mode(file, index, _write_and_read_back, allow_buffered=allow_buffered)
        except VolumeError:
            file.discard()
            raise

    @classmethod
    def open(cls, path: Path, *, index: int, allow_buffered: bool = True) -> FileVolume:
        """Opens the volume that `create` made in the directory `path`. Raises VolumeError."""
        file = BackingFile.open(path, index=index)
        try:
            return cls._choose_mode(file, index, _read_back, allow_buffered=allow_buffered)
        except VolumeError:
            file.close()
            raise

    @classmethod
    def _choose_mode(
        cls, file: BackingFile, index: int, probe: Callable[[BackingFile], None], *, allow_buffered: bool
    ) -> FileVolume:
        refusal = refusal_of_direct(file, probe)
        if not refusal:
            reason = UNTOLD if direct_io_alignment(file.descriptor) is None else ""
            return cls(file, index=index, mode="direct", reason=reason)
        if not allow_buffered:
            raise VolumeError(f"{file.place}: O_DIRECT is refused: {refusal}; set allow_buffered to use the page cache")
        probe(file)
        logger.warning("%s goes through the page cache: %s", file.place, refusal)
        return cls(file, index=index, mode="buffered", reason=refusal)

    @property
    def size_bytes(self) -> int:
        return self._file.size_bytes

    def read(self, offset_bytes: int, into: Sequence[memoryview]) -> None:
        if self._mode == "direct" and sum(buffer.nbytes for buffer in into) >= LARGE_READ_BYTES:
            with self._large_reads:
                self._file.read(offset_bytes, into)
        else:
            self._file.read(offset_bytes, into)

    def write(self, offset_bytes: int, data: Sequence[memoryview]) -> None:
        self._file.write(offset_bytes, data)

    def flush(self) -> None:
        # O_DIRECT needs this too: it leaves bytes in the drive's cache, and a block's first write changes metadata.
        self._file.sync()

    def grow(self, size_bytes: int) -> None:
        with self._growing:
            self._file.allocate(size_bytes)

    def open_to_read(self) -> int:
        return self._file.open_to_read()

    def describe(self) -> dict[str, object]:
        return {
            "index": self.index,
            "tier": self.tier.value,
            "path": self._file.shown_path,
            "mode": self._mode,
            "reason": self._reason,
            "size_bytes": self.size_bytes,
        }

    def close(self) -> None:
        self._file.close()


def refusal_of_direct(file: BackingFile, probe: Callable[[BackingFile], None]) -> str:
    """Puts `file` in direct mode and returns "", or leaves it buffered and returns why."""
    alignment_bytes = direct_io_alignment(file.descriptor)
    if alignment_bytes == 0:
        return "the file system has no direct I/O for this file"
    if alignment_bytes is not None and alignment_bytes > ALIGNMENT_BYTES:
        return f"direct I/O must be aligned to {alignment_bytes} bytes here, extents are to {ALIGNMENT_BYTES}"
    try:
        file.set_direct(True)
    except OSError as error:
        return f"setting O_DIRECT failed: {error.strerror}"
    try:
        probe(file)
    except VolumeError as error:
        file.set_direct(False)
        return f"a page did not go through with O_DIRECT: {error}"
    return ""


def _write_and_read_back(file: BackingFile) -> None:
    """Proves that transfers work on the first page of a new file, and leaves the page zero. Raises VolumeError."""
    with mmap.mmap(-1, ALIGNMENT_BYTES) as page:
        page[:] = PROBE
        with memoryview(page) as view:
            file.write(0, [view])
            view[:] = bytes(ALIGNMENT_BYTES)
            file.read(0, [view])
            found = bytes(view)
            view[:] = bytes(ALIGNMENT_BYTES)
            file.write(0, [view])
    if found != PROBE:
        raise VolumeError(f"{file.place}: a page written at offset 0 reads back otherwise")


def _read_back(file: BackingFile) -> None:
    """Proves that the first page can be read. Raises VolumeError."""
    with mmap.mmap(-1, ALIGNMENT_BYTES) as page, memoryview(page) as view:
        file.read(0, [view])
