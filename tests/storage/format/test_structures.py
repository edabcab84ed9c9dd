import random
import struct
from dataclasses import replace
from itertools import pairwise

import msgspec
import pytest

from paramstore.core.checksums import header_root
from paramstore.core.key import KeySpace
from paramstore.core.location import Identity
from paramstore.core.schema import CHUNK_BYTES, Part, Schema
from paramstore.errors import CapacityError, CorruptRecord
from paramstore.storage.format.sealing import seal
from paramstore.storage.format.structures import (
    DESCRIPTION_BYTES_MAX,
    EXTENTS_ALIGNMENT_BYTES,
    NOTE_COPIES,
    NOTE_SLOT_BYTES,
    NOTE_SLOTS,
    NOTES_START_BYTES,
    SUPERBLOCK_BYTES,
    SUPERBLOCK_COPIES,
    CommitNote,
    Header,
    NotedStep,
    Superblock,
    check_checksums,
    check_header,
    chunk_checksums,
    combine_roots,
    extents_start_bytes,
    note_offsets,
    pack_description,
    pack_header,
    pack_note,
    pack_superblock,
    unpack_header,
    unpack_note,
    unpack_superblock,
)
from paramstore.storage.volume.base import Granularity

STORE = bytes(range(16))
PART = Schema.adamw({"gate_up": (600, 700), "down": (3, 5)}).stored
"""`gate_up` takes two chunks in each of master, exp_avg and exp_avg_sq; `down` one."""
PLACE = "volume 1 offset 4096"


def header_of(part: Part = PART, **changes: object) -> Header:
    values: dict[str, object] = {
        "store_uuid": STORE,
        "namespace": "moe",
        "key": (3, 17),
        "identity": Identity(epoch=2, version=41),
        "sequence": 9,
        "optimizer_step": 40,
        "last_apply": 44,
        "checksums": tuple(range(1000, 1000 + len(part.chunks()))),
    }
    return Header(**{**values, **changes})  # type: ignore[arg-type]


def check(data: bytes, **changes: object) -> Header:
    expected: dict[str, object] = {
        "part": PART,
        "root": header_root(data),
        "store_uuid": STORE,
        "namespace": "moe",
        "key": (3, 17),
        "identity": Identity(2, 41),
        "place": PLACE,
    }
    return check_header(data, **{**expected, **changes})  # type: ignore[arg-type]


def image_of(part: Part) -> memoryview:
    return memoryview(random.Random(5).randbytes(part.image_bytes))


# --- headers


def test_header_fills_its_bytes_and_comes_back_whole() -> None:
    data = pack_header(header_of(), PART)
    assert len(data) == PART.header_bytes
    assert unpack_header(data, PART) == header_of()
    assert unpack_header(memoryview(data + b"more"), PART) == header_of()


def test_header_holds_the_longest_name_and_the_largest_numbers() -> None:
    largest = (1 << 64) - 1
    header = header_of(
        namespace="n" * 64,
        key=(4095, 65535),
        identity=Identity(largest, largest),
        sequence=largest,
        optimizer_step=largest,
        last_apply=largest,
        checksums=(largest,) * len(PART.chunks()),
    )
    assert unpack_header(pack_header(header, PART), PART) == header


def test_header_table_of_a_large_record_takes_several_pages() -> None:
    part = Schema.param({"w": ((1 << 30,), "uint8")}).stored
    assert part.header_bytes == 12288
    header = header_of(part)
    assert unpack_header(pack_header(header, part), part) == header


