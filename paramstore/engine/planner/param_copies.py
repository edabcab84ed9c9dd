"""The planner's rules for `param` copies: finding, making room, feeding a load from the right source, retiring.

A copy is made from the first of these that applies: the working slot, if it holds exactly these bytes; the working load, update or
earlier apply that will make them (then the copy waits); the extent that holds exactly them. Where the record has missed steps, the
source is looked for in the same way by the bytes without them, and the steps are made on the way.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Hashable, Iterable

from paramstore.core.apply_log import ApplyLog
from paramstore.core.key import ExpertKey
from paramstore.core.location import Identity, Located
from paramstore.core.optimizers import Options
from paramstore.core.residency import Copy, CopyEvent, Working, next_copy
from paramstore.engine.planner.loans import wake_openings
from paramstore.engine.planner.waiting import WaitingRequests
from paramstore.engine.tables.arena import Arena
from paramstore.engine.tables.copies import ParamCopy, Waiter, WorkingCopy
from paramstore.engine.tables.moves import Move, MoveKind, Outbox
from paramstore.engine.tables.namespace import LeaseRequest, NamespaceState
from paramstore.engine.tables.requests import Urgency
from paramstore.errors import ParamStoreError


class CopyPlanner:
    """Decides about `param` copies; part of the planner, on the event-loop thread."""

    def __init__(self, outbox: Outbox, requests: WaitingRequests) -> None:
        self._outbox = outbox
        self._requests = requests

    def make_room(
        self, namespace: NamespaceState, count: int, *, keep: Container[ExpertKey], needed: Container[ParamCopy] | None = None,
        is_prefetch: bool = False, made: ExpertKey | None = None,
    ) -> list[int] | None:  # fmt: skip
        """Takes `count` free slots, after evicting what the policy gives up; or None, and nothing has changed.

        made: the key whose new copy the slot is for, if nobody asked for it yet: None too if the policy would give that up first.

        keep: keys that must stay; where `needed` is given, only these copies of them must. A prefetch evicts neither protected
        keys nor other unused prefetches; demand spares them, and other versions of what it wants, as long as it can.
        """
        arena = namespace.memory.param
        lacking = count - arena.slots.free_count
        if lacking > 0:
            victims = self._victims(namespace, arena, lacking, keep, spare_wishes=True, is_prefetch=is_prefetch, made=made)
            if victims is None and not is_prefetch and namespace.protected:
                victims = self._victims(namespace, arena, lacking, keep, spare_wishes=False, is_prefetch=False)
            if victims is None and needed is not None:
                victims = _any_idle(namespace, lacking, needed)
            if victims is None:
                return None
            for copy in victims:
                self.evict(namespace, copy)
        return [arena.slots.take() for _ in range(count)]

    def _victims(
        self, namespace: NamespaceState, arena: Arena, count: int, keep: Container[ExpertKey], *,
        spare_wishes: bool, is_prefetch: bool, made: ExpertKey | None = None,
    ) -> list[ParamCopy] | None:  # fmt: skip
        wishes = namespace.protected if spare_wishes else frozenset()

        def is_protected(name: object) -> bool:
            if name in keep or name in wishes:
                return True
            return name != made and _evictable(namespace, name, is_prefetch) is None

        on_devices = namespace.on_devices
        if on_devices.isdisjoint(namespace.residency.copies):
            on_devices = frozenset()  # the usual case: they went already
        names = _worst(arena, count, is_protected, first=on_devices)
        if names is None or made in names:
            return None
        copies = [_evictable(namespace, name, is_prefetch) for name in names]
        return [copy for copy in copies if copy is not None]

    def evict(self, namespace: NamespaceState, copy: ParamCopy) -> None:
        """Frees an unleased READY copy; counted as waste if it was loaded ahead of use and never used."""
        assert copy.leases == 0
        stats = namespace.stats.param
        stats.evictions += 1
        if copy in namespace.residency.prefetched:
            stats.wasted += 1
            stats.wasted_bytes += namespace.schema.part("param").image_bytes
        self._remove(namespace, copy, CopyEvent.EVICT)

    def start(
        self, namespace: NamespaceState, key: ExpertKey, identity: Identity, located: Located | None, slot: int, *,
        urgency: Urgency, deadline_s: float | None = None, log: ApplyLog | None = None,
    ) -> ParamCopy:  # fmt: skip
        """Makes a LOADING copy in `slot` and puts its move into the outbox, unless it waits for the working copy.

        log: the apply log of the view that asks, where the record may have missed steps.
        """
        segment, offset_bytes = namespace.memory.param.place(slot)
        base = namespace.residency.working[key].target if located is None else located.identity
        missed: tuple[Options, ...] = ()
        if log is not None and base is not None:
            missed = log.missed(after=base.version, until=identity.version)
        copy = ParamCopy(
            key, identity, slot, located, segment=segment, offset_bytes=offset_bytes, base=base if missed else None, missed=missed
        )
        copy.state = next_copy(copy.state, CopyEvent.LOAD)
        namespace.residency.copies.setdefault(key, []).append(copy)
        working = namespace.residency.working[key]
        if namespace.wanted(working) == identity:
            working.current = copy
        self.feed(namespace, copy, urgency=urgency, deadline_s=deadline_s)
        return copy

    def feed(
        self, namespace: NamespaceState, copy: ParamCopy, *, urgency: Urgency = Urgency.DEMAND, deadline_s: float | None = None
    ) -> None:
        """Starts the move of a LOADING copy that has none, if its source is ready; else it goes on waiting."""
        working = namespace.residency.working[copy.key]
        found: WorkingCopy | Located | None = copy.located
        if working.identity in (copy.identity, copy.base) and namespace.is_trainable():
            if working.state in (Working.LOADING, Working.UPDATING):
                self._outbox.promoted.append(working)
                return
            found = namespace.locate(copy.key)
        elif working.identity == copy.identity:
            found = namespace.on_volume(copy.key)
        if found is None:
            return  # an apply, a fill or its first write will make these bytes
        source, located = (found, None) if isinstance(found, WorkingCopy) else (None, found)
        if source is not None:
            source.holders += 1
        if copy.missed and working.identity != copy.identity:
            kind = MoveKind.ADVANCE
        else:
            kind = MoveKind.LOAD_PARAM if source is None else MoveKind.MATERIALISE
        copy.is_moving = True
        self._outbox.moves.append(Move(kind, namespace, copy, urgency, located=located, source=source, deadline_s=deadline_s))

    def feed_waiting(self, namespace: NamespaceState, key: ExpertKey) -> None:
        """Lets copies that wait for the working copy look for their source again; to be called after any change of it."""
        for copy in namespace.residency.copies.get(key, ()):
            if copy.is_waiting:
                self.feed(namespace, copy)

    def settle(self, namespace: NamespaceState, copy: ParamCopy, error: ParamStoreError | None) -> None:
        """Settles a load: the copy's bytes have landed, or failed to. Requests that waited are finished, or miss one copy less."""
        waiters, copy.waiters = copy.waiters, []
        if error is not None:
            for request in waiters:  # all who lease a copy that has not landed wait for it
                self._fail(request, copy, error)
            copy.is_moving = False
            if copy.state is not Copy.ABSENT:  # else it went with the last who waited for it
                self._remove(namespace, copy, CopyEvent.LOAD_FAILED)
            return
        copy.is_moving = False
        copy.state = next_copy(copy.state, CopyEvent.LOADED)
        image_bytes = namespace.schema.part("param").image_bytes
        for request in waiters:
            if request.land(copy, image_bytes):
                self._requests.finish(request)
        if copy.state is Copy.RETIRED and copy.leases == 0:
            self._remove(namespace, copy, CopyEvent.FREE)

    def _fail(self, request: Waiter, copy: ParamCopy, error: ParamStoreError) -> None:
        is_over = request.fail(copy, error)
        if isinstance(request, LeaseRequest):
            self.unlease(request)
        if is_over:
            self._requests.finish(request)

    def unlease(self, request: LeaseRequest) -> None:
        """Gives up every slot the request holds, landed or not."""
        view, namespace = request.view, request.view.namespace
        leased = view.leased
        held_count = len(leased)
        for copy in request.copies:
            copy.leases -= 1
            left = leased[copy] - 1
            if left:
                leased[copy] = left
            else:
                del leased[copy]
            if copy.state is Copy.READY:
                continue  # the usual case, kept cheap
            if request.missing and request in copy.waiters:
                copy.waiters.remove(request)
            if copy.leases == 0 and copy.state is Copy.RETIRED and not copy.is_moving:
                self._free_retired(namespace, copy)
            elif copy.is_waiting and not copy.waiters:  # nobody wants what the working copy would give it
                self._remove(namespace, copy, CopyEvent.LOAD_FAILED)
        request.copies = []
        view.leases.pop(request.lease_id, None)
        if namespace.loan_waiters and (view.is_fenced or held_count > view.lease_slots + view.loan.count):
            wake_openings(self._outbox, namespace)  # what others lack is counted by what this view has leased

    def retire_stale(self, namespace: NamespaceState, keys: Iterable[ExpertKey]) -> None:
        """Retires copies of `keys` that the writer saw before the last apply. In an exact namespace every apply makes every copy
        stale; a stale one goes only when the writer asks for its key again, or needs its slot."""
        if not namespace.is_exact:
            return
        for key in keys:
            working = namespace.residency.working[key]
            older = working.current
            if older is not None and older.identity != namespace.wanted(working):
                working.current = None
                self.supersede(namespace, older)

    def evict_left_behind(self, namespace: NamespaceState) -> None:
        """Evicts unused prefetches that no view sees any more after an apply of an exact namespace was called: they are wasted, and
        would stand in the way of other prefetches."""
        if not namespace.residency.prefetched:
            return
        for copies in list(namespace.residency.copies.values()):
            for copy in list(copies):
                if (
                    copy in namespace.residency.prefetched
                    and copy.state is Copy.READY
                    and not namespace.is_seen(copy.key, copy.identity)
                ):
                    self.evict(namespace, copy)

    def supersede(self, namespace: NamespaceState, copy: ParamCopy) -> None:
        """Retires `copy`, which the writer may have moved on from, unless the writer or a reader's step still sees it."""
        if copy.state in (Copy.LOADING, Copy.READY) and not namespace.is_seen(copy.key, copy.identity):
            self.retire(namespace, copy)

    def retire_unseen(self, namespace: NamespaceState, keys: Iterable[ExpertKey]) -> None:
        """Retires those copies of `keys` that nobody sees any more; to be called after a view, the step or the epoch moved."""
        for key in keys:
            copies = namespace.residency.copies.get(key, ())
            if len(copies) == 1 and namespace.residency.working[key].current is copies[0]:
                continue  # the usual case, kept cheap: nothing but what the writer sees
            for copy in list(copies):
                self.supersede(namespace, copy)

    def retire(self, namespace: NamespaceState, copy: ParamCopy) -> None:
        """Makes the copy RETIRED: nobody new gets it, and it is freed when its last lease ends and nothing moves it."""
        copy.state = next_copy(copy.state, CopyEvent.RETIRE)
        if copy.leases == 0 and not copy.is_moving:
            self._free_retired(namespace, copy)

    def _free_retired(self, namespace: NamespaceState, copy: ParamCopy) -> None:
        """Frees a retired copy that nobody leases and nothing moves; prefetches that waited for it count it as skipped."""
        waiters, copy.waiters = copy.waiters, []
        for request in waiters:  # prefetches all: a lease would hold the copy
            if request.skip(copy):
                self._requests.finish(request)
        self._remove(namespace, copy, CopyEvent.FREE)

    def _remove(self, namespace: NamespaceState, copy: ParamCopy, event: CopyEvent) -> None:
        copy.state = next_copy(copy.state, event)
        arena = namespace.memory.param
        arena.slots.free(copy.slot)
        namespace.residency.prefetched.discard(copy)
        copies = namespace.residency.copies[copy.key]
        copies.remove(copy)
        if not copies:
            del namespace.residency.copies[copy.key]
            arena.policy.forget(copy.key)
        working = namespace.residency.working[copy.key]
        if working.current is copy:
            working.current = None


