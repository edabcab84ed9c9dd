"""Classes of damage to a small store. Each yields the outcome of every one of its damaged images (see `corruption`).

A class that stops half-way leaves its last image in place: so give such a class a store of its own.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from random import Random

from paramstore.storage.catalog.base import Change, Contents
from paramstore.storage.catalog.lmdb_catalog import LmdbCatalog
from paramstore.storage.format.structures import NOTE_SLOT_BYTES, CommitNote
from paramstore.storage.volume.base import ALIGNMENT_BYTES
from paramstore_testkit.trials.corruption import (
    DETECTED,
    FELL_BACK,
    HARMLESS,
    PART,
    CatalogRows,
    ShortVolume,
    SmallStore,
    pages_of,
    try_rows,
)

SEED = 20
PAYLOAD_FLIPS = 5000
Outcomes = dict[str, Counter[str]]
"""Outcomes of damaged images, counted by class of damage."""


def flips(memory: bytearray, start: int, length_bytes: int) -> Iterator[int]:
    """Flips every bit of a range in turn, and flips it back before the next."""
    for offset_bytes in range(start, start + length_bytes):
        for bit in range(8):
            memory[offset_bytes] ^= 1 << bit
            yield offset_bytes * 8 + bit
            memory[offset_bytes] ^= 1 << bit


def tally(found: Iterable[str]) -> Counter[str]:
    return Counter(found)


def superblock_bits(store: SmallStore) -> Iterator[str]:
    """Flips any bit of one copy of a superblock."""
    for index, (start, length_bytes) in itertools.product(store.volumes, store.places_of_superblocks()):
        for _ in flips(store.volumes[index]._bytes, start, length_bytes):
            yield store.try_superblock(index)


def superblock_bits_of_all_copies(store: SmallStore) -> Iterator[str]:
    """Flips any bit in every copy of a superblock at once."""
    (first, length_bytes), *others = store.places_of_superblocks()
    memory = store.volumes[0]._bytes
    for number in flips(memory, first, length_bytes):
        at, mask = number // 8 - first, 1 << number % 8
        for start, _ in others:
            memory[start + at] ^= mask
        yield store.try_superblock(0)
        for start, _ in others:
            memory[start + at] ^= mask


def note_bits(store: SmallStore) -> Iterator[str]:
    """Flips any bit of one copy of a note that a step needs."""
    for index, (slot, note) in itertools.product(store.volumes, list(store.notes())):
        for start, length_bytes in store.places_of_note(index, slot):
            for _ in flips(store.volumes[index]._bytes, start, length_bytes):
                yield store.try_note(index, slot, note)


def note_bits_of_the_only_copy(store: SmallStore) -> Iterator[str]:
    """Flips any bit of a note whose other copy is zeros."""
    slot, note = next(store.notes())
    (start, length_bytes), (other, _) = store.places_of_note(0, slot)
    memory = store.volumes[0]._bytes
    whole = bytes(memory[other : other + NOTE_SLOT_BYTES])
    memory[other : other + NOTE_SLOT_BYTES] = bytes(NOTE_SLOT_BYTES)
    for _ in flips(memory, start, length_bytes):
        yield store.try_note(0, slot, note)
    memory[other : other + NOTE_SLOT_BYTES] = whole


def bytes_behind_notes(store: SmallStore) -> Iterator[str]:
    """Writes garbage between a note's end and that of its slot, where nothing has a meaning."""
    random = Random(SEED)
    for slot, note in store.notes():
        for start, length_bytes in store.places_of_note(0, slot):
            for _ in range(100):
                memory, at = store.volumes[0]._bytes, random.randrange(start + length_bytes, start + NOTE_SLOT_BYTES)
                memory[at] ^= 0xFF
                outcome = store.try_note(0, slot, note)
                yield HARMLESS if outcome == FELL_BACK else outcome
                memory[at] ^= 0xFF


def header_bits(store: SmallStore) -> Iterator[str]:
    """Flips every bit of every header; puts one in 64 of these through a whole load."""
    for record in store.records:
        image = bytearray(record.image)
        for number in flips(image, 0, PART.header_bytes):
            yield store.try_header(record, image) if number % 64 else store.try_load(record, image)


