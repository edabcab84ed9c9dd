"""The history of a namespace's steps: a new step and the old ones it replaces, finalize, rollback, snapshots.

Every change is one catalog transaction, planned by the ledger; when it has succeeded, the planner and the note slots follow. A
change never runs beside a commit of its namespace.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Sequence
from contextlib import asynccontextmanager
from functools import partial

from paramstore.core.key import ExpertKey
from paramstore.core.location import Extent
from paramstore.core.slices import emptied, slices
from paramstore.engine.planner.permission import check_writing, prepared_error
from paramstore.engine.planner.waiting import await_change
from paramstore.engine.steps.borrowed import Borrowed
from paramstore.engine.steps.transactions import Transactions
from paramstore.engine.tables.namespace import NamespaceState, View
from paramstore.engine.transfers.runner import Runner, in_slices, until_woken
from paramstore.engine.transfers.transfers import Transfers
from paramstore.errors import ParamStoreError, StepOutOfOrder
from paramstore.storage.catalog.publication import Publication
from paramstore.storage.space.note_slots import NoteSlots


class History:
    """Changes the steps of all namespaces. Whoever calls `publish_newest` has the namespace's turn, or its cut."""

    def __init__(
        self, transfers: Transfers, runner: Runner, transactions: Transactions, note_slots: NoteSlots, borrowed: Borrowed, *,
        stall_s: float,
    ) -> None:  # fmt: skip
        self._transfers = transfers
        self._runner = runner
        self._transactions = transactions
        self._note_slots = note_slots
        self._borrowed = borrowed
        self._stall_s = stall_s
        self._giving: dict[str, asyncio.Future[bool]] = {}
        """What gives room back now, by the name of its namespace."""

    async def publish_newest(
        self, namespace: NamespaceState, step: int, plan: Callable[[frozenset[int]], Publication], *,
        changed: Collection[ExpertKey] = (), room_rows: int = 0,
    ) -> Publication:  # fmt: skip
        """Runs the transaction that makes `step` the committed one. plan: makes its publication, given the steps that stay for
        readers. changed: the records that the step changes, where the ledger has no rows of them.

        The steps that go are fixed here first, so that nobody can open one of them any more.
        """
        held = frozenset(namespace.held_steps())
        self._close_all_but(namespace, step, held)
        older = await self._borrowed.count(namespace, step, changed, held)
        lost = self._borrowed.choose(namespace, older)
        held = held.difference(lost)
        with self._transfers.deciding() as planner:
            dropped = planner.views.drop_readers(namespace, lost)
        self._close_all_but(namespace, step, held)
        try:
            return await self._transactions.publish(namespace, lambda: plan(held), room_rows=room_rows)
        except ParamStoreError:
            self._borrowed.settle(namespace)
            with self._transfers.deciding() as planner:
                planner.views.give_back(dropped)
            raise

    def _close_all_but(self, namespace: NamespaceState, published: int, held: frozenset[int]) -> None:
        """Closes the steps that nobody on `held` steps keeps beside `published`."""
        kept = namespace.steps.ledger.visible_steps(held, published=published)
        with self._transfers.deciding() as planner:
            planner.views.close_steps(namespace, frozenset(namespace.steps.ledger.steps()) - kept)

    def settling(self, namespace: NamespaceState, publication: Publication) -> Iterator[None]:
        """Brings what is in memory (ledger, space, note slots) in line with a publication that has succeeded, in slices."""
        yield from self._transactions.settling_ledger(namespace, publication)
        self._open_steps(namespace)
        yield from self._freeing(publication.freed)
        for slot in publication.freed_note_slots:
            self._note_slots.free(slot)
        yield from emptied(publication.put_rows, publication.drop_rows, publication.freed)
        self._borrowed.settle(namespace)  # at the very end: whoever drops a snapshot takes back its entitlement in the same turn

    def _freeing(self, extents: Sequence[Extent]) -> Iterator[None]:
        for number, some in enumerate(slices(extents)):
            if number:
                yield
            with self._transfers.deciding() as planner:
                for extent in some:
                    planner.space.release(extent)

    async def finalize(self, view: View, step: int) -> None:
        """Commits the prepared `step`, on a broken namespace too; does nothing if it is committed already.

        Raises StepOutOfOrder if another step, or none, is prepared, and as `check_writing`. If it raises CatalogError, the step is
        prepared as before.
        """
        namespace = view.namespace
        async with namespace.writing.turn:
            await self.until_no_cut(namespace)
            check_writing(view)
            prepared, committed = namespace.steps.ledger.prepared_step, namespace.steps.committed_step
            if prepared == step:
                await self._finalize(namespace, for_writer=False)
                self._see_less(namespace)
            elif prepared is not None or committed != step:
                raise StepOutOfOrder(
                    f"finalize({step}) on {namespace.name!r}: step {prepared} is prepared, {committed} is committed"
                )

    async def _finalize(self, namespace: NamespaceState, *, for_writer: bool) -> None:
        """Commits the prepared step; for_writer: in a new epoch. The caller has the turn, and no commit is under way."""
        self._transactions.check_accepting()
        step = namespace.steps.ledger.prepared_step
        assert step is not None
        assert namespace.steps.cut is None
        try:
            plan = partial(namespace.steps.ledger.plan_finalize, for_writer=for_writer)
            publication = await self.publish_newest(namespace, step, plan)
        except BaseException:
            self._open_steps(namespace)
            raise
        await in_slices(self.settling(namespace, publication))

    def _open_steps(self, namespace: NamespaceState) -> None:
        """Notes that no transaction drops steps any more."""
        with self._transfers.deciding() as planner:
            planner.views.close_steps(namespace, ())

    async def until_no_cut(self, namespace: NamespaceState) -> None:
        """Returns when no commit of `namespace` is under way, and no room of it is being given back. The caller has the turn, so
        none begins. Raises WaitTimeout where nothing moves any more, CatalogError."""
        while namespace.steps.cut is not None:
            self._transactions.check_accepting()
            future = asyncio.get_running_loop().create_future()
            await_change(namespace.steps.cut_waiters, future)
            what = f"the commit of {namespace.name!r} under way"
            await until_woken(future, self._runner, stall_s=self._stall_s, what=what)
        await self.until_given(namespace)

    async def rollback(self, namespace: NamespaceState, *, to_step: int | None = None) -> None:
        """Rolls back to `to_step`, or (None) to the newest step when earlier calls are through, which may be a prepared one.

        An apply under way stops at its next record. Raises StepDropped if there is no such step, StepPrepared if it is not
        committed, StepFailed if a later one is a snapshot; then nothing has changed.
        """
        if to_step is not None and namespace.steps.cut is None:
            namespace.steps.ledger.check_rollback(to_step)  # a wrong step stops nobody's apply
        async with self._stopped(namespace):
            if to_step is not None:
                namespace.steps.ledger.check_rollback(to_step)
            await self._roll_back_to(namespace, _newest_step(namespace) if to_step is None else to_step)

    async def start_over(self, namespace: NamespaceState) -> None:
        """Drops all values, those of the draft too. Raises StepOutOfOrder once a step is committed; nothing has changed then."""
        async with self._stopped(namespace):
            check_uncommitted(namespace)
            await self._roll_back_to(namespace, None)

    async def reopen(self, namespace: NamespaceState, *, at: int | None) -> None:
        """Takes the namespace to where a new writer starts: to `at`, a step that can be opened or the prepared one, which is then
        committed; None: to the committed step. Raises StepPrepared where None would drop a prepared step, else as `rollback`."""
        async with self._stopped(namespace):
            prepared = namespace.steps.ledger.prepared_step
            if prepared is not None and at is None:
                raise prepared_error(namespace, what="open_namespace")
            if prepared is not None and at == prepared:
                await self._finalize(namespace, for_writer=True)
                await in_slices(self._rolling_back(namespace, freed=()))
                return
            if at is not None:
                namespace.steps.ledger.check_rollback(at)
            await self._roll_back_to(namespace, _newest_step(namespace) if at is None else at)

    @asynccontextmanager
    async def _stopped(self, namespace: NamespaceState) -> AsyncIterator[None]:
        """A context in which the caller has the turn and no commit is under way. An apply under way stops at its next record."""
        with self._transfers.deciding() as planner:
            planner.request_stop(namespace)
        try:
            await namespace.writing.turn.acquire()
        finally:
            with self._transfers.deciding() as planner:
                planner.end_stop(namespace)
        try:
            await self.until_no_cut(namespace)
            yield
        finally:
            namespace.writing.turn.release()

    async def _roll_back_to(self, namespace: NamespaceState, step: int | None) -> None:
        """Rolls back to `step` (None: before any commit): the namespace is then in a new, durable epoch, and not broken.

        To be called while no commit is under way. Readers of later steps lose them.
        """
        self._transactions.check_accepting()
        assert namespace.steps.cut is None
        gone = frozenset(other for other in namespace.steps.ledger.steps() if step is None or other > step)
        with self._transfers.deciding() as planner:
            planner.views.close_steps(namespace, gone)
            lost = planner.views.drop_readers(namespace, gone)
        try:
            publication = await self._transactions.publish(namespace, partial(namespace.steps.ledger.plan_rollback, step))
        except BaseException:
            with self._transfers.deciding() as planner:
                planner.views.give_back(lost)
                planner.views.close_steps(namespace, ())
            raise
        await in_slices(self._beginning_epoch(namespace, publication))

    def _beginning_epoch(self, namespace: NamespaceState, publication: Publication) -> Iterator[None]:
        """Takes all that is in memory (ledger, tables, space, note slots) to the new epoch, which is durable, in slices."""
        with self._transfers.deciding() as planner:
            planner.views.refuse_writer(namespace)
        yield from self._transactions.settling_ledger(namespace, publication)
        self._borrowed.settle(namespace)
        self._open_steps(namespace)  # not before: the steps that go are in the ledger up to here
        yield from self._rolling_back(namespace, freed=publication.freed)
        for slot in publication.freed_note_slots:
            self._note_slots.free(slot)
        yield from emptied(publication.put_rows, publication.drop_rows, publication.freed)

    def _rolling_back(self, namespace: NamespaceState, *, freed: Sequence[Extent]) -> Iterator[None]:
        """Takes the planner's tables to the epoch in which the ledger stands already, in slices."""
        with self._transfers.deciding() as planner:
            planner.begin_rollback(namespace)
        for keys in slices(namespace.keys):
            yield
            with self._transfers.deciding() as planner:
                planner.roll_back(namespace, keys)
        yield from self._freeing(freed)
        with self._transfers.deciding() as planner:
            planner.end_rollback(namespace)

    # --- snapshots, and older steps

    async def give_back(self, namespace: NamespaceState) -> bool:
        """Drops the steps that have borrowed their room, whose readers lose them. Returns whether there were any. Nothing happens
        while a call of the writer, or a commit, is under way, which may wait for others in turn."""
        if namespace.name in self._giving:
            return await self._given_back(namespace)
        if namespace.writing.turn.locked() or namespace.steps.cut is not None:
            return False
        async with namespace.writing.turn:
            if namespace.steps.cut is not None:  # of a commit that waited for the turn already
                return False
            return await self._given_back(namespace)

    async def find_room(self, namespace: NamespaceState) -> bool:
        """Has older steps give back what they have borrowed, those of `namespace` first, then those of another: the last resort of
        a call that lacks room of which so much was lost that what `namespace` is entitled to is not there. The call has the turn of
        `namespace`, or its cut. Returns whether anything was given back."""
        if await self._given_back(namespace):
            return True
        for other in self._borrowed.borrowers():
            if other is not namespace and await self.give_back(other):
                return True
        return False

    async def _given_back(self, namespace: NamespaceState) -> bool:
        """Joins what gives back the namespace's borrowed room, or begins it. It goes on where who waits is cancelled: its
        transaction may have begun, and memory must follow."""
        name = namespace.name
        if name not in self._giving:
            self._giving[name] = task = asyncio.ensure_future(self._give_back(namespace))
            task.add_done_callback(partial(self._end_giving, name))
        return await asyncio.shield(self._giving[name])

    def _end_giving(self, name: str, task: asyncio.Future[bool]) -> None:
        del self._giving[name]
        if not task.cancelled():
            task.exception()  # told to those who waited, if any did

    async def until_given(self, namespace: NamespaceState) -> None:
        """Returns when no room of the namespace is being given back, however that has ended."""
        while namespace.name in self._giving:
            await asyncio.wait([self._giving[namespace.name]])

    async def _give_back(self, namespace: NamespaceState) -> bool:
        """The caller has the turn, and no commit is under way; or the cut of one whose step is still to be proven."""
        steps = namespace.steps.ledger.borrowing_steps
        if not steps:
            return False
        with self._transfers.deciding() as planner:
            planner.views.close_steps(namespace, steps)
            dropped = planner.views.drop_readers(namespace, steps)
        try:
            publication = await self._transactions.publish(namespace, namespace.steps.ledger.plan_give_back)
        except BaseException:
            with self._transfers.deciding() as planner:
                planner.views.give_back(dropped)
            self._open_steps(namespace)
            raise
        await in_slices(self.settling(namespace, publication))
        self._see_less(namespace)
        return True

    async def snapshot(self, namespace: NamespaceState, step: int, *, is_kept: bool) -> None:
        """Makes `step` a snapshot (`is_kept`), or an ordinary step again; on return that is durable.

        Waits for its turn behind commits and rollbacks of the namespace. Raises StepDropped; then nothing has changed.
        """
        async with namespace.writing.turn:
            await self.until_no_cut(namespace)
            self._transactions.check_accepting()
            ledger, held = namespace.steps.ledger, frozenset(namespace.held_steps())
            plan = partial(ledger.plan_snapshot, step) if is_kept else partial(ledger.plan_drop_snapshot, step, held)
            stay = frozenset(ledger.steps()) if is_kept else ledger.visible_steps(held, without=step)
            with self._transfers.deciding() as planner:
                planner.views.close_steps(namespace, frozenset(ledger.steps()) - stay)
            try:
                publication = await self._transactions.publish(namespace, plan)
            except BaseException:
                self._open_steps(namespace)
                raise
            await in_slices(self.settling(namespace, publication))
            self._see_less(namespace)

    def _see_less(self, namespace: NamespaceState) -> None:
        with self._transfers.deciding() as planner:
            planner.views.see_less(namespace)


def _newest_step(namespace: NamespaceState) -> int | None:
    newest = namespace.steps.ledger.newest
    return newest.step if newest is not None else None


def check_uncommitted(namespace: NamespaceState) -> None:
    """Raises StepOutOfOrder once there is a committed step: from then on values are trained, not given."""
    if namespace.steps.committed_step is not None:
        raise StepOutOfOrder(f"namespace {namespace.name!r} is committed at {namespace.steps.committed_step}; its values are set")
