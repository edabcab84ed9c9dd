"""A catalog made anew from what the volumes prove, and put in the place of the one that is lost.

Nothing is written before it is known that something comes back. The order is that of a commit: notes that a proven step lacks
on some volume are written again and flushed, then the new catalog is written whole beside the old one, then it takes its name
in one step. The old one stays, as `catalog.before-rebuild-N`.
"""

from __future__ import annotations

import ctypes
import os
import shutil
from collections.abc import Mapping
from pathlib import Path

from paramstore.core.key import ExpertKey
from paramstore.core.place import Extent, Identity, Located
from paramstore.errors import CatalogError
from paramstore.fsck.disks import WritableDisk
from paramstore.fsck.proof import Proof
from paramstore.fsck.reader import NOTE_COPIES, NOTE_SLOT
from paramstore.fsck.scan import Found
from paramstore.fsck.survey import FoundNote, Survey
from paramstore.storage.catalog import Catalog, Change, NamespaceRow, Row, StepRow, VolumeRow
from paramstore.storage.lmdb_catalog import LmdbCatalog

CATALOG_NAME = "catalog"
NEW_NAME = "catalog.rebuilding"
OLD_NAME = "catalog.before-rebuild"
RENAME_EXCHANGE = 2
AT_FDCWD = -100


def check_rebuildable(found: Survey, proofs: Mapping[str, Proof]) -> None:
    """Returns if there is a catalog to be made: some step is proven, or no commit was ever noted. Raises CatalogError."""
    if found.store is None:
        raise CatalogError("nothing was rebuilt: no volume has a whole superblock, so no store is known")
    missing = sorted(found.disks.keys() - found.superblocks.keys())
    if missing:
        raise CatalogError(f"nothing was rebuilt: volume {missing[0]} is not usable, see the findings")
    noted = sorted(name for name, proof in proofs.items() if proof.newest is not None)
    if noted and not any(proof.steps for proof in proofs.values()):
        raise CatalogError(f"nothing was rebuilt: no step of {', '.join(noted)} is proven, see the findings")


def new_contents(found: Survey, proofs: Mapping[str, Proof]) -> Change:
    """The rows of the new catalog. A namespace without a proven step is not among them."""
    namespaces: list[NamespaceRow] = []
    rows: list[tuple[str, ExpertKey, Row]] = []
    steps: list[tuple[str, StepRow]] = []
    for name, proof in sorted(proofs.items()):
        if proof.steps:
            own = _rows(proof)
            namespaces.append(_namespace(proof, own))
            rows.extend((name, key, row) for key, of_key in sorted(own.items()) for row in of_key)
            steps.extend((name, _step(proof, step)) for step in sorted(proof.steps))
    return Change(put_namespaces=tuple(namespaces), put_rows=tuple(rows), put_steps=tuple(steps), put_volumes=_volumes(found))


def _volumes(found: Survey) -> tuple[VolumeRow, ...]:
    """Which blocks were written before is not on the volumes: as of a new one, none."""
    return tuple(
        VolumeRow(index, superblock.volume, found.disks[index].size_bytes, superblock.extents_at)
        for index, superblock in sorted(found.superblocks.items())
    )


def _rows(proof: Proof) -> dict[ExpertKey, list[Row]]:
    """Per key a row for each change between proven steps. What the oldest of them did not bring was there at its parent."""
    rows: dict[ExpertKey, list[Row]] = {}
    for number, (step, proven) in enumerate(sorted(proof.steps.items())):
        for key, record in proven.state.items():
            own = rows.setdefault(key, [])
            located = _located(record)
            if own and own[-1].located == located:
                continue
            parent = proven.found.note.parent
            is_older = number == 0 and key not in proven.changed and parent is not None
            own.append(Row(parent if is_older and parent is not None else step, located))
    return rows


def _located(record: Found) -> Located:
    extent = Extent(record.volume, record.offset, record.record_bytes)
    return Located(extent, Identity(record.epoch, record.version), record.root)


