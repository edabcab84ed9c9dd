"""The committer: fixes which records a step consists of, and makes them durable.

A commit: cut → write what the cut found dirty → a commit note on every volume → flush every volume, all at once → one catalog
transaction → settle. A failure before the transaction changes nothing durable. The commit gives the namespace's turn back at its
cut, so that later applies run beside its writes. A prepared step is made the same way, and committed by `finalize`; so is the draft
of an initialization that is not over. A failed write is never repeated on the same extent.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Coroutine, Iterable, Iterator
from dataclasses import replace
from functools import partial
from itertools import chain, islice
from operator import attrgetter
from typing import Any

from paramstore.clock import Clock
from paramstore.core.key import ExpertKey
from paramstore.core.location import Located
from paramstore.core.residency import Working
from paramstore.core.slices import slices
from paramstore.engine.planner.permission import check_changing, check_unclaimed, check_writer, prepared_error
from paramstore.engine.records.cleaner import Cleaner
from paramstore.engine.steps.history import History, check_uncommitted
from paramstore.engine.steps.proof import Prover
from paramstore.engine.steps.transactions import Transactions
from paramstore.engine.tables.copies import Cut, WorkingCopy
from paramstore.engine.tables.counters import CommitProgress
from paramstore.engine.tables.namespace import NamespaceState, View
from paramstore.engine.tables.requests import Urgency
from paramstore.engine.transfers.runner import Runner, in_slices, until_woken
from paramstore.engine.transfers.transfers import Transfers
from paramstore.errors import CapacityError, StepFailed, StepOutOfOrder
from paramstore.storage.catalog.base import DRAFT_STEP, StepRow
from paramstore.storage.catalog.publication import Publication
from paramstore.storage.format.apply_log import pack_log
from paramstore.wire.messages import EXTRA_BYTES_MAX

FIXED_ROWS = 16
"""Rows of the catalog that a commit changes at most beside those of its records: steps, the namespace."""
NO_SLOT = -1
STEP_END = 1 << 62
QUEUED_FIRST, QUEUED_AT_ONCE = 4, 16
"""Writes of a commit that are begun before the event loop turns again, at first and from then on. The loop holds the interpreter
meanwhile, which the workers need to begin: with 16 at first, the first byte moves a millisecond later."""
WRITING_MAX = 2048
"""Most records whose writes a commit has begun and not waited for: bursts for all workers, and as many that wait. Each takes some
KB of memory until it is written."""


class Committer:
    """Makes the steps of all namespaces."""

    def __init__(
        self, transfers: Transfers, cleaner: Cleaner, runner: Runner, *, history: History,
        transactions: Transactions, prover: Prover, clock: Clock, stall_s: float,
    ) -> None:  # fmt: skip
        self._transfers = transfers
        self._cleaner = cleaner
        self._runner = runner
        self._history = history
        self._transactions = transactions
        self._prover = prover
        self._clock = clock
        self._stall_s = stall_s

    def commit(self, view: View, step: int, extra: bytes) -> Coroutine[Any, Any, dict[str, object]]:
        """Returns a coroutine that makes everything that has changed up to its turn durable as `step`, and gives figures for the
        caller. Raises StepOutOfOrder while an apply is open and under way.

        The coroutine raises StepOutOfOrder, StepFailed, CapacityError, and what a volume or the catalog raised; then the committed
        step is as before, and the records are still the newest uncommitted ones.
        """
        check_unclaimed(view.namespace, what=f"commit({step})")
        return self._commit(view, step, extra)

    def prepare(self, view: View, step: int, extra: bytes) -> Coroutine[Any, Any, dict[str, object]]:
        """Does what `commit` does, but the step is not committed before `History.finalize`. No record changes from now on. Raises
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
        async with namespace.writing.turn:
            await self._history.until_no_cut(namespace)
            check_writer(view)
            if is_prepared and namespace.epoch != prepared_in:
                raise StepFailed(f"prepare({step}) on {namespace.name!r}: it was rolled back meanwhile")
            if is_made(namespace, step, is_prepared=is_prepared):
                return {"step": step, "records": 0, "bytes_written": 0, "seconds": 0.0}
            cut = await self._cut(namespace, step)
        row = StepRow(
            step, cut.sequence, NO_SLOT, len(cut.records), extra, cut.applies, is_prepared=is_prepared,
            log=_packed_log(namespace, cut),
        )  # fmt: skip
        written = await self._make_durable(namespace, cut, row)
        return {"step": step, "records": len(cut.records), "bytes_written": written, "seconds": self._clock.now_s() - started_s}

    async def save_draft(self, view: View, extra: bytes) -> dict[str, object]:
        """Makes the initial values taken up to its turn durable, as the namespace's draft: an initialization that resumes finds
        them, and nobody else. extra: kept with the draft, in place of an earlier one's. Returns figures for the caller.

        Raises StepOutOfOrder outside of an initialization, and as `commit`; then the draft is as before.
        """
        _check_extra(extra)
        namespace, started_s = view.namespace, self._clock.now_s()
        async with namespace.writing.turn:
            await self._history.until_no_cut(namespace)
            check_writer(view)
            check_uncommitted(namespace)
            if not namespace.writing.is_initializing:
                raise StepOutOfOrder(f"namespace {namespace.name!r} is not being initialized: begin that first")
            cut = await self._cut(namespace, DRAFT_STEP)
        row = StepRow(DRAFT_STEP, cut.sequence, NO_SLOT, len(cut.records), extra, cut.applies, log=_packed_log(namespace, cut))
        written = await self._make_durable(namespace, cut, row)
        return {"records": len(cut.records), "bytes_written": written, "seconds": self._clock.now_s() - started_s}

    async def _cut(self, namespace: NamespaceState, step: int) -> Cut:
        """Fixes which records `step` consists of. The caller has the turn, and no commit is under way."""
        with self._transfers.deciding() as planner:
            cut = planner.cuts.begin(namespace)
        cut.progress = CommitProgress(step, self._clock.now_s(), namespace.stats.bytes_written)
        try:
            await in_slices(self._taking(namespace, cut))
        except BaseException:
            await in_slices(self._giving_up(namespace, cut))
            raise
        return cut

    def _taking(self, namespace: NamespaceState, cut: Cut) -> Iterator[None]:
        for number, records in enumerate(slices(cut.records)):
            if number:
                yield
            with self._transfers.deciding() as planner:
                planner.cuts.take(namespace, records)

    async def _make_durable(self, namespace: NamespaceState, cut: Cut, row: StepRow) -> int:
        """Writes, notes and publishes what `cut` fixed. row: the step's, without its note slot. Returns the bytes that the
        namespace wrote since the cut."""
        assert cut.progress is not None
        note_slot: int | None = None
        try:
            self._transactions.check_accepting()
            while not self._prover.has_slot and await self._history.find_room(namespace):
                pass
            note_slot = self._prover.take_slot()
            row = replace(row, note_slot=note_slot)
            await self._write_and_prove(namespace, cut, row)
            publication = await self._publish_cut(namespace, cut, row)
        except BaseException:  # a bug too must not leave a cut that everybody waits for
            if self._transactions.stopped is not None:
                raise  # published or not, nobody knows: whatever the step may need stays untouched until a restart
            if note_slot is not None:
                self._prover.give_back(note_slot)
            await in_slices(self._giving_up(namespace, cut))
            raise
        await in_slices(self._settling(namespace, cut, publication))
        namespace.stats.commits += 1
        namespace.stats.bytes_committed += len(cut.records) * namespace.schema.record_bytes
        return namespace.stats.bytes_written - cut.progress.bytes_written

    def _settling(self, namespace: NamespaceState, cut: Cut, publication: Publication) -> Iterator[None]:
        """Brings memory in line with the cut's step, which is published, in slices. The cut is under way until all is settled."""
        yield from self._history.settling(namespace, publication)
        yield from self._letting_go(namespace, cut, is_published=True)

    def _giving_up(self, namespace: NamespaceState, cut: Cut) -> Iterator[None]:
        """Takes back the cut, whose step was not published, in slices."""
        with self._transfers.deciding() as planner:
            planner.views.close_steps(namespace, ())
        yield from self._letting_go(namespace, cut, is_published=False)

    def _letting_go(self, namespace: NamespaceState, cut: Cut, *, is_published: bool) -> Iterator[None]:
        for number, records in enumerate(slices(cut.records)):
            if number:
                yield
            with self._transfers.deciding() as planner:
                planner.cuts.settle(namespace, records, is_published=is_published)
        if any(view.step is not None for view in namespace.views):  # copies that only the writer saw have retired already
            for number, keys in enumerate(slices(list(namespace.residency.copies))):
                if number:
                    yield
                with self._transfers.deciding() as planner:
                    planner.copies.retire_unseen(namespace, keys)
        with self._transfers.deciding() as planner:
            planner.cuts.end(namespace)

    async def _write_and_prove(self, namespace: NamespaceState, cut: Cut, row: StepRow) -> None:
        """Makes everything that the step needs durable on every volume, with its commit note; what remains is the transaction."""
        await self._transactions.reserve(_changed_rows(cut))
        await self._write_unwritten(namespace, cut)
        await self._history.until_given(namespace)
        await self._prover.prove(namespace, cut, row)

    async def _publish_cut(self, namespace: NamespaceState, cut: Cut, row: StepRow) -> Publication:
        if namespace.writing.broken is not None:  # another commit's flush failed meanwhile, and ours may have hidden behind it
            raise StepFailed(f"namespace {namespace.name!r}: {namespace.writing.broken}; rollback() is the way on")
        ledger = namespace.steps.ledger
        if row.step == DRAFT_STEP:
            return await self._transactions.publish(
                namespace, lambda: ledger.plan_draft(row, _written(cut)), room_rows=_changed_rows(cut)
            )

        def plan(held_steps: Iterable[int]) -> Publication:
            return ledger.plan_publish(row, _written(cut), held_steps)

        if row.is_prepared:
            return await self._transactions.publish(namespace, partial(plan, ()), room_rows=_changed_rows(cut))
        changed = [working.key for working in cut.records]
        return await self._history.publish_newest(namespace, row.step, plan, changed=changed, room_rows=_changed_rows(cut))

    async def _write_unwritten(self, namespace: NamespaceState, cut: Cut) -> None:
        """Writes the records that were dirty at the cut, at DEMAND: WRITING_MAX at a time, waited for together. Those that found no
        space, or failed, are then written one by one."""
        written, are_under_way = asyncio.get_running_loop().create_future(), True
        with self._transfers.deciding() as planner:
            planner.cuts.await_written(cut, written)
        records, begun = iter(cut.records), deque[WorkingCopy]()
        for number, some in enumerate(chain(slices(islice(records, QUEUED_FIRST)), slices(records, QUEUED_AT_ONCE))):
            if not cut.unwritten:
                return
            if number:  # workers that are done get something new to do meanwhile
                await asyncio.sleep(0)
            awaited = [working for working in some if cut.awaits(working)]
            begun.extend(working for working in awaited if working.state is Working.DIRTY)
            while len(begun) > WRITING_MAX:
                await self._cleaner.until_settled(namespace, begun.popleft())
            with self._transfers.deciding() as planner:
                for working in awaited:
                    are_under_way &= planner.cuts.write(namespace, working)
        if cut.unwritten and are_under_way:
            what = f"the writes of a commit of {namespace.name!r}"
            await until_woken(written, self._runner, stall_s=self._stall_s, what=what)
        if not cut.unwritten:
            return
        for working in sorted(cut.awaited(), key=lambda working: working.is_moving):  # first those whose write is still to begin
            while cut.awaits(working):
                if not await self._cleaner.write(namespace, working.key, Urgency.DEMAND) and cut.awaits(working):
                    raise StepFailed(f"{working.key} of {namespace.name!r} is in the cut of a commit, and has nothing to write")


