"""The one place that decides residency: who gets which slot, what is loaded, written, evicted, retired, and who waits.

Everything here is synchronous and runs on the event-loop thread; nothing reads a clock, a file or a socket. A call either
raises before it has changed anything, or leaves all tables consistent and its decisions in the outbox, which `Transfers`
carries out when the block ends in which it handed out the planner. `CopyPlanner` and `WorkingPlanner` hold the rules of the two
kinds of copies, `LeasePlanner` those of who gets them, `ViewPlanner` those of who may, `ClaimPlanner` and `CutPlanner` those of an
apply and a commit; this file holds what spans them: updates, rollback, eviction on request.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from paramstore.config import Retention
from paramstore.core.heat import GivenHeat
from paramstore.core.key import ExpertKey, KeySpace
from paramstore.core.location import Identity
from paramstore.core.optimizers import Options
from paramstore.core.residency import Copy, Working
from paramstore.core.schema import Schema
from paramstore.engine.planner.apply_order import missed_steps
from paramstore.engine.planner.claims import ClaimPlanner
from paramstore.engine.planner.cuts import CutPlanner
from paramstore.engine.planner.leases import LeasePlanner
from paramstore.engine.planner.loans import LoanPlanner
from paramstore.engine.planner.param_copies import CopyPlanner
from paramstore.engine.planner.speed_ranking import SpeedRanking
from paramstore.engine.planner.views import ViewPlanner
from paramstore.engine.planner.waiting import WaitingRequests
from paramstore.engine.planner.working_copies import WorkingPlanner
from paramstore.engine.tables.apply import Claims, GradientRange
from paramstore.engine.tables.copies import ParamCopy, WorkingCopy
from paramstore.engine.tables.moves import Outbox
from paramstore.engine.tables.namespace import NamespaceState
from paramstore.engine.tables.requests import Urgency
from paramstore.errors import CapacityError, ParamStoreError, StepFailed
from paramstore.storage.catalog.ledger import Ledger
from paramstore.storage.space.extents import Space


class Update(NamedTuple):
    """An update under way: the record in its slot, the `param` copy made in the same pass, the claims that it is part of, options
    of the missed steps made before, and the optimizer's step of the record once it is done."""

    working: WorkingCopy
    copy: ParamCopy | None
    claims: Claims
    missed: tuple[Options, ...]
    optimizer_step: int

    @property
    def gradients(self) -> tuple[GradientRange, ...]:
        return self.claims.gradients[self.working.key]

    @property
    def copies(self) -> tuple[WorkingCopy | ParamCopy, ...]:
        """All copies that it makes, the working copy first."""
        return (self.working,) if self.copy is None else (self.working, self.copy)


