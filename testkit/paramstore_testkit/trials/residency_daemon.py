"""The daemon's part of what a planner is told, made on the planner and on the model of it: readers of slots, one apply and one
commit at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from paramstore.core.key import ExpertKey
from paramstore.core.location import Identity
from paramstore.core.residency import Working
from paramstore.engine.planner.planner import Update
from paramstore.engine.planner.working_copies import may_update
from paramstore.engine.tables.copies import WorkingCopy
from paramstore.engine.tables.requests import SlotRequest, Urgency
from paramstore.errors import CapacityError, VolumeError, WaitTimeout
from paramstore_testkit.stores.settling import settle_cut
from paramstore_testkit.trials.residency_checks import ResidencyChecks

T = TypeVar("T")


def chosen(items: Sequence[T], pick: int) -> T:
    return items[pick % len(items)]


class ResidencyDaemon:
    """Owner of what is called and not done: keys of applies, and updates. checks: whoever checks what this does."""

    def __init__(self, checks: ResidencyChecks) -> None:
        self.checks = checks
        self.small, self.planner, self.namespace, self.model = checks.small, checks.planner, checks.namespace, checks.model
        self.claimed: list[dict[ExpertKey, None]] = []
        """Keys of applies that were called: the first apply runs if `is_applying`."""
        self.is_applying = False
        self.updating: list[Update] = []

    # --- slots

    def hold(self, key: ExpertKey) -> None:
        working = self.namespace.residency.working[key]
        self.checks.holds.append((self.small.hold(key), working))

    def let_go(self, pick: int) -> None:
        """Lets go of a slot: a holder is done; one that still waits gives up, as the loader does."""
        request, working = self.checks.holds.pop(pick % len(self.checks.holds))
        if request.is_finished:
            if request.error is None:
                self.small.unhold(working)
            return
        self.planner.leases.cancel_slot(request, WaitTimeout("given up"))
        self.checks.finished.add(request)

    def write(self, pick: int) -> None:
        dirty = [working for working in self.namespace.residency.resident.values() if working.state is Working.DIRTY]
        if dirty:
            self.planner.working.begin_write(self.namespace, chosen(dirty, pick), Urgency.WRITE_BACK)

    def evict(self, key: ExpertKey, is_param: bool) -> None:
        evict = self.planner.evict_param if is_param else self.planner.evict_working
        evict(self.namespace, key)
        self.planner.leases.pump(self.namespace)

    # --- applies

    def call_apply(self, keys: set[ExpertKey]) -> None:
        self.namespace.writing.pending = dict.fromkeys(sorted(keys))  # type: ignore[assignment]
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
            if self.checks.cut is None and not self.planner.is_space_returning:
                self._break()

    def _hold_of(self, key: ExpertKey) -> tuple[SlotRequest, WorkingCopy] | None:
        working = self.namespace.residency.working[key]
        return next((hold for hold in self.checks.holds if hold[1] is working and hold[0].is_finished and not hold[0].error), None)

    def _update(self, key: ExpertKey) -> None:
        working = self.namespace.residency.working[key]
        if all(held is not working for _, held in self.checks.holds):
            self.checks.holds.append((self.small.hold(key), working))
            self.small.start()
        for move in [move for move in self.small.under_way if move.subject is working and not self._hold_of(key)]:
            self.small.land(move)
        mine = self._hold_of(key)
        if mine is None:
            return  # the request waits for a slot
        if not may_update(self.namespace, working):
            return
        self.planner.reserve_extents(self.namespace, [key])
        self.checks.holds.remove(mine)
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
        self.checks.cut = self.small.cut()
        self.model.cut = changed
        assert {working.key for working in self.checks.cut.records} == changed.keys()

    def is_updating(self) -> bool:
        return any(not update.working.is_orphan for update in self.updating)

    def go_on_with_the_commit(self, pick: int) -> None:
        """Writes the records that the commit needs; publishes when all are written. One in twelve fails."""
        assert self.checks.cut is not None
        for working in list(self.checks.cut.awaited()):
            if working.state is Working.DIRTY:
                self.planner.working.begin_write(self.namespace, working, Urgency.DEMAND)
        if pick == 0 or self.model.is_broken:
            self.fail_commit()
        elif not self.checks.cut.unwritten:
            step = max(self.model.steps) + 1
            self.model.publish(step)
            self.small.publish(self.checks.cut, step)
            self.checks.cut = None

    def fail_commit(self) -> None:
        self.model.cut = self.checks.cut = None
        settle_cut(self.planner, self.namespace, is_published=False)
