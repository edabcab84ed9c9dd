"""Makes the contents of a new catalog, and restores the superblocks and notes that it needs: all from what the volumes prove.

Nothing is written before it is known that something comes back. The order is that of a commit: copies of superblocks that are not
whole, and notes that a proven step lacks on some volume, are written again and every volume is flushed; then `swap` makes a catalog
of `new_contents`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from paramstore.core.key import ExpertKey
from paramstore.core.location import Extent, Identity, Located
from paramstore.errors import CatalogError
from paramstore.fsck.disks import WritableDisk
from paramstore.fsck.proof import Proof
from paramstore.fsck.reader import NOTE_COPIES, NOTE_SLOT, PAGE, SUPERBLOCK_AT, Note
from paramstore.fsck.scan import Found
from paramstore.fsck.survey import FoundNote, Survey
from paramstore.storage.catalog.base import Change, Contents, NamespaceRow, Row, StepRow, VolumeRow


def check_rebuildable(found: Survey, proofs: Mapping[str, Proof], contents: Contents | None = None) -> None:
    """Checks that a new catalog can be made: some step is proven, or there is no record of any namespace; and the volumes are those
    of the present catalog, if that can be read (`contents`). Raises CatalogError."""
    if found.store is None:
        raise CatalogError("nothing was rebuilt: no volume has a whole superblock, so no store is known")
    missing = sorted(found.disks.keys() - found.superblocks.keys())
    if missing:
        raise CatalogError(f"nothing was rebuilt: volume {missing[0]} is not usable, see the findings")
    if contents is not None:
        _check_same_store(found, contents)
    if any(proof.steps for proof in proofs.values()):
        return
    noted = sorted(name for name, proof in proofs.items() if proof.newest is not None)
    if noted:
        raise CatalogError(f"nothing was rebuilt: no step of {', '.join(noted)} is proven, see the findings")
    if proofs:
        raise CatalogError(
            f"nothing was rebuilt: records of {', '.join(sorted(proofs))} are there, but no commit note is whole: an empty catalog "
            "would give their room away. Where there never was a commit, nothing is lost by a new store in another directory"
        )


def _check_same_store(found: Survey, contents: Contents) -> None:
    """Raises CatalogError if the catalog that would be replaced knows other volumes than those given."""
    if contents.store_uuid != found.store:
        raise CatalogError(
            f"nothing was rebuilt: the catalog that is there is of store {contents.store_uuid.hex()}, the volumes are of "
            f"{found.store.hex() if found.store else 'none'}: give the --dir and the --volume of one store"
        )
    missing = sorted(contents.volumes.keys() - found.disks.keys())
    if missing:
        row = contents.volumes[missing[0]]
        raise CatalogError(
            f"nothing was rebuilt: the catalog names volume {row.index} ({row.uuid.hex()}): give its path as --volume. If it is "
            "lost, move the catalog away first"
        )


def new_contents(found: Survey, proofs: Mapping[str, Proof], contents: Contents | None = None) -> Change:
    """Makes the rows of the new catalog. contents: those of the present one, if it can be read.

    A namespace without a proven step comes back as one without a commit, if a note or `contents` says what it is made of. Its epoch
    counts on: if it began anew, it could be one of which there are remains on the volumes.
    """
    namespaces: list[NamespaceRow] = []
    rows: list[tuple[str, ExpertKey, Row]] = []
    steps: list[tuple[str, StepRow]] = []
    for name, proof in sorted(proofs.items()):
        if proof.steps:
            own = _rows(proof)
            namespaces.append(_namespace(proof, own))
            rows.extend((name, key, row) for key, of_key in sorted(own.items()) for row in of_key)
            steps.extend((name, _step(proof, step, contents)) for step in sorted(proof.steps))
        elif proof.newest is not None:
            namespaces.append(_without_steps(proof, proof.newest.note))
    known = {row.name for row in namespaces}
    for name, old in sorted(contents.namespaces.items() if contents is not None else ()):
        if name not in known:
            epoch = max(old.namespace.epoch, proofs[name].epoch if name in proofs else 0) + 1
            namespaces.append(replace(old.namespace, epoch=epoch, epoch_bounds=(), applies=0))
    return Change(put_namespaces=tuple(namespaces), put_rows=tuple(rows), put_steps=tuple(steps), put_volumes=_volumes(found))


def _volumes(found: Survey) -> tuple[VolumeRow, ...]:
    """Rows of the volumes. Which blocks were written before is not known from the volumes, so none counts, as on a new volume."""
    return tuple(
        VolumeRow(index, superblock.volume, found.disks[index].size_bytes // PAGE * PAGE, superblock.extents_at)
        for index, superblock in sorted(found.superblocks.items())
    )


def _rows(proof: Proof) -> dict[ExpertKey, list[Row]]:
    """Makes a row for each change between proven steps, by key. What the oldest step did not bring was there at its parent."""
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


def _without_steps(proof: Proof, note: Note) -> NamespaceRow:
    description = note.description
    return NamespaceRow(
        name=proof.name, schema=description.schema.describe(), layers=description.keys.layers, experts=description.keys.experts,
        epoch=proof.epoch + 1, sequence=proof.sequence,
    )  # fmt: skip


def _namespace(proof: Proof, rows: Mapping[ExpertKey, list[Row]]) -> NamespaceRow:
    """Makes the namespace's row, as after a rollback to the newest proven step: in a new epoch, above all on the volumes."""
    note = proof.steps[max(proof.steps)].found.note
    bounds = {**dict(note.bounds), note.epoch: note.sequence}
    alive = {row.located.identity.epoch for own in rows.values() for row in own}
    return replace(
        _without_steps(proof, note), applies=note.applies,
        epoch_bounds=tuple((epoch, min(bounds[epoch], note.sequence)) for epoch in sorted(alive) if epoch in bounds),
    )  # fmt: skip


