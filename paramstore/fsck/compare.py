"""Compares the catalog with the volumes: finds every row, step and namespace of it that the volumes do not bear out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from paramstore.core.key import ExpertKey, KeySpace
from paramstore.core.location import Located
from paramstore.core.schema import Schema
from paramstore.errors import ParamStoreError
from paramstore.fsck.findings import Finding
from paramstore.fsck.reader import NOTE_COPIES, combine
from paramstore.fsck.scan import Found
from paramstore.fsck.survey import FoundNote, Survey
from paramstore.storage.catalog.base import Contents, NamespaceContents, Row, StepRow


def compare(contents: Contents, found: Survey) -> list[Finding]:
    """Finds everything in which the catalog and the volumes differ; nothing if each step of the catalog is there, whole."""
    findings = list(_volumes(contents, found))
    by_place = {(record.volume, record.offset): record for record in found.records}
    findings.extend(_overlaps(contents))
    for name, namespace in sorted(contents.namespaces.items()):
        findings.extend(_namespace(name, namespace, found))
        findings.extend(_records(name, namespace, by_place, found))
        for step in sorted(namespace.steps):
            findings.extend(_step(name, namespace, namespace.steps[step], found))
    return findings


def _volumes(contents: Contents, found: Survey) -> Iterator[Finding]:
    if found.store is not None and found.store != contents.store_uuid:
        yield Finding(what=f"the volumes belong to store {found.store.hex()}, the catalog to {contents.store_uuid.hex()}")
    for index, row in sorted(contents.volumes.items()):
        if index not in found.disks:
            yield Finding(volume=index, what=f"it ({row.uuid.hex()}) is missing: give its path as --volume")
            continue
        superblock = found.superblocks.get(index)
        if superblock is None:
            count = sum(row.located.extent.volume == index for row in _rows(contents))
            what = f"it was not read, since it has no whole superblock of its own: nothing is known of its {count} records"
            yield Finding(volume=index, what=what)
        elif superblock.volume != row.uuid:
            yield Finding(volume=index, what=f"it is {superblock.volume.hex()}, the catalog has {row.uuid.hex()} there")
        if found.disks[index].size_bytes < row.size_bytes:
            what = f"it was truncated to {found.disks[index].size_bytes} of {row.size_bytes} bytes"
            yield Finding(volume=index, what=what)
    for index in sorted(found.disks.keys() - contents.volumes.keys()):
        yield Finding(volume=index, what="the catalog does not know it")


def _rows(contents: Contents) -> Iterator[Row]:
    """All rows of all keys of all namespaces."""
    return (row for namespace in contents.namespaces.values() for rows in namespace.rows.values() for row in rows)


def _overlaps(contents: Contents) -> Iterator[Finding]:
    """Finds rows that share bytes."""
    extents = sorted(
        (row.located.extent, name, key)
        for name, namespace in contents.namespaces.items()
        for key, rows in namespace.rows.items()
        for row in rows
    )
    end = (-1, 0)
    for extent, name, key in extents:
        if end[0] == extent.volume and extent.offset_bytes < end[1]:
            what = "its extent overlaps the one before it"
            yield Finding(volume=extent.volume, offset=extent.offset_bytes, namespace=name, key=key, what=what)
        end = max(end, (extent.volume, extent.offset_bytes + extent.length_bytes))


def _namespace(name: str, contents: NamespaceContents, found: Survey) -> Iterator[Finding]:
    row = contents.namespace
    ages = [(one.note.epoch, one.note.sequence) for one in found.notes if one.note.namespace == name]
    ages += [(record.epoch, record.sequence) for record in found.records if record.namespace == name]
    epoch = max((age[0] for age in ages), default=0)
    if epoch > row.epoch:
        yield Finding(namespace=name, what=f"the volumes have epoch {epoch}, the catalog only {row.epoch}: it is an old copy")


def _records(
    name: str, contents: NamespaceContents, by_place: Mapping[tuple[int, int], Found], found: Survey
) -> Iterator[Finding]:
    """Finds what is wrong with the records that rows name, on the volumes that were read."""
    for key, rows in sorted(contents.rows.items()):
        for row in rows:
            if row.located.extent.volume not in found.superblocks:
                continue  # said once, of the volume
            problem = _differs(name, key, row.located, by_place)
            if problem is not None:
                extent = row.located.extent
                yield Finding(
                    volume=extent.volume, offset=extent.offset_bytes, namespace=name, key=key, step=row.first_step, what=problem
                )


def _differs(name: str, key: ExpertKey, located: Located, by_place: Mapping[tuple[int, int], Found]) -> str | None:
    record = by_place.get((located.extent.volume, located.extent.offset_bytes))
    if record is None:
        return "no whole record header lies there"
    expected = (name, tuple(key), *located.identity)
    there = (record.namespace, record.key, record.epoch, record.version)
    if there != expected:
        return f"there lies record {there[1]} of {there[0]!r}, version {there[3]} of epoch {there[2]}; the catalog has {expected}"
    if record.root != located.root:
        return f"its header has root {record.root:016x}, the catalog {located.root:016x}"
    return record.damage


def _step(name: str, contents: NamespaceContents, row: StepRow, found: Survey) -> Iterator[Finding]:
    """Finds what is wrong with a step's notes, and where its rows differ from what its note says."""
    wanted = (name, row.step, row.sequence, row.record_count, row.applies, row.extra, row.log)
    whole: FoundNote | None = None
    places: set[tuple[int, int]] = set()
    for one in found.notes:
        note = one.note
        if one.slot == row.note_slot and wanted == (
            note.namespace, note.step, note.sequence, note.record_count, note.applies, note.extra, note.log.packed
        ):  # fmt: skip
            whole, places = one, places | one.places
    for index, superblock in sorted(found.superblocks.items()):
        for copy in NOTE_COPIES:
            if (index, copy) not in places:
                what = f"copy {copy} of its commit note: {_note_there(found, row.note_slot, (index, copy))}"
                at = superblock.note_at(row.note_slot, copy)
                yield Finding(volume=index, offset=at, namespace=name, step=row.step, what=what)
    if whole is not None:
        yield from _rows_of_step(name, contents, whole)


