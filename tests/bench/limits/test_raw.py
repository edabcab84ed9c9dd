"""The raw baseline moves what it says it moves."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from paramstore.bench.limits.pages import MemoryKind, Slab
from paramstore.bench.limits.raw import PIECE_BYTES, RawFile, fill_incompressible
from paramstore.errors import VolumeError

RECORD_BYTES = PIECE_BYTES + 4096
RECORD_COUNT = 3


@pytest.fixture
def slab() -> Iterator[Slab]:
    slab = Slab(MemoryKind.PRIVATE_SMALL, RECORD_BYTES * RECORD_COUNT)
    yield slab
    slab.close()


@pytest.fixture
def raw(tmp_path: Path, slab: Slab) -> Iterator[RawFile]:
    try:
        raw = RawFile(tmp_path / "raw", slab, record_bytes=RECORD_BYTES, record_count=RECORD_COUNT)
    except VolumeError as error:
        pytest.skip(str(error))
    yield raw
    raw.close()


def test_records_read_are_those_written_whatever_the_order(raw: RawFile, slab: Slab) -> None:
    stored = bytes(slab.view)
    slab.view[: RECORD_BYTES * RECORD_COUNT] = bytes(RECORD_BYTES * RECORD_COUNT)

    sample = raw.read([2, 0])

    assert sample.work == 2 * RECORD_BYTES
    assert slab.view[:RECORD_BYTES] == stored[:RECORD_BYTES]
    assert slab.view[RECORD_BYTES : 2 * RECORD_BYTES] == bytes(RECORD_BYTES)
    assert slab.view[2 * RECORD_BYTES : 3 * RECORD_BYTES] == stored[2 * RECORD_BYTES : 3 * RECORD_BYTES]


def test_overwrite_is_found_again_and_its_flush_is_told(raw: RawFile, slab: Slab) -> None:
    slab.view[:RECORD_BYTES] = b"\x05" * RECORD_BYTES

    sample = raw.write([0])
    slab.view[:RECORD_BYTES] = bytes(RECORD_BYTES)
    raw.read([0])

    assert slab.view[:RECORD_BYTES] == b"\x05" * RECORD_BYTES
    assert 0 <= sample.parts["flush_s"] < sample.seconds


def test_second_baseline_over_the_same_file_reads_what_the_first_wrote(raw: RawFile, slab: Slab, tmp_path: Path) -> None:
    other_slab = Slab(MemoryKind.SHARED_SMALL, RECORD_BYTES * RECORD_COUNT)
    other = RawFile(tmp_path / "raw", other_slab, record_bytes=RECORD_BYTES, record_count=RECORD_COUNT)
    other.read([1])
    assert other_slab.view[RECORD_BYTES : 2 * RECORD_BYTES] == slab.view[RECORD_BYTES : 2 * RECORD_BYTES]
    other.close()
    other_slab.close()


def test_file_cut_short_is_an_error_and_no_rate(raw: RawFile, tmp_path: Path) -> None:
    with open(tmp_path / "raw", "r+b") as file:
        file.truncate(RECORD_BYTES)
    with pytest.raises(VolumeError, match="bytes moved at offset"):
        raw.read([2])


def test_content_does_not_compress_and_equal_seeds_repeat_it() -> None:
    first, second, other = (memoryview(bytearray(1 << 20)) for _ in range(3))
    fill_incompressible(first, seed=1)
    fill_incompressible(second, seed=1)
    fill_incompressible(other, seed=2)
    assert first == second
    assert first != other
    assert len(zlib.compress(first)) > len(first)