def _namespace(proof: Proof, rows: Mapping[ExpertKey, list[Row]]) -> NamespaceRow:
    """As after a rollback to the newest proven step: in an epoch of its own, above all that the volumes have."""
    note = proof.steps[max(proof.steps)].found.note
    bounds = {**dict(note.bounds), note.epoch: note.sequence}
    alive = {row.located.identity.epoch for own in rows.values() for row in own}
    return NamespaceRow(
        name=proof.name, schema=note.description.schema.describe(), layers=note.description.keys.layers,
        experts=note.description.keys.experts, epoch=proof.epoch + 1, sequence=proof.sequence,
        epoch_bounds=tuple((epoch, min(bounds[epoch], note.sequence)) for epoch in sorted(alive) if epoch in bounds),
        applies=note.applies,
    )  # fmt: skip


def _step(proof: Proof, step: int) -> StepRow:
    proven = proof.steps[step]
    note = proven.found.note
    return StepRow(
        step, note.sequence, proven.found.slot, note.record_count, note.extra, note.applies, is_snapshot=proven.is_snapshot
    )


def restore_notes(found: Survey, proofs: Mapping[str, Proof], disks: Mapping[int, WritableDisk]) -> list[tuple[int, str, int]]:
    """Writes the notes of proven steps wherever a copy is missing; durable on return. Gives (volume, namespace, step) of each.

    The store opens only if the newest step of every namespace has its note on every volume. A slot belongs to one step on all
    of them, so what is overwritten is torn, or the note of a step that was gone before. Raises VolumeError.
    """
    written = []
    for name, proof in sorted(proofs.items()):
        for step, proven in sorted(proof.steps.items()):
            data = _note_bytes(found, proven.found)
            for index, disk in sorted(disks.items()):
                copies = [copy for copy in NOTE_COPIES if (index, copy) not in proven.found.places]
                for copy in copies:
                    disk.write(found.superblocks[index].note_at(proven.found.slot, copy), data)
                if copies:
                    written.append((index, name, step))
    for index in {index for index, _, _ in written}:
        disks[index].flush()
    return written


def _note_bytes(found: Survey, note: FoundNote) -> bytes:
    index, copy = min(note.places)
    return found.disks[index].read(found.superblocks[index].note_at(note.slot, copy), NOTE_SLOT)


def fill(catalog: Catalog, change: Change) -> None:
    """Puts everything into a new, empty catalog. Raises CatalogError."""
    catalog.load()
    catalog.reserve(len(change.put_rows) + len(change.put_steps) + len(change.put_namespaces) + len(change.put_volumes))
    catalog.apply(change)


def replace_catalog(directory: Path, store: bytes, change: Change) -> Path | None:
    """On return `directory` durably has a catalog of `change` alone. Gives where the old one is now; None if there was none.

    Raises CatalogError; then the old one is in its place.
    """
    current, new = directory / CATALOG_NAME, directory / NEW_NAME
    try:
        if new.exists():
            shutil.rmtree(new)  # of a rebuild that did not come to its end
        catalog = LmdbCatalog(new, store_uuid=store)
        try:
            fill(catalog, change)
        finally:
            catalog.close()
        if not current.exists():
            new.rename(current)
            _flush(directory)
            return None
        old = _free_name(directory)
        _exchange(new, current)
        _flush(directory)
        new.rename(old)
        _flush(directory)
    except OSError as error:
        raise CatalogError(f"catalog {current}: cannot be replaced: {error}") from error
    return old


def _free_name(directory: Path) -> Path:
    number = 1
    while (directory / f"{OLD_NAME}-{number}").exists():
        number += 1
    return directory / f"{OLD_NAME}-{number}"


def _exchange(one: Path, other: Path) -> None:
    """Exchanges two names in one step: there is a whole catalog at every moment. Raises OSError, also where the file system
    cannot do it."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.renameat2(AT_FDCWD, os.fsencode(one), AT_FDCWD, os.fsencode(other), RENAME_EXCHANGE) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), str(one), None, str(other))


def _flush(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