def test_every_flipped_bit_of_a_header_is_found() -> None:
    data = bytearray(pack_header(header_of(), PART))
    for bit in random.Random(1).sample(range(len(data) * 8), 2000):
        data[bit // 8] ^= 1 << bit % 8
        with pytest.raises(CorruptRecord):
            unpack_header(data, PART)
        data[bit // 8] ^= 1 << bit % 8


def test_header_of_another_schema_is_refused() -> None:
    other = Schema.adamw({"gate_up": (600, 710), "down": (3, 5)}).stored
    assert other.header_bytes == PART.header_bytes
    with pytest.raises(CorruptRecord, match="the schema's part 'optim' has"):
        unpack_header(pack_header(header_of(other), other), PART)


def test_checked_header_is_returned() -> None:
    assert check(pack_header(header_of(), PART)) == header_of()


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"store_uuid": bytes(16)}, "store '000102030405060708090a0b0c0d0e0f', expected '00000000000000000000000000000000'"),
        ({"namespace": "eval"}, "namespace 'moe', expected 'eval'"),
        ({"key": (3, 18)}, r"key \(3, 17\), expected \(3, 18\)"),
        ({"identity": Identity(3, 41)}, r"\(epoch, version\) \(2, 41\), expected \(3, 41\)"),
        ({"identity": Identity(2, 42)}, r"\(epoch, version\) \(2, 41\), expected \(2, 42\)"),
        ({"root": 1}, "header root [0-9a-f]{16}, the catalog has 0000000000000001"),
    ],
)
def test_header_of_another_record_names_what_differs(changes: dict[str, object], what: str) -> None:
    with pytest.raises(CorruptRecord, match=what):
        check(pack_header(header_of(), PART), **changes)


def test_damaged_header_names_record_and_place() -> None:
    data = bytearray(pack_header(header_of(), PART))
    root = header_root(bytes(data))
    data[700] ^= 1
    with pytest.raises(
        CorruptRecord,
        match=r"record \(3, 17\) of namespace 'moe', version 41 of epoch 2, at volume 1 offset 4096: record header has",
    ):
        check(bytes(data), root=root)


# --- checksums


def test_checksums_of_a_range_equal_those_of_the_whole() -> None:
    image, chunks = image_of(PART), PART.chunks()
    whole = chunk_checksums(image, chunks)
    assert len(set(whole)) == len(chunks) == 9
    master = chunks[:3]
    base_bytes = master[0].offset_bytes
    end_bytes = master[-1].offset_bytes + master[-1].length_bytes
    assert chunk_checksums(image[base_bytes:end_bytes], master, base_bytes) == whole[:3]


def test_checksums_that_match_pass() -> None:
    header = header_of(checksums=tuple(chunk_checksums(image_of(PART), PART.chunks())))
    check_checksums(header, PART, 0, header.checksums, place=PLACE)
    check_checksums(header, PART, 3, list(header.checksums[3:5]), place=PLACE)
    check_checksums(header, PART, 9, [], place=PLACE)


def test_wrong_chunk_names_record_field_and_bytes() -> None:
    header = header_of()
    found = list(header.checksums[3:6])
    found[1] = 7
    chunk = PART.chunks()[4]
    with pytest.raises(CorruptRecord) as caught:
        check_checksums(header, PART, 3, found, place=PLACE)
    message = str(caught.value)
    assert "record (3, 17) of namespace 'moe', version 41 of epoch 2, at volume 1 offset 4096: chunk 4" in message
    assert f"(field 'exp_avg/gate_up', {600 * 700 * 4 - CHUNK_BYTES} bytes at byte {chunk.offset_bytes} of the" in message
    assert "has checksum 0000000000000007, its header says 00000000000003ec" in message


def test_an_image_that_ends_before_its_chunks_is_a_bug() -> None:
    with pytest.raises(AssertionError):
        chunk_checksums(image_of(PART)[:-8192], PART.chunks())


# --- superblock and regions


def test_superblock_fills_a_page_and_comes_back_whole() -> None:
    superblock = Superblock(STORE, bytes(range(16, 32)), index=3, note_slots=5, granularity=Granularity.CACHE_LINE)
    data = pack_superblock(superblock)
    assert len(data) == SUPERBLOCK_BYTES
    assert unpack_superblock(data) == superblock


def test_a_superblock_with_a_granularity_that_nobody_knows_is_refused() -> None:
    data = bytearray(pack_superblock(Superblock(STORE, STORE, 0)))
    assert unpack_superblock(data).granularity is Granularity.FILE
    data[64] = 4
    seal(data, b"PSVOLUME", len(data))
    with pytest.raises(CorruptRecord, match="superblock with granularity 4; 0 to 3 are known"):
        unpack_superblock(data)


