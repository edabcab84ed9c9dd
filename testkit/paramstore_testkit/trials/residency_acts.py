"""Acts of a planner's callers, each made on the planner and on the model of it: `tests/properties/test_residency_model.py`
chooses which, and in which order.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from paramstore.core.key import ExpertKey
from paramstore.core.location import Identity
from paramstore.errors import WaitTimeout
from paramstore.sim.world import FIRST
from paramstore_testkit.stores.small_planner import SmallPlanner
from paramstore_testkit.trials.residency_checks import ResidencyChecks
from paramstore_testkit.trials.residency_daemon import ResidencyDaemon, chosen
from paramstore_testkit.trials.residency_model import ModelLease, ModelView, ResidencyModel


class ResidencyActs(ResidencyChecks):
    """Plays everybody who calls the planner: views and their leases, and, by `daemon`, the daemon itself."""

    def begin(self, small: SmallPlanner, *, dirty: Sequence[ExpertKey]) -> None:
        """Opens the namespace for a writer and a reader; the keys of `dirty` were updated and not written."""
        self.small, self.planner, self.namespace = small, small.planner, small.namespace
        self.model = ResidencyModel(small.keys, FIRST)
        self.holds, self.cut = [], None
        self.quarantined, self.orphans, self.prefetches = [], [], []
        self.finished, self.known = set(), set()
        self.daemon = ResidencyDaemon(self)
        for key in dirty:
            self._begin_dirty(key)
        self.model.views += [ModelView(self.small.writer(), None), ModelView(self.small.reader(), 0)]

    def _begin_dirty(self, key: ExpertKey) -> None:
        """Updates the record; writes those before it if they have to give up their slot."""
        for other in list(self.namespace.residency.resident):
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
        if request.is_finished:
            self.finished.add(request)  # at once: its caller sees that, and nobody is told
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
        idle = [
            copy for copies in self.namespace.residency.copies.values() for copy in copies if not copy.leases and not copy.is_moving
        ]
        return self.small.param_arena.slots.free_count + len(idle)

    # --- rollbacks

    def roll_back(self, pick: int) -> None:
        if pick == 0 or (pick < 4 and self.model.is_broken):
            self._roll_back(chosen(sorted(self.model.steps), pick))

    def _roll_back(self, step: int) -> None:
        self.daemon.is_applying, self.daemon.claimed = False, []
        self.model.roll_back(step)
        before = list(self.namespace.residency.working.values())
        self.small.rollback(step)
        self.orphans += [working for working in before if working.slot is not None]

    # --- the end

    def end(self) -> None:
        """Lets all go and everything land; then nobody waits, and only what is resident has a slot."""
        while self.daemon.updating:
            self.daemon.settle_update(0, 0)
            self.drain()
        if self.cut is not None:
            self.daemon.fail_commit()
        self._roll_back(max(self.model.steps))  # so that nobody waits for the results of an apply any more
        for view in self.model.open_views():
            self.close_view(self.model.open_views().index(view))
        self.check_all()
        for _ in range(3):
            while self.holds:
                self.daemon.let_go(0)
            self.small.land_all()
            self.check_all()
        assert not self.small.param_arena.waiting
        assert not self.small.working_arena.waiting
        assert not self.small.under_way
        assert all(not copy.leases for copies in self.namespace.residency.copies.values() for copy in copies)
        assert not self.prefetches
