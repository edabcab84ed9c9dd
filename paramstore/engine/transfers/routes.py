"""The routes: how a worker reads, checks, casts, hashes and writes one record. No table, no event loop, no decision.

A stored part's image is the same on the volume and in a slot, so a record moves in a few large aligned pieces. Pieces
begin where checksum chunks begin; each worker hashes what it just moved, while it is still in the cache.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

from paramstore.core.checksums import header_root
from paramstore.core.location import Extent
from paramstore.core.schema import ITEM_BYTES, MASTER_DTYPE, PAGE_BYTES, Chunk, Part, Schema, round_up
from paramstore.engine.transfers.buffers import Staging
from paramstore.engine.transfers.hashing import Hashing
from paramstore.storage.format.structures import Header, check_checksums, pack_header
from paramstore.storage.volume.base import Volume

HASHED_BESIDE_BYTES = 4 << 20
"""Size of a piece from which on one part of it is hashed while the other is read: of smaller ones that saves too little."""
FIRST_PART = 0.75
"""The part of a large piece that is read first: hashing it takes less time than reading the rest."""


class Piece(NamedTuple):
    """Bytes [start, end) of an image, page-aligned, and the chunks that begin in them."""

    start: int
    end: int
    first_chunk: int
    chunks: tuple[Chunk, ...]


class PieceRead(NamedTuple):
    """The result of reading a piece: the checksums of its chunks, the header if it is the first piece, and the device sums of the
    chunks if they were asked for."""

    first_chunk: int
    checksums: list[int]
    header: bytes | None
    sums: list[int] | None = None


@lru_cache(maxsize=256)
def cut_pieces(part: Part, piece_bytes: int, field_count: int) -> tuple[Piece, ...]:
    """Cuts the image of a stored part, up to the end of its first `field_count` fields, into pieces of about equal size, at most
    about `piece_bytes`. The first piece begins with the header."""
    last = part.fields[field_count - 1]
    end = round_up(last.offset_bytes + last.length_bytes, PAGE_BYTES)
    chunks = [chunk for chunk in part.chunks() if chunk.offset_bytes < end]
    return _cut(chunks, 0, end, 0, piece_bytes)


@lru_cache(maxsize=256)
def cut_for_write(part: Part, piece_bytes: int) -> tuple[Piece, ...]:
    """Cuts the whole image; the first piece has the header. It is written last, alone, so it is small where there are others.

    A record of two pieces or less goes as one: its one worker has all checksums, and nothing waits for another piece.
    """
    chunks = part.chunks()
    if part.image_bytes <= 2 * piece_bytes:
        return (Piece(0, part.image_bytes, 0, chunks),)
    start = chunks[1].offset_bytes
    return (Piece(0, start, 0, chunks[:1]), *_cut(list(chunks[1:]), start, part.image_bytes, 1, piece_bytes))


def _cut(chunks: list[Chunk], start: int, end: int, first_chunk: int, piece_bytes: int) -> tuple[Piece, ...]:
    """Cuts bytes [start, end), in which `chunks` lie, into about equal pieces that begin where chunks begin."""
    target = (end - start) / max(1, -(-(end - start) // piece_bytes))
    pieces: list[Piece] = []
    begin, first = start, 0
    for index in range(1, len(chunks)):
        offset = chunks[index].offset_bytes
        if offset - start >= target * (len(pieces) + 1) * (1 - 1e-9):
            pieces.append(Piece(begin, offset, first_chunk + first, tuple(chunks[first:index])))
            begin, first = offset, index
    pieces.append(Piece(begin, end, first_chunk + first, tuple(chunks[first:])))
    return tuple(pieces)


def cut_for_hashing(piece: Piece) -> tuple[Piece, ...]:
    """Cuts a large piece in two, where a chunk begins: the first part is hashed while the rest is read, so that whoever waits for
    the record waits for the hash of the rest alone."""
    size_bytes = piece.end - piece.start
    if size_bytes < HASHED_BESIDE_BYTES:
        return (piece,)
    wanted = piece.start + FIRST_PART * size_bytes
    count = next((place for place, chunk in enumerate(piece.chunks) if chunk.offset_bytes >= wanted), 0)
    if not count:
        return (piece,)
    cut, first = piece.chunks[count].offset_bytes, piece.first_chunk
    return Piece(piece.start, cut, first, piece.chunks[:count]), Piece(cut, piece.end, first + count, piece.chunks[count:])


class ImageRead:
    """Reads an extent into a slot, or buffer, of the same stored part: header and fields, as they are. makes_sums: whether device
    sums are computed beside the checksums."""

    def __init__(
        self, volume: Volume, extent: Extent, image: memoryview, header_bytes: int, hashing: Hashing, *, makes_sums: bool = False
    ) -> None:
        self._volume = volume
        self._offset_bytes = extent.offset_bytes
        self._image = image
        self._header_bytes = header_bytes
        self._hashing = hashing
        self._makes_sums = makes_sums

    def run(self, piece: Piece) -> PieceRead:
        first, *rest = cut_for_hashing(piece)
        target = self._read(first)
        if rest:
            with self._hashing.beside(target, first.chunks, first.start) as checksums_of_first:
                of_rest = self._hashing.checksums(self._read(rest[0]), rest[0].chunks, rest[0].start)
                checksums = checksums_of_first() + of_rest
        else:
            checksums = self._hashing.checksums(target, first.chunks, first.start)
        header = bytes(target[: self._header_bytes]) if piece.start == 0 else None
        image = self._image[piece.start : piece.end]
        sums = self._hashing.device_sums(image, piece.chunks, piece.start) if self._makes_sums else None
        return PieceRead(piece.first_chunk, checksums, header, sums)

    def _read(self, piece: Piece) -> memoryview:
        target = self._image[piece.start : piece.end]
        self._volume.read(self._offset_bytes + piece.start, (target,))
        return target


def read_piece(
    volume: Volume, offset_bytes: int, target: memoryview, header_bytes: int, hashing: Hashing, piece: Piece, *,
    makes_sums: bool = False,
) -> PieceRead:  # fmt: skip
    """Reads one piece of the record at `offset_bytes` to the start of `target`, and hashes it. Runs in a worker."""
    target = target[: piece.end - piece.start]
    volume.read(offset_bytes + piece.start, (target,))
    header = bytes(target[:header_bytes]) if piece.start == 0 else None
    checksums = hashing.checksums(target, piece.chunks, piece.start)
    sums = hashing.device_sums(target, piece.chunks, piece.start) if makes_sums else None
    return PieceRead(piece.first_chunk, checksums, header, sums)


class MasterRead:
    """Materialises `param` from a volume: reads the `master` fields of a training record's extent into a `param` slot.

    For fp32 `param` the layouts agree, so the bytes go straight into the slot, and the header into a borrowed buffer. Otherwise a
    piece is read into a borrowed buffer and cast from there.
    """

    def __init__(
        self, volume: Volume, extent: Extent, schema: Schema, slot: memoryview, staging: Staging, hashing: Hashing
    ) -> None:
        self._volume = volume
        self._offset_bytes = extent.offset_bytes
        self._schema = schema
        self._slot = slot
        self._staging = staging
        self._hashing = hashing

    def run(self, piece: Piece) -> PieceRead:
        buffer = self._staging.borrow()
        try:
            if self._schema.part("param").fields[0].dtype == MASTER_DTYPE:
                return self._read_direct(piece, buffer)
            return self._read_and_cast(piece, buffer)
        finally:
            self._staging.give_back(buffer)

    def _read_direct(self, piece: Piece, buffer: memoryview) -> PieceRead:
        header_bytes = self._schema.stored.header_bytes
        base = max(piece.start, header_bytes)
        target = self._slot[base - header_bytes : piece.end - header_bytes]
        header = None
        if piece.start == 0:
            head = buffer[:header_bytes]
            self._volume.read(self._offset_bytes, (head, target))
            header = bytes(head)
        else:
            self._volume.read(self._offset_bytes + piece.start, (target,))
        return PieceRead(piece.first_chunk, self._hashing.checksums(target, piece.chunks, base), header)

    def _read_and_cast(self, piece: Piece, buffer: memoryview) -> PieceRead:
        from paramstore.optim.cast import cast_range  # torch only where it computes

        source = buffer[: piece.end - piece.start]
        self._volume.read(self._offset_bytes + piece.start, (source,))
        checksums = self._hashing.checksums(source, piece.chunks, piece.start)
        masters, params = self._schema.stored.fields, self._schema.part("param").fields
        for master, param in zip(masters, params, strict=False):
            item_bytes = ITEM_BYTES[param.dtype]
            for chunk in piece.chunks:
                within = chunk.offset_bytes - master.offset_bytes
                if 0 <= within < master.length_bytes:
                    start = param.offset_bytes + within // 4 * item_bytes
                    from_buffer = chunk.offset_bytes - piece.start
                    cast_range(
                        source[from_buffer : from_buffer + chunk.length_bytes],
                        self._slot[start : start + chunk.length_bytes // 4 * item_bytes],
                        param.dtype,
                    )
        header = bytes(source[: self._schema.stored.header_bytes]) if piece.start == 0 else None
        return PieceRead(piece.first_chunk, checksums, header)


@dataclass(slots=True)
class ImageWrite:
    """Writes a slot to a fresh extent. All other pieces are hashed and written before the first, whose header has the checksum
    table that is complete by then. `root` is the record's root after that last write."""

    volume: Volume
    extent: Extent
    part: Part
    image: memoryview
    header: Header
    checksums: list[int]
    """One entry for each chunk; workers fill them in."""
    hashing: Hashing
    root: int = 0

    def run(self, piece: Piece) -> None:
        data = self.image[piece.start : piece.end]
        found = self.hashing.checksums(data, piece.chunks, piece.start)
        self.checksums[piece.first_chunk : piece.first_chunk + len(found)] = found
        if piece.start == 0:
            header = replace(self.header, checksums=tuple(self.checksums))
            packed = pack_header(header, self.part)
            self.root = header_root(packed)
            data[: self.part.header_bytes] = packed
        self.volume.write(self.extent.offset_bytes + piece.start, (data,))


def check_pieces(header: Header, part: Part, results: list[PieceRead], *, place: str) -> None:
    """Checks every chunk that was read against the header's table; raises CorruptRecord naming the first that does not match."""
    for result in results:
        check_checksums(header, part, result.first_chunk, result.checksums, place=place)
