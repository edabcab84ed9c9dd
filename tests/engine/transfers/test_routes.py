"""What a worker does to one record: pieces that cover it exactly, the right bytes and checksums, and headers written last."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paramstore.core.location import Extent, Identity
from paramstore.core.schema import PAGE_BYTES, Part, Schema, round_up
from paramstore.engine.transfers import hashing
from paramstore.engine.transfers.hashing import Hashing
from paramstore.engine.transfers.routes import (
    ImageRead,
    ImageWrite,
    MasterRead,
    Piece,
    PieceRead,
    Staging,
    check_pieces,
    cut_for_hashing,
    cut_for_write,
    cut_pieces,
)
from paramstore.errors import CorruptRecord, VolumeError
from paramstore.optim.tensors import field_tensor
from paramstore.storage.format.structures import Header, check_checksums, check_header, chunk_checksums
from paramstore.testing.volumes import Fault, FaultyVolume, MemoryVolume, page_aligned

WAIT_S = 30.0
MIB = 1 << 20
STORE = bytes(range(16))
KEY, IDENTITY = (3, 4), Identity(1, 7)
EXTENT_OFFSET = 4 * PAGE_BYTES
BIG = Schema.adamw({"gate": (600, 700), "down": (300, 1100)}, param_dtype="bfloat16")
"""Fields of 1.6 and 1.3 MiB fp32: several chunks and, at 1 MiB, several pieces."""
SHAPES = st.lists(st.tuples(st.integers(1, 700), st.integers(1, 1500)), min_size=1, max_size=4)
PIECE_BYTES = st.sampled_from([MIB, 2 * MIB, 8 * MIB])


def schema_of(shapes: list[tuple[int, int]], dtype: str = "bfloat16") -> Schema:
    return Schema.adamw({f"w{number}": shape for number, shape in enumerate(shapes)}, param_dtype=dtype)


def header() -> Header:
    return Header(
        store_uuid=STORE, namespace="moe", key=KEY, identity=IDENTITY, sequence=2, optimizer_step=5, last_apply=6, checksums=()
    )


def image_of(part: Part, seed: int = 0) -> memoryview:
    """A slot with random floats in every field, zeros between them."""
    image = page_aligned(part.image_bytes)
    generator = torch.Generator().manual_seed(seed)
    for field in part.fields:
        tensor = field_tensor(image, field)
        tensor.copy_(torch.randn(tensor.shape, generator=generator))
    return image


def written(schema: Schema, *, piece_bytes: int = MIB) -> tuple[MemoryVolume, Extent, memoryview, int]:
    """A record on a volume: volume, extent, its image in memory, its root."""
    part = schema.stored
    volume = MemoryVolume(EXTENT_OFFSET + part.image_bytes + PAGE_BYTES)
    extent = Extent(0, EXTENT_OFFSET, part.image_bytes)
    image = image_of(part)
    write = ImageWrite(volume, extent, part, image, header(), [0] * len(part.chunks()), Hashing(1))
    first, *others = cut_for_write(part, piece_bytes)
    for piece in (*reversed(others), first):
        write.run(piece)
    return volume, extent, image, write.root


# --- pieces


def check_cover(pieces: tuple[Piece, ...], part: Part, *, end: int, chunk_count: int) -> None:
    assert pieces[0].start == 0
    assert pieces[-1].end == end
    assert all(piece.end == following.start for piece, following in pairwise(pieces))
    assert all(piece.start % PAGE_BYTES == 0 and piece.start < piece.end for piece in pieces)
    chunks = part.chunks()[:chunk_count]
    assert tuple(chunk for piece in pieces for chunk in piece.chunks) == chunks
    for piece in pieces:
        assert piece.chunks == chunks[piece.first_chunk : piece.first_chunk + len(piece.chunks)]
        assert piece.chunks, "no piece without a chunk"
        assert piece.start == 0 or piece.start == piece.chunks[0].offset_bytes
        assert piece.chunks[-1].offset_bytes + piece.chunks[-1].length_bytes <= piece.end


@settings(max_examples=40)
@given(shapes=SHAPES, piece_bytes=PIECE_BYTES)
def test_pieces_cover_the_image_exactly_on_pages_and_chunks(shapes: list[tuple[int, int]], piece_bytes: int) -> None:
    part = schema_of(shapes).stored
    check_cover(cut_pieces(part, piece_bytes, len(part.fields)), part, end=part.image_bytes, chunk_count=len(part.chunks()))
    check_cover(cut_for_write(part, piece_bytes), part, end=part.image_bytes, chunk_count=len(part.chunks()))


@settings(max_examples=40)
@given(shapes=SHAPES, piece_bytes=PIECE_BYTES)
def test_pieces_of_the_first_fields_end_where_those_fields_end(shapes: list[tuple[int, int]], piece_bytes: int) -> None:
    part = schema_of(shapes).stored
    count = len(shapes)
    end = round_up(part.fields[count - 1].offset_bytes + part.fields[count - 1].length_bytes, PAGE_BYTES)
    chunk_count = sum(chunk.offset_bytes < end for chunk in part.chunks())
    check_cover(cut_pieces(part, piece_bytes, count), part, end=end, chunk_count=chunk_count)


@settings(max_examples=40)
@given(shapes=SHAPES, piece_bytes=PIECE_BYTES)
def test_pieces_are_about_equal_and_about_as_large_as_asked(shapes: list[tuple[int, int]], piece_bytes: int) -> None:
    part = schema_of(shapes).stored
    pieces = cut_pieces(part, piece_bytes, len(part.fields))
    assert len(pieces) <= -(-part.image_bytes // piece_bytes)
    target = part.image_bytes / -(-part.image_bytes // piece_bytes)
    largest_chunk = MIB + part.header_bytes
    assert all(piece.end - piece.start < target + largest_chunk for piece in pieces)


def test_a_record_of_two_pieces_or_less_is_written_as_one() -> None:
    part = schema_of([(100, 100)]).stored
    assert cut_for_write(part, MIB) == (Piece(0, part.image_bytes, 0, part.chunks()),)


def test_the_piece_with_the_header_is_small_where_there_are_others() -> None:
    first, *others = cut_for_write(BIG.stored, MIB)
    assert first.chunks == BIG.stored.chunks()[:1]
    assert len(others) > 3


# --- writing


def test_the_header_is_written_after_everything_it_speaks_for() -> None:
    volume, extent, _, _ = written(BIG)
    offsets = [write.offset_bytes for write in volume.unflushed]
    assert offsets[-1] == extent.offset_bytes
    assert extent.offset_bytes not in offsets[:-1]


def test_what_was_written_passes_every_check_and_is_what_was_in_the_slot() -> None:
    volume, extent, image, root = written(BIG)
    part = BIG.stored
    found = page_aligned(part.image_bytes)
    volume.read(extent.offset_bytes, [found])
    assert found == image
    head = check_header(
        found[: part.header_bytes], part=part, root=root, store_uuid=STORE, namespace="moe", key=KEY, identity=IDENTITY, place="x"
    )
    assert (head.sequence, head.optimizer_step, head.last_apply) == (2, 5, 6)
    check_checksums(head, part, 0, chunk_checksums(found, part.chunks()), place="x")


def test_a_write_touches_nothing_outside_its_extent() -> None:
    volume, extent, _, _ = written(BIG)
    around = page_aligned(PAGE_BYTES)
    for offset in (0, extent.offset_bytes - PAGE_BYTES, extent.offset_bytes + extent.length_bytes):
        volume.read(offset, [around])
        assert not any(around)


def test_a_piece_that_fails_leaves_no_root() -> None:
    part = BIG.stored
    volume = FaultyVolume(MemoryVolume(part.image_bytes), [Fault("write", 1)])
    write = ImageWrite(volume, Extent(0, 0, part.image_bytes), part, image_of(part), header(), [0] * len(part.chunks()), Hashing(1))
    with pytest.raises(VolumeError):
        write.run(cut_for_write(part, MIB)[1])
    assert write.root == 0


# --- reading


def read_image(volume: MemoryVolume, extent: Extent, part: Part) -> tuple[memoryview, list[PieceRead]]:
    slot = page_aligned(part.image_bytes)
    read = ImageRead(volume, extent, slot, part.header_bytes, Hashing(1))
    return slot, [read.run(piece) for piece in cut_pieces(part, MIB, len(part.fields))]


def header_of(results: list[PieceRead], part: Part, root: int) -> Header:
    (head,) = [result.header for result in results if result.header is not None]
    return check_header(
        head, part=part, root=root, store_uuid=STORE, namespace="moe", key=KEY, identity=IDENTITY, place="volume 0"
    )


def test_an_image_comes_back_byte_for_byte_with_the_checksums_of_its_header() -> None:
    volume, extent, image, root = written(BIG)
    slot, results = read_image(volume, extent, BIG.stored)
    assert slot == image
    check_pieces(header_of(results, BIG.stored, root), BIG.stored, results, place="volume 0")


class _Noting(FaultyVolume):
    """Notes what is read; the read of a record's rest waits until `is_hashed`."""

    def __init__(self, inner: MemoryVolume, extent: Extent, is_hashed: threading.Event) -> None:
        super().__init__(inner, [])
        self._extent = extent
        self._is_hashed = is_hashed
        self.reads: list[tuple[int, int]] = []

    def read(self, offset_bytes: int, into: Sequence[memoryview]) -> None:
        start = offset_bytes - self._extent.offset_bytes
        if start:
            assert self._is_hashed.wait(WAIT_S), "the first part is hashed while the rest is read"
        self.reads.append((start, start + sum(map(len, into))))
        super().read(offset_bytes, into)


