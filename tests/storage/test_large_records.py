"""Records above 4 GiB where bytes are counted: files, mappings, pieces, tables, space, rows, messages. Holes take no room."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
from xxhash import xxh3_64_intdigest

from paramstore.bench.process import resident_bytes
from paramstore.core.checksums import header_root
from paramstore.core.location import Extent, Identity, Located
from paramstore.core.optimizers import AdamW
from paramstore.core.schema import CHUNK_BYTES, HEADER_FIXED_BYTES, PAGE_BYTES, Part, Schema
from paramstore.engine.transfers.arithmetic import cut_update
from paramstore.engine.transfers.hashing import Hashing
from paramstore.engine.transfers.routes import (
    ImageRead,
    ImageWrite,
    MasterRead,
    Piece,
    Staging,
    check_pieces,
    cut_for_write,
    cut_pieces,
)
from paramstore.errors import CorruptRecord
from paramstore.fsck.disks import FileDisk
from paramstore.fsck.scan import read_record
from paramstore.optim.tensors import field_tensor
from paramstore.optim.update import update
from paramstore.storage.catalog.base import Change, Row
from paramstore.storage.catalog.lmdb_catalog import LmdbCatalog
from paramstore.storage.format.structures import Header, check_header, pack_header, unpack_header
from paramstore.storage.space.extents import Space
from paramstore.storage.volume.backing_file import volume_path
from paramstore.storage.volume.base import Volume
from paramstore.storage.volume.file_volume import FileVolume
from paramstore.storage.volume.pmem_volume import PmemVolume
from paramstore.testing.catalogs import STORE_UUID, namespace_row
from paramstore.testing.volumes import page_aligned
from paramstore.wire.codec import LENGTH, decode_answer, decode_request, encode
from paramstore.wire.messages import Granted, InitializePut, OpenUpload, Push, Uploaded
from paramstore_native import libpmem2
from paramstore_testkit.disks.sparse_volume import HoleSegment, SparseVolume
from paramstore_testkit.stores.memory_disk import MemoryDisk

MIB, GIB = 1 << 20, 1 << 30
BORDER = 4 * GIB
LARGE = Schema.param({"w": ((BORDER + 256 * MIB + 12_345,), "uint8"), "b": ((1000,), "float32")})
TRAINED = Schema.adamw({"w": (GIB + 3 * MIB,), "v": (1000,)}, param_dtype="bfloat16")
"""`master/w` is longer than 4 GiB, the moments lie beyond it, the last at 8 GiB."""
PIECE_BYTES = 16 * MIB
EXTENT_AT = BORDER + 64 * MIB
KEY = (0, 3)
MEMORY_BYTES_MAX = 256 * MIB
SPARSE_FILE_BYTES = EXTENT_AT + LARGE.record_bytes


def zero_table(part: Part) -> list[int]:
    """The checksum of every chunk of a record of zeros: all but the last of each field are alike."""
    known: dict[int, int] = {}
    for chunk in part.chunks():
        if chunk.length_bytes not in known:
            known[chunk.length_bytes] = xxh3_64_intdigest(bytes(chunk.length_bytes))
    return [known[chunk.length_bytes] for chunk in part.chunks()]


def header_of(checksums: tuple[int, ...] = ()) -> Header:
    return Header(STORE_UUID, "large", KEY, Identity(1, 2), 3, 4, 5, checksums)


def write_sparsely(volume: Volume, part: Part, image: memoryview, dirty: list[int]) -> tuple[Extent, int]:
    """A record whose chunks are zeros but where `image` has something at the offsets `dirty`; gives extent and root.

    Only those pieces are hashed and written; then the one with the header.
    """
    extent = Extent(0, EXTENT_AT, part.image_bytes)
    first, *others = cut_for_write(part, PIECE_BYTES)
    write = ImageWrite(volume, extent, part, image, header_of(), zero_table(part), Hashing(1))
    for piece in others:
        if any(piece.start <= at < piece.end for at in dirty):
            write.run(piece)
    write.run(first)
    return extent, write.root


def around(pieces: tuple[Piece, ...], offsets: list[int]) -> list[Piece]:
    """The first piece, and those with one of these offsets or next to it."""
    return [piece for piece in pieces if piece.start == 0 or any(piece.start - 1 <= at <= piece.end for at in offsets)]


def field_at(part: Part, name: str, byte: int) -> int:
    """Offset in the image of a byte of a field."""
    return part.field(name).offset_bytes + byte


def borders(part: Part) -> list[int]:
    """Offsets of the image where something passes 4 GiB: in the field, in the image, on the volume; and the ends."""
    first = part.fields[0]
    last = part.fields[-1]
    found = [first.offset_bytes, first.offset_bytes + BORDER - 1, first.offset_bytes + BORDER, BORDER - 1, BORDER,
             2 * GIB - 1, 2 * GIB, last.offset_bytes, last.offset_bytes + last.length_bytes - 1]  # fmt: skip
    return sorted(set(found))


@pytest.fixture
def sparse_file(tmp_path: Path) -> Iterator[Path]:
    """The directory of a volume that is one hole."""
    path = volume_path(tmp_path, 0)
    path.touch(mode=0o600)
    os.truncate(path, SPARSE_FILE_BYTES)
    yield tmp_path
    path.unlink()


# --- layout


@pytest.mark.parametrize("schema", [LARGE, TRAINED])
def test_layout_and_header_of_a_large_record_are_exact(schema: Schema) -> None:
    part = schema.stored
    chunks = part.chunks()
    assert part.header_bytes == -(-(HEADER_FIXED_BYTES + 8 * len(chunks)) // PAGE_BYTES) * PAGE_BYTES
    assert sum(chunk.length_bytes for chunk in chunks) == sum(field.length_bytes for field in part.fields)
    assert part.image_bytes > BORDER
    checksums = tuple(range(1 << 40, (1 << 40) + len(chunks)))
    packed = pack_header(header_of(checksums), part)
    assert len(packed) == part.header_bytes
    assert unpack_header(packed, part).checksums == checksums
    pieces = cut_pieces(part, PIECE_BYTES, len(part.fields))
    assert pieces[0].start == 0
    assert all(left.end == right.start for left, right in pairwise(pieces))
    assert pieces[-1].end == part.image_bytes
    assert sum(len(piece.chunks) for piece in pieces) == len(chunks)
    assert max(piece.end - piece.start for piece in pieces) <= PIECE_BYTES + CHUNK_BYTES + part.header_bytes


def test_an_update_of_a_large_record_covers_every_element_once() -> None:
    spans = [span for piece in cut_update(TRAINED) for span in piece]
    for number, field in enumerate(TRAINED.gradient_fields()):
        own = [(start, end) for at, start, end in spans if at == number]
        assert (own[0][0], own[-1][1]) == (0, field.elements)
        assert all(left[1] == right[0] for left, right in pairwise(own))


# --- bytes


@pytest.mark.parametrize("kind", ["file", "pmem"])
def test_bytes_beyond_4_gib_of_a_real_file_come_back(sparse_file: Path, kind: str) -> None:
    if kind == "pmem" and libpmem2.missing_reason():
        pytest.skip(libpmem2.missing_reason())
    volume = FileVolume.open(sparse_file, index=0) if kind == "file" else PmemVolume.open(sparse_file, index=0)
    data, found = page_aligned(MIB, seed=1), page_aligned(MIB)
    for offset_bytes in (2 * GIB - MIB // 2, BORDER - MIB // 2, SPARSE_FILE_BYTES - MIB):
        volume.write(offset_bytes, [data])
        volume.flush()
        volume.read(offset_bytes, [found])
        assert found == data
    volume.read(MIB // 2, [found])
    assert bytes(found) == bytes(MIB)
    volume.close()
    assert volume_path(sparse_file, 0).stat().st_blocks * 512 < 64 * MIB


@pytest.mark.parametrize("schema", [LARGE, TRAINED])
def test_pieces_across_every_border_of_32_bits_are_written_read_and_verified(schema: Schema, sparse_file: Path) -> None:
    part, before_bytes = schema.stored, resident_bytes(os.getpid())
    volume: Volume = FileVolume.open(sparse_file, index=0)
    if schema is TRAINED:
        volume.close()
        volume = SparseVolume(EXTENT_AT + part.image_bytes)
    image, found = (HoleSegment(part.image_bytes).view(0, part.image_bytes) for _ in range(2))
    dirty = borders(part)
    for number, at in enumerate(dirty):
        image[at] = number + 1
    extent, root = write_sparsely(volume, part, image, dirty)
    read = ImageRead(volume, extent, found, part.header_bytes, Hashing(1))
    results = [read.run(piece) for piece in around(cut_pieces(part, PIECE_BYTES, len(part.fields)), dirty)]
    assert results[0].header is not None
    header = check_header(
        results[0].header, part=part, root=root, store_uuid=STORE_UUID, namespace="large", key=KEY, identity=Identity(1, 2),
        place="here",
    )  # fmt: skip
    check_pieces(header, part, results, place="here")
    assert [found[at] for at in dirty] == list(range(1, len(dirty) + 1))
    spoilt = page_aligned(PAGE_BYTES)
    at = part.fields[0].offset_bytes + BORDER
    volume.write(EXTENT_AT + at, [spoilt])
    again = [read.run(piece) for piece in around(cut_pieces(part, PIECE_BYTES, len(part.fields)), [at])]
    with pytest.raises(CorruptRecord, match=rf"chunk 4096 \(field '.*w', 1048576 bytes at byte {at} of the record\)"):
        check_pieces(header, part, again, place="here")
    volume.close()
    assert resident_bytes(os.getpid()) - before_bytes < MEMORY_BYTES_MAX


@pytest.mark.slow
def test_masters_beyond_4_gib_are_cast_to_their_places_and_updated() -> None:
    part, before_bytes = TRAINED.stored, resident_bytes(os.getpid())
    volume = SparseVolume(EXTENT_AT + part.image_bytes)
    image = HoleSegment(part.image_bytes).view(0, part.image_bytes)
    masters = field_tensor(image, part.fields[0])
    elements = [GIB - 1, GIB, GIB + 1, GIB + 3 * MIB - 1]
    for number, element in enumerate(elements):
        masters[element] = number + 1.5
    dirty = [field_at(part, "master/w", 4 * element) for element in elements]
    extent, root = write_sparsely(volume, part, image, dirty)
    param = TRAINED.part("param")
    slot = HoleSegment(param.image_bytes).view(0, param.image_bytes)
    pieces = cut_pieces(part, PIECE_BYTES, len(TRAINED.specs))
    staging = Staging()
    staging.add(page_aligned(max(piece.end - piece.start for piece in pieces)))
    read = MasterRead(volume, extent, TRAINED, slot, staging, Hashing(1))
    results = [read.run(piece) for piece in around(pieces, dirty)]
    assert results[0].header is not None
    assert header_root(results[0].header) == root
    check_pieces(unpack_header(results[0].header, part), part, results, place="here")
    assert field_tensor(slot, param.fields[0])[elements].tolist() == [1.5, 2.5, 3.5, 4.5]
    gradient = HoleSegment(TRAINED.gradient_bytes).view(0, TRAINED.gradient_bytes)
    field_tensor(gradient, TRAINED.gradient_fields()[0])[GIB] = 1.0
    update(
        TRAINED, image, [gradient], options=AdamW(lr=0.5, weight_decay=0.0), optimizer_step=1, param=slot,
        spans=[(0, GIB - 1024, GIB + 1024)],
    )  # fmt: skip
    assert masters[elements].tolist() == pytest.approx([1.5, 2.0, 3.5, 4.5])
    assert field_tensor(slot, param.fields[0])[elements].tolist() == [1.5, 2.0, 3.5, 4.5]
    assert resident_bytes(os.getpid()) - before_bytes < MEMORY_BYTES_MAX


class DirectDisk(MemoryDisk):
    """A volume as fsck reads it, past the page cache: filling that with holes takes ten times as long as checking them."""

    def __init__(self, volume: Volume) -> None:
        super().__init__(volume)
        self._buffer = page_aligned(CHUNK_BYTES)

    def read(self, offset_bytes: int, length_bytes: int) -> bytes:
        target = self._buffer[:length_bytes]
        self._volume.read(offset_bytes, [target])
        return bytes(target)


@pytest.mark.slow
def test_fsck_verifies_every_byte_of_a_large_record_in_a_real_file(
    sparse_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    part, before_bytes = LARGE.stored, resident_bytes(os.getpid())
    volume = FileVolume.open(sparse_file, index=0)
    image = HoleSegment(part.image_bytes).view(0, part.image_bytes)
    dirty = borders(part)
    for at in dirty:
        image[at] = 7
    _, root = write_sparsely(volume, part, image, dirty)
    volume.flush()
    started_s = time.perf_counter()
    found = read_record(DirectDisk(volume), EXTENT_AT, {"large": part}, store=STORE_UUID)
    seconds = time.perf_counter() - started_s
    volume.close()
    disk = FileDisk(sparse_file, 0)
    for at in dirty:
        page = at // PAGE_BYTES * PAGE_BYTES
        assert disk.read(EXTENT_AT + page, PAGE_BYTES)[at - page] == 7
    disk.close()
    with capsys.disabled():
        print(f"\nfsck: {part.image_bytes / GIB:.2f} GiB in {seconds:.1f} s, {part.image_bytes / seconds / 1e9:.1f} GB/s")  # noqa: T201
    assert found is not None
    assert (found.damage, found.root, found.record_bytes, found.offset) == (None, root, part.image_bytes, EXTENT_AT)
    assert resident_bytes(os.getpid()) - before_bytes < MEMORY_BYTES_MAX


# --- tables


def test_space_for_large_records_is_counted_exactly() -> None:
    space = Space()
    start_bytes, size_bytes = 11 * MIB, 1 << 50
    space.add_volume(0, start_bytes=start_bytes, size_bytes=size_bytes, written_bytes=start_bytes)
    extents = [space.reserve(LARGE.record_bytes) for _ in range(5)]
    assert [extent.offset_bytes for extent in extents if extent is not None] == [
        start_bytes + number * LARGE.record_bytes for number in range(5)
    ]
    assert space.free_bytes == size_bytes - start_bytes - 5 * LARGE.record_bytes
    assert extents[2] is not None
    space.release(extents[2])
    assert space.reserve(LARGE.record_bytes) == extents[2]


def test_a_row_keeps_offsets_lengths_and_sizes_beyond_32_bits(tmp_path: Path) -> None:
    located = Located(Extent(1, (1 << 50) + PAGE_BYTES, LARGE.record_bytes), Identity(1 << 40, 1 << 41), (1 << 64) - 1)
    catalog = LmdbCatalog(tmp_path / "catalog", store_uuid=STORE_UUID)
    catalog.load()
    catalog.apply(Change(put_namespaces=(namespace_row(),), put_rows=(("moe", KEY, Row(1 << 40, located)),)))
    catalog.close()
    again = LmdbCatalog(tmp_path / "catalog")
    (row,) = again.load().namespaces["moe"].rows[KEY]
    again.close()
    assert row == Row(1 << 40, located)


def test_messages_carry_offsets_and_lengths_beyond_32_bits() -> None:
    far = (1 << 45) + PAGE_BYTES
    for request in (
        OpenUpload(1, far), InitializePut(1, 2, KEY, 3, far), Push(1, 2, [(0, 3, 1, far)]),
    ):  # fmt: skip
        assert decode_request(memoryview(encode(request))[LENGTH.size :]) == request
    for answer in (Granted(1, [(7, far, 1 << 40, 1 << 41)], [(7, far)]), Uploaded(1, 2, far)):
        assert decode_answer(memoryview(encode(answer))[LENGTH.size :]) == answer


