"""Writes superblocks and commit notes to every copy on a volume, and reads them from the first copy that is whole.

Runs on worker threads. Only `format_volume` and `copy_notes` flush. Buffers are page-aligned (anonymous maps), as direct
I/O needs them.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from paramstore.core.schema import PAGE_BYTES
from paramstore.errors import CorruptRecord, VolumeError
from paramstore.storage.format.sealing import FORMAT_VERSION, other_version
from paramstore.storage.format.structures import (
    NOTE_SLOT_BYTES,
    NOTES_START_BYTES,
    SUPERBLOCK_BYTES,
    SUPERBLOCK_COPIES,
    SUPERBLOCK_MAGIC,
    CommitNote,
    Superblock,
    extents_start_bytes,
    note_offsets,
    pack_note,
    pack_superblock,
    unpack_note,
    unpack_superblock,
)
from paramstore.storage.volume.base import Volume

ZERO_BYTES = 1 << 20

_Unpacked = TypeVar("_Unpacked", Superblock, CommitNote)


def format_volume(volume: Volume, superblock: Superblock) -> None:
    """Formats a volume: on return it durably has `superblock`, and no commit note.

    A volume of another store is refused, and so is one that has commit notes but no superblock. A volume of the same store is
    formatted anew: it was being made when the store went down, and no catalog row names it. Raises VolumeError.
    """
    start_bytes = extents_start_bytes(superblock)
    if volume.size_bytes <= start_bytes:
        raise VolumeError(
            f"volume {volume.index} has {volume.size_bytes} bytes; its superblock and commit notes alone take {start_bytes}: "
            "make it larger (--volume-size)"
        )
    try:
        found = read_superblock(volume)
    except CorruptRecord:
        _check_blank(volume, start_bytes)
    else:
        if found.store_uuid != superblock.store_uuid:
            raise VolumeError(
                f"volume {volume.index} belongs to another store ({found.store_uuid.hex()}): name another path, or "
                "remove it there"
            )
        _write_zeros(volume, NOTES_START_BYTES, start_bytes)
        volume.flush()  # before the superblock is erased, so that a volume without one has no note either
    _write_zeros(volume, 0, start_bytes)
    _write_copies(volume, SUPERBLOCK_COPIES, pack_superblock(superblock))
    volume.flush()


def _check_blank(volume: Volume, start_bytes: int) -> None:
    """Raises VolumeError if the volume has a commit note: it is then in use by some store, and both its superblocks are damaged.
    (Without notes it may be what a crash left of a volume that was being made.)"""
    buffer, zeros = _buffer(ZERO_BYTES), bytes(ZERO_BYTES)
    for offset_bytes in range(NOTES_START_BYTES, start_bytes, ZERO_BYTES):
        piece = buffer[: start_bytes - offset_bytes]
        volume.read(offset_bytes, [piece])
        if bytes(piece) == zeros[: len(piece)]:
            continue  # a new file: told at once, and not page by page
        for at in range(0, len(piece), PAGE_BYTES):
            if _is_note(piece[at:]):
                raise VolumeError(
                    f"volume {volume.index} ({volume.describe().get('path')}) has no superblock, but a commit note at "
                    f"{offset_bytes + at}: it is not overwritten; remove the file if nothing on it is needed, or name another path"
                )


def _is_note(data: memoryview) -> bool:
    try:
        unpack_note(data)
    except CorruptRecord:
        return False
    return True


def _write_zeros(volume: Volume, start: int, end: int) -> None:
    zeros = _buffer(ZERO_BYTES)
    for offset_bytes in range(start, end, ZERO_BYTES):
        volume.write(offset_bytes, [zeros[: end - offset_bytes]])


def read_superblock(volume: Volume) -> Superblock:
    """Reads the volume's superblock. Raises CorruptRecord if no copy is whole, VolumeError if that cannot be known, if all copies
    are of another format, or if whole copies differ: then parts of two volumes lie in one file."""
    try:
        superblock = _read_first(volume, SUPERBLOCK_COPIES, SUPERBLOCK_BYTES, unpack_superblock, what="superblock")
    except CorruptRecord:
        _check_format(volume)
        raise
    last = _read_last_superblock(volume)
    if last is not None and last != superblock:
        raise VolumeError(
            f"volume {volume.index}: its superblocks differ: volume {superblock.volume_uuid.hex()} of store "
            f"{superblock.store_uuid.hex()}, and volume {last.volume_uuid.hex()} of store {last.store_uuid.hex()}"
        )
    return superblock


def _check_format(volume: Volume) -> None:
    """Raises VolumeError where every copy of the superblock is whole and of one other format: nothing is damaged then."""
    buffer, formats = _buffer(SUPERBLOCK_BYTES), set()
    for offset_bytes in SUPERBLOCK_COPIES:
        volume.read(offset_bytes, [buffer])
        formats.add(other_version(buffer, SUPERBLOCK_MAGIC))
    (found, *others) = formats
    if found is not None and not others:
        age = "a newer" if found > FORMAT_VERSION else "an older"
        raise VolumeError(
            f"volume {volume.index} ({volume.describe().get('path')}): its superblock has volume format {found}, which {age} "
            f"paramstore writes; this one reads format {FORMAT_VERSION}: open the store with that one"
        )


def _read_last_superblock(volume: Volume) -> Superblock | None:
    """Reads the last copy; None if it is not whole, since one whole copy is enough."""
    try:
        return _read_first(volume, SUPERBLOCK_COPIES[-1:], SUPERBLOCK_BYTES, unpack_superblock, what="superblock")
    except VolumeError:
        return None


def write_note(volume: Volume, superblock: Superblock, note_slot: int, note: CommitNote) -> int:
    """Writes every copy of `note`; durable after the volume's next flush. Returns the bytes of all copies, which are whole pages
    but not the whole slot. Raises VolumeError; then the slot holds garbage."""
    offsets, packed = note_offsets(superblock, note_slot), pack_note(note)
    _write_copies(volume, offsets, packed)
    return len(offsets) * len(packed)


def read_note(volume: Volume, superblock: Superblock, note_slot: int) -> CommitNote:
    """Reads the note in `note_slot`. Raises CorruptRecord if no copy is whole, VolumeError if that cannot be known."""
    offsets = note_offsets(superblock, note_slot)
    return _read_first(volume, offsets, NOTE_SLOT_BYTES, unpack_note, what=f"commit note in slot {note_slot}")


def copy_notes(source: Volume, target: Volume, superblock: Superblock, *, note_slots: Iterable[int]) -> None:
    """Copies the notes in `note_slots` to `target`, a new volume with `superblock`; durable on return.

    source: any volume of the store. note_slots: those of every step. To be called before the catalog gets the new volume's row:
    a volume without the notes of the committed steps looks like one that was replaced. Raises VolumeError.
    """
    source_superblock = read_superblock(source)
    for note_slot in note_slots:
        write_note(target, superblock, note_slot, read_note(source, source_superblock, note_slot))
    target.flush()


def _write_copies(volume: Volume, offsets: Sequence[int], data: bytes) -> None:
    buffer = _buffer(len(data))
    buffer[:] = data
    for offset_bytes in offsets:
        volume.write(offset_bytes, [buffer])


def _read_first(
    volume: Volume, offsets: Sequence[int], length_bytes: int, unpack: Callable[[memoryview], _Unpacked], *, what: str
) -> _Unpacked:
    """Reads the first copy that is whole; one that cannot be read is passed over."""
    buffer = _buffer(length_bytes)
    failures: list[VolumeError] = []
    for offset_bytes in offsets:
        try:
            volume.read(offset_bytes, [buffer])
            return unpack(buffer)
        except VolumeError as error:
            failures.append(error)
    is_proven = all(isinstance(failure, CorruptRecord) for failure in failures)
    reasons = "; ".join(f"at {offset}: {failure}" for offset, failure in zip(offsets, failures, strict=True))
    message = f"volume {volume.index}: no whole copy of its {what}: {reasons}"
    raise CorruptRecord(message) if is_proven else VolumeError(message)


def _buffer(length_bytes: int) -> memoryview:
    """Makes a zeroed, writable, page-aligned buffer; `length_bytes` is a multiple of a page."""
    return memoryview(mmap.mmap(-1, length_bytes))