def is_made(namespace: NamespaceState, step: int, *, is_prepared: bool) -> bool:
    """Whether `step` is committed already and nothing has changed since. Raises StepOutOfOrder, StepFailed, StepPrepared where it
    can neither be that nor the next step."""
    committed, what = namespace.steps.committed_step, "prepare" if is_prepared else "commit"
    if namespace.steps.ledger.prepared_step is not None:
        raise prepared_error(namespace, what=f"{what}({step})")
    if (
        step == committed
        and not is_prepared
        and not namespace.steps.changed
        and not namespace.writing.pending
        and not _has_stepped(namespace)
    ):
        return True
    if not 0 <= step < STEP_END:
        raise StepOutOfOrder(f"{what}({step}) on {namespace.name!r}: a step is 0 to {STEP_END - 1}")
    if committed is not None and step <= committed:
        raise StepOutOfOrder(f"{what}({step}) on {namespace.name!r}: steps go up, {committed} is committed")
    if committed is None:  # later every key has its value
        working = namespace.residency.working
        if not all(map(attrgetter("identity"), working.values())):  # 131,072 keys take 5 ms so, five times as long one by one
            missing = next(key for key in working if working[key].identity is None)
            raise StepFailed(f"{what}({step}) on {namespace.name!r}: {missing} has no value yet; call initialize")
        if is_prepared:
            raise StepOutOfOrder(f"prepare({step}) on {namespace.name!r}: commit the first step, then prepare later ones")
    return False


def _check_extra(extra: bytes) -> None:
    if len(extra) > EXTRA_BYTES_MAX:
        raise CapacityError(f"extra has {len(extra)} bytes; a commit takes {EXTRA_BYTES_MAX}")


def _has_stepped(namespace: NamespaceState) -> bool:
    """Whether an apply has moved records on since the committed step, though none may have changed yet."""
    newest = namespace.steps.ledger.newest
    return namespace.is_exact and newest is not None and newest.applies != namespace.writing.applies


def _packed_log(namespace: NamespaceState, cut: Cut) -> bytes:
    """The apply log that is kept with the step of `cut`; nothing where an apply changes its own records alone."""
    return pack_log(cut.log) if namespace.is_exact else b""


def _written(cut: Cut) -> dict[ExpertKey, Located]:
    """Where all records of `cut` are. Raises StepFailed where the commit was given up while this waited for its thread."""
    written = cut.located()
    if len(written) != len(cut.records):
        raise StepFailed(f"the commit with sequence {cut.sequence} was given up")
    return written


def _changed_rows(cut: Cut) -> int:
    """How many rows of the catalog the commit of `cut` changes at most."""
    return 2 * len(cut.records) + FIXED_ROWS
