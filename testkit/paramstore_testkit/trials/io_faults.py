"""Volumes and a catalog that fail at one call of a run, or from it on, in one of four ways; and a disk that loses writes.

A `Script` is shared by all volumes and the catalog of one store: it counts the calls of every site, decides which one fails, and
watches what the store does afterwards. Each kind of fault has a different effect, as harsh as the contract allows:

| kind   | a failed read leaves | a failed write leaves | a failed flush keeps | a failed transaction |
|--------|----------------------|-----------------------|----------------------|----------------------|
| EIO    | garbage              | garbage               | nothing              | did not happen       |
| ENOSPC | the buffer as it was | the range as it was   | nothing              | did not happen       |
| short  | the first half       | the first half        | the first half       | happened             |
| EINTR  | all of the bytes     | all of the bytes      | nothing              | happened             |

What a failed flush did not keep stays readable and is gone after a crash, whatever a later flush says.
"""

from __future__ import annotations

import errno
import mmap
import os
from collections import Counter
from collections.abc import Collection, Sequence
from typing import NamedTuple

from paramstore.errors import CatalogError, VolumeError
from paramstore.storage.catalog.base import Catalog, Change, Contents
from paramstore.storage.format.structures import Superblock, extents_start_bytes
from paramstore.storage.volume.base import ALIGNMENT_BYTES
from paramstore.testing.catalogs import WrappedCatalog
from paramstore.testing.volumes import SECTOR_BYTES, Keep, MemoryVolume, WrappedVolume, page_aligned

KINDS = ("EIO", "ENOSPC", "short", "EINTR")
VOLUME_SITES = ("read", "write", "flush", "grow")
CATALOG_SITES = ("reserve", "apply", "load", "reopen")
SITES = (*VOLUME_SITES, *CATALOG_SITES)
REASONS = {
    **{kind: os.strerror(getattr(errno, kind)) for kind in ("EIO", "ENOSPC", "EINTR")},
    "short": "a short count",
    "zero": "nothing",
}
"""Text in the message of a failure of each kind."""

RECORDS_START_BYTES = extents_start_bytes(Superblock(bytes(16), bytes(16), 0))
"""Offset below which superblock and notes lie: these may be written again after a failed flush, since they are flushed anew."""


class Strike(NamedTuple):
    """Order that the `nth` call of `site` (1 is the first) fails as `kind` says, and with `forever` every later one as well."""

    site: str
    nth: int
    kind: str
    forever: bool = False


class Range(NamedTuple):
    """Bytes of a volume whose write, or the flush after it, failed."""

    volume: int
    start: int
    end: int


class Script:
    """Decides what fails in the run of one store, and records what the store did. Counts from `arm` on.

    failed: ranges that must not be written again before the store is opened anew. reused: messages about writes to them.
    """

    def __init__(self, *strikes: Strike) -> None:
        self.strikes = strikes
        self.is_armed = False
        self.calls: Counter[str] = Counter()
        self.fired: Counter[str] = Counter()
        self.failed: list[Range] = []
        self.reused: list[str] = []

    @property
    def lasting_sites(self) -> set[str]:
        """Sites whose calls keep failing. A file's owner goes on after a short count, so that this is no failure there."""
        return {
            strike.site for strike in self.strikes
            if strike.forever and not (strike.kind == "short" and strike.site in ("preadv", "pwritev"))
        }  # fmt: skip

    def arm(self) -> None:
        self.is_armed = True

    def disarm(self) -> None:
        """Lets everything work again; what failed is not forgotten."""
        self.is_armed = False

    def kind_of_failure(self, site: str) -> str | None:
        """Counts a call of `site`; says how it fails, or None."""
        if not self.is_armed:
            return None
        self.calls[site] += 1
        number = self.calls[site]
        for strike in self.strikes:
            if strike.site == site and (number == strike.nth or (strike.forever and number > strike.nth)):
                self.fired[site] += 1
                return strike.kind
        return None

    def check_fresh(self, volume: int, start: int, end: int) -> None:
        """Records a write into a range that failed before."""
        for old in self.failed:
            if old.volume == volume and start < old.end and old.start < end:
                self.reused.append(f"volume {volume}: bytes {start}..{end} were written after {old} had failed")


