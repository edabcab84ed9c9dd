"""Mappings: aligned whatever address the kernel gives, populated, counted, unmapped with their last view."""

from __future__ import annotations

import gc
import mmap
from types import SimpleNamespace
from typing import Any

import pytest

from paramstore.errors import CapacityError
from paramstore.memory import pages
from paramstore.memory.pages import SEGMENT_ALIGNMENT_BYTES, AlignedMap, limits, map_aligned

PRIVATE = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
READ_WRITE = mmap.PROT_READ | mmap.PROT_WRITE


def private(length_bytes: int = SEGMENT_ALIGNMENT_BYTES) -> AlignedMap:
    return map_aligned(length_bytes, protection=READ_WRITE, flags=PRIVATE)


def mapped_lines() -> list[str]:
    gc.collect()
    with open("/proc/self/maps") as maps:
        return maps.readlines()


def test_an_unaligned_reservation_still_gives_an_aligned_mapping(monkeypatch: pytest.MonkeyPatch) -> None:
    real = pages._libc

    def one_page_off(address: int | None, length_bytes: int, *rest: Any) -> int:
        if address is None:
            shifted: int = real.mmap(None, length_bytes + mmap.PAGESIZE, *rest) + mmap.PAGESIZE
            return shifted
        mapped: int = real.mmap(address, length_bytes, *rest)
        return mapped

    monkeypatch.setattr(pages, "_libc", SimpleNamespace(mmap=one_page_off, munmap=real.munmap, madvise=real.madvise))
    mapping = private()
    assert mapping.address % SEGMENT_ALIGNMENT_BYTES == 0
    memoryview(mapping.array).cast("B")[-1] = 1


@pytest.mark.slow
def test_nothing_of_the_reservation_is_left_over() -> None:
    private().drop()
    before = len(mapped_lines())
    mappings = [private() for _ in range(4)]
    for mapping in mappings:
        mapping.drop()
    assert len(mapped_lines()) <= before
    assert not any(mapping.is_mapped for mapping in mappings)


def test_a_refused_mapping_raises_and_names_the_limits() -> None:
    with pytest.raises(CapacityError, match=r"Cannot allocate memory.*RLIMIT_AS"):
        private(1 << 60)
    with pytest.raises(CapacityError, match="Bad file descriptor"):
        map_aligned(SEGMENT_ALIGNMENT_BYTES, protection=READ_WRITE, flags=mmap.MAP_SHARED, fd=999_999)


def test_unknown_advice_is_told_not_raised() -> None:
    assert not private().advise(9999)
    assert private().advise(mmap.MADV_DONTDUMP)


def test_resident_bytes_count_touched_pages_alone() -> None:
    mapping = private()
    mapping.advise(mmap.MADV_NOHUGEPAGE)
    bytes_of = memoryview(mapping.array).cast("B")
    bytes_of[0] = bytes_of[5 * mmap.PAGESIZE] = bytes_of[-1] = 1
    assert mapping.resident_bytes() == 3 * mmap.PAGESIZE


def test_a_mapping_that_is_gone_while_it_is_counted_has_no_bytes() -> None:
    mapping = private()
    mapping.populate(wants_huge=False)
    mapping._unmapping()
    assert mapping.resident_bytes() == 0


def test_huge_bytes_are_none_where_huge_pages_were_refused() -> None:
    mapping = private()
    mapping.advise(mmap.MADV_NOHUGEPAGE)
    mapping.populate(wants_huge=False)
    assert mapping.huge_bytes() == 0
    assert mapping.resident_bytes() == SEGMENT_ALIGNMENT_BYTES


def test_lengths_beyond_one_piece_are_populated_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "POPULATE_PIECE_BYTES", SEGMENT_ALIGNMENT_BYTES)
    mapping = private(3 * SEGMENT_ALIGNMENT_BYTES)
    mapping.populate(wants_huge=True)
    assert mapping.resident_bytes() == 3 * SEGMENT_ALIGNMENT_BYTES


def test_limits_survive_a_machine_without_proc(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "_read", lambda path: "unknown")
    assert "unknown" in limits()


def test_a_dropped_mapping_cannot_be_used() -> None:
    mapping = private()
    mapping.drop()
    with pytest.raises(AssertionError, match="after drop"):
        _ = mapping.array
