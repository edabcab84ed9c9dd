"""Parses superblocks, commit notes and record headers, straight from docs/format.md.

Nothing here is shared with the code that writes them, so that a mistake of the writer is not made again by the checker. Each
`parse_*` returns what a whole structure says, or raises CorruptRecord with the reason.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple, TypeVar

import msgspec
from xxhash import xxh3_64_intdigest

from paramstore.core.key import LAYERS_MAX, ExpertKey, KeySpace
from paramstore.core.schema import Schema
from paramstore.errors import CorruptRecord, ParamStoreError, VolumeError
from paramstore.fsck.disks import Disk

PAGE = 4096
VERSION = 1
SUPERBLOCK_AT = (0, 512 * 1024)
NOTES_AT = 1024 * 1024
NOTE_SLOT = 80 * 1024
NOTE_COPIES = (0, 1)
EXTENT_BOUNDARY = 1024 * 1024
TABLE_AT = 512
RECORD_MAGIC = b"PSRECORD"

_Parsed = TypeVar("_Parsed")


@dataclass(frozen=True, slots=True)
class Superblock:
    store: bytes
    volume: bytes
    index: int
    note_slots: int
    granularity: int = 0
    """How writes become durable. 0: an ordinary file's. 1, 2, 3: a mapping's, by pages, cache lines or bytes."""

    @property
    def extents_at(self) -> int:
        """Offset of the first extent."""
        end = NOTES_AT + len(NOTE_COPIES) * self.note_slots * NOTE_SLOT
        return -(-end // EXTENT_BOUNDARY) * EXTENT_BOUNDARY

    def note_at(self, slot: int, copy: int) -> int:
        return NOTES_AT + (copy * self.note_slots + slot) * NOTE_SLOT


class Listed(NamedTuple):
    """An older step that a note lists as one that stays."""

    step: int
    sequence: int
    slot: int
    is_snapshot: bool


@dataclass(frozen=True, slots=True)
class Description:
    """Schema and keys of a namespace."""

    schema: Schema
    keys: KeySpace


class Log(NamedTuple):
    """An apply log: of the applies `first` to `last`, or of none if `last` is below `first`. packed: its bytes."""

    first: int
    last: int
    packed: bytes

    def problem(self, applies: int, oldest: int) -> str | None:
        """Says why records at apply `oldest` and later cannot be brought to `applies`; None if they can."""
        if self.last != applies:
            return f"its apply log ends at {self.last}, the step stands at apply {applies}"
        if oldest + 1 < self.first:
            return f"its apply log begins at {self.first}, a record of it stands at apply {oldest}"
        return None if oldest <= applies else f"a record of it stands at apply {oldest}, the step at {applies}"


NO_LOG = Log(1, 0, b"")


@dataclass(frozen=True, slots=True)
class Note:
    namespace: str
    epoch: int
    sequence: int
    step: int
    parent: int | None
    record_count: int
    combined_root: int
    state_root: int
    applies: int
    bounds: tuple[tuple[int, int], ...]
    listed: tuple[Listed, ...]
    description: Description
    extra: bytes
    log: Log = NO_LOG

    @property
    def age(self) -> tuple[int, int]:
        """Sort key that puts notes of one namespace in the order in which they were written."""
        return self.epoch, self.sequence


@dataclass(frozen=True, slots=True)
class Header:
    """A record's header. root: the checksum of the whole header. checksums: one per chunk."""

    store: bytes
    namespace: str
    key: ExpertKey
    epoch: int
    version: int
    sequence: int
    record_bytes: int
    header_bytes: int
    root: int
    checksums: tuple[int, ...]


class OtherFormat(CorruptRecord):
    """A whole structure of another format; or, where its other copies are not, one with a flipped bit."""

    def __init__(self, version: int) -> None:
        super().__init__(f"format version {version}, this program knows {VERSION}")
        self.format = version


def sealed_bytes(data: bytes, magic: bytes) -> int:
    """Checks the structure at the start of `data`, and gives its length. Raises CorruptRecord."""
    if len(data) < 24 or data[:8] != magic:
        raise CorruptRecord(f"starts with {data[:8]!r}, not {magic!r}")
    version, length, checksum = struct.unpack_from("<IIQ", data, 8)
    if not 24 <= length <= len(data):
        raise CorruptRecord(f"says it has {length} bytes, {len(data)} are there")
    found = xxh3_64_intdigest(memoryview(data)[24:length])
    if found != checksum:
        raise CorruptRecord(f"checksum {found:016x}, it says {checksum:016x}")
    if version != VERSION:
        raise OtherFormat(version)
    return int(length)


def parse_superblock(data: bytes) -> Superblock:
    if sealed_bytes(data, b"PSVOLUME") != PAGE:
        raise CorruptRecord("a superblock has one page")
    superblock = Superblock(*struct.unpack_from("<16s16sIII", data, 24))
    if not 1 <= superblock.note_slots <= 4096:
        raise CorruptRecord(f"{superblock.note_slots} note slots")
    if superblock.granularity > 3:
        raise CorruptRecord(f"granularity {superblock.granularity}")
    return superblock