def payload_bits(store: SmallStore) -> Iterator[str]:
    """Flips random bits of any field of any record."""
    random = Random(SEED)
    for _ in range(PAYLOAD_FLIPS):
        record, field = random.choice(store.records), random.choice(PART.fields)
        image = bytearray(record.image)
        image[field.offset_bytes + random.randrange(field.length_bytes)] ^= 1 << random.randrange(8)
        yield store.try_load(record, image)


def bytes_between_fields(store: SmallStore) -> Iterator[str]:
    """Writes garbage between a field's end and the next page, which belongs to no chunk and reaches nobody."""
    random = Random(SEED)
    for record, field in itertools.product(store.records, PART.fields):
        image = bytearray(record.image)
        image[random.randrange(field.offset_bytes + field.length_bytes, field.offset_bytes + ALIGNMENT_BYTES)] ^= 0xFF
        yield store.try_load(record, image)


def payload_bits_in_fields(store: SmallStore) -> Iterator[str]:
    """Flips every bit of one record's fields."""
    record = store.records[0]
    image = bytearray(record.image)
    for field in PART.fields:
        for _ in flips(image, field.offset_bytes, field.length_bytes):
            yield store.try_load(record, image)


def swapped_extents(store: SmallStore) -> Iterator[str]:
    """Puts the record of another key, step or namespace in the place of a record."""
    for record, other in itertools.permutations(store.records, 2):
        yield store.try_load(record, other.image)


def stale_copies(store: SmallStore) -> Iterator[str]:
    """Puts an older version of the same key in the place of a record: a write that never happened."""
    for record in store.records:
        for older in store.stale:
            if (older.namespace, older.key) == (record.namespace, record.key):
                yield store.try_load(record, older.image)


def torn_records(store: SmallStore) -> Iterator[str]:
    """Joins the first sectors of the record with an older one's others, as after a write that stopped half-way; and the reverse."""
    for record in store.records:
        older = next(old for old in store.stale if (old.namespace, old.key) == (record.namespace, record.key))
        for sector in range(512, len(record.image), 512):
            yield store.try_load(record, record.image[:sector] + older.image[sector:])
            yield store.try_load(record, older.image[:sector] + record.image[sector:])


def zeroed_pages(store: SmallStore) -> Iterator[str]:
    zeros = bytes(ALIGNMENT_BYTES)
    for record in store.records:
        for page in pages_of(0, len(record.image)):
            yield store.try_load(record, record.image[:page] + zeros + record.image[page + ALIGNMENT_BYTES :])
    memory = store.volumes[0]._bytes
    structures: list[tuple[Callable[[], str], int, int]] = [
        (lambda: store.try_superblock(0), start, length) for start, length in store.places_of_superblocks()
    ]
    for slot, note in store.notes():
        check = _note_check(store, slot, note)
        structures += [(check, start, length) for start, length in store.places_of_note(0, slot)]
    for check, start, length_bytes in structures:
        for page in pages_of(start, length_bytes):
            whole = bytes(memory[page : page + ALIGNMENT_BYTES])
            memory[page : page + ALIGNMENT_BYTES] = zeros
            yield check()
            memory[page : page + ALIGNMENT_BYTES] = whole


def _note_check(store: SmallStore, slot: int, note: CommitNote) -> Callable[[], str]:
    return lambda: store.try_note(0, slot, note)


def stale_notes(store: SmallStore) -> Iterator[str]:
    """Puts another step's whole note into both copies of a slot: the newest step is not proven, so the store is refused."""
    newest = {name: max(found.steps.values(), key=lambda row: row.step) for name, found in store.contents.namespaces.items()}
    for index, row, (slot, _) in itertools.product(store.volumes, newest.values(), list(store.notes())):
        if slot == row.note_slot:
            continue
        memory = store.volumes[index]._bytes
        sources, targets = store.places_of_note(index, slot), store.places_of_note(index, row.note_slot)
        before = [bytes(memory[start : start + NOTE_SLOT_BYTES]) for start, _ in targets]
        for (source, _), (target, _) in zip(sources, targets, strict=True):
            memory[target : target + NOTE_SLOT_BYTES] = memory[source : source + NOTE_SLOT_BYTES]
        yield store.try_open(dict(store.volumes), index)
        for (target, _), image in zip(targets, before, strict=True):
            memory[target : target + NOTE_SLOT_BYTES] = image