@pytest.mark.slow
def test_every_flipped_bit_of_a_superblock_is_found() -> None:
    data = bytearray(pack_superblock(Superblock(STORE, STORE, 0)))
    for bit in range(len(data) * 8):
        data[bit // 8] ^= 1 << bit % 8
        with pytest.raises(CorruptRecord, match="superblock"):
            unpack_superblock(data)
        data[bit // 8] ^= 1 << bit % 8


@pytest.mark.parametrize("note_slots", [1, 5, 64, 4096])
def test_regions_of_a_volume_are_aligned_and_never_overlap(note_slots: int) -> None:
    superblock = Superblock(STORE, STORE, 0, note_slots)
    ranges = [(offset, SUPERBLOCK_BYTES) for offset in SUPERBLOCK_COPIES]
    copies = [note_offsets(superblock, slot) for slot in range(note_slots)]
    ranges += [(offset, NOTE_SLOT_BYTES) for offsets in copies for offset in offsets]
    start_bytes = extents_start_bytes(superblock)
    ranges.append((start_bytes, 1))
    ranges.sort()
    assert all(first + length <= second for (first, length), (second, _) in pairwise(ranges))
    assert all(offset % 4096 == 0 for offset, _ in ranges)
    assert start_bytes % EXTENTS_ALIGNMENT_BYTES == 0
    middle = NOTES_START_BYTES + note_slots * NOTE_SLOT_BYTES
    assert all(len(offsets) == NOTE_COPIES and offsets[0] < middle <= offsets[1] for offsets in copies)


def test_a_note_slot_beyond_the_last_is_a_bug() -> None:
    with pytest.raises(AssertionError):
        note_offsets(Superblock(STORE, STORE, 0, note_slots=4), 4)


# --- commit notes


def note_of(**changes: object) -> CommitNote:
    values: dict[str, object] = {
        "namespace": "moe",
        "epoch": 3,
        "sequence": 12,
        "step": 100,
        "parent": 90,
        "record_count": 4096,
        "combined_root": 0xDEADBEEF,
        "epoch_bounds": ((0, 5), (1, 7), (2, 11)),
    }
    return CommitNote(**{**values, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "note",
    [
        note_of(),
        note_of(parent=None, epoch_bounds=()),
        note_of(parent=0, step=1),
        note_of(step=-3, parent=-4, namespace="n" * 64),
    ],
)
def test_note_comes_back_whole_from_its_slot(note: CommitNote) -> None:
    data = pack_note(note)
    assert len(data) == 4096
    assert unpack_note(data) == note
    assert unpack_note(memoryview(data.ljust(NOTE_SLOT_BYTES, b"\xff"))) == note


def test_a_note_with_everything_in_it_comes_back_whole() -> None:
    note = note_of(
        state_root=(1 << 64) - 1, applies=7, steps=(NotedStep(90, 11, 3, False), NotedStep(-5, 2, 63, True)),
        description=pack_description(Schema.param({"w": ((3,), "uint8")}), KeySpace.of(2, 4)), extra=bytes(range(256)) * 256,
    )  # fmt: skip
    assert unpack_note(pack_note(note)) == note
    assert len(note.extra) == 64 << 10


def test_note_with_as_many_bounds_as_fit_fills_its_slot_and_one_more_is_refused() -> None:
    bounds = tuple((epoch, epoch + 1) for epoch in range(NOTE_SLOT_BYTES // 16))
    most = next(count for count in range(len(bounds), 0, -1) if _packs(note_of(epoch_bounds=bounds[:count])))
    note = note_of(epoch_bounds=bounds[:most])
    assert len(pack_note(note)) == NOTE_SLOT_BYTES
    assert unpack_note(pack_note(note)) == note
    with pytest.raises(CapacityError, match=f"'moe', step 100: .* a slot has {NOTE_SLOT_BYTES}: {most + 1} epoch bounds"):
        pack_note(note_of(epoch_bounds=bounds[: most + 1]))


def test_the_longest_extra_and_description_leave_room_for_every_step_and_for_417_bounds() -> None:
    note = note_of(
        extra=bytes(64 << 10), description=bytes(DESCRIPTION_BYTES_MAX), steps=(NotedStep(1, 1, 1, False),) * NOTE_SLOTS,
        epoch_bounds=((1, 1),) * 417,
    )  # fmt: skip
    assert len(pack_note(note)) == NOTE_SLOT_BYTES
    assert not _packs(replace(note, epoch_bounds=((1, 1),) * 418))


def test_a_description_has_its_layers_as_runs() -> None:
    schema = Schema.adamw({"w": (3, 5)})
    described = msgspec.msgpack.decode(pack_description(schema, KeySpace.of((0, 1, 2, 5, 9, 10), 8)))
    assert described == {"schema": schema.describe(), "layers": [[0, 3], [5, 1], [9, 2]], "experts": 8}


def test_the_largest_schema_of_ascii_names_is_described_and_a_scattered_namespace_is_not() -> None:
    fields = {f"{number:02d}".ljust(64, "n"): ((60_000,) * 8, "float8_e4m3fn") for number in range(64)}
    assert len(pack_description(Schema.param(fields), KeySpace.of(4096, 32))) <= DESCRIPTION_BYTES_MAX
    with pytest.raises(CapacityError, match="bytes of a commit note, which has room for"):
        pack_description(Schema.param(fields), KeySpace.of(range(0, 8192, 2), 1))


def _packs(note: CommitNote) -> bool:
    try:
        pack_note(note)
    except CapacityError:
        return False
    return True


def test_a_slot_without_a_note_is_refused() -> None:
    with pytest.raises(CorruptRecord, match="no commit note"):
        unpack_note(bytes(NOTE_SLOT_BYTES))
    with pytest.raises(CorruptRecord, match="no commit note"):
        unpack_note(pack_superblock(Superblock(STORE, STORE, 0)))


def test_every_torn_note_is_refused() -> None:
    old = pack_note(note_of(epoch_bounds=tuple((epoch, 1) for epoch in range(300))))
    new = pack_note(note_of(sequence=13, epoch_bounds=tuple((epoch, 2) for epoch in range(300))))
    assert old[4096:4608] != new[4096:4608]
    for kept_bytes in range(512, 4608, 512):
        with pytest.raises(CorruptRecord):
            unpack_note(new[:kept_bytes] + old[kept_bytes:])


def test_combined_root_depends_on_every_pair_and_on_no_order() -> None:
    rows = [((layer, expert), layer * 100 + expert) for layer in range(3) for expert in range(4)]
    combined = combine_roots(rows)
    assert combine_roots(reversed(rows)) == combined
    assert combine_roots(iter(random.Random(2).sample(rows, len(rows)))) == combined
    assert combine_roots(rows[1:]) != combined
    assert combine_roots([((0, 0), 1), *rows[1:]]) != combined
    assert combine_roots([((0, 1), 0), ((0, 0), 1), *rows[2:]]) != combined
    assert combine_roots([]) == combine_roots(iter(()))


def test_values_lie_where_the_document_says() -> None:
    header = pack_header(header_of(), PART)
    assert header[:8] + header[24:43] == b"PSRECORD" + STORE + b"moe"
    assert struct.unpack_from("<IIQQQQQQQ", header, 104) == (3, 17, 2, 41, 9, 40, 44, PART.image_bytes, 9)
    assert struct.unpack_from("<9Q", header, 512) == header_of().checksums
    steps = (NotedStep(90, 11, 7, True),)
    note = pack_note(note_of(state_root=5, applies=6, steps=steps, description=b"what", extra=b"more"))
    assert note[:8] + note[24:27] == b"PSCOMMIT" + b"moe"
    assert struct.unpack_from("<QQqqBQQI", note, 88) == (3, 12, 100, 90, 1, 4096, 0xDEADBEEF, 3)
    assert struct.unpack_from("<QQIII", note, 141) == (5, 6, 1, 4, 4)
    assert struct.unpack_from("<6Q", note, 169) == (0, 5, 1, 7, 2, 11)
    assert struct.unpack_from("<qQIB8s", note, 169 + 48) == (90, 11, 7, 1, b"whatmore")
    assert struct.unpack_from("<8sII", note) == (b"PSCOMMIT", 1, 169 + 3 * 16 + 21 + 8)
    superblock = pack_superblock(Superblock(STORE, bytes(16), index=3, note_slots=5, granularity=Granularity.BYTE))
    assert superblock[:8] + superblock[24:40] == b"PSVOLUME" + STORE
    assert struct.unpack_from("<III", superblock, 56) == (3, 5, 3)
    assert extents_start_bytes(Superblock(STORE, STORE, 0)) == 11 << 20
