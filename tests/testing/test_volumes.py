from collections.abc import Collection, Iterator

import pytest

from paramstore.errors import VolumeError
from paramstore.storage.volume.base import Volume
from paramstore.testing.volume_contract import VolumeContract
from paramstore.testing.volumes import (
    Fault,
    FaultyVolume,
    Keep,
    MemoryVolume,
    drop_write,
    keep_all,
    keep_none,
    keep_random,
    page_aligned,
    tear_write,
)

SIZE_BYTES = 8 << 20


class TestMemoryVolume(VolumeContract):
    @pytest.fixture
    def volume(self) -> MemoryVolume:
        return MemoryVolume(SIZE_BYTES)


class TestFaultyVolumeWithoutFaults(VolumeContract):
    @pytest.fixture
    def volume(self) -> FaultyVolume:
        return FaultyVolume(MemoryVolume(SIZE_BYTES, index=2), plan=[])


def fill(byte: int, length_bytes: int = 4096) -> memoryview:
    buffer = page_aligned(length_bytes)
    buffer[:] = bytes([byte]) * length_bytes
    return buffer


def contents(volume: Volume, offset_bytes: int = 0, length_bytes: int = 4096) -> bytes:
    found = page_aligned(length_bytes)
    volume.read(offset_bytes, [found])
    return bytes(found)


@pytest.fixture
def written() -> MemoryVolume:
    """A flushed page of 1s; then, unflushed, a page of 2s over it and a page of 3s after it."""
    volume = MemoryVolume(16384)
    volume.write(0, [fill(1)])
    volume.flush()
    volume.write(0, [fill(2)])
    volume.write(4096, [fill(3)])
    return volume


@pytest.mark.parametrize(
    ("keep", "first", "second"),
    [
        (keep_none, b"\1" * 4096, b"\0" * 4096),
        (keep_all, b"\2" * 4096, b"\3" * 4096),
        (drop_write(0), b"\1" * 4096, b"\3" * 4096),
        (drop_write(1), b"\2" * 4096, b"\0" * 4096),
        (tear_write(0, 3), b"\2" * 1536 + b"\1" * 2560, b"\0" * 4096),
        (tear_write(1, 7), b"\2" * 4096, b"\3" * 3584 + b"\0" * 512),
    ],
)
def test_a_crash_keeps_what_it_is_told_of_unflushed_writes(
    written: MemoryVolume, keep: Keep, first: bytes, second: bytes
) -> None:
    written.crash(keep)
    assert contents(written) == first
    assert contents(written, 4096) == second
    assert written.unflushed == ()


def test_flushed_writes_survive_every_crash(written: MemoryVolume) -> None:
    written.flush()
    written.crash(keep_none)
    assert contents(written) == b"\2" * 4096
    assert contents(written, 4096) == b"\3" * 4096


def test_overlapping_writes_are_undone_in_reverse() -> None:
    volume = MemoryVolume(8192)
    for byte in (1, 2, 3):
        volume.write(0, [fill(byte)])
    volume.crash(keep_none)
    assert contents(volume) == bytes(4096)


def test_a_random_crash_is_repeated_by_its_seed(caplog: pytest.LogCaptureFixture) -> None:
    def crash(seed: int) -> bytes:
        volume = MemoryVolume(1 << 16)
        for page in range(16):
            volume.write(page * 4096, [fill(page + 1)])
        volume.crash(keep_random(seed))
        return contents(volume, 0, 1 << 16)

    assert crash(7) == crash(7) != crash(8)
    assert "crash with seed 8" in caplog.text


def test_growth_is_bounded_by_the_capacity_and_names_what_is_missing() -> None:
    volume = MemoryVolume(8192, capacity_bytes=12288)
    with pytest.raises(VolumeError, match="cannot grow to 16384 bytes: 4096 bytes are missing"):
        volume.grow(16384)
    assert volume.size_bytes == 8192
    volume.grow(12288)
    assert volume.size_bytes == 12288


def test_corrupt_flips_bits_behind_the_caller() -> None:
    volume = MemoryVolume(4096)
    volume.corrupt(17, mask=0x80)
    assert contents(volume)[16:19] == b"\x00\x80\x00"


def test_a_fault_strikes_once_or_for_ever() -> None:
    once = FaultyVolume(MemoryVolume(8192), [Fault("flush", nth=2)])
    for_ever = FaultyVolume(MemoryVolume(8192), [Fault("flush", nth=2, forever=True)])
    assert list(outcomes(once)) == [True, False, True, True]
    assert list(outcomes(for_ever)) == [True, False, False, False]
    assert (once.calls["flush"], once.fired) == (4, 1)
    assert (for_ever.calls["flush"], for_ever.fired) == (4, 3)


def outcomes(volume: Volume, count: int = 4) -> Iterator[bool]:
    for _ in range(count):
        try:
            volume.flush()
            yield True
        except VolumeError:
            yield False


def test_a_failing_flush_leaves_everything_unflushed() -> None:
    inner = MemoryVolume(8192)
    volume = FaultyVolume(inner, [Fault("flush", 1)])
    volume.write(0, [fill(1)])
    with pytest.raises(VolumeError, match="flush number 1 fails as planned"):
        volume.flush()
    assert len(inner.unflushed) == 1


def test_a_failing_read_leaves_garbage_in_the_buffers() -> None:
    volume = FaultyVolume(MemoryVolume(8192), [Fault("read", 1)])
    found = fill(1)
    with pytest.raises(VolumeError, match="read number 1"):
        volume.read(0, [found])
    assert bytes(found) == b"\xde" * 4096
    assert contents(volume) == bytes(4096)


@pytest.mark.parametrize(("length_bytes", "torn_bytes"), [(4096, 4096), (8192, 4096), (12288, 8192)])
def test_a_failing_write_has_overwritten_half_its_range(length_bytes: int, torn_bytes: int) -> None:
    inner = MemoryVolume(16384)
    volume = FaultyVolume(inner, [Fault("write", 1)])
    with pytest.raises(VolumeError, match="write number 1"):
        volume.write(0, [fill(9, length_bytes)])
    assert contents(inner, 0, 16384) == b"\x09" * torn_bytes + bytes(16384 - torn_bytes)


def test_a_failing_growth_changes_nothing() -> None:
    volume = FaultyVolume(MemoryVolume(8192), [Fault("grow", 1)])
    with pytest.raises(VolumeError):
        volume.grow(16384)
    assert volume.size_bytes == 8192


def test_keep_functions_of_a_caller_are_welcome(written: MemoryVolume) -> None:
    def odd_sectors(write: int, sectors: int) -> Collection[int]:
        return range(1, sectors, 2)

    written.crash(odd_sectors)
    assert contents(written) == (b"\1" * 512 + b"\2" * 512) * 4


def test_a_disk_made_of_an_image_holds_it_durably() -> None:
    volume = MemoryVolume.of(bytearray(b"\7" * 8192), index=3)
    volume.write(0, [fill(2)])
    volume.crash()
    assert volume.index == 3
    assert contents(volume, 0, 8192) == b"\7" * 8192
