"""Bytes on a volume: superblock, commit notes, record headers. Pure packing; `docs/format.md` draws it.

Everything is little-endian and sealed (`sealing`), so damage to a structure shows in that structure alone. Readers rely on this:

- `unpack_*` return only what `pack_*` made, whole: a wrong magic, version, length, checksum or shape is
  CorruptRecord;
- a record's header is bound to its place by what it says (store, namespace, key, identity) and by its root,
  which the catalog holds: a stale, misdirected or torn write cannot pass `check_header`;
- a commit note's roots cover the roots of all records of its commit and of its step, so a step is whole or provably
  not; with its description and `extra` a note says all of a step that the catalog says.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import msgspec
from xxhash import xxh3_64_intdigest

from paramstore.core.checksums import header_root
from paramstore.core.key import ExpertKey, KeySpace
from paramstore.core.location import Identity
from paramstore.core.schema import CHECKSUM_BYTES, CHUNK_BYTES, HEADER_FIXED_BYTES, PAGE_BYTES, Chunk, Part, Schema, round_up
from paramstore.errors import CapacityError, CorruptRecord
from paramstore.storage.format.sealing import PREFIX_BYTES, Bytes, seal, unseal
from paramstore.storage.volume.base import Granularity

NAMESPACE_BYTES_MAX = 64
UUID_BYTES = 16

SUPERBLOCK_BYTES = PAGE_BYTES
SUPERBLOCK_COPIES = (0, 512 << 10)
"""Offsets of the superblock's copies: fixed, so that a volume can be told from garbage without knowing anything about it."""
NOTES_START_BYTES = 1 << 20
NOTE_SLOTS = 64
"""Commit notes a volume has room for: retained steps, held steps and snapshots of all namespaces."""
NOTE_SLOTS_MAX = 4096
NOTE_SLOT_BYTES = 80 << 10
"""Size of a note slot. `extra` may take 64 KiB of it, the description 8; what is left holds 417 epoch bounds beside a full list of
steps, or the longest apply log of AdamW."""
NOTE_COPIES = 2
DESCRIPTION_BYTES_MAX = 8 << 10
"""Longest description of a namespace in a note: 64 fields with names of 64 letters and eight sizes below 65,536 take 7 KiB."""
EXTENTS_ALIGNMENT_BYTES = 1 << 20

_HEADER_MAGIC = b"PSRECORD"
SUPERBLOCK_MAGIC = b"PSVOLUME"
_NOTE_MAGIC = b"PSCOMMIT"

# Each comes right after the prefix; the values are named where they are packed.
_HEADER = struct.Struct("<16s64sIIQQQQQQQ")
_SUPERBLOCK = struct.Struct("<16s16sIII")
_NOTE = struct.Struct("<64sQQqqBQQIQQIII")
_BOUND = struct.Struct("<QQ")  # epoch, last sequence of it that counts
_STEP = struct.Struct("<qQIB")  # step, sequence, note slot, is snapshot
ROOT_ROW = struct.Struct("<IIQ")  # layer, expert, root

_HAS_PARENT, _HAS_LOG = 1, 2
"""A note's flags. A program that does not know the second refuses such a note, whose length is not what it expects."""
_NOTE_FIXED_BYTES = PREFIX_BYTES + _NOTE.size
assert PREFIX_BYTES + _HEADER.size <= HEADER_FIXED_BYTES


@dataclass(frozen=True, slots=True)
class Header:
    """A record's description of itself.

    sequence: that of the cut that includes it. optimizer_step: torch's `step` of its parameters. last_apply: the
    namespace's count of applies at the record's last update. checksums: one per chunk of the part.
    """

    store_uuid: bytes
    namespace: str
    key: ExpertKey
    identity: Identity
    sequence: int
    optimizer_step: int
    last_apply: int
    checksums: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Superblock:
    """Says which store a volume belongs to, where its extents start, what made its writes durable. Written once."""

    store_uuid: bytes
    volume_uuid: bytes
    index: int
    note_slots: int = NOTE_SLOTS
    granularity: Granularity = Granularity.FILE


class NotedStep(NamedTuple):
    """An older step that could still be opened when a note was written, and the slot of its own note."""

    step: int
    sequence: int
    note_slot: int
    is_snapshot: bool


@dataclass(frozen=True, slots=True)
class CommitNote:
    """The note that a commit writes on every volume, so that the step can be proven there.

    parent: the step committed before, None for the first. record_count, combined_root: those of the records that this
    commit changed. state_root: that of the records of all keys at this step. applies: how many applies the step covers.
    epoch_bounds: for every earlier epoch, the last sequence that still counts. steps: the older steps that stay beside
    this one. description: `pack_description` of the namespace. extra: the caller's own bytes. log: `pack_log` of the applies that
    the step's records may have missed.
    """

    namespace: str
    epoch: int
    sequence: int
    step: int
    parent: int | None
    record_count: int
    combined_root: int
    epoch_bounds: tuple[tuple[int, int], ...] = ()
    state_root: int = 0
    applies: int = 0
    steps: tuple[NotedStep, ...] = ()
    description: bytes = b""
    extra: bytes = b""
    log: bytes = b""


