"""The independent parsers read what the daemon's code writes, and refuse whatever is not whole."""

from __future__ import annotations

import random
import struct
from dataclasses import replace

import msgspec
import pytest

from paramstore.core.checksums import header_root
from paramstore.core.key import KeySpace
from paramstore.core.location import Identity
from paramstore.core.schema import Schema
from paramstore.errors import CorruptRecord
from paramstore.fsck import reader
from paramstore.fsck.reader import combine, header_bytes, parse_header, parse_note, parse_superblock
from paramstore.storage.format import structures as written
from paramstore.storage.format.sealing import seal
from paramstore.storage.format.structures import CommitNote, Header, NotedStep, Superblock
from paramstore.storage.volume.base import Granularity

STORE, VOLUME = bytes(range(16)), bytes(range(16, 32))
SCHEMA = Schema.adamw({"gate_up": (600, 700), "down": (3, 5)})
KEYS = KeySpace.of((0, 1, 2, 7, 9), 4)
NOTE = CommitNote(
    "moe", 3, 12, 100, 90, 4096, 0xDEADBEEF, epoch_bounds=((1, 7), (2, 11)), state_root=1 << 63, applies=5,
    steps=(NotedStep(90, 11, 3, False), NotedStep(-5, 2, 63, True)), description=written.pack_description(SCHEMA, KEYS),
    extra=b"\0more",
)  # fmt: skip
HEADER = Header(STORE, "moe", (3, 17), Identity(2, 41), 9, 40, 44, tuple(range(1000, 1009)))


def test_a_superblock_says_what_was_written() -> None:
    data = bytearray(written.pack_superblock(Superblock(STORE, VOLUME, index=3, note_slots=5, granularity=Granularity.CACHE_LINE)))
    assert parse_superblock(bytes(data)) == reader.Superblock(STORE, VOLUME, 3, 5, 2)
    data[64] = 4
    seal(data, b"PSVOLUME", len(data))
    with pytest.raises(CorruptRecord, match="granularity 4"):
        parse_superblock(bytes(data))


@pytest.mark.parametrize("note_slots", [1, 5, 64, 4096])
def test_the_regions_of_a_volume_lie_where_the_daemon_puts_them(note_slots: int) -> None:
    one = reader.Superblock(STORE, VOLUME, 0, note_slots)
    other = Superblock(STORE, VOLUME, 0, note_slots)
    assert one.extents_at == written.extents_start_bytes(other)
    for slot in {0, note_slots - 1}:
        assert [one.note_at(slot, copy) for copy in (0, 1)] == written.note_offsets(other, slot)
    assert (reader.NOTE_SLOT, reader.SUPERBLOCK_AT) == (written.NOTE_SLOT_BYTES, written.SUPERBLOCK_COPIES)


def test_a_note_says_what_was_written() -> None:
    note = parse_note(written.pack_note(NOTE).ljust(reader.NOTE_SLOT, b"\xff"))
    numbers = "epoch", "sequence", "step", "parent", "record_count", "combined_root", "state_root", "applies"
    for name in ("namespace", *numbers, "extra"):
        assert getattr(note, name) == getattr(NOTE, name), name
    assert note.bounds == NOTE.epoch_bounds
    assert [tuple(one) for one in note.listed] == [tuple(one) for one in NOTE.steps]
    assert (note.description.schema, note.description.keys) == (SCHEMA, KEYS)


def test_a_first_note_has_no_parent() -> None:
    assert parse_note(written.pack_note(replace(NOTE, parent=None))).parent is None


def test_a_header_says_what_was_written() -> None:
    data = written.pack_header(HEADER, SCHEMA.stored)
    header = parse_header(data + b"more")
    assert (header.store, header.namespace, header.key, header.epoch, header.version, header.sequence) == (
        STORE, "moe", (3, 17), 2, 41, 9,
    )  # fmt: skip
    assert (header.record_bytes, header.checksums) == (SCHEMA.record_bytes, HEADER.checksums)
    assert header.root == header_root(data)
    assert header.header_bytes == header_bytes(data, room_bytes=len(data)) == len(data)


@pytest.mark.parametrize(("at", "lie"), [(12, 1 << 31), (12, 8192), (12, 4096 + 8), (12, 0), (160, 1 << 29), (160, 1 << 63)])
def test_a_header_that_lies_about_its_length_is_not_even_read(at: int, lie: int) -> None:
    data = bytearray(written.pack_header(HEADER, SCHEMA.stored))
    data[at : at + 8] = int.from_bytes(data[at : at + 8], "little").__xor__(lie).to_bytes(8, "little") if lie else bytes(8)
    assert header_bytes(bytes(data), room_bytes=1 << 40) == 0


def test_a_header_that_would_end_beyond_the_volume_is_not_read() -> None:
    data = written.pack_header(HEADER, SCHEMA.stored)
    assert header_bytes(data, room_bytes=len(data) - 4096) == 0


def test_a_header_with_more_chunks_than_its_record_has_pages_is_not_read() -> None:
    data = bytearray(written.pack_header(HEADER, SCHEMA.stored))
    count = 1 << 27
    struct.pack_into("<I", data, 12, -(-(512 + 8 * count) // 4096) * 4096)
    struct.pack_into("<Q", data, 160, count)
    assert header_bytes(bytes(data), room_bytes=1 << 40) == 0


@pytest.mark.parametrize(
    "lie",
    [{"layers": [[0, 1 << 60]]}, {"layers": [[0, 4000], [4000, 1 << 40]]}, {"layers": 7}, {"layers": [[0]]}, {"experts": 1 << 60}],
)
def test_a_description_with_absurd_counts_is_refused_at_once(lie: dict[str, object]) -> None:
    told = {"schema": SCHEMA.describe(), "layers": [[0, 3]], "experts": 4, **lie}
    with pytest.raises(CorruptRecord, match="description of its namespace cannot be read"):
        parse_note(written.pack_note(replace(NOTE, description=msgspec.msgpack.encode(told))))


@pytest.mark.parametrize(
    ("parse", "data"),
    [
        (parse_superblock, written.pack_superblock(Superblock(STORE, VOLUME, 0))),
        (parse_note, written.pack_note(NOTE)),
        (parse_header, written.pack_header(HEADER, SCHEMA.stored)),
    ],
)
def test_every_flipped_bit_is_found(parse: object, data: bytes) -> None:
    assert callable(parse)
    spoilt = bytearray(data)
    length = int.from_bytes(data[12:16], "little")
    for bit in random.Random(1).sample(range(length * 8), 1000):
        spoilt[bit // 8] ^= 1 << bit % 8
        with pytest.raises(CorruptRecord):
            parse(bytes(spoilt))
        spoilt[bit // 8] ^= 1 << bit % 8


@pytest.mark.parametrize("description", [b"", b"\x80", b"\x93\x01\x02\x03", written.pack_description(SCHEMA, KEYS)[:-3]])
def test_a_note_whose_description_cannot_be_read_is_refused(description: bytes) -> None:
    with pytest.raises(CorruptRecord, match="description of its namespace cannot be read"):
        parse_note(written.pack_note(replace(NOTE, description=description)))


def test_roots_combine_as_the_daemon_combines_them() -> None:
    rows = [((layer, expert), layer * 1000 + expert) for layer in range(3) for expert in range(4)]
    assert combine(rows[::-1]) == written.combine_roots(rows)


def test_garbage_is_no_structure() -> None:
    for parse in (parse_superblock, parse_note, parse_header):
        for data in (b"", bytes(4096), b"PSVOLUME", random.Random(2).randbytes(4096)):
            with pytest.raises(CorruptRecord):
                parse(data)