class Planner:
    """Owner of every namespace's tables. See the module docstring for how it is called."""

    def __init__(self, space: Space, retention: Retention | None = None, *, reader_slots: int | None = None) -> None:
        self.space = space
        self.outbox = Outbox()
        self.requests = WaitingRequests(self.outbox)
        self.copies = CopyPlanner(self.outbox, self.requests)
        self.working = WorkingPlanner(space, self.outbox, self.requests, SpeedRanking(space, retention or Retention()))
        self.leases = LeasePlanner(self.outbox, self.requests, self.copies, self.working)
        self.loans = LoanPlanner(self.outbox)
        self.views = ViewPlanner(self.outbox, self.copies, self.leases, self.loans, reader_slots=reader_slots)
        self.claims = ClaimPlanner(self.outbox, self.copies, self.leases)
        self.cuts = CutPlanner(space, self.outbox, self.working, self.leases)
        self.space_waiters: list[object] = []
        """Futures of those who wait for space on the volumes to come free; opaque to the planner."""
        self._freed_seen = 0

    def drop_apply(self, namespace: NamespaceState, reason: str) -> None:
        """Gives up the open apply, if there is one. Its claims cannot be undone: where it has any, the namespace is broken."""
        claims = namespace.writing.open_apply
        if claims is None:
            return
        claims.error = StepFailed(f"the open apply of namespace {namespace.name!r} was given up: {reason}")
        self.claims.end(namespace, claims)
        if claims.gradients:
            self.mark_broken(namespace, f"an open apply was given up half-way: {reason}")

    def take_decisions(self) -> Outbox | None:
        """Hands out everything that was decided and not handed out yet; None if there is nothing."""
        return None if self.outbox.is_empty else self.outbox.take()

    def reserve_extents(self, namespace: NamespaceState, keys: Iterable[ExpertKey]) -> None:
        """Reserves for every key an extent to be written to, which no later event can take; else CapacityError, nothing changed.

        A key whose newest record is uncommitted already has its share of the volume: its next write takes a pipeline
        extent and gives the older one back. While a cut has such writes to make, one extent is left for them.
        """
        lacking = [working for key in keys if not _has_share(namespace, working := namespace.residency.working[key])]
        if not lacking:
            return
        record_bytes, name = namespace.schema.record_bytes, namespace.name
        count = len(lacking) + _needs_pipeline(namespace)
        wanted = self.working.speed_ranking.speed_classes(namespace, [working.key for working in lacking])
        extents = self.space.reserve_many(count, record_bytes, owner=name, speed_classes=wanted)
        if extents is None:
            missing = self.space.missing_bytes(count, record_bytes, owner=name)
            lack = (
                f"namespace {name!r} holds {self.space.held_bytes(name)} bytes of the volumes and needs {count} more extents of "
                f"{record_bytes} bytes; {missing} bytes are missing on the volumes: add a volume (--add-volume)"
            )
            raise CapacityError(self.space.fences.first(lack))
        for working, extent in zip(lacking, extents, strict=False):
            working.reserved = extent
        for extent in extents[len(lacking) :]:
            self.space.release(extent)

    @property
    def is_space_returning(self) -> bool:
        """Whether extents will come free by themselves: a worker still reads or writes what nobody needs."""
        return self.space.has_leaving or self.working.orphan_writes > 0

    def await_space(self, future: object) -> None:
        """Notes a future that is woken when space on the volumes comes free."""
        self.space_waiters.append(future)

    def wake_for_space(self) -> None:
        """Wakes those who wait for space, if some came free since the last call, or if none will: what was to come free is
        quarantined, since its write failed."""
        has_freed, self._freed_seen = self.space.freed != self._freed_seen, self.space.freed
        if self.space_waiters and (has_freed or not self.is_space_returning):
            self.outbox.woken.extend(self.space_waiters)
            self.space_waiters.clear()

    def go_on(self, namespaces: Iterable[NamespaceState]) -> None:
        """Lets requests that wait in these namespaces go on: their writes may have found no space, and some came free."""
        for namespace in namespaces:
            self.leases.pump(namespace)

    def plan_update(self, namespace: NamespaceState, working: WorkingCopy, claims: Claims) -> Update:
        """Starts the update of a copy that the caller holds. It makes a `param` copy in the same pass, if there is a slot for one;
        else the next load materialises it."""
        has_gradient = bool(claims.gradients[working.key])
        missed = missed_steps(namespace, working, has_gradient=has_gradient)
        self.working.begin_update(namespace, working)
        copy = self._made_copy(namespace, working)
        if copy is not None:
            copy.is_moving = True
        return Update(working, copy, claims, missed, working.optimizer_step + len(missed) + has_gradient)

    def _made_copy(self, namespace: NamespaceState, working: WorkingCopy) -> ParamCopy | None:
        identity = self._made_identity(namespace, working)
        copy = namespace.residency.find_copy(working.key, identity)
        if copy is not None:
            return None if copy.is_moving else copy
        if namespace.wanted(working) != identity:
            return None
        policy = namespace.memory.param.policy
        policy.hold(working.key)
        slots = self.copies.make_room(namespace, 1, keep=(), made=working.key, is_prefetch=True)
        if slots is None:
            if working.key not in namespace.residency.copies:
                policy.forget(working.key)
            return None
        return self.copies.start(namespace, working.key, identity, None, slots[0], urgency=Urgency.DEMAND)

    @staticmethod
    def _made_identity(namespace: NamespaceState, working: WorkingCopy) -> Identity:
        assert working.identity is not None
        return Identity(namespace.epoch, namespace.writing.applies if namespace.is_exact else working.identity.version + 1)

    def settle_update(self, namespace: NamespaceState, update: Update, error: ParamStoreError | None) -> None:
        """Settles an update whose worker returned: the record is dirty with its next identity, its gradients are not read any more,
        and its `param` copy has landed."""
        working = update.working
        if error is None:
            working.optimizer_step, working.last_apply = update.optimizer_step, namespace.writing.applies
            namespace.stats.records_updated += 1
            namespace.stats.records_caught_up += not update.gradients
            namespace.stats.missed_steps_made += len(update.missed)
            update.claims.read.add(working.key)
            self.outbox.woken.extend(update.claims.take_room_waiters())
        identity = self._made_identity(namespace, working)
        self.working.settle_update(namespace, working, identity, error)
        if update.copy is not None:
            self.copies.settle(namespace, update.copy, error)
        self.after_working(namespace, working)

    def settle_fill(self, namespace: NamespaceState, working: WorkingCopy, error: ParamStoreError | None) -> None:
        """Settles an initial value: it is in its slot, and its write begins; or it was given up, and the slot is free."""
        assert working.target is not None
        self.working.settle_update(namespace, working, working.target, error)
        if error is None and not working.is_orphan:
            self.working.begin_write(namespace, working, Urgency.WRITE_BACK)
        self.after_working(namespace, working)

    def settle_made(
        self, namespace: NamespaceState, copy: ParamCopy, error: ParamStoreError | None, *, source: WorkingCopy | None = None
    ) -> None:
        """Settles a `param` copy that was loaded, or made from `source`'s slot, which is held no more."""
        if source is not None:
            self.working.unhold(namespace, source)
        self.copies.settle(namespace, copy, error)
        self.leases.pump(namespace)

    def after_working(self, namespace: NamespaceState, working: WorkingCopy) -> None:
        """After a working copy changed state: lets loads of `param` that waited for it go on, then those who wait for slots."""
        if not working.is_orphan:
            self.copies.feed_waiting(namespace, working.key)
        self.leases.pump(namespace)

    def mark_broken(self, namespace: NamespaceState, reason: str) -> None:
        """Makes the namespace broken: push, apply, commit are refused; leases of bytes that are never made end with StepFailed."""
        writing = namespace.writing
        writing.broken = writing.broken or reason
        error = StepFailed(f"namespace {namespace.name!r}: {writing.broken}; rollback() is the way on")
        self._fail_unmade(namespace, list(namespace.residency.copies), error)
        self.leases.pump(namespace)  # queued leases fail in the same way, and slots came free

    def _fail_unmade(self, namespace: NamespaceState, keys: Iterable[ExpertKey], error: ParamStoreError) -> None:
        for key in keys:
            for copy in list(namespace.residency.copies.get(key, ())):
                is_unmade = copy.located is None and namespace.residency.working[copy.key].identity != copy.base
                if is_unmade and copy.is_waiting:
                    self.copies.settle(namespace, copy, error)

    # --- rollback

    def request_stop(self, namespace: NamespaceState) -> None:
        """Makes an apply under way stop at its next record, until `end_stop`; whoever asks then takes the turn."""
        namespace.writing.stop_requests += 1
        self.claims.wake(namespace)

    @staticmethod
    def end_stop(namespace: NamespaceState) -> None:
        namespace.writing.stop_requests -= 1

    @staticmethod
    def begin_prepare(namespace: NamespaceState, step: int) -> None:
        """Notes that `step` is being prepared: no record changes from now on."""
        namespace.steps.preparing = step

    @staticmethod
    def end_prepare(namespace: NamespaceState) -> None:
        namespace.steps.preparing = None

    def begin_rollback(self, namespace: NamespaceState) -> None:
        """Begins to take all tables back to what the ledger says: drops pending gradients and the open apply. The caller then gives
        all keys to `roll_back`; the writer is refused, as `ViewPlanner.refuse_writer` says, until `end_rollback`.

        The ledger's epoch is durable already, and no commit is under way.
        """
        assert namespace.steps.cut is None
        row, writing = namespace.steps.ledger.namespace, namespace.writing
        writing.applies = namespace.steps.applies
        if namespace.is_exact:
            writing.log = namespace.steps.ledger.newest_log
        self.drop_apply(namespace, "the namespace was rolled back")
        writing.pending.clear()
        namespace.steps.changed = []  # at its end it would let go of all discarded copies in one turn
        writing.broken = None
        self.end_initialization(namespace)
        namespace.steps.preparing = None
        namespace.epoch = row.epoch
        self.views.refuse_writer(namespace)
        self.working.requests.fail_waiting(namespace, _rolled_back(namespace))

    def roll_back(self, namespace: NamespaceState, keys: Sequence[ExpertKey]) -> None:
        """Takes these keys back to what the ledger says: drops their working copies, and `param` copies that nobody sees. Slots
        that workers still use are freed when they return."""
        residency, error = namespace.residency, _rolled_back(namespace)
        discarded = [residency.working[key] for key in keys]
        residency.working.update(namespace.steps.fresh_working(keys))
        for working in discarded:
            self.working.discard(namespace, working)
        self._fail_unmade(namespace, keys, error)
        self.copies.retire_unseen(namespace, keys)
        for key in keys:
            wanted = namespace.wanted(residency.working[key])
            for copy in residency.copies.get(key, ()):
                if copy.identity == wanted and copy.state is not Copy.RETIRED:
                    residency.working[key].current = copy
            self.copies.feed_waiting(namespace, key)  # what waited for a working copy that is gone

    def end_rollback(self, namespace: NamespaceState) -> None:
        """Ends the rollback, when all keys stand where the ledger says."""
        namespace.writing.is_rolling_back = False
        namespace.steps.changed = []  # updates that were under way may have settled since the rollback began
        namespace.writing.broken = None  # what a flush that failed meanwhile has lost is rolled back
        self.leases.pump(namespace)

    # --- initial values

    def begin_initialization(self, namespace: NamespaceState, heat: GivenHeat) -> None:
        """Lets every key that has no value be given one. heat: how much the records are to be used; empty if nobody knows."""
        self.working.speed_ranking.begin_initialization(namespace, heat)
        for working in namespace.residency.working.values():
            if working.identity is None:
                working.target = Identity(namespace.epoch, 0)
        namespace.writing.is_initializing = True

    def end_initialization(self, namespace: NamespaceState) -> None:
        self.working.speed_ranking.end_initialization(namespace)
        namespace.writing.is_initializing = False

    # --- eviction on request

    def evict(
        self, namespace: NamespaceState, keys: Sequence[ExpertKey], *, working: bool, param: bool
    ) -> tuple[int, list[ExpertKey]]:
        """Evicts what is in memory of `keys`: working copies, `param` copies or both. Returns how many copies went, and the keys
        that had one in use."""
        skipped: dict[ExpertKey, None] = {}
        evicted = 0
        for key in keys if working else ():
            was_resident = namespace.residency.working[key].slot is not None
            if not self.evict_working(namespace, key):
                skipped[key] = None
            elif was_resident:
                evicted += 1
        for key in keys if param else ():
            before = len(namespace.residency.copies.get(key, ()))
            if not self.evict_param(namespace, key):
                skipped[key] = None
            evicted += before - len(namespace.residency.copies.get(key, ()))
        self.leases.pump(namespace)
        return evicted, list(skipped)

    def evict_param(self, namespace: NamespaceState, key: ExpertKey) -> bool:
        """Evicts every copy of `key` that can go; False if one is leased or loading."""
        is_clear = True
        for copy in list(namespace.residency.copies.get(key, ())):
            if copy.state is Copy.READY and copy.leases == 0:
                self.copies.evict(namespace, copy)
            else:
                is_clear = False
        return is_clear

    def evict_working(self, namespace: NamespaceState, key: ExpertKey) -> bool:
        """Evicts a clean, unheld working copy; False if it is in use."""
        working = namespace.residency.working[key]
        if working.state is Working.CLEAN and working.holders == 0:
            self.working.evict(namespace, working)
        return working.state is Working.ABSENT