def pack_header(header: Header, part: Part) -> bytes:
    """Packs a header into exactly `part.header_bytes` bytes. `header` has one checksum per chunk of `part`."""
    count = _chunk_count(part)
    assert len(header.checksums) == count, f"{len(header.checksums)} checksums for {count} chunks of {part.name!r}"
    data = bytearray(part.header_bytes)
    _HEADER.pack_into(
        data,
        PREFIX_BYTES,
        _checked_uuid(header.store_uuid),
        _namespace_bytes(header.namespace),
        *header.key,
        *header.identity,
        header.sequence,
        header.optimizer_step,
        header.last_apply,
        part.image_bytes,
        count,
    )
    struct.pack_into(f"<{count}Q", data, HEADER_FIXED_BYTES, *header.checksums)
    seal(data, _HEADER_MAGIC, len(data))
    return bytes(data)


def unpack_header(data: Bytes, part: Part) -> Header:
    """Unpacks the first `part.header_bytes` of `data`. Raises CorruptRecord if they are not a whole header of `part`."""
    unseal(data, _HEADER_MAGIC, "record header", length_bytes=part.header_bytes)
    store, name, layer, expert, epoch, version, sequence, step, last_apply, image_bytes, count = _HEADER.unpack_from(
        data, PREFIX_BYTES
    )
    if (image_bytes, count) != (part.image_bytes, _chunk_count(part)):
        raise CorruptRecord(
            f"record header of {image_bytes} bytes in {count} chunks; the schema's part {part.name!r} has "
            f"{part.image_bytes} bytes in {_chunk_count(part)}"
        )
    return Header(
        store_uuid=store,
        namespace=_namespace_text(name),
        key=(layer, expert),
        identity=Identity(epoch, version),
        sequence=sequence,
        optimizer_step=step,
        last_apply=last_apply,
        checksums=struct.unpack_from(f"<{count}Q", data, HEADER_FIXED_BYTES),
    )


def chunk_checksums(image: memoryview, chunks: Sequence[Chunk], base_bytes: int = 0) -> list[int]:
    """Computes the xxh3 of each chunk, in order.

    image: bytes of the part from offset `base_bytes` on, at least to the chunks' end. Other threads run meanwhile:
    xxhash releases the GIL on a whole chunk.
    """
    assert image.itemsize == 1
    assert not chunks or chunks[0].offset_bytes >= base_bytes
    assert not chunks or chunks[-1].offset_bytes + chunks[-1].length_bytes <= base_bytes + len(image)
    checksums = []
    for chunk in chunks:
        start = chunk.offset_bytes - base_bytes
        checksums.append(xxh3_64_intdigest(image[start : start + chunk.length_bytes]))
    return checksums


def check_header(
    data: Bytes,
    *,
    part: Part,
    root: int,
    store_uuid: bytes,
    namespace: str,
    key: ExpertKey,
    identity: Identity,
    place: str,
) -> Header:
    """Returns the header in `data`, if it is the one that the catalog's row names.

    place: volume and offset, for the message. Raises CorruptRecord naming the record, the place and what differs.
    """
    record = _record_name(namespace, key, identity, place)
    try:
        header = unpack_header(data, part)
    except CorruptRecord as error:
        raise CorruptRecord(f"{record}: {error}") from error
    if (header.store_uuid, header.namespace, header.key, header.identity) != (store_uuid, namespace, key, identity):
        differences = [
            f"{what} {found!r}, expected {expected!r}"
            for what, found, expected in (
                ("store", header.store_uuid.hex(), store_uuid.hex()),
                ("namespace", header.namespace, namespace),
                ("key", header.key, tuple(key)),
                ("(epoch, version)", tuple(header.identity), tuple(identity)),
            )
            if found != expected
        ]
        raise CorruptRecord(f"{record}: another record lies there: {'; '.join(differences)}")
    found_root = header_root(memoryview(data)[: part.header_bytes])
    if found_root != root:
        raise CorruptRecord(f"{record}: header root {found_root:016x}, the catalog has {root:016x}")
    return header


