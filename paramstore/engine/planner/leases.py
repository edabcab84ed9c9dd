"""The planner's rules for leases and their caps, prefetches, and the queues of those who wait for slots.

- A lease request takes all its slots in one plan, or waits in FIFO order; while it waits it holds nothing.
- A request for more than the view's promise and loan (`promises`, `loans`), or one that only the view's own leases block, is
  refused at once.
- A prefetch takes the slots it can get now and waits for none; the more was wasted so far, the fewer unused slots it may hold.
"""

from __future__ import annotations

from collections.abc import Sequence

from paramstore.core.key import ExpertKey
from paramstore.core.residency import Copy
from paramstore.engine.planner.param_copies import CopyPlanner
from paramstore.engine.planner.promises import either, holders, ways_to_more
from paramstore.engine.planner.waiting import WaitingRequests
from paramstore.engine.planner.working_copies import WorkingPlanner
from paramstore.engine.tables.copies import ParamCopy, WorkingCopy
from paramstore.engine.tables.moves import Outbox
from paramstore.engine.tables.namespace import LeaseRequest, NamespaceState, View
from paramstore.engine.tables.requests import PrefetchRequest, SlotRequest, Urgency
from paramstore.errors import CapacityError, LeaseError, ParamStoreError, StepDropped, StepFailed, UnknownKey