def truncated_volumes(store: SmallStore) -> Iterator[str]:
    """Truncates a volume at every page boundary."""
    for index, volume in store.volumes.items():
        for size_bytes in range(0, volume.size_bytes, ALIGNMENT_BYTES):
            short = ShortVolume(volume, size_bytes)
            yield store.try_open({**store.volumes, index: short}, index)  # type: ignore[dict-item]


VOLUME_CLASSES: dict[str, tuple[Callable[[SmallStore], Iterator[str]], set[str]]] = {
    "superblock: any bit of one copy": (superblock_bits, {FELL_BACK}),
    "superblock: any bit of all copies": (superblock_bits_of_all_copies, {DETECTED}),
    "note: any bit of one copy": (note_bits, {FELL_BACK}),
    "note: any bit of the only copy": (note_bits_of_the_only_copy, {DETECTED}),
    "note: bytes behind it": (bytes_behind_notes, {HARMLESS}),
    "note: another step's": (stale_notes, {DETECTED}),
    "header: any bit": (header_bits, {DETECTED}),
    "payload: random bits": (payload_bits, {DETECTED}),
    "payload: bytes between fields": (bytes_between_fields, {HARMLESS}),
    "payload: any bit of a field": (payload_bits_in_fields, {DETECTED}),
    "extent: another record": (swapped_extents, {DETECTED}),
    "extent: an older version": (stale_copies, {DETECTED}),
    "extent: torn": (torn_records, {DETECTED, HARMLESS}),
    "page of zeros": (zeroed_pages, {DETECTED, FELL_BACK, HARMLESS}),
    "volume: truncated": (truncated_volumes, {DETECTED}),
}
"""Each class of damage, and the outcomes that its images may have."""


# --- the catalog


def rows_of(contents: Contents, directory: Path) -> tuple[LmdbCatalog, CatalogRows]:
    """Makes a real catalog with these contents; gives it and its rows as they lie there."""
    catalog = LmdbCatalog(directory / "catalog", store_uuid=contents.store_uuid)
    catalog.load()
    namespaces = contents.namespaces.values()
    catalog.apply(
        Change(
            put_namespaces=tuple(found.namespace for found in namespaces),
            put_rows=tuple(
                (found.namespace.name, key, row) for found in namespaces for key, rows in found.rows.items() for row in rows
            ),
            put_steps=tuple((found.namespace.name, row) for found in namespaces for row in found.steps.values()),
            put_volumes=tuple(contents.volumes.values()),
        )
    )
    with catalog._environment.begin() as transaction:
        return catalog, [(bytes(key), bytes(value)) for key, value in transaction.cursor()]


def catalog_bits(rows: CatalogRows, contents: Contents, *, of_keys: bool) -> Iterator[str]:
    for number, (key, value) in enumerate(rows):
        damaged = bytearray(key if of_keys else value)
        for _ in flips(damaged, 0, len(damaged)):
            row = (bytes(damaged), value) if of_keys else (key, bytes(damaged))
            yield try_rows([*rows[:number], row, *rows[number + 1 :]], contents, key)


def swapped_values(rows: CatalogRows, contents: Contents) -> Iterator[str]:
    for (first, (key, value)), (second, (other_key, other)) in itertools.combinations(enumerate(rows), 2):
        swapped = list(rows)
        swapped[first], swapped[second] = (key, other), (other_key, value)
        yield try_rows(swapped, contents, key)


def shortened_values(rows: CatalogRows, contents: Contents) -> Iterator[str]:
    for number, (key, value) in enumerate(rows):
        for length_bytes in range(len(value)):
            yield try_rows([*rows[:number], (key, value[:length_bytes]), *rows[number + 1 :]], contents, key)


def sweep_catalog(contents: Contents, directory: Path) -> Outcomes:
    catalog, rows = rows_of(contents, directory)
    catalog.close()
    return {
        "catalog: any bit of a value": tally(catalog_bits(rows, contents, of_keys=False)),
        "catalog: any bit of a key": tally(catalog_bits(rows, contents, of_keys=True)),
        "catalog: swapped values": tally(swapped_values(rows, contents)),
        "catalog: shortened values": tally(shortened_values(rows, contents)),
    }
