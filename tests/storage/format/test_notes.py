"""Superblocks and notes survive the loss of a copy, and a volume of another store is left alone."""

from __future__ import annotations

from dataclasses import replace

import pytest

from paramstore.errors import CorruptRecord, VolumeError
from paramstore.storage.catalog.base import Contents, NamespaceContents, NamespaceRow, StepRow
from paramstore.storage.format.notes import copy_notes, format_volume, read_note, read_superblock, write_note
from paramstore.storage.format.structures import (
    SUPERBLOCK_COPIES,
    CommitNote,
    Superblock,
    extents_start_bytes,
    note_offsets,
    pack_superblock,
)
from paramstore.storage.volume.base import Volume
from paramstore.testing.volumes import Fault, FaultyVolume, MemoryVolume, keep_none, keep_random

SUPERBLOCK = Superblock(store_uuid=b"s" * 16, volume_uuid=b"v" * 16, index=0, note_slots=4)
STRANGER = Superblock(store_uuid=b"t" * 16, volume_uuid=b"w" * 16, index=0, note_slots=4)
NOTE = CommitNote("moe", epoch=3, sequence=9, step=70, parent=60, record_count=5, combined_root=1 << 63, epoch_bounds=((1, 4),))


def blank() -> MemoryVolume:
    return MemoryVolume(4 << 20)


@pytest.fixture
def volume() -> MemoryVolume:
    made = blank()
    format_volume(made, SUPERBLOCK)
    return made


def spoil(volume: Volume, offset_bytes: int) -> None:
    volume.write(offset_bytes, [memoryview(bytearray(b"\xee" * 4096))])


def test_a_formatted_volume_bears_its_superblock_durably(volume: MemoryVolume) -> None:
    volume.crash(keep_none)
    assert read_superblock(volume) == SUPERBLOCK


@pytest.mark.parametrize("copy", range(len(SUPERBLOCK_COPIES)))
def test_a_superblock_survives_the_loss_of_one_copy(volume: MemoryVolume, copy: int) -> None:
    spoil(volume, SUPERBLOCK_COPIES[copy])
    assert read_superblock(volume) == SUPERBLOCK


def test_without_any_superblock_the_volume_is_named(volume: MemoryVolume) -> None:
    for offset_bytes in SUPERBLOCK_COPIES:
        spoil(volume, offset_bytes)
    with pytest.raises(CorruptRecord, match="volume 0: no whole copy of its superblock"):
        read_superblock(volume)


def test_a_copy_that_cannot_be_read_is_passed_over(volume: MemoryVolume) -> None:
    assert read_superblock(FaultyVolume(volume, [Fault("read", 1)])) == SUPERBLOCK


def test_a_superblock_that_cannot_be_read_is_not_called_corrupt(volume: MemoryVolume) -> None:
    with pytest.raises(VolumeError) as caught:
        read_superblock(FaultyVolume(volume, [Fault("read", 1), Fault("read", 2)]))
    assert not isinstance(caught.value, CorruptRecord)


def test_a_volume_of_another_store_is_not_formatted(volume: MemoryVolume) -> None:
    with pytest.raises(VolumeError, match="belongs to another store"):
        format_volume(volume, STRANGER)
    assert read_superblock(volume) == SUPERBLOCK


def test_a_volume_that_may_belong_to_another_store_is_not_formatted(volume: MemoryVolume) -> None:
    with pytest.raises(VolumeError, match="read number 1"):
        format_volume(FaultyVolume(volume, [Fault("read", 1), Fault("read", 2)]), STRANGER)
    assert read_superblock(volume) == SUPERBLOCK


def test_a_half_made_volume_of_this_store_is_formatted_anew_without_its_notes(volume: MemoryVolume) -> None:
    write_note(volume, SUPERBLOCK, 2, NOTE)
    anew = Superblock(SUPERBLOCK.store_uuid, b"w" * 16, 0, note_slots=4)
    format_volume(volume, anew)
    assert read_superblock(volume) == anew
    with pytest.raises(CorruptRecord):
        read_note(volume, anew, 2)


