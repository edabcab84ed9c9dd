"""Everything that lies on all volumes: superblocks, notes and records, read once and not yet compared with anything."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from paramstore.core.schema import Part
from paramstore.errors import CorruptRecord, VolumeError
from paramstore.fsck.disks import Disk
from paramstore.fsck.findings import Finding
from paramstore.fsck.reader import (
    NOTE_COPIES,
    SUPERBLOCK_AT,
    VERSION,
    Note,
    OtherFormat,
    Superblock,
    read_note,
    read_superblocks,
)
from paramstore.fsck.scan import Found, Progress, scan


@dataclass(frozen=True, slots=True)
class FoundNote:
    """One commit note. places: (volume, copy) of every whole copy in its slot."""

    note: Note
    slot: int
    places: frozenset[tuple[int, int]]


@dataclass(slots=True)
class Survey:
    """Everything found on the volumes. disks, superblocks: by volume. bad_superblocks: (volume, copy) of copies that are not
    whole while the other one is. store: None without any superblock. findings: what is wrong with the volumes alone."""

    disks: Mapping[int, Disk]
    superblocks: dict[int, Superblock] = field(default_factory=dict)
    bad_superblocks: list[tuple[int, int]] = field(default_factory=list)
    notes: list[FoundNote] = field(default_factory=list)
    records: list[Found] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)

    @property
    def store(self) -> bytes | None:
        return next((superblock.store for _, superblock in sorted(self.superblocks.items())), None)

    def namespaces(self) -> list[str]:
        """Names of the namespaces that a note or a record names."""
        return sorted({found.note.namespace for found in self.notes} | {record.namespace for record in self.records})

    def layouts(self) -> dict[str, Part]:
        """The stored part of every namespace that has a note."""
        newest: dict[str, Note] = {}
        for found in self.notes:
            name = found.note.namespace
            if name not in newest or newest[name].age < found.note.age:
                newest[name] = found.note
        return {name: note.description.schema.stored for name, note in newest.items()}


def survey(
    disks: Sequence[Disk], progress: Progress = lambda _: None, *, layouts: Mapping[str, Part] = MappingProxyType({})
) -> Survey:
    """Reads every volume from its first to its last byte. What cannot be read becomes a finding. Raises VolumeError for a volume of
    another format.

    layouts: the stored parts of namespaces according to the catalog; for a namespace with a note, the note counts.
    """
    result = Survey({disk.index: disk for disk in disks})
    for disk in disks:
        _take_superblock(result, disk)
    _check_stores(result)
    for index, superblock in sorted(result.superblocks.items()):
        _take_notes(result, result.disks[index], superblock)
    layouts = {**layouts, **result.layouts()}
    for index, superblock in sorted(result.superblocks.items()):
        try:
            for told in scan(result.disks[index], superblock, layouts, progress):
                if isinstance(told, Finding):
                    result.findings.append(told)
                else:
                    result.records.append(told)
        except VolumeError as error:
            result.findings.append(Finding(volume=index, what=f"the search for records ended early: {error}"))
    return result


def _take_superblock(result: Survey, disk: Disk) -> None:
    copies = read_superblocks(disk)
    whole = [copy for copy in copies if isinstance(copy, Superblock)]
    formats = {copy.format if isinstance(copy, OtherFormat) else None for copy in copies}
    if len(formats) == 1 and (found := formats.pop()) is not None:
        age = "a newer" if found > VERSION else "an older"
        raise VolumeError(
            f"volume {disk.index} has volume format {found}, which {age} paramstore writes; this one reads format {VERSION}: check "
            "the store with that one"
        )
    for at, copy in zip(SUPERBLOCK_AT, copies, strict=True):
        if isinstance(copy, VolumeError):
            other = "; the other copy is whole" if whole else ""
            result.findings.append(Finding(volume=disk.index, offset=at, what=f"no whole superblock: {copy}{other}"))
    if not whole:
        return
    if any(copy != whole[0] for copy in whole):
        result.findings.append(Finding(volume=disk.index, what="its superblocks differ: parts of two volumes lie in one file"))
        return
    if whole[0].index != disk.index:
        what = f"says that it is volume {whole[0].index}: its file was renamed"
        result.findings.append(Finding(volume=disk.index, what=what))
        return
    result.superblocks[disk.index] = whole[0]
    bad = (number for number, copy in enumerate(copies) if isinstance(copy, VolumeError))
    result.bad_superblocks.extend((disk.index, number) for number in bad)


def _check_stores(result: Survey) -> None:
    """Leaves out volumes of another store than the first one's."""
    first = result.store
    for index, superblock in sorted(result.superblocks.items()):
        if first is not None and superblock.store != first:
            what = f"belongs to store {superblock.store.hex()}, the volumes before it to {first.hex()}"
            result.findings.append(Finding(volume=index, what=what))
            del result.superblocks[index]


def _take_notes(result: Survey, disk: Disk, superblock: Superblock) -> None:
    """Reads the volume's notes, and joins equal notes of all copies and volumes."""
    at = {(found.slot, found.note): number for number, found in enumerate(result.notes)}
    for slot in range(superblock.note_slots):
        for copy in NOTE_COPIES:
            try:
                note = read_note(disk, superblock, slot, copy)
            except VolumeError as error:
                result.findings.append(Finding(volume=disk.index, offset=superblock.note_at(slot, copy), what=str(error)))
                continue
            if isinstance(note, CorruptRecord):
                continue  # a free slot, or one that a power cut tore; the catalog's steps are looked at one by one
            number = at.setdefault((slot, note), len(result.notes))
            if number == len(result.notes):
                result.notes.append(FoundNote(note, slot, frozenset()))
            found = result.notes[number]
            result.notes[number] = replace(found, places=found.places | {(disk.index, copy)})