def check_checksums(header: Header, part: Part, first_chunk: int, found: Sequence[int], *, place: str) -> None:
    """Checks that `found` are the checksums of the chunks from `first_chunk` on.

    place: volume and offset of the record, for the message.
    Raises CorruptRecord naming the record, the first chunk that differs, its field and its bytes.
    """
    expected = header.checksums[first_chunk : first_chunk + len(found)]
    assert len(expected) == len(found), f"chunks {first_chunk} to {first_chunk + len(found)} of {len(header.checksums)}"
    if expected == tuple(found):
        return
    position = next(at for at, pair in enumerate(zip(expected, found, strict=True)) if pair[0] != pair[1])
    chunk = part.chunks()[first_chunk + position]
    field = max(
        (field for field in part.fields if field.offset_bytes <= chunk.offset_bytes),
        key=lambda f: f.offset_bytes,
    )
    record = _record_name(header.namespace, header.key, header.identity, place)
    raise CorruptRecord(
        f"{record}: chunk {first_chunk + position} (field {field.name!r}, {chunk.length_bytes} bytes at byte "
        f"{chunk.offset_bytes} of the record) has checksum {found[position]:016x}, its header says {expected[position]:016x}"
    )


def pack_superblock(superblock: Superblock) -> bytes:
    """Packs a superblock into SUPERBLOCK_BYTES bytes, to be written at every offset of SUPERBLOCK_COPIES."""
    assert 1 <= superblock.note_slots <= NOTE_SLOTS_MAX
    data = bytearray(SUPERBLOCK_BYTES)
    uuids = _checked_uuid(superblock.store_uuid), _checked_uuid(superblock.volume_uuid)
    _SUPERBLOCK.pack_into(data, PREFIX_BYTES, *uuids, superblock.index, superblock.note_slots, superblock.granularity)
    seal(data, SUPERBLOCK_MAGIC, len(data))
    return bytes(data)


def unpack_superblock(data: Bytes) -> Superblock:
    """Unpacks the superblock in the first SUPERBLOCK_BYTES of `data`. Raises CorruptRecord."""
    unseal(data, SUPERBLOCK_MAGIC, "superblock", length_bytes=SUPERBLOCK_BYTES)
    store, volume, index, note_slots, granularity = _SUPERBLOCK.unpack_from(data, PREFIX_BYTES)
    if not 1 <= note_slots <= NOTE_SLOTS_MAX:
        raise CorruptRecord(f"superblock with {note_slots} note slots; 1 to {NOTE_SLOTS_MAX} are possible")
    if granularity > max(Granularity):
        raise CorruptRecord(f"superblock with granularity {granularity}; 0 to {max(Granularity)} are known")
    return Superblock(store, volume, index, note_slots, Granularity(granularity))


def extents_start_bytes(superblock: Superblock) -> int:
    """Offset from which on a volume holds extents, and nothing else."""
    return round_up(NOTES_START_BYTES + NOTE_COPIES * superblock.note_slots * NOTE_SLOT_BYTES, EXTENTS_ALIGNMENT_BYTES)


def note_offsets(superblock: Superblock, note_slot: int) -> list[int]:
    """Offsets of a note slot's copies, NOTE_SLOT_BYTES each: one in each half of the note region."""
    assert 0 <= note_slot < superblock.note_slots, f"note slot {note_slot} of {superblock.note_slots}"
    half_bytes = superblock.note_slots * NOTE_SLOT_BYTES
    return [NOTES_START_BYTES + copy * half_bytes + note_slot * NOTE_SLOT_BYTES for copy in range(NOTE_COPIES)]


def pack_description(schema: Schema, keys: KeySpace) -> bytes:
    """Packs what a note says of its namespace: msgpack, the layers as runs. Raises CapacityError if no note has room for it."""
    runs: list[list[int]] = []  # [first layer, count]
    for layer in keys.layers:
        if runs and sum(runs[-1]) == layer:
            runs[-1][1] += 1
        else:
            runs.append([layer, 1])
    description = msgspec.msgpack.encode({"schema": schema.describe(), "layers": runs, "experts": keys.experts})
    if len(description) > DESCRIPTION_BYTES_MAX:
        raise CapacityError(
            f"schema and layers take {len(description)} bytes of a commit note, which has room for {DESCRIPTION_BYTES_MAX}: use "
            "fewer fields, shorter field names, or layers without gaps"
        )
    return description