def test_the_first_part_of_a_large_record_is_hashed_while_the_rest_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    part, is_hashed = BIG.stored, threading.Event()
    inner, extent, image, root = written(BIG)
    kept = hashing.chunk_checksums

    def noting(*arguments: Any) -> list[int]:
        found = kept(*arguments)
        is_hashed.set()
        return found

    monkeypatch.setattr(hashing, "chunk_checksums", noting)
    volume, slot = _Noting(inner, extent, is_hashed), page_aligned(part.image_bytes)
    (piece,) = cut_pieces(part, 16 * MIB, len(part.fields))
    result = ImageRead(volume, extent, slot, part.header_bytes, Hashing(1)).run(piece)
    assert slot == image
    check_pieces(header_of([result], part, root), part, [result], place="volume 0")
    (start, cut), (again, end) = volume.reads
    assert (start, again, end) == (0, cut, part.image_bytes)
    assert 0.7 * end < cut < end


@settings(max_examples=40)
@given(shapes=SHAPES, piece_bytes=PIECE_BYTES)
def test_both_parts_of_a_large_piece_cover_it_exactly(shapes: list[tuple[int, int]], piece_bytes: int) -> None:
    part = schema_of(shapes).stored
    halves = [half for piece in cut_pieces(part, piece_bytes, len(part.fields)) for half in cut_for_hashing(piece)]
    check_cover(tuple(halves), part, end=part.image_bytes, chunk_count=len(part.chunks()))


