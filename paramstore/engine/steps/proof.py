"""The proof of a step: a commit note on every volume, then a flush of every volume, all at once.

After a failed flush nothing written to that volume since its last good flush can be trusted: namespaces that have records there
which no step has published are broken until rollback. A flush that does not return in time counts as failed. Neither a failed note
nor a failed flush is repeated in the same place.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping

from paramstore.core.location import Extent
from paramstore.core.residency import Working
from paramstore.engine.steps.transactions import Transactions
from paramstore.engine.tables.copies import Cut
from paramstore.engine.tables.namespace import NamespaceState
from paramstore.engine.transfers.runner import CATALOG_LANE, Runner, volume_lane
from paramstore.engine.transfers.transfers import Transfers
from paramstore.errors import VolumeError, WaitTimeout
from paramstore.storage.catalog.base import StepRow
from paramstore.storage.format.notes import write_note
from paramstore.storage.format.structures import CommitNote, NotedStep, Superblock, combine_roots, pack_description
from paramstore.storage.space.note_slots import NoteSlots
from paramstore.storage.volume.base import Volume

NOTED_ON_LOOP_MAX = 256
"""Changed records up to which the commit note is made on the loop: that takes less time (0.1 ms) than handing it to a worker."""


class Prover:
    """Proves the steps of all namespaces on all volumes. Owner of the note slots that must not be used again."""

    def __init__(
        self, transfers: Transfers, runner: Runner, *, transactions: Transactions, volumes: Mapping[int, Volume],
        superblocks: Mapping[int, Superblock], note_slots: NoteSlots, namespaces: Mapping[str, NamespaceState],
        flush_timeout_s: float,
    ) -> None:  # fmt: skip
        self._transfers = transfers
        self._runner = runner
        self._transactions = transactions
        self._volumes = volumes
        self._superblocks = superblocks
        self._note_slots = note_slots
        self._namespaces = namespaces
        self._flush_timeout_s = flush_timeout_s
        self._bad_slots: set[int] = set()
        """Note slots that a note could not be written to, or may still be; they are not tried again before a restart."""

    @property
    def has_slot(self) -> bool:
        """Whether a note slot is free."""
        return self._note_slots.free_count > 0

    def take_slot(self) -> int:
        """Takes the note slot of a step to be proven. Raises CapacityError where all are taken."""
        return self._note_slots.take()

    def give_back(self, slot: int) -> None:
        """Gives back the note slot of a step that was not published."""
        if slot not in self._bad_slots:
            self._note_slots.free(slot)

    async def prove(self, namespace: NamespaceState, cut: Cut, row: StepRow) -> None:
        """Notes the step on every volume, and makes durable all that was written before. What remains is the transaction."""
        kept = namespace.steps.ledger.visible_steps(namespace.held_steps(), published=row.step)
        if len(cut.records) <= NOTED_ON_LOOP_MAX:
            note = _note(namespace, cut, row, kept)
        else:
            with self._transactions.planned_elsewhere(namespace):
                note = await self._runner.call(CATALOG_LANE, lambda: _note(namespace, cut, row, kept))
        outcomes = await asyncio.gather(
            *(self._note_one(index, note, row.note_slot) for index in self._volumes), return_exceptions=True
        )
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                raise outcome

    async def _note_one(self, index: int, note: CommitNote, note_slot: int) -> None:
        volume, superblock = self._volumes[index], self._superblocks[index]

        def prove() -> tuple[int, VolumeError | None]:
            """Writes the note, then flushes; returns the note's bytes, and the flush's error. Runs in a worker."""
            note_bytes = write_note(volume, superblock, note_slot, note)
            try:
                volume.flush()
            except VolumeError as error:
                return note_bytes, error
            return note_bytes, None

        failed_flush: VolumeError | None
        try:
            note_bytes, failed_flush = await self._runner.call(volume_lane(index), prove, timeout_s=self._flush_timeout_s)
        except WaitTimeout as error:
            self._bad_slots.add(note_slot)
            late = VolumeError(f"volume {index}: no note and flush in {self._flush_timeout_s} s (flush_timeout_s)")
            self._distrust(index, late)
            raise late from error
        except VolumeError as error:
            self._bad_slots.add(note_slot)
            self._transfers.fail_note(index, error)
            raise
        self._transfers.count_note(self._namespaces[note.namespace], index, note_bytes)
        if failed_flush is not None:
            self._distrust(index, failed_flush)
            raise failed_flush

    def _distrust(self, volume: int, error: VolumeError) -> None:
        """Fences a volume whose flush failed, or has not returned, since no later flush would report that again: no further step is
        begun, and every namespace is broken that has an unpublished record there, one on its way there, or a commit under way."""
        space = self._transfers.space
        space.fences.fail_flush(volume, error)
        with self._transfers.deciding() as planner:
            for namespace in self._namespaces.values():
                lost = list(_unpublished_on(namespace, volume))
                for extent in lost:
                    space.quarantine(extent)
                written = namespace.residency.in_state[Working.WRITING]
                is_moving = namespace.steps.cut is not None or any(
                    self._transfers.is_writing(working, volume) for working in written
                )
                if lost or is_moving:
                    planner.mark_broken(namespace, f"a flush of volume {volume} failed: {error}")


def _note(namespace: NamespaceState, cut: Cut, row: StepRow, kept: frozenset[int]) -> CommitNote:
    """Makes the commit note, which proves the step and describes it to whoever lost the catalog. It hashes a row of every changed
    key. It only reads, and nothing settles in the ledger while a commit is under way, so it may run on another thread. kept: the
    steps that stay with this one."""
    ledger, parent = namespace.steps.ledger, namespace.steps.committed_step
    older = (ledger.step(step) for step in ledger.steps() if step in kept)
    roots = [(key, located.root) for key, located in cut.located().items()]
    return CommitNote(
        namespace=namespace.name, epoch=namespace.epoch, sequence=cut.sequence, step=row.step, parent=parent,
        record_count=len(cut.records), combined_root=combine_roots(roots), state_root=ledger.state_root(cut.sequence, roots),
        applies=cut.applies, epoch_bounds=ledger.namespace.epoch_bounds,
        steps=tuple(NotedStep(other.step, other.sequence, other.note_slot, other.is_snapshot) for other in older),
        description=pack_description(namespace.schema, namespace.keys), extra=row.extra, log=row.log,
    )  # fmt: skip


def _unpublished_on(namespace: NamespaceState, volume: int) -> Iterable[Extent]:
    """Extents of whole records on `volume` that no step has published, so far as the ledger is settled."""
    for key, working in namespace.residency.working.items():
        found = working.uncommitted
        if found is not None and found.extent.volume == volume and namespace.steps.newest(key) != found:
            yield found.extent
