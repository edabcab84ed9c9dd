"""Damages a small store's disks and catalog in every way that disks can, and classifies what readers make of each image.

Every `try_*` gives one damaged image to the code that reads it, and returns the outcome: `detected` (a typed error that
names the place), `fell back` (another copy served) or `harmless` (the bytes that mean something are as they were). It fails
with an AssertionError where damage was accepted, or the error does not say where.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from paramstore.core.key import ExpertKey
from paramstore.core.location import Located
from paramstore.core.schema import PAGE_BYTES, Part
from paramstore.engine.transfers.hashing import Hashing
from paramstore.engine.transfers.routes import ImageRead, check_pieces, cut_pieces
from paramstore.errors import CatalogError, CorruptRecord, ParamStoreError, VolumeError
from paramstore.storage.catalog import row_bytes as rows
from paramstore.storage.catalog.base import Contents
from paramstore.storage.catalog.lmdb_catalog import _read as read_catalog
from paramstore.storage.format.notes import read_note, read_superblock
from paramstore.storage.format.sealing import MAGIC_BYTES, unseal
from paramstore.storage.format.structures import (
    NOTE_SLOT_BYTES,
    SUPERBLOCK_BYTES,
    SUPERBLOCK_COPIES,
    CommitNote,
    Superblock,
    check_header,
    note_offsets,
)
from paramstore.storage.recovery import open_store
from paramstore.storage.volume.base import Volume
from paramstore.testing.catalogs import MemoryCatalog
from paramstore.testing.volumes import MemoryVolume
from paramstore_testkit.stores.small_store import SCHEMA, create, train
from paramstore_testkit.trials.io_faults import Script
from paramstore_testkit.trials.io_trial import HOST_BYTES, NAMES, VOLUME_COUNT, Disks, fields_of

PART: Part = SCHEMA.stored
PIECES = cut_pieces(PART, 1 << 20, len(PART.fields))
STEPS = 6
"""Commits of each namespace: most of their records are not retained, and serve as stale copies."""
DETECTED, FELL_BACK, HARMLESS = "detected", "fell back", "harmless"


@dataclass(frozen=True, slots=True)
class RecordAt:
    """One record of a retained step. image: the bytes of its extent."""

    namespace: str
    key: ExpertKey
    located: Located
    image: bytes

    @property
    def place(self) -> str:
        return f"volume {self.located.extent.volume}, offset {self.located.extent.offset_bytes}"


class Extents:
    """A volume that is one extent: enough for a load, without a disk around it."""

    def __init__(self, base_bytes: int) -> None:
        self.memory = bytearray(PART.image_bytes)
        self._base_bytes = base_bytes

    def read(self, offset_bytes: int, into: Any) -> None:
        start = offset_bytes - self._base_bytes
        for buffer in into:
            buffer[:] = self.memory[start : start + buffer.nbytes]
            start += buffer.nbytes


class SmallStore:
    """Two volumes and a catalog as some commits left them. stale: older images by namespace and key."""

    def __init__(self, volumes: dict[int, MemoryVolume], contents: Contents, history: list[RecordAt]) -> None:
        self.volumes = volumes
        self.contents = contents
        self.superblocks = {index: read_superblock(volume) for index, volume in volumes.items()}
        retained = {
            (name, key, row.located)
            for name, found in contents.namespaces.items()
            for key, found_rows in found.rows.items()
            for row in found_rows
        }
        self.records = [record for record in history if (record.namespace, record.key, record.located) in retained]
        self.stale = [record for record in history if record not in self.records]
        self._target = memoryview(mmap.mmap(-1, PART.image_bytes))

    @classmethod
    async def make(cls) -> SmallStore:
        machine = Disks.blank().machine(0, Script())
        store = machine.start()
        history: list[RecordAt] = []
        views = {name: await create(store, name, host_bytes=HOST_BYTES, step=None) for name in NAMES}
        for step in range(STEPS):
            for name, view in views.items():
                await train(store, view)
                await store.committer.commit(view, step, f"extra {step}".encode())
                if step == 0:
                    await store.rollback(view, step)  # so that later notes have an epoch bound
                for key in view.namespace.keys:
                    located = view.namespace.on_volume(key)
                    assert located is not None
                    history.append(RecordAt(name, key, located, image_of(machine.disks[located.extent.volume], located)))
        await machine.crash()
        assert len(machine.disks) == VOLUME_COUNT
        return cls(dict(machine.disks), machine.durable.load(), history)

    # --- superblocks and notes

    def try_superblock(self, index: int) -> str:
        """Reads the superblock of a volume with damaged copies."""
        return self._try_copies(index, "superblock", read_superblock, self.superblocks[index])

    def notes(self) -> Iterator[tuple[int, CommitNote]]:
        """Yields (note slot, note) of every step that can be opened."""
        for found in self.contents.namespaces.values():
            for row in found.steps.values():
                yield row.note_slot, read_note(self.volumes[0], self.superblocks[0], row.note_slot)

    def try_note(self, index: int, slot: int, note: CommitNote) -> str:
        return self._try_copies(
            index, f"commit note in slot {slot}", lambda volume: read_note(volume, self.superblocks[index], slot), note
        )

    def _try_copies(self, index: int, what: str, read: Callable[[Volume], object], expected: Superblock | CommitNote) -> str:
        try:
            found = read(self.volumes[index])
        except VolumeError as error:  # the same bit of the version in all copies looks like another format
            return detected(error, f"volume {index}", what)
        assert found == expected, f"a damaged {what} was accepted: {found}"
        return FELL_BACK

    def places_of_superblocks(self) -> list[tuple[int, int]]:
        """Lists (offset, bytes that mean something) of each copy."""
        return [(offset_bytes, SUPERBLOCK_BYTES) for offset_bytes in SUPERBLOCK_COPIES]

    def places_of_note(self, index: int, slot: int) -> list[tuple[int, int]]:
        places = []
        for offset_bytes in note_offsets(self.superblocks[index], slot):
            image = bytes(self.volumes[index]._bytes[offset_bytes : offset_bytes + NOTE_SLOT_BYTES])
            places.append((offset_bytes, unseal(image, image[:MAGIC_BYTES], "note")))
        return places

    # --- records

    def try_header(self, record: RecordAt, image: bytearray | bytes) -> str:
        """Checks a header against the catalog's row, as every load does before anything else."""
        try:
            check_header(
                memoryview(image)[: PART.header_bytes], part=PART, root=record.located.root, store_uuid=self.contents.store_uuid,
                namespace=record.namespace, key=record.key, identity=record.located.identity, place=record.place,
            )  # fmt: skip
        except CorruptRecord as error:
            return detected(error, record.place)
        assert image[: PART.header_bytes] == record.image[: PART.header_bytes], f"a damaged header at {record.place} was accepted"
        return HARMLESS

    def try_load(self, record: RecordAt, image: bytearray | bytes) -> str:
        """Loads a record whose extent holds `image`, through the route and the checks of the engine."""
        volume = Extents(record.located.extent.offset_bytes)
        volume.memory[: len(image)] = image
        hashing = Hashing(at_once=1)
        read = ImageRead(volume, record.located.extent, self._target, PART.header_bytes, hashing)  # type: ignore[arg-type]
        try:
            results = [read.run(piece) for piece in PIECES]
            head = next(result.header for result in results if result.header is not None)
            header = check_header(
                head, part=PART, root=record.located.root, store_uuid=self.contents.store_uuid, namespace=record.namespace,
                key=record.key, identity=record.located.identity, place=record.place,
            )  # fmt: skip
            check_pieces(header, PART, results, place=record.place)
        except CorruptRecord as error:
            return detected(error, record.place)
        assert fields_of(self._target) == fields_of(record.image), f"damaged bytes at {record.place} were accepted"
        return HARMLESS

    # --- the whole store

    def try_open(self, volumes: dict[int, Volume], index: int) -> str:
        """Opens the store on volumes of which number `index` is damaged."""
        contents = MemoryCatalog(self.contents).load()
        try:
            open_store(contents, volumes)
        except VolumeError as error:
            return detected(error, f"volume {index}")
        return HARMLESS