def test_a_large_record_whose_rest_fails_gives_the_error_of_the_disk() -> None:
    inner, extent, _, _ = written(BIG)
    volume, part = FaultyVolume(inner, [Fault("read", 2)]), BIG.stored
    read = ImageRead(volume, extent, page_aligned(part.image_bytes), part.header_bytes, Hashing(1))
    with pytest.raises(VolumeError):
        read.run(*cut_pieces(part, 16 * MIB, len(part.fields)))


def masters(schema: Schema, image: memoryview) -> dict[str, torch.Tensor]:
    return {name: field_tensor(image, schema.stored.field(f"master/{name}")) for name, _, _ in schema.specs}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("piece_bytes", [MIB, 8 * MIB])
def test_param_is_read_from_the_masters_alone_and_cast_as_torch_casts(dtype: str, piece_bytes: int) -> None:
    schema = schema_of([(600, 700), (7, 13), (1, 1)], dtype)
    volume, extent, image, root = written(schema)
    param = schema.part("param")
    slot = page_aligned(param.image_bytes)
    staging = Staging()
    staging.add(page_aligned(piece_bytes + 2 * MIB))
    pieces = cut_pieces(schema.stored, piece_bytes, len(schema.specs))
    read = MasterRead(volume, extent, schema, slot, staging, Hashing(1))
    results = [read.run(piece) for piece in pieces]
    for name, value in masters(schema, image).items():
        assert torch.equal(field_tensor(slot, param.field(name)), value.to(getattr(torch, dtype))), name
    check_pieces(header_of(results, schema.stored, root), schema.stored, results, place="volume 0")
    assert sum(len(result.checksums) for result in results) < len(schema.stored.chunks()), "the moments were not read"
    staging.borrow()  # it was given back each time


def test_a_staging_buffer_is_given_back_when_its_read_fails() -> None:
    schema = schema_of([(10, 10)])
    volume = FaultyVolume(MemoryVolume(schema.record_bytes), [Fault("read", 1)])
    staging, buffer = Staging(), page_aligned(2 * MIB)
    staging.add(buffer)
    read = MasterRead(volume, Extent(0, 0, schema.record_bytes), schema, page_aligned(8 * PAGE_BYTES), staging, Hashing(1))
    with pytest.raises(VolumeError):
        read.run(cut_pieces(schema.stored, MIB, 1)[0])
    assert staging.borrow() is buffer


def test_a_flipped_byte_anywhere_in_header_or_fields_is_found() -> None:
    part = BIG.stored
    volume, extent, _, root = written(BIG)
    offsets = [0, 100, part.header_bytes - 1]
    for field in part.fields:
        offsets += [field.offset_bytes, field.offset_bytes + field.length_bytes - 1]
    for offset in offsets:
        volume.corrupt(extent.offset_bytes + offset)
        _, results = read_image(volume, extent, part)
        with pytest.raises(CorruptRecord, match=r"record \(3, 4\) of namespace 'moe', version 7 of epoch 1, at volume 0"):
            check_pieces(header_of(results, part, root), part, results, place="volume 0")
        volume.corrupt(extent.offset_bytes + offset)


def test_a_flipped_byte_of_a_master_is_found_when_param_is_read_and_named_with_its_field() -> None:
    volume, extent, _, root = written(BIG)
    volume.corrupt(extent.offset_bytes + BIG.stored.field("master/down").offset_bytes + 8)
    staging = Staging()
    staging.add(page_aligned(8 * MIB))
    read = MasterRead(volume, extent, BIG, page_aligned(BIG.part("param").image_bytes), staging, Hashing(1))
    results = [read.run(piece) for piece in cut_pieces(BIG.stored, MIB, len(BIG.specs))]
    with pytest.raises(CorruptRecord, match="field 'master/down'"):
        check_pieces(header_of(results, BIG.stored, root), BIG.stored, results, place="volume 0")
