"""A sparse volume is one like any other, and takes room for nothing that is zero."""

from __future__ import annotations

import os

import pytest

from paramstore.bench.process import resident_bytes
from paramstore.testing.volume_contract import VolumeContract
from paramstore.testing.volumes import page_aligned
from paramstore_testkit.disks.sparse_volume import HoleSegment, SparseVolume, copy

GIB = 1 << 30


@pytest.fixture
def volume() -> SparseVolume:
    return SparseVolume(8 << 20)


class TestSparseVolume(VolumeContract):
    """The fixture is the module's."""


def test_zeros_take_no_room_and_overwritten_bytes_give_theirs_back() -> None:
    volume = SparseVolume(1 << 45)
    volume.write(1 << 44, [page_aligned(8192, seed=1), page_aligned(1 << 20)])
    assert sorted(volume.pages) == [1 << 44, (1 << 44) + 4096]
    volume.write(1 << 44, [page_aligned(8192)])
    assert volume.pages == {}


def test_a_corrupted_hole_reads_back_so() -> None:
    volume = SparseVolume(1 << 45)
    volume.corrupt((1 << 33) + 5)
    found = page_aligned(4096, seed=2)
    volume.read(1 << 33, [found])
    assert bytes(found) == bytes(5) + b"\1" + bytes(4090)


def test_holes_are_read_and_copied_without_taking_memory() -> None:
    segment, target = HoleSegment(GIB), HoleSegment(GIB)
    segment.view(GIB // 2, 3)[:] = b"abc"
    before_bytes = resident_bytes(os.getpid())
    copy(segment.view(0, GIB), target.view(0, GIB))
    SparseVolume(GIB).read(0, [segment.view(0, GIB // 2)])
    assert bytes(target.view(GIB // 2 - 1, 5)) == b"\0abc\0"
    assert resident_bytes(os.getpid()) - before_bytes < 64 << 20
