"""The committer: makes one cut durable, and takes a namespace back to a step.

A commit: write what the cut found dirty → a commit note on every volume → flush every volume, all at once → one catalog
transaction → settle. Whatever fails before the transaction changes nothing durable. A transaction that raised is
*unknown*: the catalog is reopened and read, and what it says is what happened.

After a failed flush nothing written to that volume since its last good flush can be trusted, in memory-only extents of any
namespace: those namespaces are broken until rollback. A failed write or flush is never repeated on the same extent.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Iterator, Mapping

from paramstore.core.key import ExpertKey
from paramstore.core.place import Extent, Located
from paramstore.engine.cleaner import Cleaner
from paramstore.engine.moves import MoveKind
from paramstore.engine.namespace import Cut, NamespaceState, WorkingCopy
from paramstore.engine.planner import Planner
from paramstore.engine.requests import Urgency
from paramstore.engine.runner import CATALOG_LANE, Runner, volume_lane
from paramstore.engine.transfers import Transfers
from paramstore.engine.waiting import until_woken
from paramstore.errors import CatalogError, ParamStoreError, StepFailed, VolumeError
from paramstore.storage.catalog import Catalog, Change, Contents, StepRow
from paramstore.storage.format import CommitNote, NotedStep, Superblock, combine_roots, pack_description
from paramstore.storage.ledger import Publication
from paramstore.storage.note_slots import NoteSlots
from paramstore.storage.notes import write_note
from paramstore.storage.volume import Volume

logger = logging.getLogger(__name__)


class Committer:
    """Publishes cuts and rollbacks, one transaction at a time (the catalog's one thread)."""

    def __init__(
        self, planner: Planner, transfers: Transfers, cleaner: Cleaner, runner: Runner, *, catalog: Catalog,
        volumes: Mapping[int, Volume], superblocks: Mapping[int, Superblock], note_slots: NoteSlots,
        namespaces: Mapping[str, NamespaceState], stall_s: float,
    ) -> None:  # fmt: skip
        self._planner = planner
        self._transfers = transfers
        self._cleaner = cleaner
        self._runner = runner
        self._catalog = catalog
        self._volumes = volumes
        self._superblocks = superblocks
        self._note_slots = note_slots
        self._namespaces = namespaces
        self._stall_s = stall_s
        self.stopped: str | None = None
        """Why nothing durable is accepted any more: the catalog could not be read back after a failure."""
        self._bad_note_slots: set[int] = set()
        """Slots whose note could not be written: not tried again before a restart."""

    async def commit(self, namespace: NamespaceState, cut: Cut, step: int, extra: bytes) -> int:
        """Makes `cut` durable as `step`; on return it is. Gives how many records it published.

        Raises what a volume or the catalog raised; then the committed step is as before, and the cut's records are still
        the newest uncommitted ones.
        """
        note_slot: int | None = None
        try:
            self.check_accepting()
            note_slot = self._note_slots.take()
            step_row = StepRow(step, cut.sequence, note_slot, len(cut.keys), extra, cut.applies)
            await self._prove(namespace, cut, step_row)
            publication = await self._publish_cut(namespace, cut, step_row)
        except BaseException:  # a bug too must not leave a cut that everybody waits for
            if self.stopped is not None:
                raise  # published or not, nobody knows: whatever the step may need stays untouched until a restart
            if note_slot is not None and note_slot not in self._bad_note_slots:
                self._note_slots.free(note_slot)
            namespace.closing_steps = frozenset()
            self._planner.settle_cut(namespace, is_published=False)
            self._transfers.drain()
            raise
        self._settle(namespace, publication)
        self._planner.settle_cut(namespace, is_published=True)
        self._transfers.drain()
        namespace.stats.commits += 1
        namespace.stats.bytes_committed += len(cut.keys) * namespace.schema.record_bytes
        return len(cut.keys)

    def check_accepting(self) -> None:
        if self.stopped is not None:
            raise CatalogError(f"this store accepts no writes: {self.stopped}; restart the daemon")

    async def _prove(self, namespace: NamespaceState, cut: Cut, row: StepRow) -> None:
        """Everything the step needs is durable on every volume; what remains is the transaction."""
        await self._runner.call(CATALOG_LANE, lambda: self._catalog.reserve(2 * len(cut.keys) + 16))
        await self._write_unwritten(namespace, cut)
        kept = namespace.ledger.visible_steps(namespace.held_steps(), published=row.step)
        note = await self._runner.call(CATALOG_LANE, lambda: _note(namespace, cut, row, kept))
        await self._note_and_flush(note, row.note_slot)

    async def _publish_cut(self, namespace: NamespaceState, cut: Cut, row: StepRow) -> Publication:
        """The transaction. Planned on the catalog's thread: 15,000 changed records take longer than the loop may be held.

        Which steps go is fixed here first; nobody can open one of them any more.
        """
        if namespace.broken is not None:  # another commit's flush failed meanwhile, and ours may have hidden behind it
            raise StepFailed(f"namespace {namespace.name!r}: {namespace.broken}; rollback() is the way on")
        dropped = self._planner.drop_oldest_readers(namespace, row.step)
        held = frozenset(namespace.held_steps())
        namespace.closing_steps = frozenset(namespace.ledger.steps()) - namespace.ledger.visible_steps(held, published=row.step)

        def plan() -> Publication:
            return namespace.ledger.plan_publish(row, cut.located, held)

        try:
            publication: Publication = await self._runner.call(CATALOG_LANE, plan)
            await self.apply_change(publication.change())
        except ParamStoreError:
            for view in dropped:
                view.is_dropped = False
            raise
        return publication

    async def _write_unwritten(self, namespace: NamespaceState, cut: Cut) -> None:
        """Writes the records that were dirty at the cut, at DEMAND: all are queued before the first is awaited."""
        for key in list(cut.unwritten):
            working = namespace.working[key]
            if working.state == "dirty":
                self._planner.working.begin_write(namespace, working, Urgency.DEMAND)
        self._transfers.drain()
        for key in sorted(cut.unwritten):  # a copy: the set shrinks as writes land
            while key in cut.unwritten:
                await self._cleaner.write(namespace, key, Urgency.DEMAND)

    async def _note_and_flush(self, note: CommitNote, note_slot: int) -> None:
        outcomes = await asyncio.gather(
            *(self._note_one(index, note, note_slot) for index in self._volumes), return_exceptions=True
        )
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                raise outcome

    async def _note_one(self, index: int, note: CommitNote, note_slot: int) -> None:
        volume, superblock = self._volumes[index], self._superblocks[index]
        lane = volume_lane(index)
        try:
            await self._runner.call(lane, lambda: write_note(volume, superblock, note_slot, note))
        except VolumeError:
            self._bad_note_slots.add(note_slot)
            raise
        try:
            await self._runner.call(lane, volume.flush)
        except VolumeError as error:
            self._distrust(index, error)
            raise

    def _distrust(self, volume: int, error: VolumeError) -> None:
        """A flush failed, and no later one will say so again: every namespace is broken that has an unpublished record on
        that volume, has one on its way there, or has a commit under way, with a note there."""
        logger.error("flush of volume %d failed: %s", volume, error)
        for namespace in self._namespaces.values():
            lost = list(_unpublished_on(namespace, volume))
            for extent in lost:
                self._planner.space.quarantine(extent)
            is_moving = namespace.cut is not None or any(_written_to(working, volume) for working in namespace.resident.values())
            if lost or is_moving:
                self._planner.mark_broken(namespace, f"a flush of volume {volume} failed: {error}")
        self._transfers.drain()

    async def apply_change(self, change: Change) -> None:
        """One transaction. If it raises, what the reopened catalog holds is the truth. Raises CatalogError."""
        self.check_accepting()
        try:
            await self._runner.call(CATALOG_LANE, lambda: self._catalog.apply(change))
        except CatalogError as error:
            if not await self._happened(change, error):
                raise

    async def _happened(self, change: Change, error: CatalogError) -> bool:
        """Resolves an unknown outcome from disk. Raises CatalogError, and stops all writes, if that fails too."""
        logger.error("a catalog transaction failed, reading it back: %s", error)

        def read_back() -> bool:
            self._catalog.reopen()
            return _is_in(change, self._catalog.load())

        try:
            return bool(await self._runner.call(CATALOG_LANE, read_back))
        except ParamStoreError as second:
            self._stop(f"the catalog failed ({error}) and could not be read back ({second})")
            raise CatalogError(f"the outcome of the transaction is unknown: {self.stopped}; restart the daemon") from error

    def _stop(self, reason: str) -> None:
        """Nothing durable is accepted from here on: every writer is told, whoever waits for a commit goes on."""
        self.stopped = reason
        for namespace in self._namespaces.values():
            self._planner.mark_broken(namespace, f"{reason}; restart the daemon")
            self._planner.outbox.woken.extend(namespace.cut_waiters)
            namespace.cut_waiters.clear()
        self._transfers.drain()

    def _settle(self, namespace: NamespaceState, publication: Publication) -> None:
        namespace.ledger.settle(publication)
        namespace.closing_steps = frozenset()
        for extent in publication.freed:
            self._planner.space.release(extent)
        for slot in publication.freed_note_slots:
            self._note_slots.free(slot)

    async def until_no_cut(self, namespace: NamespaceState) -> None:
        """Returns when no commit of `namespace` is under way. The caller has the turn, so none begins. Raises WaitTimeout
        where nothing moves any more, CatalogError."""
        while namespace.cut is not None:
            self.check_accepting()
            future = asyncio.get_running_loop().create_future()
            namespace.cut_waiters.append(future)
            what = f"the commit of {namespace.name!r} under way"
            await until_woken(future, self._runner, stall_s=self._stall_s, what=what)

    async def rollback(self, namespace: NamespaceState, *, to_step: int | None = None) -> None:
        """To `to_step`, or (None) to the step that is committed when the calls before this one are through.

        An apply under way stops at its next record. Raises StepDropped if there is no such step, StepFailed if a later one is a
        snapshot; then nothing has changed.
        """
        if to_step is not None and namespace.cut is None:
            namespace.ledger.step(to_step)  # a wrong step stops nobody's apply
        namespace.stop_requests += 1
        try:
            await namespace.turn.acquire()
        finally:
            namespace.stop_requests -= 1
        try:
            await self.until_no_cut(namespace)
            await self._roll_back_to(namespace, namespace.committed_step if to_step is None else to_step)
        finally:
            namespace.turn.release()

    async def _roll_back_to(self, namespace: NamespaceState, step: int | None) -> None:
        """On return the namespace stands at `step` (None: before any commit) in a new, durable epoch, and is not broken.

        No commit is under way. Readers of later steps have lost them.
        """
        self.check_accepting()
        assert namespace.cut is None
        publication = namespace.ledger.plan_rollback(step)
        gone = frozenset(dropped for _, dropped in publication.drop_steps)
        namespace.closing_steps = gone
        lost = self._planner.drop_readers(namespace, gone)
        try:
            await self.apply_change(publication.change())
        except ParamStoreError:
            for view in lost:
                view.is_dropped = False
            raise
        finally:
            namespace.closing_steps = frozenset()
        namespace.ledger.settle(publication)
        for slot in publication.freed_note_slots:
            self._note_slots.free(slot)
        namespace.applies = publication.namespace.applies
        self._planner.rollback(namespace, epoch=publication.namespace.epoch, freed=publication.freed)
        self._transfers.drain()

    # --- snapshots

    async def snapshot(self, namespace: NamespaceState, step: int, *, is_kept: bool) -> None:
        """On return it is durable that `step` stays (`is_kept`), or that it stays no longer than any other.

        Serial with commits and rollbacks of the namespace. Raises StepDropped; then nothing has changed.
        """
        async with namespace.turn:
            await self.until_no_cut(namespace)
            self.check_accepting()
            ledger = namespace.ledger
            publication = ledger.plan_snapshot(step) if is_kept else ledger.plan_drop_snapshot(step, namespace.held_steps())
            namespace.closing_steps = frozenset(dropped for _, dropped in publication.drop_steps)
            try:
                await self.apply_change(publication.change())
            finally:
                namespace.closing_steps = frozenset()
            self._settle(namespace, publication)
            self._planner.copies.retire_unseen(namespace)
            self._planner.leases.pump(namespace)
            self._transfers.drain()


def _note(namespace: NamespaceState, cut: Cut, row: StepRow, kept: frozenset[int]) -> CommitNote:
    """What proves the step, and describes it to whoever lost the catalog. Made on the catalog's thread: it hashes a row of every
    key, and only reads; nothing settles in the ledger while a commit is under way. kept: the steps that stay with this one."""
    ledger, parent = namespace.ledger, namespace.committed_step
    older = (ledger.step(step) for step in ledger.steps() if step in kept)
    return CommitNote(
        namespace=namespace.name, epoch=namespace.epoch, sequence=cut.sequence, step=row.step, parent=parent,
        record_count=len(cut.keys), combined_root=combine_roots((key, located.root) for key, located in cut.located.items()),
        state_root=combine_roots((key, located.root) for key, located in _state(namespace, cut, parent)),
        applies=cut.applies, epoch_bounds=ledger.namespace.epoch_bounds,
        steps=tuple(NotedStep(other.step, other.sequence, other.note_slot, other.is_snapshot) for other in older),
        description=pack_description(namespace.schema, namespace.keys), extra=row.extra,
    )  # fmt: skip


def _state(namespace: NamespaceState, cut: Cut, parent: int | None) -> Iterator[tuple[ExpertKey, Located]]:
    """Every key with its record as the cut's step has it."""
    for key in namespace.keys:
        located = cut.located.get(key)
        if located is None and parent is not None:
            located = namespace.ledger.at(key, parent)
        if located is not None:
            yield key, located


def _is_in(change: Change, contents: Contents) -> bool:
    """Whether the catalog holds what `change` put there. The rows of namespaces and steps tell: one of them is new each time."""
    rows = {name: found.namespace for name, found in contents.namespaces.items()}
    if any(rows.get(row.name) != row for row in change.put_namespaces):
        return False
    steps = {name: found.steps for name, found in contents.namespaces.items()}
    are_steps_in = all(steps[name].get(row.step) == row for name, row in change.put_steps)
    are_steps_out = all(step not in steps[name] for name, step in change.drop_steps)
    return are_steps_in and are_steps_out and all(contents.volumes.get(row.index) == row for row in change.put_volumes)


def _written_to(working: WorkingCopy, volume: int) -> bool:
    """Whether a write to `volume` is under way."""
    move = working.move
    return move is not None and move.kind is MoveKind.WRITE and move.located is not None and move.located.extent.volume == volume


def _unpublished_on(namespace: NamespaceState, volume: int) -> Iterable[Extent]:
    """Extents of whole records on `volume` that no step has published."""
    located = (working.uncommitted for working in namespace.working.values())
    return (found.extent for found in located if found is not None and found.extent.volume == volume)
