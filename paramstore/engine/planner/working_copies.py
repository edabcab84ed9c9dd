"""The planner's rules for working copies: slots, loads, updates, writes, orphans.

- Slot requests wait in FIFO order per arena. Eviction never writes, so a request that finds only dirty slots has some of
  them written at its own urgency. Where no volume takes writes any more it is refused, with the reason.
- A changed record is written to a fresh extent. The older uncommitted extent is freed when the newer one is complete,
  unless a cut under way holds it.
- A record that was dirty at a cut is not updated before its write has landed.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator
from heapq import nsmallest
from itertools import islice

from paramstore.core.key import ExpertKey
from paramstore.core.location import Extent, Identity, Located
from paramstore.core.residency import MAY_MATERIALISE, Working, WorkingEvent, next_working
from paramstore.engine.planner.speed_ranking import SpeedRanking
from paramstore.engine.planner.waiting import WaitingRequests
from paramstore.engine.tables.copies import NO_FAILURES, WorkingCopy, WriteFailures
from paramstore.engine.tables.moves import Move, MoveKind, Outbox
from paramstore.engine.tables.namespace import NamespaceState
from paramstore.engine.tables.requests import PrefetchRequest, SlotRequest, Urgency
from paramstore.errors import CapacityError, ParamStoreError, StepFailed, VolumeError
from paramstore.storage.space.extents import Space
from paramstore.storage.space.fences import Fences

WRITE_TRIES = 2
"""A record whose write fails is written once more, elsewhere; if that fails too, those who need it written get the error."""


class WorkingPlanner:
    """Decides about working copies; part of the planner, on the event-loop thread."""

    def __init__(self, space: Space, outbox: Outbox, requests: WaitingRequests, speed_ranking: SpeedRanking) -> None:
        self._space = space
        self.speed_ranking = speed_ranking
        self._outbox = outbox
        self.requests = requests
        self.orphan_writes = 0
        """Number of writes under way of records that a rollback discarded: their extents come free when they end."""

    # --- slots

    def request_slot(self, request: SlotRequest) -> None:
        """Finishes the request now, or when its load lands, or queues it for a slot."""
        if not self._try_slot(request):
            arena = request.namespace.memory.working
            arena.waiting.append(request)
            self.clean_for_waiting(request.namespace)

    def retry_slot(self, request: SlotRequest) -> bool:
        """Tries a queued request again: True if it waits for no slot any more."""
        return request.is_finished or self._try_slot(request)

    def _try_slot(self, request: SlotRequest) -> bool:
        namespace = request.namespace
        working = namespace.residency.working[request.key]
        arena = namespace.memory.working
        if working.state in MAY_MATERIALISE:
            working.holders += 1
            arena.policy.record(request.key)
            namespace.stats.optim.hits += 1
            self.requests.finish(request)
            return True
        if working.state in (Working.LOADING, Working.UPDATING):
            working.requests.append(request)
            namespace.stats.optim.joins += 1
            if request.urgency is Urgency.DEMAND:
                self._outbox.promoted.append(working)
            return True
        slot = self._make_room(namespace, request.spared)
        if slot is None:
            return False
        if request.is_fill:
            self._take_slot(namespace, working, slot)
            self._record(namespace, working.key)
            _change(namespace, working, WorkingEvent.FILL)
            working.is_moving = True
            self.requests.finish(request)
        else:
            working.requests.append(request)
            namespace.stats.optim.misses += 1
            self._load(namespace, working, slot, urgency=request.urgency)
        return True

    def _make_room(self, namespace: NamespaceState, spared: Container[ExpertKey] = ()) -> int | None:
        arena = namespace.memory.working
        if not arena.slots.free_count and namespace.is_trainable():
            victims = arena.policy.victims(1, lambda name: name in spared or not _is_evictable(namespace.residency.working[name]))  # type: ignore[index]
            if victims is None:
                return None
            self.evict(namespace, namespace.residency.working[victims[0]])  # type: ignore[index]
        return arena.slots.take() if arena.slots.free_count else None

    def _load(
        self, namespace: NamespaceState, working: WorkingCopy, slot: int, *, urgency: Urgency, deadline_s: float | None = None,
        is_ahead: bool = False,
    ) -> None:  # fmt: skip
        located = namespace.on_volume(working.key)
        assert located is not None, f"{working.key} has no record"
        self._take_slot(namespace, working, slot)
        _change(namespace, working, WorkingEvent.LOAD)
        working.is_moving = True
        self._record(namespace, working.key, is_ahead=is_ahead)
        self._outbox.moves.append(Move(MoveKind.LOAD_WORKING, namespace, working, urgency, located=located, deadline_s=deadline_s))

    def _record(self, namespace: NamespaceState, key: ExpertKey, *, is_ahead: bool = False) -> None:
        """Tells the policy of a use, or of a record held ahead of one. (A param schema's arena ranks `param` copies alone.)"""
        if namespace.is_trainable():
            policy = namespace.memory.working.policy
            (policy.hold if is_ahead else policy.record)(key)

    def prefetch(self, request: PrefetchRequest, key: ExpertKey) -> None:
        """Loads `key` if a slot can be had now, or joins a load under way; the request counts which it was."""
        namespace = request.namespace
        working = namespace.residency.working[key]
        if working.state in (Working.LOADING, Working.UPDATING):
            request.pending.add(working)
            working.prefetches.append(request)
        elif working.state is not Working.ABSENT:
            request.resident += 1
            self._record(namespace, key, is_ahead=True)
        elif namespace.on_volume(key) is None or (slot := self._make_room(namespace)) is None:
            request.skipped += 1
        else:
            request.pending.add(working)
            working.prefetches.append(request)
            namespace.stats.optim.prefetched += 1
            namespace.stats.optim.prefetched_bytes += namespace.schema.record_bytes
            self._load(namespace, working, slot, urgency=Urgency.PREFETCH, deadline_s=request.deadline_s, is_ahead=True)

    def evict(self, namespace: NamespaceState, working: WorkingCopy) -> None:
        """Frees a clean, unheld slot."""
        assert working.holders == 0
        _change(namespace, working, WorkingEvent.EVICT)
        namespace.stats.optim.evictions += 1
        self._free_slot(namespace, working)

    def _take_slot(self, namespace: NamespaceState, working: WorkingCopy, slot: int) -> None:
        working.slot = slot
        namespace.residency.resident[working.key] = working

    def _free_slot(self, namespace: NamespaceState, working: WorkingCopy) -> None:
        arena = namespace.memory.working
        assert working.slot is not None
        arena.slots.free(working.slot)
        working.slot = None
        if not working.is_orphan:
            del namespace.residency.resident[working.key]
            if namespace.is_trainable():
                arena.policy.forget(working.key)

    # --- writes

    def clean_for_waiting(self, namespace: NamespaceState) -> None:
        """Starts writes until there are as many as requests that wait for a slot, at the urgency of the most urgent of these;
        raises writes under way where that is DEMAND. Keys that the first request spares are neither written nor counted. Where no
        slot can come free any more, the requests fail."""
        arena = namespace.memory.working
        requests = [request for request in arena.waiting if isinstance(request, SlotRequest)]
        if not requests:
            return
        needed, urgency, spared = len(requests), min(request.urgency for request in requests), requests[0].spared
        for working in namespace.residency.in_state[Working.WRITING]:
            if urgency is Urgency.DEMAND:
                self._outbox.promoted.append(working)
            needed -= working.key not in spared
        self.clean(namespace, needed, urgency, spared=spared)
        if self._is_stuck(namespace):
            lack = f"every slot of namespace {namespace.name!r} holds a changed record that cannot be written"
            self.requests.fail_waiting(namespace, CapacityError(self._space.fences.first(lack)))

    def _is_stuck(self, namespace: NamespaceState) -> bool:
        """Whether no slot can come free any more: every one, and every one still to be added, would hold a dirty record, and all
        volumes are fenced. A slot in any other state may come free, and whatever changes it looks here again."""
        arena = namespace.memory.working
        if len(namespace.residency.in_state[Working.DIRTY]) < max(arena.planned_slots, arena.slots.count):
            return False
        return all(volume.fenced is not None for volume in self._space.stats())

    def clean(
        self, namespace: NamespaceState, count: int, urgency: Urgency, *, spared: Container[ExpertKey] = ()
    ) -> None:
        """Starts writing up to `count` dirty records, none of `spared`; those go first that the policy would give up first."""
        if count <= 0:
            return
        cleanable = {working.key: working for working in _cleanable(namespace) if working.key not in spared}
        names = namespace.memory.working.policy.victims(min(count, len(cleanable)), lambda name: name not in cleanable)
        if names is None:  # fills of a param schema: they only pass through an arena whose policy ranks its `param` copies
            self._write_some(namespace, islice(cleanable.values(), count), urgency)
        else:
            self._write_some(namespace, [cleanable[name] for name in names], urgency)  # type: ignore[index]

    def clean_settled(self, namespace: NamespaceState, count: int) -> None:
        """Starts writing up to `count` dirty records at WRITE_BACK, those that changed longest ago first. Leaves out records that
        an apply which was called already will change again."""
        settled = (working for working in _cleanable(namespace) if working.identity == working.target)
        self._write_some(namespace, nsmallest(count, settled, key=lambda working: working.last_apply), Urgency.WRITE_BACK)

    def _write_some(self, namespace: NamespaceState, chosen: Iterable[WorkingCopy], urgency: Urgency) -> None:
        for working in chosen:
            if not self.begin_write(namespace, working, urgency):
                return  # no space on the volume until a publish or another write frees some

    def begin_write(self, namespace: NamespaceState, working: WorkingCopy, urgency: Urgency) -> bool:
        """Starts writing a dirty record to a fresh extent. Returns False, and it stays dirty, if no space is free now."""
        extent, working.reserved = self._space.unless_fenced(working.reserved), None
        if extent is None:
            extent = self._space.reserve(
                namespace.schema.record_bytes, owner=namespace.name, avoid=working.write_failures.volume,
                speed_class=self.speed_ranking.speed_classes(namespace, [working.key])[0],
            )  # fmt: skip
        if extent is None:
            return False
        assert working.identity is not None
        _change(namespace, working, WorkingEvent.WRITE)
        working.is_moving = True
        self._outbox.moves.append(Move(MoveKind.WRITE, namespace, working, urgency, located=Located(extent, working.identity, 0)))
        return True

    def settle_write(
        self, namespace: NamespaceState, working: WorkingCopy, located: Located, error: ParamStoreError | None
    ) -> None:
        """Settles a write: the record is whole in `located`; or it failed, the extent is quarantined and the slot dirty again."""
        working.is_moving = False
        if error is not None:
            self._space.quarantine(located.extent)
            if isinstance(error, VolumeError):
                self._space.fences.fail_write(located.extent.volume, error)
        if working.is_orphan:
            self.orphan_writes -= 1
            if error is None:
                self._space.release(located.extent)
            self.settle_orphan(namespace, working)
            return
        if error is not None:
            _change(namespace, working, WorkingEvent.WRITE_FAILED)
            working.write_failures = WriteFailures(working.write_failures.tries + 1, error, located.extent.volume)
            if working.write_failures.tries >= WRITE_TRIES:
                self.requests.fail_waiting(namespace, failed_twice(namespace, working, self._space.fences))
            if namespace.steps.is_cut(working):
                self._wake_cut(namespace)
        else:
            _change(namespace, working, WorkingEvent.WRITTEN)
            working.write_failures = NO_FAILURES
            namespace.stats.records_written += 1
            self._replace_uncommitted(namespace, working, located)
            if not namespace.is_trainable():  # a param schema's working copies only pass through its one arena
                self.evict(namespace, working)
        self.wake(working)

    def _replace_uncommitted(self, namespace: NamespaceState, working: WorkingCopy, located: Located) -> None:
        older, working.uncommitted = working.uncommitted, located
        cut = namespace.steps.cut
        if cut is not None and cut.awaits(working):
            cut.keep(working, located)
            if not cut.unwritten:
                self._wake_cut(namespace)
        if older is not None and working.cut_record != older:  # the cut's is released when that is settled, if ever
            self._space.release(older.extent)

    def _wake_cut(self, namespace: NamespaceState) -> None:
        """Wakes the commit under way, since all its writes have landed or one has failed."""
        assert namespace.steps.cut is not None
        if namespace.steps.cut.written is not None:
            self._outbox.woken.append(namespace.steps.cut.written)

    # --- loads and updates

    def settle_load(
        self, namespace: NamespaceState, working: WorkingCopy, *, optimizer_step: int, last_apply: int,
        error: ParamStoreError | None,
    ) -> None:  # fmt: skip
        """Settles a load: the record is in its slot, verified; or it failed, the slot is free and all who waited get the error."""
        if self._is_whole(namespace, working, error, well=WorkingEvent.LOADED, badly=WorkingEvent.LOAD_FAILED):
            working.optimizer_step, working.last_apply = optimizer_step, last_apply
            self._land(namespace, working)

    def _is_whole(
        self, namespace: NamespaceState, working: WorkingCopy, error: ParamStoreError | None, *,
        well: WorkingEvent, badly: WorkingEvent,
    ) -> bool:  # fmt: skip
        """Ends the move that filled the slot, well or badly. Returns whether whole bytes are there that somebody may want; else
        the slot is free, or an orphan's, and all who waited got the error."""
        working.is_moving = False
        if working.is_orphan:
            self.requests.fail(working, error)
            self.settle_orphan(namespace, working)
            return False
        _change(namespace, working, well if error is None else badly)
        if error is not None:
            self._free_slot(namespace, working)
            self.requests.fail(working, error)
            self.wake(working)
        return error is None

    def _land(self, namespace: NamespaceState, working: WorkingCopy) -> None:
        """Tells all who wait for the copy that its bytes are there."""
        self.requests.land(namespace, working)
        self.wake(working)

    def begin_update(self, namespace: NamespaceState, working: WorkingCopy) -> None:
        """Turns the caller's hold into an update: from here on only the update's worker touches the slot."""
        assert may_update(namespace, working)
        working.holders = 0
        _change(namespace, working, WorkingEvent.UPDATE)
        working.is_moving = True

    def settle_update(
        self, namespace: NamespaceState, working: WorkingCopy, identity: Identity, error: ParamStoreError | None
    ) -> None:
        """Settles an update: the slot holds `identity`; or it failed, and the slot with its torn bytes is free."""
        if self._is_whole(namespace, working, error, well=WorkingEvent.UPDATED, badly=WorkingEvent.UPDATE_FAILED):
            working.identity, working.write_failures = identity, NO_FAILURES
            namespace.steps.note_change(working)
            self._land(namespace, working)

    def unhold(self, namespace: NamespaceState, working: WorkingCopy) -> None:
        """Ends the hold of one reader of the slot."""
        working.holders -= 1
        if working.is_orphan:
            self.settle_orphan(namespace, working)
        elif working.holders <= 1:
            self.wake(working)

    # --- rollback

    def discard(self, namespace: NamespaceState, working: WorkingCopy) -> None:
        """Forgets a working copy. A slot that a worker or holder still uses is orphaned, and freed when the last returns."""
        for extent in self._unpublished(working):
            self._space.release(extent)
        if working.state is Working.ABSENT:
            return
        if namespace.is_trainable():
            namespace.memory.working.policy.forget(working.key)
        del namespace.residency.resident[working.key]
        self.orphan_writes += working.state is Working.WRITING
        _change(namespace, working, WorkingEvent.DISCARD)
        working.is_orphan = True
        self.settle_orphan(namespace, working)
        self.wake(working)

    @staticmethod
    def _unpublished(working: WorkingCopy) -> list[Extent]:
        extents = [working.uncommitted.extent] if working.uncommitted is not None else []
        if working.reserved is not None:
            extents.append(working.reserved)
        return extents

    def settle_orphan(self, namespace: NamespaceState, working: WorkingCopy) -> None:
        if not working.is_moving and working.holders == 0 and working.slot is not None:
            self._free_slot(namespace, working)

    def wake(self, working: WorkingCopy) -> None:
        """Wakes those who wait for any change of the copy."""
        self._outbox.woken.extend(working.waiters)
        working.waiters.clear()


def _change(namespace: NamespaceState, working: WorkingCopy, event: WorkingEvent) -> None:
    """Changes a working copy's state; nothing else does."""
    before, working.state = working.state, next_working(working.state, event)
    if before is not Working.ABSENT:
        namespace.residency.in_state[before].let_out(working)
    if working.state is not Working.ABSENT:
        namespace.residency.in_state[working.state].take_in(working)


def may_update(namespace: NamespaceState, working: WorkingCopy) -> bool:
    """Whether an update may start: the caller is the only holder, and no write that a cut waits for is due."""
    return working.state in (Working.CLEAN, Working.DIRTY) and working.holders == 1 and not namespace.steps.is_cut(working)


def failed_twice(namespace: NamespaceState, working: WorkingCopy, fences: Fences) -> StepFailed:
    """The error of whoever needs a record written, when that has failed as often as it is tried."""
    return StepFailed(
        f"{working.key} of {namespace.name!r}: its write-back failed twice, on different extents: {working.write_failures.error}"
        f"{fences.hint()}"
    )


def _is_evictable(working: WorkingCopy) -> bool:
    return working.state is Working.CLEAN and working.holders == 0


def _cleanable(namespace: NamespaceState) -> Iterator[WorkingCopy]:
    """Dirty records that may be written, the longest dirty first; without those that are held or whose write keeps failing."""
    dirty = namespace.residency.in_state[Working.DIRTY]
    return (working for working in dirty if not working.holders and working.write_failures.tries < WRITE_TRIES)