class LeasePlanner:
    """Decides who gets which slots, and who waits; part of the planner, on the event-loop thread."""

    def __init__(
        self, outbox: Outbox, requests: WaitingRequests, copies: CopyPlanner, working: WorkingPlanner
    ) -> None:
        self._outbox = outbox
        self._requests = requests
        self._copies = copies
        self._working = working

    def request_lease(self, request: LeaseRequest) -> None:
        """Plans the lease, or queues it. The request is finished at once (`is_finished`) if every copy is in memory.

        Raises UnknownKey, CapacityError above the view's promise, LeaseError where only the caller's own leases stand in the way,
        StepFailed for bytes that a failed apply will never make; then nothing has changed.
        """
        view = request.view
        view.check_open()
        found = self._resolve(request)
        leased = view.leased
        new_count = sum([copy not in leased for copy in found])  # None, still to be loaded, is never leased
        arena = view.namespace.memory.param
        queued = [waiting for waiting in arena.waiting if isinstance(waiting, LeaseRequest)]
        own = [waiting for waiting in queued if waiting.view is view]
        if new_count and len(leased) + new_count + sum(len(waiting.keys) for waiting in own) > _cap(view):
            self._check_promise(request, own)
        if not self._plan_lease(request, found, may_take_slots=not queued):
            arena.waiting.append(request)
        else:
            request.is_finished = not request.missing  # nobody waits yet who would have to be told
        view.leases[request.lease_id] = request

    def _check_promise(self, request: LeaseRequest, waiting: Sequence[LeaseRequest] = ()) -> None:
        """Raises LeaseError or CapacityError where the view would have more slots leased than it may. waiting: its earlier requests
        that still wait. The error says what would help: to release some where that is enough, else to ask for less."""
        view, namespace = request.view, request.view.namespace
        name, key_count, cap = namespace.name, len(set(request.keys)), _cap(view)
        awaited = set().union(*map(self._unleased_keys, waiting))
        held_count = len(view.leased) + len(awaited)
        new_count = len(self._unleased_keys(request) - awaited)
        if not new_count or held_count + new_count <= cap:
            return
        if key_count <= cap:
            raise LeaseError(
                f"{new_count} more keys of {name!r}: this handle has or waits for {held_count} of {cap} slots; release some first"
            )
        ways, no_more = ["ask in parts"] if cap else [], ""
        if view.most_slots is not None and view.lease_slots >= view.most_slots:
            no_more = f", and asked for no more (max_lease_slots={view.most_slots})"
            ways += ["open with a greater max_lease_slots (expert_memory, of a model that is served)"]
        else:
            ways = ways or ["close another and open again"]
            ways += [] if view.is_writer else ["open with min_lease_slots"]
            ways += ways_to_more(namespace, is_writer=view.is_writer)
        raise CapacityError(
            f"{key_count} keys of {name!r} in one lease; this handle was promised {view.lease_slots} slots when it opened "
            f"(lease_slots){no_more}. Of the {namespace.memory.param.planned_slots} there are {holders(namespace)}: {either(ways)}"
        )

    def _unleased_keys(self, request: LeaseRequest) -> set[ExpertKey]:
        """Keys for which `request` would take one more of its view's slots now; none where it would be refused."""
        try:
            found = self._resolve(request)
        except ParamStoreError:
            return set()
        return {key for key, copy in zip(request.keys, found, strict=True) if copy not in request.view.leased}

    def _resolve(self, request: LeaseRequest) -> list[ParamCopy | None]:
        """Finds the copy of each key that this view sees; None where there is none yet."""
        view, namespace = request.view, request.view.namespace
        found: list[ParamCopy | None] = []
        working_copies = namespace.residency.working
        for key in request.keys:
            working = working_copies.get(key)
            if working is None:
                namespace.keys.check([key], namespace=namespace.name)
                raise UnknownKey(f"key {key} is not in namespace {namespace.name!r}")
            if view.is_writer:
                copy = working.current
                if namespace.is_exact and (wanted := namespace.wanted(working)) is not None:
                    copy = namespace.residency.find_copy(key, wanted)
                elif copy is None and working.target is not None:  # a copy from before a rollback to these bytes, still leased
                    copy = namespace.residency.find_copy(key, working.target)
                if copy is None:
                    self._check_reachable(namespace, working)
            else:
                identity, _ = view.locate(key)
                if identity is None:
                    raise StepDropped(f"{key} of {namespace.name!r} has no record at step {view.step}; refresh()")
                copy = namespace.residency.find_copy(key, identity)
            found.append(copy)
        return found

    @staticmethod
    def _check_reachable(namespace: NamespaceState, working: WorkingCopy) -> None:
        if working.target is None:
            raise StepFailed(f"{working.key} of {namespace.name!r} has no value yet: call initialize")
        if not _is_reachable(namespace, working):
            raise StepFailed(f"{working.key} of {namespace.name!r}: {namespace.writing.broken}; rollback() is the way on")

    def _plan_lease(self, request: LeaseRequest, found: list[ParamCopy | None], *, may_take_slots: bool) -> bool:
        """Takes all the slots and starts loading what is missing, or does nothing and returns False."""
        view, namespace = request.view, request.view.namespace
        arena = namespace.memory.param
        absent = list(dict.fromkeys(key for key, copy in zip(request.keys, found, strict=True) if copy is None))
        slots: list[int] = []
        if absent:
            if view.is_writer and may_take_slots:
                self._copies.retire_stale(namespace, absent)
            keep, needed = frozenset(request.keys), frozenset(copy for copy in found if copy is not None)
            room = self._copies.make_room(namespace, len(absent), keep=keep, needed=needed) if may_take_slots else None
            if room is None:
                return False
            slots = room
        started: dict[ExpertKey, ParamCopy] = {}
        for key, slot in zip(absent, slots, strict=True):
            identity, located = view.locate(key)
            assert identity is not None
            started[key] = self._copies.start(
                namespace, key, identity, located, slot, urgency=Urgency.DEMAND, log=view.log if namespace.is_exact else None
            )
        namespace.stats.param.misses += len(absent)
        namespace.stats.param.hits += len(found) - len(absent)
        request.copies = [copy or started[key] for key, copy in zip(request.keys, found, strict=True)]
        arena.policy.record_all(request.keys)
        leased = view.leased
        for copy in request.copies:  # 64 of them in every request of a resident layer: nothing here but what must be
            copy.leases += 1
            leased[copy] = leased.get(copy, 0) + 1
            if copy.state is not Copy.READY and not copy.has_landed:
                self._join(request, copy)
        request.absent_count = request.missing
        if namespace.residency.prefetched:
            namespace.residency.prefetched.difference_update(request.copies)
        return True

    def _join(self, request: LeaseRequest, copy: ParamCopy) -> None:
        request.missing += 1
        copy.waiters.append(request)
        if copy.is_moving:
            self._outbox.promoted.append(copy)
        else:  # the copy waits for a working copy's load or update, which becomes urgent now
            self._copies.feed(request.view.namespace, copy)

    def release(self, view: View, lease_id: int) -> None:
        """Ends a lease. An unknown id is ignored: it was cancelled, or its view closed."""
        request = view.leases.get(lease_id)
        if request is None:
            return
        self._copies.unlease(request)
        if view.namespace.memory.param.waiting:
            self.pump(view.namespace)

    def cancel_lease(self, request: LeaseRequest, error: ParamStoreError) -> None:
        """Ends a waiting request with `error`; releases a granted one."""
        namespace = request.view.namespace
        if not request.is_finished:
            request.error = error
            self._requests.finish(request)
        self._copies.unlease(request)
        if request in namespace.memory.param.waiting:
            namespace.memory.param.waiting.remove(request)
        self.pump(namespace)

    # --- prefetch

    def request_prefetch(self, request: PrefetchRequest, view: View, keys: Sequence[ExpertKey]) -> None:
        """Starts loading what fits; finished at once if nothing loads. Raises UnknownKey; nothing has changed then."""
        namespace, wanted = request.namespace, frozenset(keys)
        view.check_open()
        if not wanted <= namespace.residency.working.keys():
            namespace.keys.check(keys, namespace=namespace.name)
        if request.part == "optim":
            for key in dict.fromkeys(keys):
                self._working.prefetch(request, key)
        else:
            for key in dict.fromkeys(keys):
                self._prefetch_param(request, view, key, wanted)
        if not request.pending:
            self._requests.finish(request)

    def _prefetch_param(self, request: PrefetchRequest, view: View, key: ExpertKey, wanted: frozenset[ExpertKey]) -> None:
        namespace = request.namespace
        identity, located = view.locate(key)
        copy = namespace.residency.find_copy(key, identity) if identity is not None else None
        if copy is not None and copy.state is not Copy.LOADING:
            request.resident += 1
            return
        if copy is None:
            is_unmade = view.is_writer and not _is_reachable(namespace, namespace.residency.working[key])
            if identity is None or is_unmade or len(namespace.residency.prefetched) >= self._prefetch_allowance(namespace):
                request.skipped += 1
                return
            if view.is_writer:
                self._copies.retire_stale(namespace, [key])
            slots = self._copies.make_room(namespace, 1, keep=wanted, is_prefetch=True)
            if slots is None:
                request.skipped += 1
                return
            copy = self._copies.start(
                namespace, key, identity, located, slots[0], urgency=Urgency.PREFETCH, deadline_s=request.deadline_s,
                log=view.log if namespace.is_exact else None,
            )  # fmt: skip
            namespace.residency.prefetched.add(copy)
            namespace.stats.param.prefetched += 1
            namespace.stats.param.prefetched_bytes += namespace.schema.part("param").image_bytes
            namespace.memory.param.policy.hold(key)
        copy.waiters.append(request)
        request.pending.add(copy)

    @staticmethod
    def _prefetch_allowance(namespace: NamespaceState) -> int:
        """How many slots may hold unused prefetches at once: the more was wasted, the fewer."""
        stats = namespace.stats.param
        useful = 1.0 - stats.wasted / stats.prefetched if stats.prefetched >= 64 else 1.0
        return max(1, int(namespace.memory.param.planned_slots * useful))

    # --- queues

    def cancel_slot(self, request: SlotRequest, error: ParamStoreError) -> None:
        """Fails a request for a slot that is given up before it is finished; those behind it go on."""
        self._requests.abandon(request, error)
        self.pump(request.namespace)

    def pump(self, namespace: NamespaceState) -> None:
        """Lets requests that wait for slots go on, in the order in which they came, as far as there are slots."""
        if namespace.writing.is_rolling_back:
            return  # a lease would see some keys as they were, and some rolled back; the rollback's end pumps
        arenas = namespace.arenas()
        for arena in arenas:
            while arena.waiting:
                head = arena.waiting[0]
                if isinstance(head, SlotRequest):
                    is_done = self._working.retry_slot(head)
                else:
                    is_done = head.is_finished or self._retry_lease(head)
                if not is_done:
                    break
                arena.waiting.popleft()
        if arenas and arenas[0].waiting:
            self._working.clean_for_waiting(namespace)

    def _retry_lease(self, request: LeaseRequest) -> bool:
        try:
            request.view.check_open()
            found = self._resolve(request)
            self._check_promise(request)  # the copies that the view holds may be of an older step by now
        except ParamStoreError as error:
            request.error = error
            request.view.leases.pop(request.lease_id, None)
            self._requests.finish(request)
            return True
        if not self._plan_lease(request, found, may_take_slots=True):
            return False
        if not request.missing:
            self._requests.finish(request)
        return True


def _cap(view: View) -> int:
    """Slots that the view may have leased: its promise and what it was lent, or all the arena's slots where the machine had memory
    for fewer."""
    return min(view.lease_slots + view.loan.count, view.namespace.memory.param.planned_slots)


def _is_reachable(namespace: NamespaceState, working: WorkingCopy) -> bool:
    """Whether the bytes that the writer is to see exist, or will: in a broken namespace no apply makes missing ones."""
    return working.identity == working.target or namespace.writing.broken is None
