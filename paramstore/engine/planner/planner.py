"""The one place that decides residency: who gets which slot, what is loaded, written, evicted, retired, and who waits.

Everything here is synchronous and runs on the event-loop thread; nothing reads a clock, a file or a socket. A call either
raises before it has changed anything, or leaves all tables consistent and its decisions in the outbox, which the caller
drains before its next await. `CopyPlanner` and `WorkingPlanner` hold the rules of the two kinds of copies, `LeasePlanner`
those of who gets them, `ViewPlanner` those of who may, `CutPlanner` those of a commit; this file holds what spans them: an apply's
claim, updates, rollback.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

from paramstore.config import Retention
from paramstore.core.key import ExpertKey, KeySpace
from paramstore.core.location import Extent, Identity
from paramstore.core.optimizers import Options
from paramstore.core.residency import Copy, Working
from paramstore.core.schema import Schema
from paramstore.engine.planner.apply_order import backward_order, due_keys, update_order
from paramstore.engine.planner.cuts import CutPlanner
from paramstore.engine.planner.leases import LeasePlanner
from paramstore.engine.planner.param_copies import CopyPlanner
from paramstore.engine.planner.views import ViewPlanner
from paramstore.engine.planner.waiting import WaitingRequests
from paramstore.engine.planner.working_copies import WorkingPlanner
from paramstore.engine.tables.apply import Claimed, Claims, awaited_keys
from paramstore.engine.tables.copies import Cut, ParamCopy, WorkingCopy
from paramstore.engine.tables.moves import Outbox
from paramstore.engine.tables.namespace import NamespaceState
from paramstore.engine.tables.requests import SlotRequest, Urgency
from paramstore.errors import CapacityError, ParamStoreError, StepFailed
from paramstore.storage.catalog.ledger import Ledger
from paramstore.storage.space.extents import Space


class Planner:
    """Owner of every namespace's tables. See the module docstring for how it is called."""

    def __init__(self, space: Space, retention: Retention | None = None, *, reader_slots: int | None = None) -> None:
        self.space = space
        self.outbox = Outbox()
        requests = WaitingRequests(self.outbox)
        self.copies = CopyPlanner(self.outbox, requests)
        self.working = WorkingPlanner(space, self.outbox, requests)
        self.leases = LeasePlanner(self.outbox, requests, self.copies, self.working)
        self.views = ViewPlanner(self.copies, self.leases, retention or Retention(), reader_slots=reader_slots)
        self.cuts = CutPlanner(space, self.outbox, self.copies, self.working, self.leases)
        self.space_waiters: list[object] = []
        """Futures of those who wait for space on the volumes to come free; opaque to the planner."""
        self._freed_seen = 0

    # --- apply

    def begin_apply(self, namespace: NamespaceState, options: Options | None = None) -> Claimed:
        """Claims what is pending. From here on the writer sees the bytes that this apply will make.

        options: the apply's. Returns the claimed keys with their gradients; those of an exact namespace that are due have none.
        """
        claimed: Claimed = dict(namespace.pending)
        namespace.pending = {}
        if namespace.is_exact:
            assert options is not None
            kept_since = min(namespace.applies, namespace.log.last)  # an apply that was open counts as soon as it updates
            namespace.log = namespace.log.trimmed(kept_since).appended(namespace.epoch, options)
            claimed = dict.fromkeys(due_keys(namespace), ()) | claimed
        self._claim(namespace, claimed, apply=namespace.log.last)
        if namespace.is_exact:
            self.copies.evict_left_behind(namespace)
        self.leases.pump(namespace)
        return claimed

    def _claim(self, namespace: NamespaceState, keys: Iterable[ExpertKey], *, apply: int) -> None:
        """Makes the writer see `keys` as an apply will leave them. apply: its number, used in an exact namespace only."""
        for key in keys:
            working = namespace.working[key]
            assert working.target is not None
            older, working.current = working.current, None
            version = apply if namespace.is_exact else working.target.version + 1
            working.target = Identity(namespace.epoch, version)
            if older is not None:
                self.copies.supersede(namespace, older)

    # --- an open apply

    @staticmethod
    def open_apply(namespace: NamespaceState, claims: Claims) -> None:
        """Begins an apply that claims keys as their gradients come. Nothing changes before its first claim."""
        namespace.open_apply = claims

    @staticmethod
    def await_resident(namespace: NamespaceState, claims: Claims, *, pipeline_slots: int) -> None:
        """Prepares an open apply to update: chooses the records in memory that are claimed, or probably will be, and that it must
        not evict before their update. Queues what is in memory first.

        pipeline_slots: how many of the arena's slots are left for other records meanwhile.
        """
        arena = namespace.working_arena
        assert arena is not None
        heat = {key: arena.policy.heat(key) for key in namespace.resident}
        claims.awaited.update(awaited_keys(heat, len(heat) + arena.slots.free_count - pipeline_slots))
        present, absent = backward_order(claims.queue, namespace.resident)
        claims.queue = deque([*present, *absent])
        arena.policy.expect(claims.awaited | claims.gradients.keys())

    @staticmethod
    def line_up(namespace: NamespaceState, claims: Claims, keys: Iterable[ExpertKey], *, pipeline_slots: int) -> None:
        """Puts `keys`, all that is left to update, into the best order; nothing more will be claimed. Records in memory that wait
        for their turn are not evicted; `pipeline_slots` of the arena's slots are left for the others."""
        arena = namespace.working_arena
        assert arena is not None
        order, kept = update_order(keys, namespace.resident, given_up=max(0, pipeline_slots - arena.slots.free_count))
        claims.queue, claims.awaited = deque(order), set(kept)

    def claim(self, namespace: NamespaceState, claims: Claims, keys: Sequence[ExpertKey]) -> None:
        """Lets the open apply claim `keys`, whose pending gradients are complete: from here on the writer sees them as the apply
        will leave them. In an exact namespace it sees every other key as it stood before, until the apply is closed."""
        for key in keys:
            claims.gradients[key] = namespace.pending.pop(key)
        self._claim(namespace, keys, apply=namespace.log.last + 1)
        present, absent = backward_order(keys, namespace.resident)
        claims.queue.extendleft(present)  # these need no transfer
        claims.queue.extend(absent)
        self.leases.pump(namespace)
        self._wake(claims)

    def close_apply(self, namespace: NamespaceState, claims: Claims, *, pipeline_slots: int) -> None:
        """Closes the open apply: it claims what a plain one would, and its work becomes urgent. pipeline_slots: see `line_up`."""
        self._end_claims(namespace, claims)
        taken = claims.gradients.keys() - claims.queue
        claims.gradients |= self.begin_apply(namespace, claims.options)
        self.line_up(namespace, claims, claims.gradients.keys() - taken, pipeline_slots=pipeline_slots)
        for arena in namespace.arenas():
            for request in arena.waiting:
                if isinstance(request, SlotRequest):
                    request.urgency = Urgency.DEMAND
        self.outbox.promoted.extend(namespace.working[key] for key in taken)
        self.leases.pump(namespace)

    def drop_apply(self, namespace: NamespaceState, reason: str) -> None:
        """Gives up the open apply, if there is one. Its claims cannot be undone: where it has any, the namespace is broken."""
        claims = namespace.open_apply
        if claims is None:
            return
        claims.error = StepFailed(f"the open apply of namespace {namespace.name!r} was given up: {reason}")
        self._end_claims(namespace, claims)
        if claims.gradients:
            self.mark_broken(namespace, f"an open apply was given up half-way: {reason}")

    def _end_claims(self, namespace: NamespaceState, claims: Claims) -> None:
        namespace.open_apply = None
        claims.is_open = False
        self._wake(claims)

    def wake_open(self, namespace: NamespaceState) -> None:
        """Wakes an open apply that waits for gradients, so that it looks whether it is to stop."""
        if namespace.open_apply is not None:
            self._wake(namespace.open_apply)

    def _wake(self, claims: Claims) -> None:
        self.outbox.woken.extend((*claims.waiters, *claims.take_room_waiters()))
        claims.waiters.clear()

    def end_claim(self, claims: Claims, key: ExpertKey) -> None:
        """Notes that `key` has been updated: its gradients are not read any more."""
        claims.read.add(key)
        self.outbox.woken.extend(claims.take_room_waiters())

    def reserve_extents(self, namespace: NamespaceState, keys: Iterable[ExpertKey]) -> None:
        """Reserves for every key an extent to be written to, which no later event can take; else CapacityError, nothing changed.

        A key whose newest record is uncommitted already has its share of the volume: its next write takes a pipeline
        extent and gives the older one back. While a cut has such writes to make, one extent is left for them.
        """
        lacking = [working for key in keys if not _has_share(working := namespace.working[key], namespace.cut)]
        if not lacking:
            return
        record_bytes, name = namespace.schema.record_bytes, namespace.name
        count = len(lacking) + _needs_pipeline(namespace)
        extents = self.space.reserve_many(count, record_bytes, owner=name)
        if extents is None:
            missing = self.space.missing_bytes(count, record_bytes, owner=name)
            lack = (
                f"namespace {name!r} holds {self.space.held_bytes(name)} bytes of the volumes and needs {count} more extents of "
                f"{record_bytes} bytes; {missing} bytes are missing on the volumes: add a volume (--add-volume), or let readers "
                "refresh"
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

    def wake_for_space(self) -> None:
        """Wakes those who wait for space, if some came free since the last call."""
        if self.space.freed != self._freed_seen:
            self._freed_seen = self.space.freed
            self.outbox.woken.extend(self.space_waiters)
            self.space_waiters.clear()

    def plan_update(self, namespace: NamespaceState, working: WorkingCopy) -> ParamCopy | None:
        """Starts the update of a copy that the caller holds. Returns the `param` copy that it makes in the same pass, if there is
        a slot for one; else the next load materialises it."""
        self.working.begin_update(namespace, working)
        copy = self._made_copy(namespace, working)
        if copy is not None:
            copy.is_moving = True
        return copy

    def _made_copy(self, namespace: NamespaceState, working: WorkingCopy) -> ParamCopy | None:
        identity = self._made_identity(namespace, working)
        copy = namespace.find_copy(working.key, identity)
        if copy is not None:
            return None if copy.is_moving else copy
        if namespace.wanted(working) != identity:
            return None
        assert namespace.param_arena is not None
        policy = namespace.param_arena.policy
        policy.hold(working.key)
        slots = self.copies.make_room(namespace, 1, keep=(), made=working.key, is_prefetch=True)
        if slots is None:
            if working.key not in namespace.copies:
                policy.forget(working.key)
            return None
        return self.copies.start(namespace, working.key, identity, None, slots[0], urgency=Urgency.DEMAND)

    @staticmethod
    def _made_identity(namespace: NamespaceState, working: WorkingCopy) -> Identity:
        assert working.identity is not None
        return Identity(namespace.epoch, namespace.applies if namespace.is_exact else working.identity.version + 1)

    def settle_update(
        self, namespace: NamespaceState, working: WorkingCopy, copy: ParamCopy | None, error: ParamStoreError | None
    ) -> None:
        """Settles an update whose worker returned: the record is dirty with its next identity, and `copy` holds its `param`."""
        identity = self._made_identity(namespace, working)
        self.working.settle_update(namespace, working, identity, error)
        if copy is not None:
            self.copies.settle(namespace, copy, error)
        self.after_working(namespace, working)

    def after_working(self, namespace: NamespaceState, working: WorkingCopy) -> None:
        """After a working copy changed state: lets loads of `param` that waited for it go on, then those who wait for slots."""
        if not working.is_orphan:
            self.copies.feed_waiting(namespace, working.key)
        self.leases.pump(namespace)

    def mark_broken(self, namespace: NamespaceState, reason: str) -> None:
        """Makes the namespace broken: push, apply, commit are refused; leases of bytes that are never made end with StepFailed."""
        namespace.broken = namespace.broken or reason
        self._fail_unmade(namespace, StepFailed(f"namespace {namespace.name!r}: {namespace.broken}; rollback() is the way on"))
        self.leases.pump(namespace)  # queued leases fail in the same way, and slots came free

    def _fail_unmade(self, namespace: NamespaceState, error: ParamStoreError) -> None:
        for copies in list(namespace.copies.values()):
            for copy in list(copies):
                is_unmade = copy.located is None and namespace.working[copy.key].identity != copy.base
                if is_unmade and copy.is_waiting:
                    self.copies.settle(namespace, copy, error)

    # --- rollback

    def rollback(self, namespace: NamespaceState, *, epoch: int, freed: Iterable[Extent]) -> None:
        """Takes all tables back to what the ledger says: drops pending gradients, working copies and unseen `param` copies.

        The new epoch is durable already, and no commit is under way. Slots that workers still use are freed when they return.
        """
        assert namespace.cut is None
        self.drop_apply(namespace, "the namespace was rolled back")
        namespace.pending.clear()
        namespace.changed.clear()
        namespace.broken = None
        namespace.is_initializing = False
        namespace.preparing = None
        namespace.epoch = epoch
        discarded = list(namespace.working.values())
        namespace.working = fresh_working(namespace)
        for working in discarded:
            self.working.discard(namespace, working)
        error = StepFailed(f"namespace {namespace.name!r} was rolled back")
        self.working.requests.fail_waiting(namespace, error)
        self._fail_unmade(namespace, error)
        self.copies.retire_unseen(namespace)
        for key, copies in namespace.copies.items():
            wanted = namespace.wanted(namespace.working[key])
            for copy in copies:
                if copy.identity == wanted and copy.state is not Copy.RETIRED:
                    namespace.working[key].current = copy
        for key in list(namespace.copies):
            self.copies.feed_waiting(namespace, key)  # what waited for a working copy that is gone
        for extent in freed:
            self.space.release(extent)
        self.leases.pump(namespace)

    # --- eviction on request

    def evict_param(self, namespace: NamespaceState, key: ExpertKey) -> bool:
        """Evicts every copy of `key` that can go; False if one is leased or loading."""
        is_clear = True
        for copy in list(namespace.copies.get(key, ())):
            if copy.state is Copy.READY and copy.leases == 0:
                self.copies.evict(namespace, copy)
            else:
                is_clear = False
        return is_clear

    def evict_working(self, namespace: NamespaceState, key: ExpertKey) -> bool:
        """Evicts a clean, unheld working copy; False if it is in use."""
        working = namespace.working[key]
        if working.state is Working.CLEAN and working.holders == 0:
            self.working.evict(namespace, working)
        return working.state is Working.ABSENT


def fresh_namespace(ledger: Ledger) -> NamespaceState:
    """The tables of a namespace as its newest step has them: nothing is resident, and it has no arenas yet."""
    row = ledger.namespace
    schema, keys = Schema.from_description(row.schema), KeySpace.of(row.layers, row.experts)
    namespace = NamespaceState(row.name, schema, keys, ledger, epoch=row.epoch, sequence=row.sequence)
    namespace.applies = row.applies
    if namespace.is_exact:
        namespace.log = ledger.newest_log
    namespace.working = fresh_working(namespace)
    return namespace


def fresh_working(namespace: NamespaceState) -> dict[ExpertKey, WorkingCopy]:
    """Working copies of all keys as the newest step has them, none resident."""
    newest = namespace.ledger.newest
    working = {}
    for key in namespace.keys:
        located = namespace.ledger.at(key, newest.step) if newest is not None else None
        working[key] = WorkingCopy(key, located.identity if located is not None else None)
    return working


def _needs_pipeline(namespace: NamespaceState) -> bool:
    """Whether a cut under way has a record to write for which no extent is reserved: it needs one beside its older extent."""
    cut = namespace.cut
    return cut is not None and any(namespace.working[key].reserved is None for key in cut.unwritten)


def _has_share(working: WorkingCopy, cut: Cut | None) -> bool:
    """Whether the record's next version has its extent's worth of the volumes already. See `reserve_extents`."""
    if working.reserved is not None:
        return True
    if working.is_cut:
        return False  # what it has goes to the cut
    if working.uncommitted is not None:
        return cut is None or cut.located.get(working.key) != working.uncommitted
    return working.state is Working.WRITING