class ShortVolume:
    """A volume whose file somebody truncated: only its first bytes are left."""

    def __init__(self, inner: Volume, size_bytes: int) -> None:
        self.index = inner.index
        self.size_bytes = size_bytes
        self._inner = inner

    def read(self, offset_bytes: int, into: Any) -> None:
        length_bytes = sum(buffer.nbytes for buffer in into)
        if offset_bytes + length_bytes > self.size_bytes:
            raise VolumeError(f"volume {self.index}: {length_bytes} bytes at {offset_bytes} are outside its {self.size_bytes}")
        self._inner.read(offset_bytes, into)


# --- the catalog


CatalogRows = list[tuple[bytes, bytes]]
"""Keys and values in the order of a cursor."""


class RowsInOrder:
    """The part of a transaction that reading the whole catalog needs."""

    def __init__(self, found: CatalogRows) -> None:
        self._found = found

    def cursor(self) -> Iterator[tuple[bytes, bytes]]:
        return iter(self._found)


def try_rows(found: CatalogRows, expected: Contents, damaged: bytes) -> str:
    """Reads the whole catalog, in which the row under the key `damaged` was changed."""
    try:
        contents, _ = read_catalog(RowsInOrder(found))  # type: ignore[arg-type]
    except CatalogError as error:
        return detected(error, "row")
    assert contents == expected, f"damage of {rows.describe_key(damaged)} was accepted"
    return HARMLESS


def detected(error: ParamStoreError, *places: str) -> str:
    """Gives DETECTED, if the error names the places."""
    assert all(place in str(error) for place in places), f"{error!r} does not name {places}"
    return DETECTED


# --- images


def image_of(volume: MemoryVolume, located: Located) -> bytes:
    start = located.extent.offset_bytes
    return bytes(volume._bytes[start : start + located.extent.length_bytes])


def pages_of(start: int, length_bytes: int) -> range:
    """Offsets of the whole pages that a structure touches."""
    return range(start // PAGE_BYTES * PAGE_BYTES, start + length_bytes, PAGE_BYTES)