def _note_there(found: Survey, slot: int, place: tuple[int, int]) -> str:
    """Says what lies where a step's note should be."""
    for one in found.notes:
        if one.slot == slot and place in one.places:
            whose = f"step {one.note.step} of {one.note.namespace!r}, sequence {one.note.sequence}"
            return f"slot {slot} has a note of {whose}, which the catalog does not have like that"
    return f"there is no whole note in slot {slot}"


def _rows_of_step(name: str, contents: NamespaceContents, whole: FoundNote) -> Iterator[Finding]:
    note, row = whole.note, contents.namespace
    try:
        described = (Schema.from_description(row.schema), KeySpace.of(row.layers, row.experts))
    except ParamStoreError as error:
        yield Finding(namespace=name, what=f"the catalog's description of it cannot be read: {error}")
        return
    if described != (note.description.schema, note.description.keys):
        yield Finding(namespace=name, step=note.step, what="its note describes other keys or another schema than the catalog")
    state = {}
    for key, rows in contents.rows.items():
        in_force = [row.located for row in rows if row.first_step <= note.step]
        if in_force:
            state[key] = in_force[-1]
    if note.description.schema.updates == "exact" and state:
        lacks = note.log.problem(note.applies, min(located.identity.version for located in state.values()))
        if lacks is not None:
            yield Finding(namespace=name, step=note.step, what=lacks)
    if combine([(key, located.root) for key, located in state.items()]) != note.state_root:
        yield Finding(namespace=name, step=note.step, what="the catalog's rows do not combine to its note's root")