class ForgetfulVolume(MemoryVolume):
    """A disk behind a page cache: after a failed flush its pages are clean, yet their contents were never written.

    `lose` is such a flush; what was lost is as before after the next `crash`, unless it was written and flushed again.
    """

    def __init__(self, size_bytes: int, *, index: int = 0) -> None:
        super().__init__(size_bytes, index=index)
        self._lost: dict[int, bytes] = {}
        """Contents of the disk, by page, where the cache pretends to have newer ones."""

    def lose(self, *, kept_share: float) -> list[Range]:
        """Fails a flush: the first `kept_share` of the writes since the last one are durable, the others only look so."""
        kept = int(len(self._unflushed) * kept_share)
        lost = self._unflushed[kept:]
        for write in self._unflushed[:kept]:
            self._forget_loss(write.offset_bytes, len(write.after))
        for write in lost:
            for at in range(0, len(write.before), ALIGNMENT_BYTES):
                self._lost.setdefault(write.offset_bytes + at, write.before[at : at + ALIGNMENT_BYTES])
        self._unflushed.clear()
        return [Range(self.index, write.offset_bytes, write.offset_bytes + len(write.after)) for write in lost]

    def flush(self) -> None:
        for write in self._unflushed:
            self._forget_loss(write.offset_bytes, len(write.after))
        super().flush()

    def _forget_loss(self, offset_bytes: int, length_bytes: int) -> None:
        for page in range(offset_bytes, offset_bytes + length_bytes, ALIGNMENT_BYTES):
            self._lost.pop(page, None)

    def crash(self, keep: Keep = lambda write, sectors: ()) -> None:
        kept: set[int] = set()
        unflushed = self.unflushed

        def watched(number: int, sectors: int) -> Collection[int]:
            chosen = list(keep(number, sectors))
            first = unflushed[number].offset_bytes // SECTOR_BYTES
            kept.update(first + sector for sector in chosen)
            return chosen

        super().crash(watched)
        for page, durable in self._lost.items():
            for at in range(0, ALIGNMENT_BYTES, SECTOR_BYTES):
                if (page + at) // SECTOR_BYTES not in kept:
                    self._bytes[page + at : page + at + SECTOR_BYTES] = durable[at : at + SECTOR_BYTES]
        self._lost.clear()


class DiskImage:
    """Contents of a disk, to be copied often: copies share the pages that they have not written to."""

    def __init__(self, disk: MemoryVolume) -> None:
        self.index = disk.index
        self.size_bytes = disk.size_bytes
        self._descriptor = os.memfd_create("disk")
        os.write(self._descriptor, disk._bytes)

    def copy(self) -> ForgetfulVolume:
        """Makes a disk with these bytes, none of them waiting for a flush."""
        disk = SharingVolume(0, index=self.index)
        disk._bytes = mmap.mmap(self._descriptor, self.size_bytes, flags=mmap.MAP_PRIVATE)  # type: ignore[assignment]
        return disk

    def pages(self) -> list[tuple[int, bytes]]:
        """Lists (offset, bytes) of every page that is not all zeros."""
        zeros = bytes(ALIGNMENT_BYTES)
        pages = ((at, os.pread(self._descriptor, ALIGNMENT_BYTES, at)) for at in range(0, self.size_bytes, ALIGNMENT_BYTES))
        return [(at, page) for at, page in pages if page != zeros]

    def __del__(self) -> None:
        os.close(self._descriptor)


class SharingVolume(ForgetfulVolume):
    """A disk whose bytes are a mapping, until it grows."""

    def grow(self, size_bytes: int) -> None:
        self._bytes = bytearray(self._bytes)
        super().grow(size_bytes)