def _evictable(namespace: NamespaceState, name: object, is_prefetch: bool) -> ParamCopy | None:
    """The oldest copy of the key that can be evicted now; None if there is none."""
    for copy in namespace.residency.copies.get(name, ()):  # type: ignore[call-overload]
        if copy.state is Copy.READY and copy.leases == 0 and not (is_prefetch and copy in namespace.residency.prefetched):
            return copy  # type: ignore[no-any-return]
    return None


def _worst(
    arena: Arena, count: int, is_protected: Callable[[object], bool], *, first: frozenset[ExpertKey]
) -> list[Hashable] | None:
    """The policy's victims, of `first` before all others, as far as there are such."""
    chosen = list[Hashable]()
    size = count if first else 0
    while size and len(chosen) < count:
        size = min(size, count - len(chosen))
        found = arena.policy.victims(size, lambda name: name not in first or name in chosen or is_protected(name))
        if found is None:
            size //= 2
        else:
            chosen.extend(found)
    others = arena.policy.victims(count - len(chosen), lambda name: name in chosen or is_protected(name))
    return None if others is None else chosen + others


def _any_idle(namespace: NamespaceState, count: int, needed: Container[ParamCopy]) -> list[ParamCopy] | None:
    """`count` copies that nobody uses, whatever their keys, or None. (The policy's victims have at most one copy of each key.)"""
    idle = [
        copy for copies in namespace.residency.copies.values() for copy in copies
        if copy.state is Copy.READY and copy.leases == 0 and copy not in needed
    ]  # fmt: skip
    return idle[:count] if len(idle) >= count else None
