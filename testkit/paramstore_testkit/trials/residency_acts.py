"""Acts of a planner's callers, each made on the planner and on the model of it: `tests/properties/test_residency_model.py`
chooses which, and in which order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import pytest

from paramstore.core.key import ExpertKey
from paramstore.core.location import Identity
from paramstore.core.residency import Working
from paramstore.engine.planner.working_copies import may_update
from paramstore.engine.tables.copies import WorkingCopy
from paramstore.engine.tables.requests import SlotRequest, Urgency
from paramstore.errors import CapacityError, VolumeError, WaitTimeout
from paramstore.sim.world import FIRST
from paramstore_testkit.stores.small_planner import SmallPlanner
from paramstore_testkit.trials.residency_checks import ResidencyChecks
from paramstore_testkit.trials.residency_model import ModelLease, ModelView, ResidencyModel

T = TypeVar("T")


def chosen(items: Sequence[T], pick: int) -> T:
    return items[pick % len(items)]


class ResidencyActs(ResidencyChecks):
    """Plays everybody who calls the planner: views, readers of slots, one apply and one commit at a time."""

    def begin(self, small: SmallPlanner, *, dirty: Sequence[ExpertKey]) -> None:
        """Opens the namespace for a writer and a reader; the keys of `dirty` were updated and not written."""
        self.small, self.planner, self.namespace = small, small.planner, small.namespace
        self.model = ResidencyModel(small.keys, FIRST)
        self.holds, self.claimed, self.updating = [], [], []
        self.is_applying, self.cut = False, None
        self.quarantined, self.orphans, self.prefetches = [], [], []
        self.finished, self.known = set(), set()
        for key in dirty:
            self._begin_dirty(key)
        self.model.views += [ModelView(self.small.writer(), None), ModelView(self.small.reader(), 0)]

    def _begin_dirty(self, key: ExpertKey) -> None:
        """Updates the record; writes those before it if they have to give up their slot."""
        for other in list(self.namespace.resident):
            self.small.write(other)
        self.small.update(key)
        self.model.newest[key] = self.model.target[key] = Identity(1, self.model.newest[key].version + 1)

    # --- views

    def open_reader(self, pick: int) -> None:
        step = chosen(sorted(self.model.steps), pick)
        self.model.views.append(ModelView(self.small.reader(step), step))

    def open_writer(self, pick: int) -> None:
        """Opens a writer, which fences the present one and takes back what that has not committed."""
        if self.model.writer() and pick:
            return
        writer = self.model.writer()
        if writer is not None:
            writer.is_fenced = writer.view.is_fenced = True
        self._roll_back(max(self.model.steps))
        self.model.views.append(ModelView(self.small.writer(), None))

    def close_view(self, pick: int) -> None:
        view = chosen(self.model.open_views(), pick)
        view.is_closed = True
        for lease in self.model.leases:
            if lease.owner is view:
                self.ended(lease)
        self.planner.views.close(view.view)

    def end_writing(self, pick: int) -> None:
        """Ends the writer's connection, but not its process."""
        writer = self.model.writer()
        if pick or writer is None:
            return
        writer.is_fenced = True
        self.planner.views.end_writing(writer.view)

    def refresh(self, pick: int) -> None:
        view = chosen([view for view in self.model.open_views() if view.step is not None], pick)
        view.step, view.is_dropped = max(self.model.steps), False
        self.planner.views.move(view.view, view.step)

    def protect(self, pick: int, keys: set[ExpertKey]) -> None:
        chosen(self.model.open_views(), pick).view.protected = frozenset(keys)

    # --- leases

    def release(self, pick: int) -> None:
        """Releases the lease last asked for, even if it is over; one that still waits is cancelled instead, as a session does."""
        lease = chosen(self.model.leases[-6:], pick)
        if lease.is_ended or lease.request.is_finished:
            self.ended(lease)
            self.small.release(lease.request)

    def cancel(self, pick: int) -> None:
        """Cancels a lease: the client gives it up, or its time is over."""
        lease = chosen(self.running(), pick)
        self.ended(lease)
        self.planner.leases.cancel_lease(lease.request, WaitTimeout("enough"))

    def ask(self, owner: ModelView, keys: Sequence[ExpertKey]) -> None:
        """Asks for a lease, which is given, queued, or refused as the model says; a refusal changes nothing."""
        waiting = [
            key for lease in self.running() if lease.owner is owner and lease.is_waiting
            and not self.model.is_never_made(owner, lease.keys, self.found(owner, lease.keys)) for key in lease.keys
        ]  # fmt: skip
        leased = self.model.leased(owner)
        awaited = {key for key, copy in zip(waiting, self.found(owner, waiting), strict=True) if copy not in leased}
        refusal = self.model.refusal(owner, keys, self.found(owner, keys), awaited)
        if refusal is not None:
            before = self.small.picture()
            with pytest.raises(refusal):
                self.small.lease(owner.view, *keys)
            assert self.small.picture() == before
            return
        request = self.small.lease(owner.view, *keys)
        self.model.leases.append(ModelLease(request, owner, tuple(keys)))

    def crowd(self, first: ModelView, second: ModelView, *, spare: int) -> None:
        """Leaves `spare` slots beside loads that have not landed: `first` asks for one more and waits, `second` waits for one."""
        absent = [key for key in self.model.keys if self.found(second, [key]) == [None]]
        for key in absent[: max(0, len(absent) - spare - 1)]:
            if self._slots_left() > spare:
                self.prefetches.append(self.small.prefetch(second.view, key))
        wanted = [key for key in self.model.keys if self.found(first, [key]) == [None]][: spare + 1]
        if wanted:
            self.ask(first, wanted)
        if absent:
            self.ask(second, absent[-1:])

    def _slots_left(self) -> int:
        idle = [copy for copies in self.namespace.copies.values() for copy in copies if not copy.leases and not copy.is_moving]
        return self.small.param_arena.slots.free_count + len(idle)

    # --- slots

    def hold(self, key: ExpertKey) -> None:
        working = self.namespace.working[key]
        self.holds.append((self.small.hold(key), working))

    def let_go(self, pick: int) -> None:
        """Lets go of a slot: a holder is done; one that still waits gives up, as the loader does."""
        request, working = self.holds.pop(pick % len(self.holds))
        if request.is_finished:
            if request.error is None:
                self.small.unhold(working)
            return
        if request in self.small.working_arena.waiting:
            self.small.working_arena.waiting.remove(request)
        if request in working.requests:
            working.requests.remove(request)
        request.is_finished, request.error = True, WaitTimeout("given up")
        self.finished.add(request)

    def write(self, pick: int) -> None:
        dirty = [working for working in self.namespace.resident.values() if working.state is Working.DIRTY]
        if dirty:
            self.planner.working.begin_write(self.namespace, chosen(dirty, pick), Urgency.WRITE_BACK)

    def evict(self, key: ExpertKey, is_param: bool) -> None:
        evict = self.planner.evict_param if is_param else self.planner.evict_working
        evict(self.namespace, key)
        self.planner.leases.pump(self.namespace)

    # --- applies

    def call_apply(self, keys: set[ExpertKey]) -> None:
        self.namespace.pending = dict.fromkeys(sorted(keys))  # type: ignore[assignment]
        self.claimed.append(dict.fromkeys(self.planner.claims.begin(self.namespace)))
        for key in keys:
            self.model.target[key] = Identity(self.model.epoch, self.model.target[key].version + 1)

    def _break(self) -> None:
        self.model.is_broken, self.is_applying, self.claimed = True, False, []
        self.planner.mark_broken(self.namespace, "an apply failed")

    def go_on_with_the_apply(self, key: ExpertKey) -> None:
        """Goes on with the apply, or begins it: holds one of its records, and begins the update if nobody else holds that."""
        keys = self.claimed[0]
        try:
            if not self.is_applying:
                self.planner.reserve_extents(self.namespace, keys)
                self.is_applying = True
            self._update(next((held for held in keys if self._hold_of(held)), key if key in keys else next(iter(keys))))
        except CapacityError:
            if self.cut is None and not self.planner.is_space_returning:
                self._break()

    def _hold_of(self, key: ExpertKey) -> tuple[SlotRequest, WorkingCopy] | None:
        working = self.namespace.working[key]
        return next((hold for hold in self.holds if hold[1] is working and hold[0].is_finished and not hold[0].error), None)

    def _update(self, key: ExpertKey) -> None:
        working = self.namespace.working[key]
        if all(held is not working for _, held in self.holds):
            self.holds.append((self.small.hold(key), working))
            self.small.start()
        for move in [move for move in self.small.under_way if move.subject is working and not self._hold_of(key)]:
            self.small.land(move)
        mine = self._hold_of(key)
        if mine is None:
            return  # the request waits for a slot
        if not may_update(self.namespace, working):
            return
        self.planner.reserve_extents(self.namespace, [key])
        self.holds.remove(mine)
        self.updating.append(self.small.begin_update(key, is_held=True))
        del self.claimed[0][key]
        if not self.claimed[0]:
            del self.claimed[0]
            self.is_applying = False

    def settle_update(self, pick: int, outcome: int) -> None:
        update = self.updating.pop(pick % len(self.updating))
        working = update.working
        is_orphan, error = working.is_orphan, VolumeError("torn") if outcome == 7 else None
        self.small.settle_update(update, error)
        if is_orphan:
            return
        if error is not None:
            self._break()
        else:
            key = working.key
            self.model.newest[key] = Identity(self.model.epoch, self.model.newest[key].version + 1)

    # --- commits

    def begin_commit(self) -> None:
        changed = self.model.changed()
        self.cut = self.small.cut()
        self.model.cut = changed
        assert self.cut.keys == changed.keys()

    def is_updating(self) -> bool:
        return any(not update.working.is_orphan for update in self.updating)

    def go_on_with_the_commit(self, pick: int) -> None:
        """Writes the records that the commit needs; publishes when all are written. One in twelve fails."""
        assert self.cut is not None
        for key in sorted(self.cut.unwritten):
            working = self.namespace.working[key]
            if working.state is Working.DIRTY:
                self.planner.working.begin_write(self.namespace, working, Urgency.DEMAND)
        if pick == 0 or self.model.is_broken:
            self._fail_commit()
        elif not self.cut.unwritten:
            step = max(self.model.steps) + 1
            self.model.publish(step)
            self.small.publish(self.cut, step)
            self.cut = None

    def _fail_commit(self) -> None:
        self.model.cut = self.cut = None
        self.planner.cuts.settle(self.namespace, is_published=False)

    # --- rollbacks

    def roll_back(self, pick: int) -> None:
        if pick == 0 or (pick < 4 and self.model.is_broken):
            self._roll_back(chosen(sorted(self.model.steps), pick))

    def _roll_back(self, step: int) -> None:
        self.is_applying, self.claimed = False, []
        self.model.roll_back(step)
        before = list(self.namespace.working.values())
        self.small.rollback(step)
        self.orphans += [working for working in before if working.slot is not None]

    # --- the end

    def end(self) -> None:
        """Lets all go and everything land; then nobody waits, and only what is resident has a slot."""
        while self.updating:
            self.settle_update(0, 0)
            self.drain()
        if self.cut is not None:
            self._fail_commit()
        self._roll_back(max(self.model.steps))  # so that nobody waits for the results of an apply any more
        for view in self.model.open_views():
            self.close_view(self.model.open_views().index(view))
        self.check_all()
        for _ in range(3):
            while self.holds:
                self.let_go(0)
            self.small.land_all()
            self.check_all()
        assert not self.small.param_arena.waiting
        assert not self.small.working_arena.waiting
        assert not self.small.under_way
        assert all(not copy.leases for copies in self.namespace.copies.values() for copy in copies)
        assert not self.prefetches