def _step(proof: Proof, step: int, contents: Contents | None) -> StepRow:
    """Makes a step's row. contents: knows what no note says: a later snapshot or its end, and that a step was only prepared."""
    proven = proof.steps[step]
    note = proven.found.note
    row = StepRow(
        step, note.sequence, proven.found.slot, note.record_count, note.extra, note.applies, is_snapshot=proven.is_snapshot,
        log=note.log.packed,
    )  # fmt: skip
    namespace = contents.namespaces.get(proof.name) if contents is not None else None
    known = namespace.steps.get(step) if namespace is not None else None
    if known is None or known.sequence != row.sequence:
        return row
    return replace(row, is_snapshot=known.is_snapshot, is_prepared=known.is_prepared and step == max(proof.steps))


def is_blank(contents: Contents) -> bool:
    """Whether a catalog names nothing, as one just made by a start that was then refused. It counts as no catalog."""
    return not contents.volumes and not contents.namespaces


def restore_superblocks(found: Survey, disks: Mapping[int, WritableDisk]) -> list[tuple[int, int]]:
    """Writes superblock copies that are not whole again, from the other copy. Gives (volume, copy) of each; `restore_notes` makes
    them durable. Raises VolumeError."""
    written = []
    for index, copy in found.bad_superblocks:
        at, whole_at = SUPERBLOCK_AT[copy], SUPERBLOCK_AT[1 - copy]
        if index in found.superblocks and at + PAGE <= found.disks[index].size_bytes:
            disks[index].write(at, found.disks[index].read(whole_at, PAGE))
            written.append((index, copy))
    return written


def restore_notes(found: Survey, proofs: Mapping[str, Proof], disks: Mapping[int, WritableDisk]) -> list[tuple[int, str, int]]:
    """Writes the notes of proven steps wherever a copy is missing. Gives (volume, namespace, step) of each. On return they are
    durable, and so is whatever else was read: what a killed daemon wrote may have been in the page cache only.

    The store opens only if the newest step of every namespace has its note on every volume. A slot belongs to one step on all
    volumes, so what is overwritten is torn, or is the note of a step that was dropped before. Raises VolumeError.
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
    for disk in disks.values():
        disk.flush()
    return written


def _note_bytes(found: Survey, note: FoundNote) -> bytes:
    index, copy = min(note.places)
    return found.disks[index].read(found.superblocks[index].note_at(note.slot, copy), NOTE_SLOT)