def pack_note(note: CommitNote) -> bytes:
    """Packs a note, rounded up to whole pages. Raises CapacityError if a slot has no room for it."""
    lists = (
        *(_BOUND.pack(*bound) for bound in note.epoch_bounds), *(_STEP.pack(*step) for step in note.steps),
        note.description, note.extra, note.log,
    )  # fmt: skip
    length_bytes = _NOTE_FIXED_BYTES + sum(map(len, lists))
    if length_bytes > NOTE_SLOT_BYTES:
        raise CapacityError(
            f"commit note of namespace {note.namespace!r}, step {note.step}: {length_bytes} bytes, a slot has {NOTE_SLOT_BYTES}: "
            f"{len(note.epoch_bounds)} epoch bounds, {len(note.extra)} bytes of extra, an apply log of {len(note.log)} bytes; use "
            "less extra, or copy the namespace into a new one"
        )
    data = bytearray(round_up(length_bytes, PAGE_BYTES))
    _NOTE.pack_into(
        data, PREFIX_BYTES, _namespace_bytes(note.namespace), note.epoch, note.sequence, note.step,
        0 if note.parent is None else note.parent, _HAS_PARENT * (note.parent is not None) | _HAS_LOG * bool(note.log),
        note.record_count, note.combined_root,
        len(note.epoch_bounds), note.state_root, note.applies, len(note.steps), len(note.description), len(note.extra),
    )  # fmt: skip
    data[_NOTE_FIXED_BYTES:length_bytes] = b"".join(lists)
    seal(data, _NOTE_MAGIC, length_bytes)
    return bytes(data)


def unpack_note(data: Bytes) -> CommitNote:
    """Unpacks the note at the start of `data`, which may be longer (a whole slot). Raises CorruptRecord if none is there."""
    length_bytes = unseal(data, _NOTE_MAGIC, "commit note")
    if length_bytes < _NOTE_FIXED_BYTES:
        raise CorruptRecord(f"commit note of {length_bytes} bytes; the shortest has {_NOTE_FIXED_BYTES}")
    (
        name, epoch, sequence, step, parent, flags, record_count, root, bound_count, state_root, applies, step_count,
        description_bytes, extra_bytes,
    ) = _NOTE.unpack_from(data, PREFIX_BYTES)  # fmt: skip
    steps_at = _NOTE_FIXED_BYTES + bound_count * _BOUND.size
    description_at = steps_at + step_count * _STEP.size
    extra_at = description_at + description_bytes
    log_at = extra_at + extra_bytes
    if length_bytes < log_at or (length_bytes > log_at) != bool(flags & _HAS_LOG) or flags > _HAS_PARENT | _HAS_LOG:
        raise CorruptRecord(
            f"commit note of {length_bytes} bytes cannot hold {bound_count} epoch bounds, {step_count} steps, {description_bytes} "
            f"bytes of description, {extra_bytes} of extra and what flags {flags} say follows"
        )
    view = memoryview(data)
    rows = _STEP.iter_unpack(view[steps_at:description_at])
    steps = (NotedStep(number, cut, slot, bool(kept)) for number, cut, slot, kept in rows)
    return CommitNote(
        namespace=_namespace_text(name), epoch=epoch, sequence=sequence, step=step,
        parent=parent if flags & _HAS_PARENT else None,
        record_count=record_count, combined_root=root, epoch_bounds=tuple(_BOUND.iter_unpack(view[_NOTE_FIXED_BYTES:steps_at])),
        state_root=state_root, applies=applies, steps=tuple(steps), description=bytes(view[description_at:extra_at]),
        extra=bytes(view[extra_at:log_at]), log=bytes(view[log_at:length_bytes]),
    )  # fmt: skip


def combine_roots(roots: Iterable[tuple[ExpertKey, int]]) -> int:
    """Combines all (key, root) pairs, in whatever order they come, into one number."""
    return combine_packed_roots(b"".join(ROOT_ROW.pack(*key, root) for key, root in sorted(roots)))


def combine_packed_roots(rows: bytes) -> int:
    """Does what `combine_roots` does, for pairs that are packed already, in order of their keys."""
    return int(xxh3_64_intdigest(rows))


def _chunk_count(part: Part) -> int:
    """The number of `part.chunks()`, without making them."""
    count = sum(-(-field.length_bytes // CHUNK_BYTES) for field in part.fields)
    assert HEADER_FIXED_BYTES + count * CHECKSUM_BYTES <= part.header_bytes, f"part {part.name!r} has no room for a header"
    return count


def _checked_uuid(uuid: bytes) -> bytes:
    assert len(uuid) == UUID_BYTES, f"a uuid has {UUID_BYTES} bytes, got {uuid!r}"
    return uuid


def _namespace_bytes(namespace: str) -> bytes:
    name = namespace.encode("ascii")
    assert 1 <= len(name) <= NAMESPACE_BYTES_MAX, f"namespace name {namespace!r}"
    return name


def _namespace_text(name: bytes) -> str:
    """Decodes a name. Never raises: garbage differs from the expected name, and the message shows it."""
    return name.rstrip(b"\0").decode("ascii", errors="backslashreplace")


def _record_name(namespace: str, key: ExpertKey, identity: Identity, place: str) -> str:
    return f"record {tuple(key)} of namespace {namespace!r}, version {identity.version} of epoch {identity.epoch}, at {place}"
