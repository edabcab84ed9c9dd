"""Damage on disks and in the catalog: every image is detected, or a whole copy serves, or nothing that means anything changed.

The images are those of a small store; the code that reads them is the product's own. Whole stores are opened for every class of
damage, so that what the functions find reaches whoever asks.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random

import pytest

from paramstore.errors import CatalogError, CorruptRecord, ParamStoreError, VolumeError
from paramstore.storage.catalog.base import Contents
from paramstore.storage.catalog.lmdb_catalog import LmdbCatalog
from paramstore.storage.catalog.row_bytes import describe_key
from paramstore.storage.format import sealing
from paramstore.storage.format import structures as volume_format
from paramstore.storage.format.structures import extents_start_bytes, pack_superblock
from paramstore.storage.volume.base import ALIGNMENT_BYTES
from paramstore.testing.volumes import MemoryVolume
from paramstore_testkit.disks.machine import Machine
from paramstore_testkit.stores.small_store import first_values, keys_of, versions
from paramstore_testkit.trials import damage as damages
from paramstore_testkit.trials.corruption import DETECTED, FELL_BACK, HARMLESS, PART, RecordAt, SmallStore
from paramstore_testkit.trials.damage import PAYLOAD_FLIPS, SEED, VOLUME_CLASSES, Outcomes, rows_of, sweep_catalog, tally
from paramstore_testkit.trials.io_faults import Script
from paramstore_testkit.trials.io_trial import HOST_BYTES, NAMES, Disks

IMAGES_MIN = 150_000


@pytest.fixture(scope="module")
def store() -> SmallStore:
    return asyncio.run(SmallStore.make())


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


# --- the sweep


@pytest.mark.slow
def test_no_damage_of_any_class_is_taken_for_the_truth(store: SmallStore, tmp_path: Path) -> None:
    outcomes: Outcomes = {}
    for name, (damage, allowed) in VOLUME_CLASSES.items():
        outcomes[name] = tally(damage(store))
        assert set(outcomes[name]) <= allowed, (name, outcomes[name])
    outcomes |= sweep_catalog(store.contents, tmp_path)
    total = sum(counts.total() for counts in outcomes.values())
    print(f"\n{total} damaged images, seed {SEED}")  # noqa: T201
    for name, counts in outcomes.items():
        print(f"  {name:34} {counts.total():7} {dict(counts)}")  # noqa: T201
        assert counts.total() > 0, name
        assert name in VOLUME_CLASSES or set(counts) == {DETECTED}, (name, counts)
    superblock_bits = volume_format.SUPERBLOCK_BYTES * 8
    assert outcomes["superblock: any bit of one copy"].total() == len(store.volumes) * 2 * superblock_bits
    assert outcomes["superblock: any bit of all copies"].total() == superblock_bits
    assert outcomes["extent: another record"].total() == len(store.records) * (len(store.records) - 1)
    pages = sum(volume.size_bytes // ALIGNMENT_BYTES for volume in store.volumes.values())
    assert outcomes["volume: truncated"].total() == pages
    assert outcomes["payload: random bits"].total() == PAYLOAD_FLIPS
    assert outcomes["header: any bit"].total() == len(store.records) * PART.header_bytes * 8
    assert total >= IMAGES_MIN


def test_what_is_not_damaged_is_read_as_it_is(store: SmallStore) -> None:
    assert len(store.records) == len(NAMES) * 4 * 2
    assert len(store.stale) > len(store.records)
    assert {store.try_load(record, record.image) for record in store.records} == {HARMLESS}
    assert {store.try_superblock(index) for index in store.volumes} == {FELL_BACK}
    assert store.try_open(dict(store.volumes), 0) == HARMLESS


@pytest.mark.slow
def test_a_bit_of_any_value_in_the_catalog_s_file_is_found(store: SmallStore, tmp_path: Path) -> None:
    catalog, rows = rows_of(store.contents, tmp_path)
    catalog.close()
    file = tmp_path / "catalog" / "data.mdb"
    whole = file.read_bytes()
    random = Random(SEED)
    for key, value in rows:
        places = [found.start() for found in re.finditer(re.escape(value), whole)]
        assert places, describe_key(key)
        damaged = bytearray(whole)
        for place in places:  # a page that was copied has it twice
            damaged[place + random.randrange(len(value))] ^= 1 << random.randrange(8)
        file.write_bytes(damaged)
        with pytest.raises(CatalogError, match="catalog"):
            open_catalog(tmp_path)
    file.write_bytes(whole)
    assert open_catalog(tmp_path) == store.contents


def open_catalog(directory: Path) -> Contents:
    catalog = LmdbCatalog(directory / "catalog")
    try:
        return catalog.load()
    finally:
        catalog.close()


# --- whole stores


def record_at(machine: Machine, volume: int) -> tuple[int, int]:
    """(volume, offset) of a record of the newest step of `moe`."""
    contents = machine.durable.load().namespaces["moe"]
    places = [rows[-1].located.extent for rows in contents.rows.values()]
    return volume, min(extent.offset_bytes for extent in places if extent.volume == volume)


def damage_header(machine: Machine) -> None:
    volume, at = record_at(machine, 1)
    machine.disks[volume].corrupt(at + 200)


def damage_payload(machine: Machine) -> None:
    volume, at = record_at(machine, 1)
    machine.disks[volume].corrupt(at + PART.fields[0].offset_bytes, 0x80)


def zero_page(machine: Machine) -> None:
    volume, at = record_at(machine, 1)
    machine.disks[volume]._bytes[at : at + ALIGNMENT_BYTES] = bytes(ALIGNMENT_BYTES)


def swap_extents(machine: Machine) -> None:
    memory = machine.disks[1]._bytes
    _, at = record_at(machine, 1)
    start = min(
        row.located.extent.offset_bytes
        for found in machine.durable.load().namespaces.values() for rows in found.rows.values() for row in rows
        if row.located.extent.volume == 1 and row.located.extent.offset_bytes != at
    )  # fmt: skip
    length_bytes = PART.image_bytes
    first, second = bytes(memory[at : at + length_bytes]), bytes(memory[start : start + length_bytes])
    memory[at : at + length_bytes], memory[start : start + length_bytes] = second, first


def damage_superblocks(machine: Machine) -> None:
    for start in volume_format.SUPERBLOCK_COPIES:
        machine.disks[1].corrupt(start + 30)


def exchange_superblocks(machine: Machine) -> None:
    superblock = volume_format.Superblock(b"a" * 16, b"b" * 16, 1)
    for start in volume_format.SUPERBLOCK_COPIES:
        machine.disks[1]._bytes[start : start + len(pack_superblock(superblock))] = pack_superblock(superblock)


def damage_notes(machine: Machine) -> None:
    memory = machine.disks[1]._bytes
    end = extents_start_bytes(volume_format.Superblock(b"a" * 16, b"b" * 16, 1))
    memory[volume_format.NOTES_START_BYTES : end] = bytes(end - volume_format.NOTES_START_BYTES)


def truncate(machine: Machine) -> None:
    machine.disks[1] = MemoryVolume.of(machine.disks[1]._bytes[:-ALIGNMENT_BYTES], index=1)


def load_everything(machine: Machine) -> list[ParamStoreError]:
    """What opening the store and leasing and reading every record of it raises; whatever is answered, is right."""
    errors: list[ParamStoreError] = []

    async def scenario() -> None:
        machine.volumes = dict(machine.disks)
        try:
            store = machine.start()
        except ParamStoreError as error:
            errors.append(error)
            return
        for name in NAMES:
            view = await store.admission.open(name, mode="read", at=None, host_bytes=HOST_BYTES)
            for key in keys_of(view):
                try:
                    value = await first_values(store, view, [key])
                    assert value == [pytest.approx(key[1] - 0.5)], f"{key} of {name} is {value}"
                except ParamStoreError as error:
                    errors.append(error)
            try:
                await versions(store, view)
            except ParamStoreError as error:
                errors.append(error)
        await machine.crash()

    asyncio.run(scenario())
    return errors


@pytest.mark.parametrize(
    ("damage", "error_class"),
    [
        (damage_header, CorruptRecord), (damage_payload, CorruptRecord), (zero_page, CorruptRecord),
        (swap_extents, CorruptRecord), (damage_superblocks, VolumeError), (exchange_superblocks, VolumeError),
        (damage_notes, VolumeError), (truncate, VolumeError),
    ],
)  # fmt: skip
def test_damage_reaches_whoever_asks_as_an_error_that_names_the_volume(
    damage: Callable[[Machine], None], error_class: type[ParamStoreError]
) -> None:
    machine = asyncio.run(Disks.prepared()).machine(SEED, Script())
    damage(machine)
    errors = load_everything(machine)
    assert errors
    for error in errors:
        assert isinstance(error, error_class), error
        assert "volume 1" in str(error)


def test_one_damaged_copy_of_superblock_and_note_is_nobody_s_loss() -> None:
    machine = asyncio.run(Disks.prepared()).machine(SEED, Script())
    for disk in machine.disks.values():
        disk.corrupt(volume_format.SUPERBLOCK_COPIES[0] + 30)
        superblock = volume_format.Superblock(bytes(16), bytes(16), disk.index)
        for slot in range(4):
            disk.corrupt(volume_format.note_offsets(superblock, slot)[0] + 30)
    assert load_everything(machine) == []


# --- that the sweep fails where it should


def accepts(damage: Callable[[SmallStore], Iterator[str]], store: SmallStore, allowed: set[str]) -> bool:
    """Whether the sweep lets this class pass."""
    try:
        found = set(damage(store))
    except AssertionError:
        return False
    return found <= allowed


@pytest.fixture
def own_store() -> SmallStore:
    """A sweep that fails leaves its bit flipped."""
    return asyncio.run(SmallStore.make())


@pytest.mark.slow
class TestTheSweepFinds:
    def test_a_checksum_that_covers_too_little(self, own_store: SmallStore, monkeypatch: pytest.MonkeyPatch) -> None:
        whole = sealing._checksum
        monkeypatch.setattr(sealing, "_checksum", lambda data, length_bytes: whole(data, min(length_bytes, 60)))
        own_store = asyncio.run(SmallStore.make())
        assert not accepts(damages.superblock_bits_of_all_copies, own_store, {DETECTED})
        assert not accepts(damages.note_bits_of_the_only_copy, asyncio.run(SmallStore.make()), {DETECTED})

    def test_a_copy_that_is_not_looked_for(self, own_store: SmallStore, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("paramstore.storage.format.notes.SUPERBLOCK_COPIES", volume_format.SUPERBLOCK_COPIES[:1])
        assert not accepts(damages.superblock_bits, own_store, {FELL_BACK})

    def test_a_header_that_is_believed_whoever_s_it_is(self, own_store: SmallStore, monkeypatch: pytest.MonkeyPatch) -> None:
        def trusting(data: memoryview, **_: object) -> volume_format.Header:
            return volume_format.unpack_header(data, PART)

        monkeypatch.setattr("paramstore_testkit.trials.corruption.check_header", trusting)
        for damage in (damages.swapped_extents, damages.stale_copies):
            assert not accepts(damage, own_store, {DETECTED})

    def test_a_payload_that_is_not_checked(self, own_store: SmallStore, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("paramstore.engine.transfers.routes.check_checksums", lambda *_, **__: None)
        for damage in (damages.payload_bits, damages.torn_records, damages.zeroed_pages):
            assert not accepts(damage, own_store, {DETECTED, HARMLESS, FELL_BACK})

    def test_a_size_that_is_not_compared(self, own_store: SmallStore, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("paramstore.storage.recovery._truncated", lambda *_: iter(()))
        assert not accepts(damages.truncated_volumes, own_store, {DETECTED})

    def test_a_note_that_is_not_compared(self, own_store: SmallStore, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("paramstore.storage.recovery._unproven", lambda *_: iter(()))
        assert not accepts(damages.stale_notes, own_store, {DETECTED})

    def test_a_catalog_row_that_is_not_checked(
        self, own_store: SmallStore, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        monkeypatch.setattr("paramstore.storage.catalog.row_bytes.xxh3_64_digest", lambda _: bytes(8))
        with pytest.raises((AssertionError, KeyError, ValueError, TypeError)):
            sweep_catalog(own_store.contents, tmp_path)


def test_records_of_a_store_say_where_they_are(store: SmallStore) -> None:
    record: RecordAt = store.records[0]
    assert record.place == f"volume {record.located.extent.volume}, offset {record.located.extent.offset_bytes}"
    assert len(record.image) == PART.image_bytes
