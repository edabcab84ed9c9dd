"""The committer: fixes which records a step consists of, and makes them durable.

A commit: cut → write what the cut found dirty → a commit note on every volume → flush every volume, all at once → one catalog
transaction → settle. A failure before the transaction changes nothing durable. The commit gives the namespace's turn back at its
cut, so that later applies run beside its writes. A prepared step is made the same way, and committed by `finalize`; so is the draft
of an initialization that is not over.

After a failed flush nothing written to that volume since its last good flush can be trusted: namespaces that have records there
which no step has published are broken until rollback. A failed write or flush is never repeated on the same extent.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from paramstore.clock import Clock
from paramstore.core.location import Extent
from paramstore.core.residency import Working
from paramstore.engine.planner.permission import check_changing, check_unclaimed, check_writer, prepared_error
from paramstore.engine.records.cleaner import Cleaner
from paramstore.engine.steps.history import Chain, check_uncommitted
from paramstore.engine.steps.transactions import Transactions
from paramstore.engine.tables.copies import Cut
from paramstore.engine.tables.counters import CommitProgress
from paramstore.engine.tables.namespace import NamespaceState, View
from paramstore.engine.tables.requests import Urgency
from paramstore.engine.transfers.runner import CATALOG_LANE, Runner, until_woken, volume_lane
from paramstore.engine.transfers.transfers import Transfers
from paramstore.errors import CapacityError, StepFailed, StepOutOfOrder, VolumeError
from paramstore.storage.catalog.base import DRAFT_STEP, StepRow
from paramstore.storage.catalog.publication import Publication
from paramstore.storage.format.apply_log import pack_log
from paramstore.storage.format.notes import write_note
from paramstore.storage.format.structures import CommitNote, NotedStep, Superblock, combine_roots, pack_description
from paramstore.storage.space.note_slots import NoteSlots
from paramstore.storage.volume.base import Volume
from paramstore.wire.messages import EXTRA_BYTES_MAX

FIXED_ROWS = 16
"""Rows of the catalog that a commit changes at most beside those of its records: steps, the namespace."""
NO_SLOT = -1
STEP_END = 1 << 62
QUEUED_AT_ONCE = 64
"""Writes of a commit that are begun before the event loop turns again: this takes a millisecond."""
NOTED_ON_LOOP_MAX = 256
"""Changed records up to which the commit note is made on the loop: that takes less time (0.1 ms) than handing it to a worker."""


class Committer:
    """Makes the steps of all namespaces."""

    def __init__(
        self, transfers: Transfers, cleaner: Cleaner, runner: Runner, *, chain: Chain,
        transactions: Transactions, volumes: Mapping[int, Volume], superblocks: Mapping[int, Superblock],
        note_slots: NoteSlots, namespaces: Mapping[str, NamespaceState], clock: Clock, stall_s: float,
    ) -> None:  # fmt: skip
        self._transfers = transfers
        self._cleaner = cleaner
        self._runner = runner
        self._chain = chain
        self._transactions = transactions
        self._volumes = volumes
        self._superblocks = superblocks
        self._note_slots = note_slots
        self._namespaces = namespaces
        self._clock = clock
        self._stall_s = stall_s
        self._bad_note_slots: set[int] = set()
        """Note slots that a note could not be written to; they are not tried again before a restart."""

    def commit(self, view: View, step: int, extra: bytes) -> Coroutine[Any, Any, dict[str, object]]:
        """Returns a coroutine that makes everything that has changed up to its turn durable as `step`, and gives figures for the
        caller. Raises StepOutOfOrder while an apply is open and under way.

        The coroutine raises StepOutOfOrder, StepFailed, CapacityError, and what a volume or the catalog raised; then the committed
        step is as before, and the records are still the newest uncommitted ones.
        """
        check_unclaimed(view.namespace, what=f"commit({step})")
        return self._commit(view, step, extra)

    def prepare(self, view: View, step: int, extra: bytes) -> Coroutine[Any, Any, dict[str, object]]:
        """Does what `commit` does, but the step is not committed before `Chain.finalize`. No record changes from now on. Raises
        StepPrepared."""
        namespace = check_changing(view)
        epoch = namespace.epoch
        with self._transfers.deciding() as planner:
            planner.begin_prepare(namespace, step)

        async def run() -> dict[str, object]:
            try:
                return await self._commit(view, step, extra, prepared_in=epoch)
            finally:
                if namespace.epoch == epoch:  # else a rollback has cleared it, and another may prepare by now
                    with self._transfers.deciding() as planner:
                        planner.end_prepare(namespace)

        return run()

    async def _commit(self, view: View, step: int, extra: bytes, *, prepared_in: int | None = None) -> dict[str, object]:
        """prepared_in: epoch in which the step was to be prepared; None for one that is committed at once."""
        _check_extra(extra)
        namespace, is_prepared, started_s = view.namespace, prepared_in is not None, self._clock.now_s()
        async with namespace.turn:
            await self._chain.until_no_cut(namespace)
            check_writer(view)
            if is_prepared and namespace.epoch != prepared_in:
                raise StepFailed(f"prepare({step}) on {namespace.name!r}: it was rolled back meanwhile")
            if is_made(namespace, step, is_prepared=is_prepared):
                return {"step": step, "records": 0, "bytes_written": 0, "seconds": 0.0}
            cut = self._cut(namespace, step)
        row = StepRow(
            step, cut.sequence, NO_SLOT, len(cut.keys), extra, cut.applies, is_prepared=is_prepared, log=pack_log(cut.log)
        )
        written = await self._make_durable(namespace, cut, row)
        return {"step": step, "records": len(cut.keys), "bytes_written": written, "seconds": self._clock.now_s() - started_s}

    async def save_draft(self, view: View, extra: bytes) -> dict[str, object]:
        """Makes the initial values taken up to its turn durable, as the namespace's draft: an initialization that resumes finds
        them, and nobody else. extra: kept with the draft, in place of an earlier one's. Returns figures for the caller.

        Raises StepOutOfOrder outside of an initialization, and as `commit`; then the draft is as before.
        """
        _check_extra(extra)
        namespace, started_s = view.namespace, self._clock.now_s()
        async with namespace.turn:
            await self._chain.until_no_cut(namespace)
            check_writer(view)
            check_uncommitted(namespace)
            if not namespace.is_initializing:
                raise StepOutOfOrder(f"namespace {namespace.name!r} is not being initialized: begin that first")
            cut = self._cut(namespace, DRAFT_STEP)
        row = StepRow(DRAFT_STEP, cut.sequence, NO_SLOT, len(cut.keys), extra, cut.applies, log=pack_log(cut.log))
        written = await self._make_durable(namespace, cut, row)
        return {"records": len(cut.keys), "bytes_written": written, "seconds": self._clock.now_s() - started_s}

    def _cut(self, namespace: NamespaceState, step: int) -> Cut:
        """Fixes which records `step` consists of. The caller has the turn, and no commit is under way."""
        with self._transfers.deciding() as planner:
            cut = planner.cuts.cut(namespace)
        cut.progress = CommitProgress(step, self._clock.now_s(), namespace.stats.bytes_written)
        return cut

    async def _make_durable(self, namespace: NamespaceState, cut: Cut, row: StepRow) -> int:
        """Writes, notes and publishes what `cut` fixed. row: the step's, without its note slot. Returns the bytes that the
        namespace wrote since the cut."""
        assert cut.progress is not None
        note_slot: int | None = None
        try:
            self._transactions.check_accepting()
            note_slot = self._note_slots.take()
            row = replace(row, note_slot=note_slot)
            await self._prove(namespace, cut, row)
            publication = await self._publish_cut(namespace, cut, row)
        except BaseException:  # a bug too must not leave a cut that everybody waits for
            if self._transactions.stopped is not None:
                raise  # published or not, nobody knows: whatever the step may need stays untouched until a restart
            if note_slot is not None and note_slot not in self._bad_note_slots:
                self._note_slots.free(note_slot)
            with self._transfers.deciding() as planner:
                planner.views.close_steps(namespace, ())
                planner.cuts.settle(namespace, is_published=False)
            raise
        with self._transfers.deciding() as planner:
            self._chain.settle(namespace, publication)
            planner.cuts.settle(namespace, is_published=True)
        namespace.stats.commits += 1
        namespace.stats.bytes_committed += len(cut.keys) * namespace.schema.record_bytes
        return namespace.stats.bytes_written - cut.progress.bytes_written

    async def _prove(self, namespace: NamespaceState, cut: Cut, row: StepRow) -> None:
        """Makes everything that the step needs durable on every volume, with its commit note; what remains is the transaction."""
        await self._transactions.reserve(_changed_rows(cut))
        await self._write_unwritten(namespace, cut)
        kept = namespace.ledger.visible_steps(namespace.held_steps(), published=row.step)
        if len(cut.keys) <= NOTED_ON_LOOP_MAX:
            note = _note(namespace, cut, row, kept)
        else:
            with self._transactions.planned_elsewhere(namespace):
                note = await self._runner.call(CATALOG_LANE, lambda: _note(namespace, cut, row, kept))
        await self._note_and_flush(note, row.note_slot)

    async def _publish_cut(self, namespace: NamespaceState, cut: Cut, row: StepRow) -> Publication:
        if namespace.broken is not None:  # another commit's flush failed meanwhile, and ours may have hidden behind it
            raise StepFailed(f"namespace {namespace.name!r}: {namespace.broken}; rollback() is the way on")
        if row.step == DRAFT_STEP:
            draft = partial(namespace.ledger.plan_draft, row, cut.located)
            return await self._transactions.publish(namespace, draft, room_rows=_changed_rows(cut))
        plan = partial(namespace.ledger.plan_publish, row, cut.located)
        if row.is_prepared:
            return await self._transactions.publish(namespace, partial(plan, ()), room_rows=_changed_rows(cut))
        return await self._chain.publish_newest(namespace, row.step, plan, room_rows=_changed_rows(cut))

    async def _write_unwritten(self, namespace: NamespaceState, cut: Cut) -> None:
        """Writes the records that were dirty at the cut, at DEMAND: all are queued, then waited for together. Those that found no
        space, or failed, are then written one by one."""
        unwritten = list(cut.unwritten)
        for start in range(0, len(unwritten), QUEUED_AT_ONCE):
            if start:  # workers that are done get something new to do meanwhile
                await asyncio.sleep(0)
            with self._transfers.deciding() as planner:
                for key in unwritten[start : start + QUEUED_AT_ONCE]:
                    planner.cuts.write(namespace, key)
        if cut.unwritten and all(namespace.working[key].state is Working.WRITING for key in cut.unwritten):
            written = asyncio.get_running_loop().create_future()
            with self._transfers.deciding() as planner:
                planner.cuts.await_written(cut, written)
            what = f"the writes of a commit of {namespace.name!r}"
            await until_woken(written, self._runner, stall_s=self._stall_s, what=what)
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
            note_bytes, failed_flush = await self._runner.call(volume_lane(index), prove)
        except VolumeError as error:
            self._bad_note_slots.add(note_slot)
            self._transfers.fail_note(index, error)
            raise
        self._transfers.count_note(self._namespaces[note.namespace], index, note_bytes)
        if failed_flush is not None:
            self._distrust(index, failed_flush)
            raise failed_flush

    def _distrust(self, volume: int, error: VolumeError) -> None:
        """Fences a volume whose flush failed, since no later flush would report that again: no further step is begun, and every
        namespace is broken that has an unpublished record there, one on its way there, or a commit under way."""
        space = self._transfers.space
        space.fences.fail_flush(volume, error)
        with self._transfers.deciding() as planner:
            for namespace in self._namespaces.values():
                lost = list(_unpublished_on(namespace, volume))
                for extent in lost:
                    space.quarantine(extent)
                written = namespace.in_state[Working.WRITING].values()
                is_moving = namespace.cut is not None or any(self._transfers.is_writing(working, volume) for working in written)
                if lost or is_moving:
                    planner.mark_broken(namespace, f"a flush of volume {volume} failed: {error}")


def is_made(namespace: NamespaceState, step: int, *, is_prepared: bool) -> bool:
    """Whether `step` is committed already and nothing has changed since. Raises StepOutOfOrder, StepFailed, StepPrepared where it
    can neither be that nor the next step."""
    committed, what = namespace.committed_step, "prepare" if is_prepared else "commit"
    if namespace.ledger.prepared_step is not None:
        raise prepared_error(namespace, what=f"{what}({step})")
    if step == committed and not is_prepared and not namespace.changed and not namespace.pending and not _has_stepped(namespace):
        return True
    if not 0 <= step < STEP_END:
        raise StepOutOfOrder(f"{what}({step}) on {namespace.name!r}: a step is 0 to {STEP_END - 1}")
    if committed is not None and step <= committed:
        raise StepOutOfOrder(f"{what}({step}) on {namespace.name!r}: steps go up, {committed} is committed")
    if committed is None:  # later every key has its value
        missing = next((key for key, working in namespace.working.items() if working.identity is None), None)
        if missing is not None:
            raise StepFailed(f"{what}({step}) on {namespace.name!r}: {missing} has no value yet; call initialize")
        if is_prepared:
            raise StepOutOfOrder(f"prepare({step}) on {namespace.name!r}: commit the first step, then prepare later ones")
    return False


def _check_extra(extra: bytes) -> None:
    if len(extra) > EXTRA_BYTES_MAX:
        raise CapacityError(f"extra has {len(extra)} bytes; a commit takes {EXTRA_BYTES_MAX}")


def _has_stepped(namespace: NamespaceState) -> bool:
    """Whether an apply has moved records on since the committed step, though none may have changed yet."""
    newest = namespace.ledger.newest
    return namespace.is_exact and newest is not None and newest.applies != namespace.applies


def _changed_rows(cut: Cut) -> int:
    """How many rows of the catalog the commit of `cut` changes at most."""
    return 2 * len(cut.keys) + FIXED_ROWS


def _note(namespace: NamespaceState, cut: Cut, row: StepRow, kept: frozenset[int]) -> CommitNote:
    """Makes the commit note, which proves the step and describes it to whoever lost the catalog. It hashes a row of every changed
    key. It only reads, and nothing settles in the ledger while a commit is under way, so it may run on another thread. kept: the
    steps that stay with this one."""
    ledger, parent = namespace.ledger, namespace.committed_step
    older = (ledger.step(step) for step in ledger.steps() if step in kept)
    roots = [(key, located.root) for key, located in cut.located.items()]
    return CommitNote(
        namespace=namespace.name, epoch=namespace.epoch, sequence=cut.sequence, step=row.step, parent=parent,
        record_count=len(cut.keys), combined_root=combine_roots(roots), state_root=ledger.state_root(cut.sequence, roots),
        applies=cut.applies, epoch_bounds=ledger.namespace.epoch_bounds,
        steps=tuple(NotedStep(other.step, other.sequence, other.note_slot, other.is_snapshot) for other in older),
        description=pack_description(namespace.schema, namespace.keys), extra=row.extra, log=row.log,
    )  # fmt: skip


def _unpublished_on(namespace: NamespaceState, volume: int) -> Iterable[Extent]:
    """Extents of whole records on `volume` that no step has published."""
    located = (working.uncommitted for working in namespace.working.values())
    return (found.extent for found in located if found is not None and found.extent.volume == volume)
