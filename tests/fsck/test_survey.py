"""What the volumes alone tell: who they are, which notes they hold, and what of it cannot be."""

from __future__ import annotations

import pytest

from paramstore.core.key import KeySpace
from paramstore.core.schema import Schema
from paramstore.fsck import scan as scan_module
from paramstore.fsck.survey import survey
from paramstore.storage.format.notes import format_volume
from paramstore.storage.format.structures import (
    SUPERBLOCK_COPIES,
    CommitNote,
    Superblock,
    note_offsets,
    pack_description,
    pack_note,
    pack_superblock,
)
from paramstore.testing.volumes import Fault, FaultyVolume, MemoryVolume
from paramstore_testkit.disks.machine import Machine
from paramstore_testkit.stores.memory_disk import MemoryDisk, disks_of, eventful, survey_of
from paramstore_testkit.stores.small_store import run

STORE = b"s" * 16
SIZE_BYTES = 4 << 20


def volume_of(index: int, *, store: bytes = STORE, says: int | None = None) -> MemoryVolume:
    volume = MemoryVolume(SIZE_BYTES, index=index)
    format_volume(volume, Superblock(store, bytes([index]) * 16, index if says is None else says, note_slots=4))
    return volume


def test_whole_volumes_of_one_store_have_no_findings() -> None:
    found = survey([MemoryDisk(volume_of(index)) for index in range(2)])
    assert (found.store, sorted(found.superblocks), found.findings, found.namespaces()) == (STORE, [0, 1], [], [])


@pytest.mark.parametrize("copy", [0, 1])
def test_a_lost_superblock_is_named_and_the_other_used(copy: int) -> None:
    volume = volume_of(0)
    volume.corrupt(SUPERBLOCK_COPIES[copy] + 30)
    found = survey([MemoryDisk(volume)])
    assert [(one.volume, one.offset) for one in found.findings] == [(0, SUPERBLOCK_COPIES[copy])]
    assert "the other copy is whole" in found.findings[0].what
    assert (list(found.superblocks), found.bad_superblocks) == ([0], [(0, copy)])


def test_without_a_superblock_a_volume_is_left_out() -> None:
    found = survey([MemoryDisk(MemoryVolume(SIZE_BYTES))])
    assert (found.store, found.superblocks, found.bad_superblocks, len(found.findings)) == (None, {}, [], 2)
    assert not any("whole" in one.what.removeprefix("no whole") for one in found.findings)


def test_superblocks_that_differ_are_named() -> None:
    volume = volume_of(0)
    page = bytearray(pack_superblock(Superblock(b"t" * 16, b"w" * 16, 0, note_slots=4)))
    volume.write(SUPERBLOCK_COPIES[1], [memoryview(page)])
    found = survey([MemoryDisk(volume)])
    assert found.superblocks == {}
    assert "parts of two volumes" in found.findings[0].what


def test_a_volume_of_another_store_or_in_another_place_is_left_out() -> None:
    found = survey([MemoryDisk(volume_of(0)), MemoryDisk(volume_of(1, store=b"t" * 16)), MemoryDisk(volume_of(2, says=3))])
    assert list(found.superblocks) == [0]
    assert sorted((one.volume or 0, one.what.split()[0]) for one in found.findings) == [(1, "belongs"), (2, "says")]


def test_a_volume_that_cannot_be_read_is_a_finding() -> None:
    volume = volume_of(0)
    found = survey([MemoryDisk(FaultyVolume(volume, [Fault("read", 1, forever=True)]))])
    assert [one.offset for one in found.findings] == list(SUPERBLOCK_COPIES)
    assert found.superblocks == {}
    found = survey([MemoryDisk(FaultyVolume(volume, [Fault("read", 3)]))])
    assert [one.offset for one in found.findings] == [found.superblocks[0].note_at(0, 0)]


@pytest.mark.parametrize("copy", [0, 1])
def test_a_superblock_that_cannot_be_read_is_named_and_the_other_used(copy: int) -> None:
    found = survey([MemoryDisk(FaultyVolume(volume_of(0), [Fault("read", 1 + copy)]))])
    assert [one.offset for one in found.findings] == [SUPERBLOCK_COPIES[copy]]
    assert list(found.superblocks) == [0]


def test_a_search_that_a_device_ends_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scan_module, "UNREADABLE_BYTES_MAX", 1 << 20)
    volume = volume_of(0)
    reads = 2 + 2 * 4  # superblocks and note slots, two copies each
    found = survey([MemoryDisk(FaultyVolume(volume, [Fault("read", reads + 1, forever=True)]))])
    assert "the search for records ended early" in found.findings[0].what


def test_notes_of_one_age_that_differ_are_not_one() -> None:
    """As where a namespace was made anew under its old name, and one copy of a note is of the one before."""

    def note(extra: bytes) -> list[memoryview]:
        description = pack_description(Schema.param({"w": ((4,), "uint8")}), KeySpace.of(1, 1))
        return [memoryview(bytearray(pack_note(CommitNote("moe", 1, 1, 1, None, 0, 0, description=description, extra=extra))))]

    volume = volume_of(0)
    for copy, offset in enumerate(note_offsets(Superblock(STORE, bytes(16), 0, note_slots=4), 2)):
        volume.write(offset, note(b"%d" % copy))
    found = survey([MemoryDisk(volume)])
    assert sorted((one.note.extra, one.places) for one in found.notes) == [
        (b"0", frozenset({(0, 0)})), (b"1", frozenset({(0, 1)})),
    ]  # fmt: skip


def test_equal_notes_of_all_volumes_are_one() -> None:
    async def scenario() -> None:
        machine = Machine(seed=3, volume_count=2)
        await eventful(machine)
        found = survey_of(machine)
        newest = max((one for one in found.notes if one.note.namespace == "moe"), key=lambda one: one.note.age)
        assert newest.note.step == 9
        assert newest.places == {(volume, copy) for volume in (0, 1) for copy in (0, 1)}
        assert found.namespaces() == ["eval", "moe"]
        assert set(found.layouts()) == {"eval", "moe"}
        await machine.crash()

    run(scenario())


def test_every_byte_is_accounted_for_and_none_is_written() -> None:
    async def scenario() -> None:
        machine = Machine(seed=3, volume_count=2)
        await eventful(machine)
        await machine.crash()
        disks = disks_of(machine.volumes)
        done: list[int] = []
        survey(list(disks.values()), done.append)
        assert sum(done) == sum(disk.size_bytes for disk in disks.values())
        assert all(disk.writes == [] for disk in disks.values())

    run(scenario())
