"""Checks that hold of a planner and its model after every call: `tests/properties/test_residency_model.py` drives both."""

from __future__ import annotations

from collections.abc import Sequence

from paramstore.core.key import ExpertKey
from paramstore.core.location import Extent
from paramstore.core.residency import Copy, Working
from paramstore.engine.planner.planner import Planner
from paramstore.engine.tables.copies import Cut, ParamCopy, Waiter, WorkingCopy
from paramstore.engine.tables.moves import MoveKind
from paramstore.engine.tables.namespace import LeaseRequest, NamespaceState
from paramstore.engine.tables.requests import PrefetchRequest, SlotRequest
from paramstore_testkit.stores.small_planner import SmallPlanner, held_extents, taken
from paramstore_testkit.trials.residency_model import ModelLease, ModelView, ResidencyModel


class ResidencyChecks:
    """Checks of `small`, the real planner with its tables, against `model`; who holds slots is kept here."""

    small: SmallPlanner
    planner: Planner
    namespace: NamespaceState
    model: ResidencyModel
    holds: list[tuple[SlotRequest, WorkingCopy]]
    """Holds of readers of slots, asked for or given; one that is updated is so no more."""
    cut: Cut | None
    quarantined: list[Extent]
    orphans: list[WorkingCopy]
    prefetches: list[PrefetchRequest]
    finished: set[Waiter]
    known: set[ParamCopy]
    """Copies that existed after the last rule."""

    def check_all(self) -> None:
        self.drain()
        self.check_identities()
        self.check_slots()
        self.check_leases()
        self.check_queues()
        self.check_cut()
        self.check_extents()
        self.known = {copy for copies in self.namespace.residency.copies.values() for copy in copies}

    # --- looking

    def found(self, owner: ModelView, keys: Sequence[ExpertKey]) -> list[ParamCopy | None]:
        """Finds the existing copies of what the view sees."""
        identities = [self.model.seen_by(owner, key) for key in keys]
        return [self.namespace.residency.find_copy(key, seen) if seen else None for key, seen in zip(keys, identities, strict=True)]

    def running(self) -> list[ModelLease]:
        return [lease for lease in self.model.leases if not lease.is_ended]

    def ended(self, lease: ModelLease) -> None:
        lease.is_ended, lease.held = True, []

    def room_for(self, request: LeaseRequest) -> int:
        """Counts the slots that are left once the request has taken what it lacks."""
        owner = next(lease.owner for lease in self.model.leases if lease.request is request)
        found = self.found(owner, request.keys)
        lacking = len({key for key, copy in zip(request.keys, found, strict=True) if copy is None})
        idle = [
            copy for copies in self.namespace.residency.copies.values() for copy in copies
            if copy.state is Copy.READY and not copy.leases and copy not in found
        ]  # fmt: skip
        return self.small.param_arena.slots.free_count + len(idle) - lacking

    # --- what holds

    def drain(self) -> None:
        """Carries out what was decided; checks that each request is told only once that it is finished."""
        self.small.start()
        outbox = self.planner.outbox
        told, outbox.finished = outbox.finished, []
        outbox.promoted.clear()
        outbox.woken.clear()
        assert len(set(told)) == len(told)
        assert self.finished.isdisjoint(told)
        assert all(request.is_finished for request in told)
        self.finished.update(told)
        for request in self.prefetches:
            assert request.is_finished == (not request.pending) == (request in self.finished)
        self.prefetches = [request for request in self.prefetches if not request.is_finished]
        for lease in self.running():
            assert lease.request.is_finished == (lease.request in self.finished)
        assert all(request.is_finished == (request in self.finished) for request, _ in self.holds)
        self.holds = [hold for hold in self.holds if not hold[0].is_finished or hold[0].error is None]

    def check_identities(self) -> None:
        for key, working in self.namespace.residency.working.items():
            assert (working.identity, working.target) == (self.model.newest[key], self.model.target[key])
        assert self.namespace.steps.ledger.steps() == sorted(self.model.steps)
        for view in self.model.views:
            assert view.view.is_dropped == view.is_dropped
            assert view.view.step == view.step
        changed = [working.key for working in self.namespace.steps.changed]
        assert sorted(changed) == sorted(self.model.changed())
        assert all(self.namespace.residency.working[working.key] is working for working in self.namespace.steps.changed)

    def check_slots(self) -> None:
        """Checks that each taken slot has one owner and each free slot none, and that readers of slots are counted."""
        copies = [copy for found in self.namespace.residency.copies.values() for copy in found]
        assert sorted(copy.slot for copy in copies) == taken(self.small.param_arena)
        self.orphans = [working for working in self.orphans if working.is_orphan and working.slot is not None]
        residents = [*self.namespace.residency.resident.values(), *self.orphans]
        queued = [(working, state) for state, queue in self.namespace.residency.in_state.items() for working in queue]
        assert dict(queued) == {working: working.state for working in self.namespace.residency.resident.values()}
        assert len(queued) == len(self.namespace.residency.resident), "no copy is in two queues"
        assert sorted(working.slot for working in residents if working.slot is not None) == taken(self.small.working_arena)
        for arena in (self.small.param_arena, self.small.working_arena):
            assert arena.slots.free_count + len(taken(arena)) == arena.slots.count
        assert self.namespace.residency.prefetched <= set(copies)
        for working in residents:
            readers = sum(held is working and request.is_finished for request, held in self.holds)
            readers += sum(move.source is working for move in self.small.under_way)
            assert working.holders == readers
        for copy in copies:
            is_seen = self.model.is_seen(copy.key, copy.identity)
            assert is_seen or copy.state is Copy.RETIRED
            assert copy.state is not Copy.RETIRED or copy.leases or copy.is_moving

    def check_leases(self) -> None:
        """Checks that a lease has all or nothing of what the view sees, and that nothing of a leased copy changes."""
        counts: dict[ParamCopy, int] = {}
        for lease in self.running():
            request = lease.request
            if request.error is not None:
                assert request.copies == []
                self.ended(lease)
                continue
            if lease.is_waiting and request.copies:
                self._granted(lease)
            assert [held[0] for held in lease.held] == request.copies
            for copy, identity, slot, place in lease.held:
                assert (copy.identity, copy.slot, copy.place) == (identity, slot, place)
                assert copy in self.namespace.residency.copies[copy.key]
                counts[copy] = counts.get(copy, 0) + 1
            missing = sum(copy.is_moving or copy.is_waiting for copy, *_ in lease.held)
            assert request.missing == missing
            assert request.is_finished == (bool(lease.held) and not missing)
        for copies in self.namespace.residency.copies.values():
            assert all(copy.leases == counts.get(copy, 0) for copy in copies)
        for view in self.model.views:
            assert view.view.leased.keys() == self.model.leased(view)

    def _granted(self, lease: ModelLease) -> None:
        copies = lease.request.copies
        assert tuple(copy.key for copy in copies) == lease.keys
        assert [copy.identity for copy in copies] == [self.model.seen_by(lease.owner, key) for key in lease.keys]
        if not self.known.issuperset(copies):  # it took slots, so those who came before it have theirs
            earlier = self.model.leases[: self.model.leases.index(lease)]
            assert not [other for other in earlier if other.is_waiting and not other.request.copies and not other.request.error]
        before = self.model.leased(lease.owner)
        lease.held = [(copy, copy.identity, copy.slot, copy.place) for copy in copies]
        assert before.issuperset(copies) or len(self.model.leased(lease.owner)) <= lease.owner.view.lease_slots

    def check_queues(self) -> None:
        """Checks that requests wait in order of coming, and the first one cannot be given what it asks for."""
        waiting = [lease.request for lease in self.running() if lease.is_waiting]
        assert list(self.small.param_arena.waiting) == waiting
        if waiting:
            assert self.room_for(waiting[0]) < 0
        slots = self.small.working_arena
        if slots.waiting:
            assert not slots.slots.free_count
            states = [working for working in self.namespace.residency.resident.values() if working.state is not Working.DIRTY]
            assert all(working.state is not Working.CLEAN or working.holders for working in states)
            head = self.namespace.residency.working[slots.waiting[0].key]
            assert head.state in (Working.ABSENT,)
            is_stuck = not states and not any(working.holders for working in self.namespace.residency.resident.values())
            assert not is_stuck or self.orphans or not self.may_write()

    def may_write(self) -> bool:
        is_worth_it = any(working.write_failures.tries < 2 for working in self.namespace.residency.resident.values())
        return is_worth_it and self.small.space.missing_bytes(1, self.namespace.schema.record_bytes, owner="moe") == 0

    def check_cut(self) -> None:
        """Checks that what was dirty at the cut is not updated before it is written, and is written as it was."""
        working_copies = self.namespace.residency.working.values()
        sequence = self.namespace.steps.sequence
        assert {working for working in working_copies if working.publish_in == sequence + 1} == {*self.namespace.steps.changed}
        if self.cut is None:
            assert self.namespace.steps.cut is None
            assert all(working.publish_in in (None, sequence + 1) and working.cut_record is None for working in working_copies)
            return
        assert self.model.cut is not None
        unwritten, located_at = list(self.cut.awaited()), self.cut.located()
        assert self.cut.unwritten == len(unwritten)
        assert sorted([*(working.key for working in unwritten), *located_at]) == sorted(self.model.cut)
        for working in unwritten:
            assert working.identity == self.model.cut[working.key]
            assert working.state in (Working.DIRTY, Working.WRITING)
        for key, located in located_at.items():
            assert located.identity == self.model.cut[key]

    def check_extents(self) -> None:
        """Checks that no extent has two owners: rows, uncommitted and reserved extents, the cut's, and those of moves."""
        own = held_extents(self.namespace)
        assert len(set(own)) == len(own)
        writes = [move.located.extent for move in self.small.under_way if move.located and move.kind is MoveKind.WRITE]
        assert len(set(writes)) == len(writes)
        assert set(writes).isdisjoint(own)
        held = {*own, *writes, *(move.located.extent for move in self.small.under_way if move.located)}
        held |= {located.extent for located in self.cut.located().values()} if self.cut is not None else set()
        (stats,) = self.small.space.stats()
        record_bytes = self.namespace.schema.record_bytes
        assert stats.quarantined_bytes == len(self.quarantined) * record_bytes
        assert stats.size_bytes - stats.free_bytes - stats.quarantined_bytes == len(held - {*self.quarantined}) * record_bytes
