"""A rebuild writes superblock copies again; a catalog that says nothing counts as none."""

from __future__ import annotations

import pytest

from paramstore.fsck.check import examine
from paramstore.fsck.reader import PAGE, SUPERBLOCK_AT
from paramstore.fsck.rebuild import is_blank, restore_notes, restore_superblocks
from paramstore.fsck.survey import survey
from paramstore.storage.catalog.base import Change, VolumeRow
from paramstore.storage.format.structures import Superblock, pack_superblock
from paramstore.testing.catalogs import MemoryCatalog
from paramstore.testing.volumes import MemoryVolume
from paramstore_testkit.disks.machine import Machine
from paramstore_testkit.stores.memory_disk import MemoryDisk, disks_of, eventful, survey_of
from paramstore_testkit.stores.small_store import run

STORE = b"s" * 16


@pytest.mark.parametrize("copy", [0, 1])
def test_a_superblock_copy_that_is_not_whole_is_written_again_from_the_other(copy: int) -> None:
    async def scenario() -> None:
        machine = Machine(seed=3, volume_count=2)
        await eventful(machine)
        await machine.crash()
        disks = disks_of(machine.volumes)
        before = disks[1].read(SUPERBLOCK_AT[copy], PAGE)
        machine.disks[1].corrupt(SUPERBLOCK_AT[copy] + 30)
        report = examine(survey_of(machine), None)
        assert restore_superblocks(report.found, disks) == [(1, copy)]
        assert disks[1].read(SUPERBLOCK_AT[copy], PAGE) == before
        assert [disk.writes for disk in disks.values()] == [[], [SUPERBLOCK_AT[copy]]]
        restore_notes(report.found, report.proofs, disks)
        assert all(disk.unflushed == () for disk in machine.disks.values())
        assert restore_superblocks(examine(survey_of(machine), None).found, disks) == []

    run(scenario())


def test_a_superblock_copy_beyond_the_end_of_its_volume_is_not_written() -> None:
    """It would make the file longer."""
    volume = MemoryVolume(SUPERBLOCK_AT[1])
    page = pack_superblock(Superblock(STORE, bytes(16), 0, note_slots=4))
    volume.write(SUPERBLOCK_AT[0], [memoryview(bytearray(page))])
    disk = MemoryDisk(volume)
    found = survey([disk])
    assert (found.bad_superblocks, restore_superblocks(found, {0: disk}), disk.writes) == ([(0, 1)], [], [])


def test_a_catalog_is_blank_until_it_has_a_volume_or_a_namespace() -> None:
    catalog = MemoryCatalog(store_uuid=STORE)
    contents = catalog.load()
    assert is_blank(contents)
    catalog.apply(Change(put_volumes=(VolumeRow(0, bytes(16), 1, 0),)))
    assert not is_blank(catalog.load())
