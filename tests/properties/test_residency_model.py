"""The planner against a model of who may hold what: every order of leases, loads, updates, writes, cuts and rollbacks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from paramstore.core.key import ExpertKey
from paramstore.core.place import Extent, Identity
from paramstore.core.residency import Copy, Working
from paramstore.engine.moves import MoveKind
from paramstore.engine.namespace import Cut, ParamCopy, WorkingCopy
from paramstore.engine.requests import LeaseRequest, PrefetchRequest, Request, SlotRequest, Urgency
from paramstore.errors import CapacityError, ParamStoreError, VolumeError, WaitTimeout
from paramstore.policy.decayed_lfu import DecayedLfu
from paramstore.policy.lru import Lru
from paramstore.testing.residency_model import ModelLease, ModelView, ResidencyModel
from paramstore.testing.small_planner import FIRST, SmallPlanner, taken
from paramstore.testing.state_machines import run_fixed, run_new

EXPERTS = 4
KEYS = [(0, expert) for expert in range(EXPERTS)]
PICK = st.integers(0, 11)
KEY = st.sampled_from(KEYS)
SOME = st.lists(KEY, min_size=1, max_size=2) | st.lists(KEY, min_size=1, max_size=4)
VIEW_ACTS = ["open reader", "open reader", "open writer", "open writer", "close", "refresh", "end writing", "protect", "roll back"]
T = TypeVar("T")


def chosen(items: Sequence[T], pick: int) -> T:
    return items[pick % len(items)]


def lose_heat(slots: int) -> DecayedLfu:
    return DecayedLfu(threshold=1.0, beta=0.5, decay_steps=2, capacity=slots)


class ResidencyMachine(RuleBasedStateMachine):
    """`small` is the real planner with its tables, `model` what is expected of it; holders and updates are kept here."""

    @initialize(
        param_slots=st.integers(1, 9), working_slots=st.integers(1, 4), spare=st.integers(5, 14), is_lru=st.booleans(),
        dirty=st.lists(KEY, max_size=4, unique=True),
    )
    def start(self, param_slots: int, working_slots: int, spare: int, is_lru: bool, dirty: list[ExpertKey]) -> None:
        policy = Lru if is_lru else lambda: lose_heat(param_slots)
        self.small = SmallPlanner(
            experts=EXPERTS, param_slots=param_slots, working_slots=working_slots, extents=EXPERTS + spare, policy=policy
        )
        self.planner, self.namespace = self.small.planner, self.small.namespace
        self.model = ResidencyModel(KEYS, FIRST, param_slots=param_slots)
        self.holds: list[tuple[SlotRequest, WorkingCopy]] = []
        """Asked for by whoever reads a slot, or gone to `updating`."""
        self.claimed: list[dict[ExpertKey, None]] = []
        """Applies that were called: the first runs if `is_applying`."""
        self.is_applying = False
        self.updating: list[tuple[WorkingCopy, ParamCopy | None]] = []
        self.cut: Cut | None = None
        self.quarantined: list[Extent] = []
        self.orphans: list[WorkingCopy] = []
        self.prefetches: list[PrefetchRequest] = []
        self.finished: set[Request] = set()
        self.known: set[ParamCopy] = set()
        for key in dirty:
            self._begin_dirty(key)
        self.model.views += [ModelView(self.small.writer(), None), ModelView(self.small.reader(), 0)]

    def _begin_dirty(self, key: ExpertKey) -> None:
        """The record has been updated; those before it were written if they had to give their slot."""
        for other in list(self.namespace.resident):
            self.small.write(other)
        self.small.update(key)
        self.model.newest[key] = self.model.target[key] = Identity(1, self.model.newest[key].version + 1)

    # --- views

    @rule(what=st.sampled_from(VIEW_ACTS), pick=PICK)
    def change_views(self, what: str, pick: int) -> None:
        views, cut = self.model.open_views(), self.cut
        if what == "open reader" and len(views) < 3:
            self.open_reader(pick)
        elif what == "open writer" and len(views) < 3 and cut is None:
            self.open_writer(pick)
        elif what == "close" and len(views) > 1:
            self.close_view(pick)
        elif what == "refresh" and any(view.step is not None for view in views):
            self.refresh(pick)
        elif what == "end writing" and self.model.writer() is not None:
            self.end_writing(pick)
        elif what == "protect" and views:
            self.protect(pick, {chosen(KEYS, pick), chosen(KEYS, pick + 1)} if pick % 3 else set())
        elif what == "roll back" and cut is None:
            self.roll_back(pick)

    def open_reader(self, pick: int) -> None:
        step = chosen(sorted(self.model.steps), pick)
        self.model.views.append(ModelView(self.small.reader(step), step))

    def open_writer(self, pick: int) -> None:
        """Fences the writer there is and takes back what it has not committed."""
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
                self._ended(lease)
        self.planner.leases.close_view(view.view)

    def end_writing(self, pick: int) -> None:
        """The writer's connection is gone, its process is not."""
        writer = self.model.writer()
        if pick or writer is None:
            return
        writer.is_fenced = True
        writer.view.end_writing()

    def refresh(self, pick: int) -> None:
        view = chosen([view for view in self.model.open_views() if view.step is not None], pick)
        view.step, view.is_dropped = max(self.model.steps), False
        self.planner.leases.move_view(view.view, view.step)

    def protect(self, pick: int, keys: set[ExpertKey]) -> None:
        chosen(self.model.open_views(), pick).view.protected = frozenset(keys)

    # --- leases and prefetch

    def _found(self, owner: ModelView, keys: Sequence[ExpertKey]) -> list[ParamCopy | None]:
        """The copies that there are of what the view sees, retired ones of the writer's aside."""
        identities = [self.model.seen_by(owner, key) for key in keys]
        copies = [self.namespace.find_copy(key, seen) if seen else None for key, seen in zip(keys, identities, strict=True)]
        return [copy if copy is None or copy.state is not Copy.RETIRED else None for copy in copies]

    @precondition(lambda self: self.model.views)
    @rule(pick=PICK, keys=SOME)
    def acquire(self, pick: int, keys: list[ExpertKey]) -> None:
        owner = chosen(self.model.views[-4:], pick)
        refusal = self.model.refusal(owner, keys, self._found(owner, keys))
        before = self.small.picture() if refusal is not None else None
        if refusal is not None:
            with pytest.raises(refusal):
                self.small.lease(owner.view, *keys)
            assert self.small.picture() == before
            return
        request = self.small.lease(owner.view, *keys)
        self.model.leases.append(ModelLease(request, owner, tuple(keys), self.model.cap()))

    def _running(self) -> list[ModelLease]:
        return [lease for lease in self.model.leases if not lease.is_ended]

    def _ended(self, lease: ModelLease) -> None:
        lease.is_ended, lease.held = True, []

    @precondition(lambda self: self.model.leases)
    @rule(pick=PICK, is_cancelled=st.booleans())
    def give_back(self, pick: int, is_cancelled: bool) -> None:
        if is_cancelled and self._running():
            self.cancel(pick)
        else:
            self.release(pick)

    def release(self, pick: int) -> None:
        """Of whatever was asked for last, even if it is over; what still waits is cancelled instead, as a session does."""
        lease = chosen(self.model.leases[-6:], pick)
        if lease.is_ended or lease.request.is_finished:
            self._ended(lease)
            self.small.release(lease.request)

    def cancel(self, pick: int) -> None:
        """The client gives it up, or its time is over."""
        lease = chosen(self._running(), pick)
        self._ended(lease)
        self.planner.leases.cancel_lease(lease.request, WaitTimeout("enough"))

    @precondition(lambda self: self.model.open_views())
    @rule(pick=PICK, keys=SOME, is_optim=st.booleans())
    def prefetch(self, pick: int, keys: list[ExpertKey], is_optim: bool) -> None:
        owner = chosen(self.model.open_views(), pick)
        if owner.is_fenced or owner.is_dropped:
            with pytest.raises(ParamStoreError):
                self.small.prefetch(owner.view, *keys)
        else:
            self.prefetches.append(self.small.prefetch(owner.view, *keys, part="optim" if is_optim else "param"))

    # --- workers

    @precondition(lambda self: self.small.under_way)
    @rule(pick=PICK, outcome=st.integers(0, 4))
    def land(self, pick: int, outcome: int) -> None:
        """One transfer in five fails."""
        move = chosen(self.small.under_way, pick)
        error = ParamStoreError("the device failed") if outcome == 4 else None
        if error is not None and move.kind is MoveKind.WRITE:
            assert move.located is not None
            self.quarantined.append(move.located.extent)
        self.small.land(move, error)

    @rule(what=st.sampled_from(["land", "land", "hold", "let go", "write", "write", "evict"]), key=KEY, pick=PICK)
    def work(self, what: str, key: ExpertKey, pick: int) -> None:
        """What the daemon does beside: everything lands, slots are read, written, evicted."""
        if what == "land":
            self.land_everything()
        elif what == "hold" and len(self.holds) < 4:
            self.hold(key)
        elif what == "let go" and self.holds:
            self.let_go(pick)
        elif what == "write":
            self.write(pick)
        elif what == "evict":
            self.evict(key, bool(pick % 2))

    work_more = work

    def land_everything(self) -> None:
        self.small.land_all()

    def hold(self, key: ExpertKey) -> None:
        working = self.namespace.working[key]
        self.holds.append((self.small.hold(key), working))

    def let_go(self, pick: int) -> None:
        """Whoever held it is done; whoever still waits gives up, as the loader does."""
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

    # --- applies

    @rule(keys=st.sets(KEY, min_size=1), pick=PICK, outcome=st.integers(0, 7))
    def train(self, keys: set[ExpertKey], pick: int, outcome: int) -> None:
        """What an apply does next; at times another one is called meanwhile. One update in eight fails."""
        may_call = self.model.writer() is not None and not self.model.is_broken
        if may_call and (not self.claimed or (pick == 0 and len(self.claimed) < 2)):
            self.call_apply(keys)
        elif self.updating and (pick % 2 or not self.claimed):
            self.settle_update(pick, outcome)
        elif self.claimed:
            self.go_on_with_the_apply(min(keys))

    train_twice, train_thrice = train, train

    def call_apply(self, keys: set[ExpertKey]) -> None:
        self.namespace.pending = dict.fromkeys(sorted(keys))  # type: ignore[arg-type]
        self.claimed.append(dict.fromkeys(self.planner.begin_apply(self.namespace)))
        for key in keys:
            self.model.target[key] = Identity(self.model.epoch, self.model.target[key].version + 1)

    def _break(self) -> None:
        self.model.is_broken, self.is_applying, self.claimed = True, False, []
        self.planner.mark_broken(self.namespace, "an apply failed")

    def go_on_with_the_apply(self, key: ExpertKey) -> None:
        """Begins it if need be; then holds one of its records, begins its update if it is held alone."""
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
        if not self._hold_of(key) and working.move in self.small.under_way:
            self.small.land(working.move)
        mine = self._hold_of(key)
        if mine is None:
            return  # it waits for a slot
        if not self.planner.working.may_update(working):
            return
        self.planner.reserve_extents(self.namespace, [key])
        self.holds.remove(mine)
        self.updating.append((working, self.planner.plan_update(self.namespace, working)))
        del self.claimed[0][key]
        if not self.claimed[0]:
            del self.claimed[0]
            self.is_applying = False

    def settle_update(self, pick: int, outcome: int) -> None:
        working, copy = self.updating.pop(pick % len(self.updating))
        is_orphan, error = working.is_orphan, VolumeError("torn") if outcome == 7 else None
        self.planner.settle_update(self.namespace, working, copy, error)
        if is_orphan:
            return
        if error is not None:
            self._break()
        else:
            key = working.key
            self.model.newest[key] = Identity(self.model.epoch, self.model.newest[key].version + 1)

    # --- writes, commits, rollbacks

    def write(self, pick: int) -> None:
        dirty = [working for working in self.namespace.resident.values() if working.state is Working.DIRTY]
        if dirty:
            self.planner.working.begin_write(self.namespace, chosen(dirty, pick), Urgency.WRITE_BACK)

    @rule(pick=PICK)
    def commit(self, pick: int) -> None:
        """What a commit does next. No apply has the turn at its cut."""
        if self.cut is not None:
            self.go_on_with_the_commit(pick)
        elif self.model.writer() and not self.model.is_broken and not self.is_applying and not self._is_updating():
            self.begin_commit()

    def _is_updating(self) -> bool:
        return any(not working.is_orphan for working, _ in self.updating)

    commit_more = commit

    def begin_commit(self) -> None:
        changed = self.model.changed()
        self.cut = self.small.cut()
        self.model.cut = changed
        assert self.cut.keys == changed.keys()

    def go_on_with_the_commit(self, pick: int) -> None:
        """Writes what is to be written, publishes when all is; one in twelve fails."""
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
        self.planner.settle_cut(self.namespace, is_published=False)

    def roll_back(self, pick: int) -> None:
        if pick == 0 or (pick < 4 and self.model.is_broken):
            self._roll_back(chosen(sorted(self.model.steps), pick))

    def _roll_back(self, step: int) -> None:
        self.is_applying, self.claimed = False, []
        self.model.roll_back(step)
        before = list(self.namespace.working.values())
        self.small.rollback(step)
        self.orphans += [working for working in before if working.slot is not None]

    def evict(self, key: ExpertKey, is_param: bool) -> None:
        evict = self.planner.evict_param if is_param else self.planner.evict_working
        evict(self.namespace, key)
        self.planner.leases.pump(self.namespace)

    # --- what holds after every rule

    @invariant()
    def all_is_accounted_for(self) -> None:
        self.drain()
        self.check_identities()
        self.check_slots()
        self.check_leases()
        self.check_queues()
        self.check_cut()
        self.check_extents()
        self.known = {copy for copies in self.namespace.copies.values() for copy in copies}

    def drain(self) -> None:
        """What was decided is carried out; each request is told once that it is finished."""
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
        for lease in self._running():
            assert lease.request.is_finished == (lease.request in self.finished)
        assert all(request.is_finished == (request in self.finished) for request, _ in self.holds)
        self.holds = [hold for hold in self.holds if not hold[0].is_finished or hold[0].error is None]

    def check_identities(self) -> None:
        for key, working in self.namespace.working.items():
            assert (working.identity, working.target) == (self.model.newest[key], self.model.target[key])
        assert self.namespace.ledger.steps() == sorted(self.model.steps)
        for view in self.model.views:
            assert view.view.is_dropped == view.is_dropped
            assert view.view.step == view.step
        assert set(self.namespace.changed) == self.model.changed().keys()

    def check_slots(self) -> None:
        """Each taken slot has one owner, each free slot none; who reads a slot is counted."""
        copies = [copy for found in self.namespace.copies.values() for copy in found]
        assert sorted(copy.slot for copy in copies) == taken(self.small.param_arena)
        self.orphans = [working for working in self.orphans if working.is_orphan and working.slot is not None]
        residents = [*self.namespace.resident.values(), *self.orphans]
        assert sorted(working.slot for working in residents if working.slot is not None) == taken(self.small.working_arena)
        for arena in (self.small.param_arena, self.small.working_arena):
            assert arena.slots.free_count + len(taken(arena)) == arena.slots.count
        assert sum(copy.is_prefetched for copy in copies) == self.namespace.unused_prefetches
        for working in residents:
            readers = sum(held is working and request.is_finished for request, held in self.holds)
            readers += sum(move.source is working for move in self.small.under_way)
            assert working.holders == readers
        for copy in copies:
            is_seen = self.model.is_seen(copy.key, copy.identity)
            assert is_seen or copy.state is Copy.RETIRED
            assert copy.state is not Copy.RETIRED or copy.leases or copy.move is not None

    def check_leases(self) -> None:
        """All or nothing, of what the view sees; and nothing of a leased copy changes."""
        counts: dict[ParamCopy, int] = {}
        for lease in self._running():
            request = lease.request
            if request.error is not None:
                assert request.copies == []
                self._ended(lease)
                continue
            if lease.is_waiting and request.copies:
                self._granted(lease)
            assert [held[0] for held in lease.held] == request.copies
            for copy, identity, slot, place in lease.held:
                assert (copy.identity, copy.slot, copy.place) == (identity, slot, place)
                assert copy in self.namespace.copies[copy.key]
                counts[copy] = counts.get(copy, 0) + 1
            missing = sum(copy.move is not None or copy.is_waiting for copy, *_ in lease.held)
            assert request.missing == missing
            assert request.is_finished == (bool(lease.held) and not missing)
        for copies in self.namespace.copies.values():
            assert all(copy.leases == counts.get(copy, 0) for copy in copies)
        for view in self.model.views:
            assert view.view.leased.keys() == self.model.leased(view)

    def _granted(self, lease: ModelLease) -> None:
        copies = lease.request.copies
        assert tuple(copy.key for copy in copies) == lease.keys
        assert [copy.identity for copy in copies] == [self.model.seen_by(lease.owner, key) for key in lease.keys]
        if not self.known.issuperset(copies):  # it took slots: those who came before it have theirs
            earlier = self.model.leases[: self.model.leases.index(lease)]
            assert not [other for other in earlier if other.is_waiting and not other.request.copies and not other.request.error]
        before = self.model.leased(lease.owner)
        lease.held = [(copy, copy.identity, copy.slot, copy.place) for copy in copies]
        assert before.issuperset(copies) or len(self.model.leased(lease.owner)) <= lease.cap

    def check_queues(self) -> None:
        """In order of coming, and whoever stands first cannot be given what is asked for."""
        waiting = [lease.request for lease in self._running() if lease.is_waiting]
        assert list(self.small.param_arena.waiting) == waiting
        if waiting:
            assert self._room_for(waiting[0]) < 0
        slots = self.small.working_arena
        if slots.waiting:
            assert not slots.slots.free_count
            states = [working for working in self.namespace.resident.values() if working.state is not Working.DIRTY]
            assert all(working.state is not Working.CLEAN or working.holders for working in states)
            head = self.namespace.working[slots.waiting[0].key]
            assert head.state in (Working.ABSENT,)
            is_stuck = not states and not any(working.holders for working in self.namespace.resident.values())
            assert not is_stuck or self.orphans or not self._may_write()

    def _room_for(self, request: LeaseRequest) -> int:
        """Slots that are left once the request has taken what it lacks."""
        owner = next(lease.owner for lease in self.model.leases if lease.request is request)
        found = self._found(owner, request.keys)
        lacking = len({key for key, copy in zip(request.keys, found, strict=True) if copy is None})
        idle = [
            copy for copies in self.namespace.copies.values() for copy in copies
            if copy.state is Copy.READY and not copy.leases and copy not in found
        ]  # fmt: skip
        return self.small.param_arena.slots.free_count + len(idle) - lacking

    def _may_write(self) -> bool:
        is_worth_it = any(working.write_failures < 2 for working in self.namespace.resident.values())
        return is_worth_it and self.small.space.missing_bytes(1, self.namespace.schema.record_bytes, owner="moe") == 0

    def check_cut(self) -> None:
        """What was dirty at the cut is not updated before it is written, and is written as it was."""
        if self.cut is None:
            assert self.namespace.cut is None
            return
        assert self.model.cut is not None
        assert self.cut.unwritten.isdisjoint(self.cut.located)
        assert self.cut.unwritten.union(self.cut.located) == self.model.cut.keys()
        for key in self.cut.unwritten:
            working = self.namespace.working[key]
            assert working.identity == self.model.cut[key]
            assert working.state in (Working.DIRTY, Working.WRITING)
        for key, located in self.cut.located.items():
            assert located.identity == self.model.cut[key]

    def check_extents(self) -> None:
        """No extent has two owners; what is held is rows, uncommitted and reserved extents, the cut's, and those of moves."""
        own = list(self.namespace.ledger.extents())
        for working in self.namespace.working.values():
            own += [working.uncommitted.extent] if working.uncommitted is not None else []
            own += [working.reserved] if working.reserved is not None else []
        assert len(set(own)) == len(own)
        writes = [move.located.extent for move in self.small.under_way if move.located and move.kind is MoveKind.WRITE]
        assert len(set(writes)) == len(writes)
        assert set(writes).isdisjoint(own)
        held = {*own, *writes, *(move.located.extent for move in self.small.under_way if move.located)}
        held |= {located.extent for located in self.cut.located.values()} if self.cut is not None else set()
        (stats,) = self.small.space.stats()
        record_bytes = self.namespace.schema.record_bytes
        assert stats.quarantined_bytes == len(self.quarantined) * record_bytes
        assert stats.size_bytes - stats.free_bytes - stats.quarantined_bytes == len(held - {*self.quarantined}) * record_bytes

    def teardown(self) -> None:
        """Once everybody has gone and everything has landed, nobody waits and only what is resident has a slot."""
        if not hasattr(self, "small"):
            return
        while self.updating:
            self.settle_update(0, 0)
        if self.cut is not None:
            self._fail_commit()
        self._roll_back(max(self.model.steps))  # what an apply was to make is not waited for any more
        for view in self.model.open_views():
            self.close_view(self.model.open_views().index(view))
        self.all_is_accounted_for()
        for _ in range(3):
            while self.holds:
                self.let_go(0)
            self.small.land_all()
            self.all_is_accounted_for()
        assert not self.small.param_arena.waiting
        assert not self.small.working_arena.waiting
        assert not self.small.under_way
        assert all(not copy.leases for copies in self.namespace.copies.values() for copy in copies)
        assert not self.prefetches

    # What most of this is about comes more often.
    acquire_more, land_second, land_third = acquire, land, land


@pytest.mark.slow
def test_whoever_may_hold_something_gets_it_in_turn_and_nobody_else() -> None:
    run_fixed(ResidencyMachine)


@pytest.mark.slow
def test_the_same_in_lives_that_no_run_had_before(capsys: pytest.CaptureFixture[str]) -> None:
    run_new(ResidencyMachine, capsys)
