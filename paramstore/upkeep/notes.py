"""Checks, for a scrub, all copies of each volume's superblock, and of the commit note of every existing step.

- The ledgers are asked for the steps when a scrub comes to the notes; a step that is dropped meanwhile is left out. A note slot is
  written anew only after its step has left the ledger, so bytes that were read for a step that still exists are its note.
- A copy is whole if it can be read and says what the catalog says; any other copy is damaged, whatever the other copies are.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from paramstore.engine.tables.namespace import NamespaceState
from paramstore.errors import VolumeError
from paramstore.storage.catalog.base import StepRow
from paramstore.storage.format.structures import (
    NOTE_SLOT_BYTES,
    SUPERBLOCK_BYTES,
    SUPERBLOCK_COPIES,
    Superblock,
    note_offsets,
    unpack_note,
    unpack_superblock,
)
from paramstore.storage.volume.base import Volume

SUPERBLOCK, NOTE = "superblock", "note"


@dataclass(frozen=True, slots=True)
class CopyFinding:
    """A copy of a superblock or a commit note that could not be read, or is not what it must be. copy: its index, from 0 on.
    namespace, step: those of a note; None for a superblock."""

    kind: str
    namespace: str | None
    step: int | None
    volume: int
    offset_bytes: int
    copy: int
    reason: str


@dataclass(frozen=True, slots=True)
class CopyCheck:
    """One superblock or note on one volume, to be checked in all its copies. is_current: whether it still has to be there."""

    kind: str
    volume: Volume
    offsets: Sequence[int]
    length_bytes: int
    objection: Callable[[memoryview], str | None]
    """Says why these bytes are not the superblock or note; None if they are. Raises VolumeError. Called in a worker."""
    is_current: Callable[[], bool]
    namespace: str | None = None
    step: int | None = None

    def run(self) -> list[str | None]:
        """Reads all copies, in a worker; says for each why it is damaged, None for a whole one."""
        buffer = memoryview(mmap.mmap(-1, self.length_bytes))
        return [self._read(offset_bytes, buffer) for offset_bytes in self.offsets]

    def _read(self, offset_bytes: int, buffer: memoryview) -> str | None:
        try:
            self.volume.read(offset_bytes, (buffer,))
            return self.objection(buffer)
        except VolumeError as error:
            return str(error)

    def findings(self, outcomes: Sequence[str | None]) -> Iterator[CopyFinding]:
        """Turns what `run` returned into findings."""
        others = "the other copy is whole" if None in outcomes else "no copy on this volume is whole"
        for copy, (offset_bytes, reason) in enumerate(zip(self.offsets, outcomes, strict=True)):
            if reason is not None:
                text = f"{reason}; {others}"
                yield CopyFinding(self.kind, self.namespace, self.step, self.volume.index, offset_bytes, copy, text)


class NoteScrub:
    """Lists the superblocks and notes that there are to check. Reads tables, changes none."""

    def __init__(self, volumes: Mapping[int, Volume], superblocks: Mapping[int, Superblock]) -> None:
        self._volumes = volumes
        self._superblocks = superblocks

    def checks(self, namespaces: Iterable[NamespaceState]) -> list[CopyCheck]:
        """Lists for every volume its superblock, and the notes of all steps of `namespaces`, prepared ones and drafts included."""
        checks = []
        for index, superblock in self._superblocks.items():
            volume = self._volumes[index]
            checks.append(_superblock_check(volume, superblock))
            for namespace in namespaces:
                checks.extend(_note_check(volume, superblock, namespace, row) for row in _steps_of(namespace))
        return checks


def _superblock_check(volume: Volume, superblock: Superblock) -> CopyCheck:
    return CopyCheck(
        SUPERBLOCK, volume, SUPERBLOCK_COPIES, SUPERBLOCK_BYTES, partial(_superblock_objection, superblock), is_current=lambda: True
    )


def _superblock_objection(expected: Superblock, data: memoryview) -> str | None:
    found = unpack_superblock(data)
    return None if found == expected else f"it is another superblock: {found}, expected {expected}"


def _note_check(volume: Volume, superblock: Superblock, namespace: NamespaceState, row: StepRow) -> CopyCheck:
    return CopyCheck(
        NOTE, volume, note_offsets(superblock, row.note_slot), NOTE_SLOT_BYTES, partial(_note_objection, namespace.name, row),
        is_current=partial(_is_there, namespace, row), namespace=namespace.name, step=row.step,
    )  # fmt: skip


def _note_objection(name: str, row: StepRow, data: memoryview) -> str | None:
    note = unpack_note(data)
    found = (note.namespace, note.step, note.sequence, note.record_count)
    expected = (name, row.step, row.sequence, row.record_count)
    if found == expected:
        return None
    return f"it is the note of (namespace, step, sequence, records) {found}, expected {expected}"


def _is_there(namespace: NamespaceState, row: StepRow) -> bool:
    """Whether `row`'s step still exists, perhaps finalized or a snapshot by now. One made again has another sequence."""
    return any((found.sequence, found.note_slot) == (row.sequence, row.note_slot) for found in _steps_of(namespace))


def _steps_of(namespace: NamespaceState) -> list[StepRow]:
    """Lists every step that has a note."""
    ledger = namespace.steps.ledger
    rows = [ledger.step(step) for step in ledger.steps()]
    newest = ledger.newest  # a prepared step or a draft is not among the steps that can be opened
    return [*rows, newest] if newest is not None and newest not in rows else rows
