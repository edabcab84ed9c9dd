"""Every record header on a volume is found, whatever lies between, and damage is told from wholeness."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import pytest

from paramstore.core.location import Identity
from paramstore.core.schema import Schema
from paramstore.errors import VolumeError
from paramstore.fsck import scan as scan_module
from paramstore.fsck.findings import Finding
from paramstore.fsck.reader import Superblock
from paramstore.fsck.scan import Found, scan
from paramstore.storage.format.structures import Header, chunk_checksums, pack_header
from paramstore.testing.volumes import MemoryVolume
from paramstore_testkit.stores.memory_disk import MemoryDisk

STORE = b"s" * 16
SUPERBLOCK = Superblock(STORE, b"v" * 16, 0, note_slots=1)
START = SUPERBLOCK.extents_at
PART = Schema.param({"w": ((9000,), "uint8"), "v": ((5,), "uint8")}).stored
LARGE = Schema.param({"w": (((1 << 20) + 5000,), "uint8")}).stored
LAYOUTS = {"moe": PART, "large": LARGE}
PAGE = 4096


def image_of(number: int, *, name: str = "moe", store: bytes = STORE, fill: bytes = b"\x07") -> bytes:
    part = LAYOUTS[name]
    image = bytearray(fill * part.image_bytes)
    checksums = tuple(chunk_checksums(memoryview(image), part.chunks()))
    header = pack_header(Header(store, name, (0, number), Identity(1, number), 1, 0, 0, checksums), part)
    image[: len(header)] = header
    return bytes(image)


@pytest.fixture
def disk() -> MemoryDisk:
    return MemoryDisk(MemoryVolume(START + (4 << 20)))


def found_on(disk: MemoryDisk) -> list[Found]:
    return records_of(scan(disk, SUPERBLOCK, LAYOUTS, lambda _: None))


def records_of(told: Iterable[Found | Finding]) -> list[Found]:
    return [one for one in told if isinstance(one, Found)]


def places(found: list[Found]) -> list[tuple[int, int, bool]]:
    return [(record.offset, record.key[1], record.damage is None) for record in found]


@pytest.mark.parametrize("window", [PAGE, 3 * PAGE, 1 << 20, 8 << 20])
def test_records_are_found_wherever_they_lie(disk: MemoryDisk, window: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scan_module, "WINDOW_BYTES", window)
    end = disk.size_bytes - PART.image_bytes
    offsets = [START, START + PART.image_bytes, START + (1 << 20) + PAGE, START + (2 << 20) - PAGE, end]
    for number, offset in enumerate(offsets):
        disk.write(offset, image_of(number))
    large = START + (5 << 18)
    disk.write(large, image_of(9, name="large"))
    offsets_found = places(found_on(disk))
    expected = [(offset, number, True) for number, offset in enumerate(offsets) if not large < offset < large + LARGE.image_bytes]
    assert offsets_found == sorted([*expected, (large, 9, True)])


def test_nothing_inside_a_whole_record_is_taken_for_a_record(disk: MemoryDisk) -> None:
    image = bytearray(image_of(1, name="large"))
    inner = image_of(5)
    image[LARGE.header_bytes + PAGE : LARGE.header_bytes + PAGE + len(inner)] = inner
    checksums = tuple(chunk_checksums(memoryview(image), LARGE.chunks()))
    image[: LARGE.header_bytes] = pack_header(Header(STORE, "large", (0, 1), Identity(1, 1), 1, 0, 0, checksums), LARGE)
    disk.write(START, bytes(image))
    assert places(found_on(disk)) == [(START, 1, True)]


def test_a_record_on_the_remains_of_another_is_found(disk: MemoryDisk) -> None:
    disk.write(START, image_of(1, name="large"))
    disk.write(START + LARGE.header_bytes + PAGE, image_of(2))
    assert places(found_on(disk)) == [(START, 1, False), (START + LARGE.header_bytes + PAGE, 2, True)]


@pytest.mark.parametrize(("byte", "chunk"), [(PART.header_bytes, 0), (PART.header_bytes + 8999, 0), (PART.header_bytes + 12292, 1)])
def test_a_flipped_byte_of_a_chunk_is_named(disk: MemoryDisk, byte: int, chunk: int) -> None:
    image = bytearray(image_of(1))
    image[byte] ^= 1
    disk.write(START, bytes(image))
    (record,) = found_on(disk)
    assert record.damage is not None
    assert record.damage.startswith(f"chunk {chunk}, ")


def test_bytes_that_belong_to_no_chunk_mean_nothing(disk: MemoryDisk) -> None:
    image = bytearray(image_of(1))
    image[PART.header_bytes + 9000] ^= 1
    disk.write(START, bytes(image))
    assert places(found_on(disk)) == [(START, 1, True)]


def test_records_of_another_store_and_torn_headers_are_passed_over(disk: MemoryDisk) -> None:
    disk.write(START, image_of(1, store=b"t" * 16))
    torn = bytearray(image_of(2))
    torn[600] ^= 1
    disk.write(START + (1 << 20), bytes(torn))
    assert found_on(disk) == []


def test_a_record_that_the_volume_cuts_off_is_damaged(disk: MemoryDisk) -> None:
    disk.write(disk.size_bytes - PAGE, image_of(1)[:PAGE])
    (record,) = found_on(disk)
    assert "ends beyond" in (record.damage or "")


def test_without_a_description_a_record_is_not_called_whole(disk: MemoryDisk) -> None:
    disk.write(START, image_of(1))
    (record,) = records_of(scan(disk, SUPERBLOCK, {}, lambda _: None))
    assert "says what its namespace is made of" in (record.damage or "")
    (other,) = records_of(scan(disk, SUPERBLOCK, {"moe": LARGE}, lambda _: None))
    assert "its schema of others" in (other.damage or "")


@dataclass
class BadPages:
    """`inner`, some pages of which no read reaches."""

    inner: MemoryDisk
    bad: frozenset[int]
    reads: int = 0

    index = 0
    place = "volume 0"

    @property
    def size_bytes(self) -> int:
        return self.inner.size_bytes

    def read(self, offset_bytes: int, length_bytes: int) -> bytes:
        self.reads += 1
        if any(offset_bytes <= page < offset_bytes + length_bytes for page in self.bad):
            raise VolumeError(f"{length_bytes} bytes at offset {offset_bytes}: Input/output error")
        return self.inner.read(offset_bytes, length_bytes)


def test_pages_that_cannot_be_read_hide_no_record_but_those_on_them(disk: MemoryDisk) -> None:
    offsets = [START + number * PART.image_bytes for number in range(4)]
    for number, offset in enumerate(offsets):
        disk.write(offset, image_of(number))
    free = START + (3 << 20)
    bad = BadPages(disk, frozenset({offsets[1] + PAGE, offsets[2], free, free + PAGE}))
    told = list(scan(bad, SUPERBLOCK, LAYOUTS, lambda _: None))
    records = [one for one in told if isinstance(one, Found)]
    assert places(records) == [(offsets[0], 0, True), (offsets[1], 1, False), (offsets[3], 3, True)]
    assert "Input/output error" in (records[1].damage or "")
    unread = [(one.offset, one.what.split(":")[0]) for one in told if isinstance(one, Finding)]
    assert unread == [
        (offsets[1] + PAGE, "4096 bytes cannot be read"), (offsets[2], "4096 bytes cannot be read"),
        (free, "8192 bytes cannot be read"),
    ]  # fmt: skip
    done: list[int] = []
    list(scan(bad, SUPERBLOCK, LAYOUTS, done.append))
    assert sum(done) == disk.size_bytes


def test_a_header_of_which_a_page_cannot_be_read_is_none(disk: MemoryDisk) -> None:
    part = Schema.param({"w": ((600 << 20,), "uint8")}).stored
    assert part.header_bytes > PAGE
    header = pack_header(Header(STORE, "huge", (0, 0), Identity(1, 1), 1, 0, 0, (0,) * len(part.chunks())), part)
    disk.write(START, header)
    (found,) = scan(disk, SUPERBLOCK, {"huge": part}, lambda _: None)
    assert isinstance(found, Found)
    assert "ends beyond" in (found.damage or "")
    (one,) = scan(BadPages(disk, frozenset({START + PAGE})), SUPERBLOCK, {"huge": part}, lambda _: None)
    assert isinstance(one, Finding)


def test_a_device_that_gives_nothing_more_is_given_up(disk: MemoryDisk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scan_module, "UNREADABLE_BYTES_MAX", 16 * PAGE)
    disk.write(START, image_of(1))
    bad = BadPages(disk, frozenset(range(START + (1 << 20), disk.size_bytes, PAGE)))
    told = scan(bad, SUPERBLOCK, LAYOUTS, lambda _: None)
    assert isinstance(next(told), Found)
    with pytest.raises(VolumeError, match="nothing more can be read from offset"):
        next(told)
    assert bad.reads < 100


def test_progress_adds_up_to_the_size_of_the_volume(disk: MemoryDisk) -> None:
    disk.write(START, image_of(1, name="large"))
    disk.write(disk.size_bytes - PART.image_bytes, image_of(2))
    done: list[int] = []
    list(scan(disk, SUPERBLOCK, LAYOUTS, done.append))
    assert sum(done) == disk.size_bytes
