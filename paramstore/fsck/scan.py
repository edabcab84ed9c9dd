"""Finds every record header on a volume, and says which records are whole.

Headers start on page boundaries with a magic number, for which a whole window of the volume is searched at once. A record whose
every chunk matches is skipped, so that nothing inside it is taken for a header. After a damaged one the search goes on at its next
page, since a newer record may lie on its remains. Pages that cannot be read are reported and passed over: they cost the records
that lie on them and no others.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
from xxhash import xxh3_64_intdigest

from paramstore.core.key import ExpertKey
from paramstore.core.schema import Part
from paramstore.errors import VolumeError
from paramstore.fsck.disks import Disk
from paramstore.fsck.findings import Finding
from paramstore.fsck.reader import PAGE, RECORD_MAGIC, Header, Superblock, header_bytes, parse_header

WINDOW_BYTES = 8 << 20
UNREADABLE_BYTES_MAX = 8 << 20
"""Length of an unreadable range that is no bad spot any more: the device is gone, and trying each of its pages would take days."""
_MAGIC = int.from_bytes(RECORD_MAGIC, "little")

Progress = Callable[[int], None]
"""Function that is told how many more bytes of a volume are done."""


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
        """Sort key that puts records of one key in the order in which they were written."""
        return self.epoch, self.version, self.sequence


def scan(disk: Disk, superblock: Superblock, layouts: Mapping[str, Part], progress: Progress) -> Iterator[Found | Finding]:
    """Finds every record of the superblock's store on `disk`, by offset, and yields a finding for every range that cannot be read.

    layouts: the stored part of each known namespace. Raises VolumeError if the disk gives nothing more.
    """
    end = disk.size_bytes - disk.size_bytes % PAGE
    at = superblock.extents_at
    bad_bytes, reason = 0, ""  # the unreadable range right before `at`
    progress(min(at, disk.size_bytes))
    while at < end:
        try:
            window = _read_some(disk, at, min(PAGE if bad_bytes else WINDOW_BYTES, end - at))
        except VolumeError as error:
            bad_bytes, reason, after = bad_bytes + PAGE, str(error), at + PAGE
            if bad_bytes >= UNREADABLE_BYTES_MAX:
                raise VolumeError(f"nothing more can be read from offset {after - bad_bytes} on: {reason}") from error
        else:
            if bad_bytes:
                yield _unreadable(disk, at, bad_bytes, reason)
                bad_bytes = 0
            after = yield from _records_of(disk, superblock, layouts, window, at)
        progress(after - at)
        at = after
    if bad_bytes:
        yield _unreadable(disk, at, bad_bytes, reason)


def _read_some(disk: Disk, offset: int, length_bytes: int) -> bytes:
    """Reads `length_bytes` from `offset` on, or as many as come at once. Raises VolumeError if not even its page can be read."""
    while True:
        try:
            return disk.read(offset, length_bytes)
        except VolumeError:
            if length_bytes == PAGE:
                raise
            length_bytes = max(PAGE, length_bytes // 2 // PAGE * PAGE)


def _unreadable(disk: Disk, end: int, length_bytes: int, reason: str) -> Finding:
    return Finding(volume=disk.index, offset=end - length_bytes, what=f"{length_bytes} bytes cannot be read: {reason}")


def _records_of(
    disk: Disk, superblock: Superblock, layouts: Mapping[str, Part], window: bytes, at: int
) -> Generator[Found, None, int]:
    """Finds the records that begin in `window`, which lies at `at`. Returns where the search goes on."""
    done = at  # everything before it was searched
    for offset in _pages_with_magic(window, at):
        if offset < done:
            continue
        found = read_record(disk, offset, layouts, store=superblock.store)
        if found is not None:
            yield found
            done = offset + found.record_bytes if found.damage is None else offset + PAGE
    return max(done, at + len(window))


def read_record(disk: Disk, offset: int, layouts: Mapping[str, Part], *, store: bytes) -> Found | None:
    """Reads the record at `offset`; None if no whole header of this store is there, or if it cannot be read."""
    try:
        page = disk.read(offset, PAGE)
        length = header_bytes(page, room_bytes=disk.size_bytes - offset)
        if length == 0:
            return None
        header = parse_header(page if length == PAGE else disk.read(offset, length))
    except VolumeError:
        return None
    if header.store != store:
        return None
    return Found(
        volume=disk.index, offset=offset, record_bytes=header.record_bytes, namespace=header.namespace, key=header.key,
        epoch=header.epoch, version=header.version, sequence=header.sequence, root=header.root,
        damage=_damage(disk, offset, header, layouts.get(header.namespace)),
    )  # fmt: skip


def _damage(disk: Disk, offset: int, header: Header, part: Part | None) -> str | None:
    """Says what is wrong with the record's bytes; None if nothing is."""
    if part is None:
        return "neither a commit note nor a catalog says what its namespace is made of"
    if offset + header.record_bytes > disk.size_bytes:
        return f"it ends beyond the volume's {disk.size_bytes} bytes"
    is_of_schema = (header.record_bytes, header.header_bytes) == (part.image_bytes, part.header_bytes)
    chunks = part.chunks() if is_of_schema else ()  # only then: a schema may claim more chunks than the record has room for
    if len(header.checksums) != len(chunks):
        return f"its header speaks of {header.record_bytes} bytes in {len(header.checksums)} chunks, its schema of others"
    for number, (chunk, checksum) in enumerate(zip(chunks, header.checksums, strict=True)):
        whole_pages = -(-chunk.length_bytes // PAGE) * PAGE
        try:
            data = memoryview(disk.read(offset + chunk.offset_bytes, whole_pages))[: chunk.length_bytes]
        except VolumeError as error:
            return f"chunk {number}, at byte {chunk.offset_bytes} of it, cannot be read: {error}"
        found = xxh3_64_intdigest(data)
        if found != checksum:
            return f"chunk {number}, at byte {chunk.offset_bytes} of it, has checksum {found:016x}, its header says {checksum:016x}"
    return None


def _pages_with_magic(window: bytes, at: int) -> list[int]:
    """Finds the pages of `window`, which lies at `at`, that start with a record's magic. Gives their offsets on the volume."""
    firsts = np.frombuffer(window, dtype="<u8")[:: PAGE // 8]
    return [at + int(page) * PAGE for page in np.flatnonzero(firsts == _MAGIC)]