def test_a_volume_whose_superblocks_are_both_damaged_is_not_taken_for_a_blank_one(volume: MemoryVolume) -> None:
    write_note(volume, SUPERBLOCK, 2, NOTE)
    for offset_bytes in SUPERBLOCK_COPIES:
        spoil(volume, offset_bytes)
    with pytest.raises(VolumeError, match=r"has no superblock, but a commit note at \d+: it is not overwritten"):
        format_volume(volume, SUPERBLOCK)
    assert read_note(volume, SUPERBLOCK, 2) == NOTE


@pytest.mark.slow
def test_a_crash_while_a_volume_is_formatted_anew_leaves_one_that_can_be(volume: MemoryVolume) -> None:
    for seed in range(50):
        twin = blank()
        format_volume(twin, SUPERBLOCK)
        write_note(twin, SUPERBLOCK, 2, NOTE)
        twin.flush()
        with pytest.raises(VolumeError, match="write number"):
            format_volume(FaultyVolume(twin, [Fault("write", 1 + seed % 4)]), SUPERBLOCK)
        twin.crash(keep_random(seed))
        format_volume(twin, SUPERBLOCK)
        assert read_superblock(twin) == SUPERBLOCK


def test_a_volume_without_room_for_extents_is_refused() -> None:
    size_bytes = extents_start_bytes(SUPERBLOCK)
    with pytest.raises(VolumeError, match=f"take {size_bytes}"):
        format_volume(MemoryVolume(size_bytes), SUPERBLOCK)


@pytest.mark.parametrize("slot", range(4))
def test_a_note_comes_back_from_its_slot_only(volume: MemoryVolume, slot: int) -> None:
    write_note(volume, SUPERBLOCK, slot, NOTE)
    assert read_note(volume, SUPERBLOCK, slot) == NOTE
    for other in set(range(4)) - {slot}:
        with pytest.raises(CorruptRecord, match=f"commit note in slot {other}"):
            read_note(volume, SUPERBLOCK, other)
    assert read_superblock(volume) == SUPERBLOCK


def test_a_note_tells_how_many_bytes_it_took_whole_pages_of_what_it_says_and_both_copies(volume: MemoryVolume) -> None:
    assert write_note(volume, SUPERBLOCK, 0, NOTE) == 2 * 4096
    assert write_note(volume, SUPERBLOCK, 1, replace(NOTE, extra=bytes(10_000))) == 2 * 3 * 4096


@pytest.mark.parametrize("copy", range(2))
def test_a_note_survives_the_loss_of_one_copy(volume: MemoryVolume, copy: int) -> None:
    write_note(volume, SUPERBLOCK, 1, NOTE)
    spoil(volume, note_offsets(SUPERBLOCK, 1)[copy])
    assert read_note(volume, SUPERBLOCK, 1) == NOTE


def test_a_note_is_durable_only_after_a_flush(volume: MemoryVolume) -> None:
    write_note(volume, SUPERBLOCK, 1, NOTE)
    volume.crash(keep_none)
    with pytest.raises(CorruptRecord):
        read_note(volume, SUPERBLOCK, 1)


def test_a_new_volume_gets_the_notes_of_all_steps_durably(volume: MemoryVolume) -> None:
    row = NamespaceRow("moe", {}, (0,), 1, epoch=3, sequence=9)
    contents = Contents(SUPERBLOCK.store_uuid, {"moe": NamespaceContents(row, steps={70: StepRow(70, 9, 2, 5, b"")})})
    write_note(volume, SUPERBLOCK, 2, NOTE)
    superblock = Superblock(SUPERBLOCK.store_uuid, b"w" * 16, 1, note_slots=8)
    added = MemoryVolume(4 << 20, index=1)
    format_volume(added, superblock)
    copy_notes(volume, added, superblock, note_slots=contents.note_slots())
    added.crash(keep_none)
    assert read_note(added, superblock, 2) == NOTE


def test_a_volume_whose_superblocks_differ_is_refused(volume: MemoryVolume) -> None:
    page = memoryview(bytearray(pack_superblock(STRANGER)))
    volume.write(SUPERBLOCK_COPIES[1], [page])
    with pytest.raises(VolumeError, match="superblocks differ"):
        read_superblock(volume)