def parse_note(data: bytes) -> Note:
    length = sealed_bytes(data, b"PSCOMMIT")
    if length < 169:
        raise CorruptRecord(f"a note of {length} bytes")
    epoch, sequence, step, parent, flags, count, root = struct.unpack_from("<QQqqBQQ", data, 88)
    bound_count, state_root, applies, step_count, description_bytes, extra_bytes = struct.unpack_from("<IQQIII", data, 137)
    log_at = 169 + 16 * bound_count + 21 * step_count + description_bytes + extra_bytes
    if flags > 3 or length < log_at or (length > log_at) != bool(flags & 2):
        raise CorruptRecord(f"a note of {length} bytes cannot hold what it says it holds")
    at = 169
    bounds = tuple(struct.unpack_from("<QQ", data, at + 16 * n) for n in range(bound_count))
    at += 16 * bound_count
    listed = [struct.unpack_from("<qQIB", data, at + 21 * n) for n in range(step_count)]
    at += 21 * step_count
    return Note(
        namespace=_text(data[24:88]), epoch=epoch, sequence=sequence, step=step, parent=parent if flags & 1 else None,
        record_count=count, combined_root=root, state_root=state_root, applies=applies, bounds=bounds,
        listed=tuple(Listed(number, cut, slot, bool(kept)) for number, cut, slot, kept in listed),
        description=_parse_description(data[at : at + description_bytes]),
        extra=data[at + description_bytes : log_at], log=parse_log(data[log_at:length]),
    )  # fmt: skip


def parse_log(data: bytes) -> Log:
    """Reads an apply log. Of its columns it only checks that each has a value for every apply. No bytes are a log of no apply."""
    if not data:
        return NO_LOG
    try:
        first, count, columns = msgspec.msgpack.decode(data, type=tuple[int, int, dict[str, list[Any]]])
        sizes = {name: sum(runs[::2]) for name, runs in columns.items()}
    except (msgspec.DecodeError, TypeError, ValueError) as error:
        raise CorruptRecord(f"its apply log cannot be read: {error}") from error
    if first < 1 or count < 1 or "epoch" not in sizes or any(size != count for size in sizes.values()):
        raise CorruptRecord(f"its apply log of {count} applies from {first} has columns of {sizes}")
    return Log(first, first + count - 1, data)


def _parse_description(data: bytes) -> Description:
    try:
        found: dict[str, Any] = msgspec.msgpack.decode(data)  # a volume may say anything; the checks follow
        schema = Schema.from_description(found["schema"])
        layers = (layer for first, count in found["layers"] for layer in range(first, first + count))
        return Description(schema, KeySpace.of(islice(layers, LAYERS_MAX + 1), found["experts"]))
    except (msgspec.DecodeError, ParamStoreError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise CorruptRecord(f"the description of its namespace cannot be read: {error}") from error


def parse_header(data: bytes) -> Header:
    """Reads a record's header. data: at least the whole header."""
    length = sealed_bytes(data, RECORD_MAGIC)
    layer, expert, epoch, version, sequence, _, _, record_bytes, count = struct.unpack_from("<IIQQQQQQQ", data, 104)
    if length % PAGE or record_bytes % PAGE or record_bytes < length or TABLE_AT + 8 * count > length:
        raise CorruptRecord(f"a header of {length} bytes for {count} chunks of a record of {record_bytes}")
    return Header(
        store=data[24:40], namespace=_text(data[40:104]), key=(layer, expert), epoch=epoch, version=version, sequence=sequence,
        record_bytes=record_bytes, header_bytes=length, root=xxh3_64_intdigest(memoryview(data)[:length]),
        checksums=struct.unpack_from(f"<{count}Q", data, TABLE_AT),
    )  # fmt: skip


def header_bytes(page: bytes, *, room_bytes: int) -> int:
    """Length of the header whose first page is `page`, as it says itself; 0 if that cannot be.

    It is asked before the checksum is checked, so that one wrong bit makes nobody read gigabytes: the length must be that of the
    table, and the record must have a page for every chunk. room_bytes: from there to the end of the volume.
    """
    (length,) = struct.unpack_from("<I", page, 12)
    record_bytes, count = struct.unpack_from("<QQ", page, 152)
    table_end = TABLE_AT + 8 * count
    is_possible = length % PAGE == 0 and table_end <= length < table_end + PAGE and count * PAGE <= record_bytes
    return int(length) if is_possible and length <= room_bytes else 0


def combine(rows: list[tuple[ExpertKey, int]]) -> int:
    """Computes the combined root of (key, root) rows."""
    return int(xxh3_64_intdigest(b"".join(struct.pack("<IIQ", *key, root) for key, root in sorted(rows))))


def read_superblocks(disk: Disk) -> list[Superblock | VolumeError]:
    """Reads each copy of the superblock, or gives why that is impossible: CorruptRecord, or what the disk raised."""
    copies: list[Superblock | VolumeError] = []
    for at in SUPERBLOCK_AT:
        try:
            copies.append(_parsed(parse_superblock, disk, at, PAGE))
        except VolumeError as error:
            copies.append(error)
    return copies


def read_note(disk: Disk, superblock: Superblock, slot: int, copy: int) -> Note | CorruptRecord:
    """Reads one copy of a commit note. Raises VolumeError if the disk cannot be read."""
    return _parsed(parse_note, disk, superblock.note_at(slot, copy), NOTE_SLOT)


def _parsed(parse: Callable[[bytes], _Parsed], disk: Disk, at: int, length: int) -> _Parsed | CorruptRecord:
    if at + length > disk.size_bytes:
        return CorruptRecord(f"the volume ends at {disk.size_bytes}")
    try:
        return parse(disk.read(at, length))
    except CorruptRecord as error:
        return error


def _text(name: bytes) -> str:
    return name.rstrip(b"\0").decode("ascii", errors="backslashreplace")