def fresh_namespace(ledger: Ledger, *, turn: object = None) -> NamespaceState:
    """The tables of a namespace as its newest step has them: nothing is resident, and it has no arenas yet. turn: its lock."""
    row = ledger.namespace
    schema, keys = Schema.from_description(row.schema), KeySpace.of(row.layers, row.experts)
    namespace = NamespaceState(row.name, schema, keys, ledger, epoch=row.epoch, turn=turn)
    namespace.writing.applies = namespace.steps.applies
    if namespace.is_exact:
        namespace.writing.log = ledger.newest_log
    namespace.residency.working = namespace.steps.fresh_working(keys)
    return namespace


def _rolled_back(namespace: NamespaceState) -> StepFailed:
    return StepFailed(f"namespace {namespace.name!r} was rolled back")


def _needs_pipeline(namespace: NamespaceState) -> bool:
    """Whether a cut under way has a record to write for which no extent is reserved: it needs one beside its older extent."""
    cut = namespace.steps.cut
    if cut is None:
        return False
    return any(working.reserved is None for working in cut.awaited())


def _has_share(namespace: NamespaceState, working: WorkingCopy) -> bool:
    """Whether the record's next version has its extent's worth of the volumes already. See `reserve_extents`."""
    if working.reserved is not None:
        return True
    cut = namespace.steps.cut
    if cut is not None and cut.awaits(working):
        return False  # what it has goes to the cut
    if working.uncommitted is not None:
        return working.cut_record != working.uncommitted
    return working.state is Working.WRITING
