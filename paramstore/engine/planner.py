"""The one place that decides residency: who gets which slot, what is loaded, written, evicted, retired, and who waits.

Everything here is synchronous and runs on the event-loop thread; nothing reads a clock, a file or a socket. A call either
raises before it has changed anything, or leaves all tables consistent and its decisions in the outbox, which the caller
drains before its next await. `CopyPlanner` and `WorkingPlanner` hold the rules of the two kinds of copies; this file
holds what spans both: leases and their caps, prefetch, queues, the cut and what it publishes, rollback.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from paramstore.config import HELD_STEPS, RETAINED_STEPS
from paramstore.core.key import ExpertKey
from paramstore.core.place import Extent, Identity
from paramstore.core.residency import Copy, Working
from paramstore.engine.copies import CopyPlanner
from paramstore.engine.moves import Outbox
from paramstore.engine.namespace import Cut, GradientRange, NamespaceState, ParamCopy, View, WorkingCopy
from paramstore.engine.requests import LeaseRequest, PrefetchRequest, SlotRequest, Urgency
from paramstore.engine.working import WorkingPlanner
from paramstore.errors import CapacityError, LeaseError, ParamStoreError, StepDropped, StepFailed, UnknownKey, WriterFenced
from paramstore.storage.extents import Space


class Planner:
    """Owner of every namespace's tables. See the module docstring for how it is called."""

    def __init__(self, space: Space) -> None:
        self.space = space
        self.outbox = Outbox()
        self.copies = CopyPlanner(self.outbox)
        self.working = WorkingPlanner(space, self.outbox)

    # --- views

    def open_view(self, namespace: NamespaceState, *, is_writer: bool, step: int | None) -> View:
        view = View(namespace, is_writer=is_writer, step=step)
        namespace.views.append(view)
        if is_writer:
            if namespace.writer is not None:
                namespace.writer.is_fenced = True
            namespace.writer = view
        return view

    def close_view(self, view: View) -> None:
        """Ends the view's leases and waits; pending gradients of a writer are dropped."""
        namespace = view.namespace
        view.is_closed = True
        for request in list(view.leases.values()):
            self.cancel_lease(request, LeaseError("the session ended"))
        if view in namespace.views:
            namespace.views.remove(view)
        if namespace.writer is view:
            namespace.writer = None
            namespace.pending.clear()
        self._retire_unseen(namespace)
        self.pump(namespace)

    def move_view(self, view: View, step: int) -> None:
        """A reader stands on `step` from here on; what it leased before stays leased."""
        view.step = step
        view.is_dropped = False
        self._retire_unseen(view.namespace)
        self.pump(view.namespace)

    def _retire_unseen(self, namespace: NamespaceState) -> None:
        for key, copies in list(namespace.copies.items()):
            if len(copies) == 1 and namespace.working[key].current is copies[0]:
                continue  # the usual case, kept cheap: nothing but what the writer sees
            for copy in list(copies):
                self.copies.supersede(namespace, copy)

    def lease_cap(self, namespace: NamespaceState) -> int:
        """Slots one view may have leased at once: an equal share of the arena less a reserve."""
        arena = namespace.param_arena
        assert arena is not None
        reserve = max(1, arena.planned_slots // 16)
        return max(1, (arena.planned_slots - reserve) // max(1, len(namespace.views)))

    def check_view(self, view: View) -> None:
        """Raises what keeps this view from new leases and writes."""
        if view.is_closed:
            raise LeaseError(f"namespace {view.namespace.name!r} was closed")
        if view.is_fenced:
            raise WriterFenced(f"another writer opened namespace {view.namespace.name!r}; open it again to write on")
        if view.is_dropped:
            raise StepDropped(f"step {view.step} of {view.namespace.name!r} was dropped: newer commits needed its room; refresh()")

    # --- leases

    def request_lease(self, request: LeaseRequest) -> None:
        """Plans the lease, or queues it. Finished at once (`is_finished`) if every copy is here.

        Raises UnknownKey, CapacityError above the cap, LeaseError where only the caller's own leases stand in the way,
        StepFailed for bytes that a failed apply will never make; then nothing has changed.
        """
        view = request.view
        self.check_view(view)
        found = self._resolve(request)
        new_count = sum(copy is None or copy not in view.leased for copy in found)
        cap = self.lease_cap(view.namespace)
        if new_count + len(view.leased) > cap:
            self._refuse(view, new_count, cap)
        arena = view.namespace.param_arena
        assert arena is not None
        must_queue = any(isinstance(waiting, LeaseRequest) for waiting in arena.waiting)
        if not self._plan_lease(request, found, may_take_slots=not must_queue):
            arena.waiting.append(request)
        view.leases[request.lease_id] = request

    @staticmethod
    def _refuse(view: View, new_count: int, cap: int) -> None:
        name = view.namespace.name
        if new_count > cap:
            raise CapacityError(
                f"{new_count} keys of {name!r} in one lease; this session may lease {cap} slots at once: "
                "ask in parts, or raise host_budget"
            )
        raise LeaseError(
            f"{new_count} more keys of {name!r}: this session has {len(view.leased)} of {cap} slots leased; release some first"
        )

    def _resolve(self, request: LeaseRequest) -> list[ParamCopy | None]:
        """Per key the copy this view sees, None where there is none yet."""
        view, namespace = request.view, request.view.namespace
        found: list[ParamCopy | None] = []
        working_copies = namespace.working
        for key in request.keys:
            working = working_copies.get(key)
            if working is None:
                namespace.keys.check([key], namespace=namespace.name)
                raise UnknownKey(f"key {key} is not in namespace {namespace.name!r}")
            if view.is_writer:
                copy = working.current
                if copy is None:
                    self._check_reachable(namespace, working)
            else:
                identity, _ = view.locate(key)
                if identity is None:
                    raise StepDropped(f"{key} of {namespace.name!r} has no record at step {view.step}; refresh()")
                copy = namespace.find_copy(key, identity)
            found.append(copy)
        return found

    @staticmethod
    def _check_reachable(namespace: NamespaceState, working: WorkingCopy) -> None:
        if working.target is None:
            raise StepFailed(f"{working.key} of {namespace.name!r} has no value yet: call initialize")
        if working.identity != working.target and namespace.broken is not None:
            raise StepFailed(f"{working.key} of {namespace.name!r}: {namespace.broken}; rollback() is the way on")

    def _plan_lease(self, request: LeaseRequest, found: list[ParamCopy | None], *, may_take_slots: bool) -> bool:
        """All of it, or nothing: takes the slots and starts what is missing."""
        view, namespace = request.view, request.view.namespace
        arena = namespace.param_arena
        assert arena is not None
        absent = list(dict.fromkeys(key for key, copy in zip(request.keys, found, strict=True) if copy is None))
        slots: list[int] = []
        if absent:
            room = self.copies.make_room(namespace, len(absent), keep=frozenset(request.keys)) if may_take_slots else None
            if room is None:
                return False
            slots = room
        started: dict[ExpertKey, ParamCopy] = {}
        for key, slot in zip(absent, slots, strict=True):
            identity, located = view.locate(key)
            assert identity is not None
            started[key] = self.copies.start(namespace, key, identity, located, slot, urgency=Urgency.DEMAND)
        stats, record, leased = namespace.stats.param, arena.policy.record, view.leased
        stats.misses += len(absent)
        stats.hits += len(found) - len(absent)
        for key, resident in zip(request.keys, found, strict=True):
            copy = resident or started[key]
            copy.leases += 1
            leased[copy] = leased.get(copy, 0) + 1
            record(key)
            request.copies.append(copy)
            if copy.is_prefetched:
                copy.is_prefetched = False
                namespace.unused_prefetches -= 1
            if copy.state is Copy.LOADING:
                self._join(request, copy)
        if not request.missing:
            request.is_finished = True
            self.outbox.finished.append(request)
        return True

    def _join(self, request: LeaseRequest, copy: ParamCopy) -> None:
        request.missing += 1
        copy.waiters.append(request)
        if copy.move is not None:
            self.outbox.promoted.append(copy.move)
        else:  # it waits for a working copy's load: that is demand now
            self.copies.feed(request.view.namespace, copy)

    def release(self, view: View, lease_id: int) -> None:
        """Ends a lease. An unknown id is ignored: it was cancelled, or its view closed."""
        request = view.leases.get(lease_id)
        if request is None:
            return
        self.copies.unlease(request)
        if view.namespace.param_arena is not None and view.namespace.param_arena.waiting:
            self.pump(view.namespace)

    def cancel_lease(self, request: LeaseRequest, error: ParamStoreError) -> None:
        """A waiting request ends with `error`; a granted one is released."""
        namespace = request.view.namespace
        if not request.is_finished:
            request.error = error
            request.is_finished = True
            self.outbox.finished.append(request)
        self.copies.unlease(request)
        assert namespace.param_arena is not None
        if request in namespace.param_arena.waiting:
            namespace.param_arena.waiting.remove(request)
        self.pump(namespace)

    # --- prefetch

    def request_prefetch(self, request: PrefetchRequest, view: View, keys: Sequence[ExpertKey]) -> None:
        """Starts loading what fits; finished at once if nothing was started. Raises UnknownKey, and nothing has changed."""
        namespace = request.namespace
        self.check_view(view)
        namespace.keys.check(keys, namespace=namespace.name)
        if request.part == "optim":
            for key in dict.fromkeys(keys):
                self.working.prefetch(request, key)
        else:
            wanted = frozenset(keys)
            for key in dict.fromkeys(keys):
                self._prefetch_param(request, view, key, wanted)
        if not request.pending:
            request.is_finished = True
            self.outbox.finished.append(request)

    def _prefetch_param(self, request: PrefetchRequest, view: View, key: ExpertKey, wanted: frozenset[ExpertKey]) -> None:
        namespace = request.namespace
        identity, located = view.locate(key)
        copy = namespace.find_copy(key, identity) if identity is not None else None
        if copy is not None and copy.state is not Copy.LOADING:
            request.resident += 1
            return
        if copy is None:
            if identity is None or namespace.unused_prefetches >= self._prefetch_allowance(namespace):
                request.skipped += 1
                return
            slots = self.copies.make_room(namespace, 1, keep=wanted, is_prefetch=True)
            if slots is None:
                request.skipped += 1
                return
            copy = self.copies.start(
                namespace, key, identity, located, slots[0], urgency=Urgency.PREFETCH, deadline_s=request.deadline_s
            )
            copy.is_prefetched = True
            namespace.unused_prefetches += 1
            namespace.stats.param.prefetched += 1
            namespace.stats.param.prefetched_bytes += namespace.schema.part("param").image_bytes
            assert namespace.param_arena is not None
            namespace.param_arena.policy.record(key)
        copy.waiters.append(request)
        request.pending.add(copy)

    @staticmethod
    def _prefetch_allowance(namespace: NamespaceState) -> int:
        """Unused prefetched slots allowed at once: the more was wasted, the fewer."""
        stats = namespace.stats.param
        useful = 1.0 - stats.wasted / stats.prefetched if stats.prefetched >= 64 else 1.0
        assert namespace.param_arena is not None
        return max(1, int(namespace.param_arena.planned_slots * useful))

    # --- queues

    def pump(self, namespace: NamespaceState) -> None:
        """Lets those who wait for slots go on, in the order they came, as far as slots go."""
        for arena in (namespace.working_arena, namespace.param_arena):
            while arena is not None and arena.waiting:
                head = arena.waiting[0]
                if isinstance(head, SlotRequest):
                    is_done = self.working.retry_slot(head)
                else:
                    is_done = head.is_finished or self._retry_lease(head)
                if not is_done:
                    break
                arena.waiting.popleft()
        if namespace.working_arena is not None and namespace.working_arena.waiting:
            self.working.clean_for_waiting(namespace)

    def _retry_lease(self, request: LeaseRequest) -> bool:
        try:
            self.check_view(request.view)
            found = self._resolve(request)
        except ParamStoreError as error:
            request.error = error
            request.is_finished = True
            request.view.leases.pop(request.lease_id, None)
            self.outbox.finished.append(request)
            return True
        return self._plan_lease(request, found, may_take_slots=True)

    # --- apply

    def begin_apply(self, namespace: NamespaceState) -> dict[ExpertKey, GradientRange]:
        """Takes what is pending. From here on the working view means the bytes this apply will make."""
        pending, namespace.pending = namespace.pending, {}
        for key in pending:
            working = namespace.working[key]
            assert working.target is not None
            older, working.current = working.current, None
            working.target = Identity(namespace.epoch, working.target.version + 1)
            if older is not None:
                self.copies.supersede(namespace, older)
        return pending

    def reserve_extents(self, namespace: NamespaceState, keys: Iterable[ExpertKey]) -> None:
        """Every key has an extent to be written to that no later event can take; else CapacityError, nothing changed.

        A key whose newest record is uncommitted already has its share of the volume: its next write takes a pipeline
        extent and gives the older one back.
        """
        lacking = [working for key in keys if not _has_share(working := namespace.working[key], namespace.cut)]
        record_bytes = namespace.schema.record_bytes
        extents = self.space.reserve_many(len(lacking), record_bytes)
        if extents is None:
            missing = self.space.missing_bytes(len(lacking), record_bytes)
            raise CapacityError(
                f"namespace {namespace.name!r} needs {len(lacking)} more extents of {record_bytes} bytes; {missing} bytes are "
                "missing on the volumes: raise volume_size, add a volume, or let readers refresh"
            )
        for working, extent in zip(lacking, extents, strict=True):
            working.reserved = extent

    def plan_update(self, namespace: NamespaceState, working: WorkingCopy) -> ParamCopy | None:
        """Starts the update (the caller holds the copy) and gives the `param` copy it makes in the same pass, if a slot
        can be had; else the next load materialises it."""
        self.working.begin_update(namespace, working)
        copy = self._made_copy(namespace, working)
        if copy is not None:
            copy.move = working.move
        return copy

    def _made_copy(self, namespace: NamespaceState, working: WorkingCopy) -> ParamCopy | None:
        identity = self._made_identity(namespace, working)
        copy = namespace.find_copy(working.key, identity)
        if copy is not None:
            return copy if copy.move is None else None
        if working.target != identity:
            return None
        slots = self.copies.make_room(namespace, 1, keep=(working.key,), is_prefetch=True)
        if slots is None:
            return None
        assert namespace.param_arena is not None
        namespace.param_arena.policy.record(working.key)
        return self.copies.start(namespace, working.key, identity, None, slots[0], urgency=Urgency.DEMAND)

    @staticmethod
    def _made_identity(namespace: NamespaceState, working: WorkingCopy) -> Identity:
        assert working.identity is not None
        return Identity(namespace.epoch, working.identity.version + 1)

    def settle_update(
        self, namespace: NamespaceState, working: WorkingCopy, copy: ParamCopy | None, error: ParamStoreError | None
    ) -> None:
        """The update's worker returned: the record is dirty with its next identity, and `copy` holds its `param`."""
        identity = self._made_identity(namespace, working)
        self.working.settle_update(namespace, working, identity, error)
        if copy is not None:
            self.copies.settle(namespace, copy, error)
        self.after_working(namespace, working)

    def after_working(self, namespace: NamespaceState, working: WorkingCopy) -> None:
        """A working copy changed state: loads of `param` that waited for it go on, then whoever waits for slots."""
        if not working.is_orphan:
            self.copies.feed_waiting(namespace, working.key)
        self.pump(namespace)

    def mark_broken(self, namespace: NamespaceState, reason: str) -> None:
        """Push, apply and commit are refused from here on; leases that wait for bytes never made end with StepFailed."""
        namespace.broken = namespace.broken or reason
        self._fail_unmade(namespace, StepFailed(f"namespace {namespace.name!r}: {namespace.broken}; rollback() is the way on"))

    def _fail_unmade(self, namespace: NamespaceState, error: ParamStoreError) -> None:
        for copies in list(namespace.copies.values()):
            for copy in list(copies):
                if copy.state is Copy.LOADING and copy.move is None and copy.located is None:
                    self.copies.settle(namespace, copy, error)

    # --- cut, publish, rollback

    def cut(self, namespace: NamespaceState) -> Cut:
        """Fixes what a commit publishes: every changed record as it is now. Those not yet written are due."""
        namespace.sequence += 1
        keys = frozenset(namespace.changed)
        located, unwritten = {}, set()
        for key in keys:
            working = namespace.working[key]
            if working.uncommitted is not None and working.uncommitted.identity == working.identity:
                located[key] = working.uncommitted
                self.space.pin(working.uncommitted.extent)
            else:
                working.is_cut = True
                unwritten.add(key)
        namespace.changed = set()
        cut = Cut(namespace.sequence, namespace.applies, keys, unwritten, located)
        namespace.cut = cut
        return cut

    def settle_cut(self, namespace: NamespaceState, *, is_published: bool) -> None:
        """The commit of the cut is over. Published extents are the ledger's now; of a failed one the newest stay uncommitted."""
        cut, namespace.cut = namespace.cut, None
        assert cut is not None
        for key, located in cut.located.items():
            self.space.unpin(located.extent)
            working = namespace.working[key]
            is_newest = working.uncommitted == located
            if is_published and is_newest:
                working.uncommitted = None
            elif not is_published and not is_newest:
                self.space.release(located.extent)
        for key in cut.keys:
            namespace.working[key].is_cut = False
        if not is_published:
            namespace.changed |= cut.keys
        self.outbox.woken.extend(namespace.cut_waiters)
        namespace.cut_waiters.clear()
        self._retire_unseen(namespace)
        self.pump(namespace)

    def drop_oldest_readers(self, namespace: NamespaceState, newest_step: int) -> None:
        """Before `newest_step` is published: readers of more than HELD_STEPS old steps lose the oldest."""
        retained = {*namespace.ledger.steps()[-(RETAINED_STEPS - 1) :], newest_step} if RETAINED_STEPS > 1 else {newest_step}
        old = sorted(set(namespace.held_steps()) - retained)
        for step in old[: max(0, len(old) - HELD_STEPS)]:
            for view in namespace.views:
                if view.step == step:
                    view.is_dropped = True

    def rollback(self, namespace: NamespaceState, *, epoch: int, freed: Iterable[Extent]) -> None:
        """Back to what the ledger says: pending gradients, working copies and unseen `param` copies are gone.

        The new epoch is durable already. No commit is under way. What workers still use is freed when they return.
        """
        assert namespace.cut is None
        namespace.pending.clear()
        namespace.changed.clear()
        namespace.broken = None
        namespace.is_initializing = False
        namespace.epoch = epoch
        discarded = list(namespace.working.values())
        namespace.working = fresh_working(namespace)
        for working in discarded:
            self.working.discard(namespace, working)
        error = StepFailed(f"namespace {namespace.name!r} was rolled back")
        self._fail_unmade(namespace, error)
        self._retire_unseen(namespace)
        for key, copies in namespace.copies.items():
            target = namespace.working[key].target
            for copy in copies:
                if copy.identity == target and copy.state is not Copy.RETIRED:
                    namespace.working[key].current = copy
        for extent in freed:
            self.space.release(extent)
        self.pump(namespace)

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


def fresh_working(namespace: NamespaceState) -> dict[ExpertKey, WorkingCopy]:
    """Working copies of all keys as the newest committed step has them, none resident."""
    step = namespace.ledger.committed_step
    working = {}
    for key in namespace.keys:
        located = namespace.ledger.at(key, step) if step is not None else None
        working[key] = WorkingCopy(key, located.identity if located is not None else None)
    return working


def _has_share(working: WorkingCopy, cut: Cut | None) -> bool:
    if working.reserved is not None:
        return True
    if working.is_cut:
        return False  # what it has goes to the cut
    if working.uncommitted is not None:
        return cut is None or cut.located.get(working.key) != working.uncommitted
    return working.state is Working.WRITING
