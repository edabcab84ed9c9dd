"""Finds every record header on a volume, and says which of the records are whole.

Headers start on pages, with a magic: a window of the volume is looked through at once. A record whose every chunk matches is
skipped over, so that nothing inside it is taken for a header; behind a damaged one the search goes on at its next page, since
a newer record may lie on its remains.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
from xxhash import xxh3_64_intdigest

from paramstore.core.key import ExpertKey
from paramstore.core.schema import Part
from paramstore.errors import CorruptRecord
from paramstore.fsck.disks import Disk
from paramstore.fsck.reader import PAGE, RECORD_MAGIC, Header, Superblock, header_bytes, parse_header

WINDOW_BYTES = 8 << 20
_MAGIC = int.from_bytes(RECORD_MAGIC, "little")

Progress = Callable[[int], None]
"""Told how many more bytes of a volume are done with."""


@dataclass(frozen=True, slots=True)
class Found:
    """A record whose header is whole. damage: what is wrong with its bytes; None if they are as the header says."""

    volume: int
    offset: int
    record_bytes: int
    namespace: str
    key: ExpertKey
    epoch: int
    version: int
    sequence: int
    root: int
    damage: str | None

    @property
    def age(self) -> tuple[int, int, int]:
        """Records of one key in the order in which they were written."""
        return self.epoch, self.version, self.sequence


def scan(disk: Disk, superblock: Superblock, layouts: Mapping[str, Part], progress: Progress) -> Iterator[Found]:
    """Every record of the superblock's store on `disk`, by offset. layouts: the stored part of each namespace that is known.

    Raises VolumeError if the disk cannot be read.
    """
    end = disk.size_bytes - disk.size_bytes % PAGE
    at = superblock.extents_at
    progress(min(at, disk.size_bytes))
    while at < end:
        window = disk.read(at, min(WINDOW_BYTES, end - at))
        done = at  # everything before it is looked through
        for offset in _pages_with_magic(window, at):
            if offset < done:
                continue
            found = read_record(disk, offset, layouts, store=superblock.store)
            if found is not None:
                yield found
                done = offset + found.record_bytes if found.damage is None else offset + PAGE
        after = max(done, at + len(window))
        progress(after - at)
        at = after


def read_record(disk: Disk, offset: int, layouts: Mapping[str, Part], *, store: bytes) -> Found | None:
    """The record at `offset`; None if no whole header of this store is there. Raises VolumeError if the disk cannot be read."""
    if offset + PAGE > disk.size_bytes:
        return None
    page = disk.read(offset, PAGE)
    length = header_bytes(page)
    if not 0 < length <= disk.size_bytes - offset:
        return None
    try:
        header = parse_header(page if length == PAGE else disk.read(offset, length))
    except CorruptRecord:
        return None
    if header.store != store:
        return None
    return Found(
        volume=disk.index, offset=offset, record_bytes=header.record_bytes, namespace=header.namespace, key=header.key,
        epoch=header.epoch, version=header.version, sequence=header.sequence, root=header.root,
        damage=_damage(disk, offset, header, layouts.get(header.namespace)),
    )  # fmt: skip


def _damage(disk: Disk, offset: int, header: Header, part: Part | None) -> str | None:
    """What is wrong with the record's bytes; None if nothing is."""
    if part is None:
        return "no commit note says what its namespace is made of"
    chunks = part.chunks()
    if (header.record_bytes, header.header_bytes, len(header.checksums)) != (part.image_bytes, part.header_bytes, len(chunks)):
        return f"its header speaks of {header.record_bytes} bytes in {len(header.checksums)} chunks, its schema of others"
    if offset + header.record_bytes > disk.size_bytes:
        return f"it ends beyond the volume's {disk.size_bytes} bytes"
    for number, (chunk, checksum) in enumerate(zip(chunks, header.checksums, strict=True)):
        whole_pages = -(-chunk.length_bytes // PAGE) * PAGE
        data = memoryview(disk.read(offset + chunk.offset_bytes, whole_pages))[: chunk.length_bytes]
        found = xxh3_64_intdigest(data)
        if found != checksum:
            return f"chunk {number}, at byte {chunk.offset_bytes} of it, has checksum {found:016x}, its header says {checksum:016x}"
    return None


def _pages_with_magic(window: bytes, at: int) -> list[int]:
    """Offsets on the volume of the pages of `window`, which lies at `at`, that start with a record's magic."""
    firsts = np.frombuffer(window, dtype="<u8")[:: PAGE // 8]
    return [at + int(page) * PAGE for page in np.flatnonzero(firsts == _MAGIC)]