class ScriptedVolume(WrappedVolume):
    """`disk`, with calls that fail as the script says. Everything else is passed on."""

    def __init__(self, disk: ForgetfulVolume, script: Script) -> None:
        super().__init__(disk)
        self.disk = disk
        self._script = script

    def read(self, offset_bytes: int, into: Sequence[memoryview]) -> None:
        kind = self._script.kind_of_failure("read")
        if kind in (None, "short", "EINTR"):
            self.disk.read(offset_bytes, into)
        if kind == "EIO":
            _spoil(into, from_share=0.0)
        elif kind == "short":
            _spoil(into, from_share=0.5)
        if kind is not None:
            raise self._failure(f"read at offset {offset_bytes}", kind)

    def write(self, offset_bytes: int, data: Sequence[memoryview]) -> None:
        length_bytes = sum(buffer.nbytes for buffer in data)
        self._script.check_fresh(self.index, offset_bytes, offset_bytes + length_bytes)
        kind = self._script.kind_of_failure("write")
        if kind in (None, "EINTR"):
            self.disk.write(offset_bytes, data)
        elif kind in ("EIO", "short"):
            self.disk.write(offset_bytes, [_torn(data, is_garbage=kind == "EIO")])
        if kind is not None:
            self._script.failed.append(Range(self.index, offset_bytes, offset_bytes + length_bytes))
            raise self._failure(f"write at offset {offset_bytes}", kind)

    def flush(self) -> None:
        kind = self._script.kind_of_failure("flush")
        if kind is None:
            self.disk.flush()
            return
        lost = self.disk.lose(kept_share=0.5 if kind == "short" else 0.0)
        self._script.failed += [found for found in lost if found.start >= RECORDS_START_BYTES]
        raise self._failure("flush", kind)

    def grow(self, size_bytes: int) -> None:
        kind = self._script.kind_of_failure("grow")
        if kind is not None:
            raise self._failure(f"growth to {size_bytes} bytes", kind)
        super().grow(size_bytes)

    def _failure(self, what: str, kind: str) -> VolumeError:
        return VolumeError(f"volume {self.index} (scripted): {what} failed: {REASONS[kind]}")


class ScriptedCatalog(WrappedCatalog):
    """`inner`, with calls that fail as the script says. After a failed `apply` it takes nothing until reopened, as LMDB does."""

    def __init__(self, inner: Catalog, script: Script) -> None:
        super().__init__(inner)
        self._script = script
        self._is_panicked = False

    def load(self) -> Contents:
        self._fail_if_due("load")
        return super().load()

    def reserve(self, row_count: int, *, kept_rows: int = 0) -> None:
        self._fail_if_due("reserve")
        super().reserve(row_count, kept_rows=kept_rows)

    def apply(self, change: Change) -> None:
        if self._is_panicked:
            raise CatalogError("catalog (scripted): an earlier transaction failed and its outcome is unknown: reopen")
        kind = self._script.kind_of_failure("apply")
        if kind in (None, "short", "EINTR"):
            super().apply(change)
        if kind is not None:
            self._is_panicked = True
            raise _catalog_failure("apply", kind)

    def reopen(self) -> None:
        self._fail_if_due("reopen")
        self._is_panicked = False
        super().reopen()

    def _fail_if_due(self, site: str) -> None:
        kind = self._script.kind_of_failure(site)
        if kind is not None:
            raise _catalog_failure(site, kind)


def _catalog_failure(site: str, kind: str) -> CatalogError:
    return CatalogError(f"catalog (scripted): {site} failed: {REASONS[kind]}")


def _spoil(buffers: Sequence[memoryview], *, from_share: float) -> None:
    for buffer in buffers:
        start = int(buffer.nbytes * from_share)
        buffer.cast("B")[start:] = b"\xde" * (buffer.nbytes - start)


def _torn(data: Sequence[memoryview], *, is_garbage: bool) -> memoryview:
    """Makes what a failed write leaves: garbage all over, or the first half (in whole pages) of what it was given."""
    whole = b"".join(data)
    if not is_garbage:
        whole = whole[: max(ALIGNMENT_BYTES, len(whole) // 2 // ALIGNMENT_BYTES * ALIGNMENT_BYTES)]
    torn = page_aligned(len(whole))
    torn[:] = b"\xde" * len(whole) if is_garbage else whole
    return torn
