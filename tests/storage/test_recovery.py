"""A store opens as it was committed, or names every volume that keeps it from opening."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest

from paramstore.core.apply_log import ApplyLog
from paramstore.core.location import Extent, Identity, Located
from paramstore.core.optimizers import AdamW
from paramstore.errors import CorruptCatalog, VolumeError
from paramstore.storage.catalog.base import Contents, NamespaceContents, NamespaceRow, Row, StepRow, VolumeRow
from paramstore.storage.format.apply_log import pack_log
from paramstore.storage.format.notes import copy_notes, format_volume, write_note
from paramstore.storage.format.structures import CommitNote, Superblock, extents_start_bytes
from paramstore.storage.recovery import Recovered, open_store
from paramstore.storage.volume.base import Granularity
from paramstore.testing.volumes import MemoryVolume

STORE = b"s" * 16
SIZE_BYTES = 8 << 20
EXTENT_BYTES = 1 << 20


def superblock(index: int) -> Superblock:
    return Superblock(STORE, bytes([index]) * 16, index, note_slots=4)


START_BYTES = extents_start_bytes(superblock(0))


def extent(volume: int, number: int) -> Extent:
    return Extent(volume, START_BYTES + number * EXTENT_BYTES, EXTENT_BYTES)


def note(step: int, sequence: int, *, namespace: str = "moe", record_count: int = 2) -> CommitNote:
    return CommitNote(namespace, 1, sequence, step, None, record_count, 0)


@dataclass
class Store:
    """Two volumes and a namespace whose step 5 changed two records, one on each."""

    contents: Contents
    volumes: dict[int, MemoryVolume]

    def open(self) -> Recovered:
        return open_store(self.contents, self.volumes)


@pytest.fixture
def store() -> Store:
    volumes = {index: MemoryVolume(SIZE_BYTES, index=index) for index in range(2)}
    namespace = NamespaceContents(NamespaceRow("moe", {}, (0,), 2, epoch=1, sequence=3))
    for index, volume in volumes.items():
        format_volume(volume, superblock(index))
        write_note(volume, superblock(index), 1, note(5, 3))
        namespace.rows[0, index] = [Row(5, Located(extent(index, 1), Identity(1, 0), index))]
    namespace.steps[5] = StepRow(5, 3, note_slot=1, record_count=2, extra=b"")
    rows = {index: VolumeRow(index, superblock(index).volume_uuid, SIZE_BYTES, 0) for index in volumes}
    return Store(Contents(STORE, {"moe": namespace}, rows), volumes)


def test_a_committed_store_opens_with_its_rows_taken_and_all_else_free(store: Store) -> None:
    recovered = store.open()
    assert recovered.superblocks == {index: superblock(index) for index in range(2)}
    assert recovered.ledgers["moe"].committed_step == 5
    assert recovered.space.free_bytes == 2 * (SIZE_BYTES - START_BYTES - EXTENT_BYTES)
    assert recovered.note_slots.free_count == 3
    recovered.space.release(extent(0, 1))


def test_a_new_store_opens_empty() -> None:
    volume = MemoryVolume(SIZE_BYTES)
    format_volume(volume, superblock(0))
    contents = Contents(STORE, volumes={0: VolumeRow(0, superblock(0).volume_uuid, SIZE_BYTES, 0)})
    recovered = open_store(contents, {0: volume})
    assert recovered.ledgers == {}
    assert recovered.space.free_bytes == SIZE_BYTES - START_BYTES


def test_a_namespace_without_commit_needs_no_note(store: Store) -> None:
    store.contents.namespaces["new"] = NamespaceContents(NamespaceRow("new", {}, (0,), 1, epoch=1, sequence=0))
    assert store.open().ledgers["new"].committed_step is None


def test_missing_and_foreign_volumes_are_listed_together(store: Store) -> None:
    del store.volumes[1]
    store.volumes[4] = MemoryVolume(SIZE_BYTES, index=4)
    with pytest.raises(VolumeError, match=r"volume 4 is not in the catalog.*; volume 1 .* is missing"):
        store.open()


def test_a_blank_volume_is_named(store: Store) -> None:
    store.volumes[1] = MemoryVolume(SIZE_BYTES, index=1)
    with pytest.raises(VolumeError, match="volume 1: no whole copy of its superblock"):
        store.open()


@pytest.mark.parametrize(
    ("found", "reason"),
    [
        (Superblock(b"t" * 16, superblock(1).volume_uuid, 1, 4), f"belongs to store {(b't' * 16).hex()}"),
        (Superblock(STORE, b"w" * 16, 1, 4), f"is {(b'w' * 16).hex()}, the catalog has {(bytes([1]) * 16).hex()}"),
        (Superblock(STORE, superblock(1).volume_uuid, 0, 4), "says that it is volume 0"),
    ],
)
def test_a_volume_in_the_wrong_place_is_named(store: Store, found: Superblock, reason: str) -> None:
    store.volumes[1] = MemoryVolume(SIZE_BYTES, index=1)
    format_volume(store.volumes[1], found)
    with pytest.raises(VolumeError, match=f"volume 1 {reason}"):
        store.open()


def test_exchanged_volumes_are_both_named(store: Store) -> None:
    store.volumes = {0: store.volumes[1], 1: store.volumes[0]}
    with pytest.raises(VolumeError, match=r"volume 0 is .*; volume 1 is "):
        store.open()


def test_a_truncated_volume_is_named_with_both_sizes(store: Store) -> None:
    store.contents.volumes[1] = replace(store.contents.volumes[1], size_bytes=2 * SIZE_BYTES)
    with pytest.raises(VolumeError, match=f"volume 1 was truncated: {SIZE_BYTES} bytes, expected {2 * SIZE_BYTES}"):
        store.open()


def test_an_extent_beyond_the_end_is_a_truncated_volume(store: Store) -> None:
    beyond = extent(1, (SIZE_BYTES - START_BYTES) // EXTENT_BYTES)
    store.contents.namespaces["moe"].rows[0, 0] = [Row(5, Located(beyond, Identity(1, 0), 0))]
    with pytest.raises(VolumeError, match=f"volume 1 was truncated: {SIZE_BYTES} bytes, .* ends at {SIZE_BYTES + EXTENT_BYTES}"):
        store.open()


def test_a_volume_that_grew_unnoticed_is_used_whole(store: Store) -> None:
    store.volumes[0].grow(2 * SIZE_BYTES)
    recovered = store.open()
    assert recovered.space.free_bytes_of(0) == 2 * SIZE_BYTES - START_BYTES - EXTENT_BYTES


def test_an_old_copy_of_a_volume_is_found_by_its_note(store: Store) -> None:
    write_note(store.volumes[1], superblock(1), 1, note(4, 2))
    with pytest.raises(VolumeError, match=r"volume 1 is an old copy or was replaced: .* has step 4 .* the catalog has step 5"):
        store.open()


@pytest.mark.parametrize("wrong", [note(5, 9), note(5, 3, namespace="other"), note(5, 3, record_count=9)])
def test_a_note_must_agree_in_all_it_says(store: Store, wrong: CommitNote) -> None:
    write_note(store.volumes[0], superblock(0), 1, wrong)
    with pytest.raises(VolumeError, match="volume 0 is an old copy"):
        store.open()


def test_a_volume_without_the_newest_note_is_named(store: Store) -> None:
    format_volume(store.volumes[0], superblock(0))
    with pytest.raises(VolumeError, match="step 5 of namespace 'moe' cannot be proven: volume 0"):
        store.open()


def test_a_volume_added_with_the_notes_of_the_committed_steps_opens(store: Store) -> None:
    store.volumes[2] = MemoryVolume(SIZE_BYTES, index=2)
    format_volume(store.volumes[2], superblock(2))
    copy_notes(store.volumes[0], store.volumes[2], superblock(2), note_slots=store.contents.note_slots())
    store.contents.volumes[2] = VolumeRow(2, superblock(2).volume_uuid, SIZE_BYTES, 0)
    assert store.open().space.free_bytes_of(2) == SIZE_BYTES - START_BYTES


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        (extent(1, 1), "overlaps another extent"),
        (Extent(0, START_BYTES - 4096, 4096), "is outside of"),
        (extent(7, 1), "no such volume"),
    ],
)
def test_rows_that_contradict_each_other_are_a_catalog_error(store: Store, wrong: Extent, reason: str) -> None:
    store.contents.namespaces["moe"].rows[0, 0] = [Row(5, Located(wrong, Identity(1, 0), 0))]
    with pytest.raises(CorruptCatalog, match=reason):
        store.open()


def test_two_steps_in_one_note_slot_are_a_catalog_error(store: Store) -> None:
    store.contents.namespaces["moe"].steps[4] = StepRow(4, 2, note_slot=1, record_count=1, extra=b"")
    with pytest.raises(CorruptCatalog, match="note slot 1 is named by two steps"):
        store.open()


def test_opening_writes_nothing(store: Store) -> None:
    for volume in store.volumes.values():
        volume.flush()
    store.open()
    assert all(volume.unflushed == () for volume in store.volumes.values())


class MappedVolume(MemoryVolume):
    """One that says it is mapped, with this granularity."""

    granularity: Granularity

    def describe(self) -> dict[str, object]:
        return {**super().describe(), "granularity": self.granularity.label}


def made_with(store: Store, granularity: Granularity) -> None:
    """Volume 1 was made so."""
    format_volume(store.volumes[1], replace(superblock(1), granularity=granularity))
    write_note(store.volumes[1], superblock(1), 1, note(5, 3))


def map_with(store: Store, granularity: Granularity) -> None:
    """Volume 1 is mapped so now."""
    volume = MappedVolume.of(bytearray(store.volumes[1]._bytes), index=1)
    volume.granularity = granularity
    store.volumes[1] = volume


@pytest.mark.parametrize("made", list(Granularity))
@pytest.mark.parametrize("now", [Granularity.PAGE, Granularity.CACHE_LINE, Granularity.BYTE])
def test_what_was_made_to_persist_at_each_write_is_not_mapped_where_it_would_not(
    store: Store, made: Granularity, now: Granularity
) -> None:
    made_with(store, made)
    map_with(store, now)
    if made in (Granularity.CACHE_LINE, Granularity.BYTE) and now is Granularity.PAGE:
        with pytest.raises(VolumeError, match=f"volume 1 .* was made .* with granularity {made.label}, and has .* page now: mount"):
            store.open()
    else:
        assert store.open().superblocks[1].granularity is made


@pytest.mark.parametrize("made", list(Granularity))
def test_as_an_ordinary_file_a_volume_opens_whatever_it_was_made_with(store: Store, made: Granularity) -> None:
    made_with(store, made)
    assert store.open().superblocks[1].granularity is made


@pytest.mark.parametrize(("first", "count", "is_enough"), [(1, 9, True), (5, 5, True), (6, 4, False), (1, 8, False), (1, 0, False)])
def test_a_step_whose_log_does_not_cover_its_records_is_refused(store: Store, first: int, count: int, is_enough: bool) -> None:
    log = ApplyLog(first)
    for _ in range(count):
        log = log.appended(1, AdamW())
    found = store.contents.namespaces["moe"]
    found.namespace = replace(found.namespace, schema={"updates": "exact"})
    found.rows = {key: [Row(5, row.located._replace(identity=Identity(1, 4)))] for key, (row,) in found.rows.items()}
    found.steps[5] = replace(found.steps[5], applies=9, log=pack_log(log))
    if is_enough:
        assert store.open().ledgers["moe"].log_at(5) == log
    else:
        with pytest.raises(CorruptCatalog, match=r"step 5 of namespace 'moe' has an apply log .* stand at apply 4 .* at 9"):
            store.open()
