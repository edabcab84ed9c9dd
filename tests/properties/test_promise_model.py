"""Handles that open, close, fence each other, borrow and lose their sessions: whoever stays within what it was promised and lent is
never refused, never waits for another's leases, and is never promised anything else."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from paramstore.core.key import ExpertKey
from paramstore.core.residency import Copy
from paramstore.core.schema import Schema
from paramstore.engine.planner.promises import Opening, reserve_of
from paramstore.engine.tables.namespace import LeaseRequest, View, WriterGroup
from paramstore.errors import CapacityError, LeaseError
from paramstore_testkit.stores.small_planner import SCHEMA, SmallPlanner
from paramstore_testkit.trials.state_machines import run_new

EXPERTS = 12
PICK = st.integers(0, 23)
KEYS = st.lists(st.tuples(st.just(0), st.integers(0, EXPERTS - 1)), min_size=1, max_size=4)
VIEWS_MAX = 8
OPAQUE = Schema.param({"w": ((3, 5), "bfloat16")})


class PromiseMachine(RuleBasedStateMachine):
    """`promised` is what each handle was told when it opened. Handles that are gone are in the namespace's views alone."""

    @initialize(slots=st.integers(1, 24), reader_slots=st.none() | st.integers(0, 20), is_trainable=st.booleans())
    def start(self, slots: int, reader_slots: int | None, is_trainable: bool) -> None:
        self.small = SmallPlanner(
            experts=EXPERTS, param_slots=slots, working_slots=EXPERTS, extents=12 * EXPERTS,
            schema=SCHEMA if is_trainable else OPAQUE, reader_slots=reader_slots,
        )  # fmt: skip
        self.slots = slots
        self.promised: dict[View, int] = {}
        self.granted: list[LeaseRequest] = []
        self.waiting: list[LeaseRequest] = []
        """Within their promise, of handles that take leases: each will be granted once what moves has landed."""

    @property
    def views(self) -> list[View]:
        return list(self.small.namespace.views)

    def one(self, pick: int) -> View:
        return self.views[pick % len(self.views)]

    # --- who comes and goes

    @precondition(lambda self: len(self.views) < VIEWS_MAX)
    @rule(is_writer=st.booleans(), world_size=st.sampled_from([1, 1, 2, 3]), least=st.sampled_from([0, 0, 0, 1, 3, 9]))
    def open(self, is_writer: bool, world_size: int, least: int) -> None:
        namespace, views = self.small.namespace, self.small.planner.views
        group = WriterGroup("job", world_size) if is_writer else None
        step = None if is_writer else namespace.steps.committed_step
        before = self.views
        try:
            first = views.open(namespace, Opening(group, least), step=step)
        except CapacityError:
            assert least
            assert self.views == before
            return
        opened = [first]
        if group is not None:
            opened += [views.open_rank(namespace, group, rank) for rank in range(1, world_size)]
        assert all(view.lease_slots >= least for view in opened)
        self.promised.update((view, view.lease_slots) for view in opened)
        if is_writer:  # those before are fenced: what they wait for never comes
            self.waiting = [request for request in self.waiting if not request.view.is_fenced]

    @precondition(lambda self: self.views)
    @rule(pick=PICK)
    def close(self, pick: int) -> None:
        """A handle is closed; or the process is gone of one whose session was."""
        view = self.one(pick)
        self.forget(view)
        self.small.planner.views.close(view)

    @precondition(lambda self: self.views)
    @rule(pick=PICK)
    def lose(self, pick: int) -> None:
        """The session of a handle is gone and its process is not: what waits is cancelled, what it leased stays leased."""
        view = self.one(pick)
        for request in [request for request in view.leases.values() if not request.is_finished]:
            self.small.planner.leases.cancel_lease(request, LeaseError("the session ended"))
        held = [request for request in self.granted if request.view is view]
        self.forget(view)
        self.granted += held
        self.small.planner.views.end_writing(view)

    # --- loans

    @precondition(lambda self: self.live())
    @rule(pick=PICK, count=st.integers(0, 24))
    def borrow(self, pick: int, count: int) -> None:
        view = self.live()[pick % len(self.live())]
        before, left = view.loan.count, self.left()
        lent = self.small.planner.loans.lend(view, count)
        assert lent == view.loan.count == view.loan.may_keep
        assert before <= lent <= max(before, count)
        assert lent == 0 if view.is_writer else lent - before <= max(0, (left + before) // 2)

    borrow_again = borrow

    def left(self) -> int:
        """Slots that nobody has been promised, was lent or keeps, without the reserve."""
        kept = [view for view in self.views if not view.is_fenced]
        held = {copy for view in self.views if view.is_fenced for copy in view.leased}
        return self.slots - reserve_of(self.slots) - sum(map(self.kept_by, kept)) - len(held)

    @staticmethod
    def kept_by(view: View) -> int:
        return max(view.lease_slots + view.loan.count, len(view.leased))

    @precondition(lambda self: self.live())
    @rule(pick=PICK, kept=st.integers(0, 12), is_early=st.booleans())
    def give_back(self, pick: int, kept: int, is_early: bool) -> None:
        """is_early: what was cancelled is released only after the slots were given back."""
        view = self.live()[pick % len(self.live())]
        if any(request.view is view for request in self.waiting):
            return  # it would be refused: it was within what is given back
        if is_early:
            self.small.planner.loans.take_back(view, kept)
        self.release_to(view, view.lease_slots + min(kept, view.loan.count))
        self.small.planner.loans.take_back(view, kept)

    def release_to(self, view: View, most: int) -> None:
        while len(view.leased) > most:
            request = next(request for request in self.granted if request.view is view)
            self.granted.remove(request)
            self.small.release(request)

    @precondition(lambda self: len(self.views) < VIEWS_MAX)
    @rule(is_writer=st.booleans(), least=st.sampled_from([0, 0, 1, 3, 9]), is_willing=st.booleans())
    def open_after_a_recall(self, is_writer: bool, least: int, is_willing: bool) -> None:
        """is_willing: all who are asked give back; else nobody does, and the promise is smaller, or refused."""
        namespace, planner = self.small.namespace, self.small.planner
        opening = Opening(WriterGroup() if is_writer else None, least)
        planner.loans.begin_opening(namespace)
        loans = {view: view.loan.count for view in self.views}
        try:
            owed, asked = planner.views.recall(namespace, opening)
            assert sum(view.loan.count - view.loan.may_keep for view in self.views if not view.is_fenced) <= owed
            assert planner.views.recall(namespace, opening) == (owed, []), "nobody is asked twice"
            if is_willing and not any(request.view in asked for request in self.waiting):
                for view in asked:
                    self.release_to(view, view.lease_slots + view.loan.may_keep)
                    planner.loans.take_back(view, view.loan.may_keep)
                whole, _ = planner.views._promise(namespace, opening)
                assert planner.views.recall(namespace, opening) == (0, [])
                assert planner.views.promise(namespace, opening) == whole
            assert all(planner.loans.lend(view, 24) == view.loan.count <= loans[view] for view in self.live()), "nothing is lent"
            self.open(is_writer, 1, least)
        except CapacityError:
            assert least
        finally:
            planner.loans.end_opening(namespace)
        assert all(view.loan.may_keep == view.loan.count for view in self.views), "what was not given back may be kept"

    def forget(self, view: View) -> None:
        self.granted = [request for request in self.granted if request.view is not view]
        self.waiting = [request for request in self.waiting if request.view is not view]

    # --- leases

    def live(self) -> list[View]:
        """Those that take leases."""
        return [view for view in self.views if not view.is_fenced and not view.is_dropped]

    @precondition(lambda self: self.live())
    @rule(pick=PICK, keys=KEYS)
    def acquire(self, pick: int, keys: list[ExpertKey]) -> None:
        self.ask(self.live()[pick % len(self.live())], keys)

    acquire_more = acquire_again = acquire

    @precondition(lambda self: self.live())
    @rule(picks=st.lists(PICK, min_size=2, max_size=5), keys=KEYS)
    def crowd(self, picks: list[int], keys: list[ExpertKey]) -> None:
        """Loads that have not landed take the slots that there are: who asks for more waits in line."""
        views = [self.live()[pick % len(self.live())] for pick in picks]
        self.small.prefetch(views[0], *[key for key in self.small.keys if key not in keys])
        for view, key in zip(views, keys * len(views), strict=False):
            self.ask(view, [key])

    crowd_again = crowd

    def ask(self, view: View, keys: list[ExpertKey]) -> None:
        """Given, or put in line, if it is within the promise; else refused."""
        waiting = [request for request in self.waiting if request.view is view]
        wanted = {(key, view.locate(key)[0]) for request in waiting for key in request.keys}
        wanted |= {(key, view.locate(key)[0]) for key in keys}
        held = {(copy.key, copy.identity) for copy in view.leased}
        is_within = len(held | wanted) <= view.lease_slots + view.loan.count or wanted <= held
        try:
            request = self.small.lease(view, *keys)
        except (CapacityError, LeaseError):
            if is_within:
                raise
            return
        assert is_within
        (self.granted if request.is_finished else self.waiting).append(request)

    @precondition(lambda self: self.granted)
    @rule(pick=PICK)
    def release(self, pick: int) -> None:
        request = self.granted.pop(pick % len(self.granted))
        self.small.release(request)

    # --- what moves

    @rule(pick=PICK)
    def land_one(self, pick: int) -> None:
        self.small.start()
        if self.small.under_way:
            self.small.land(self.small.under_way[pick % len(self.small.under_way)])
        self.look()

    @rule()
    def land_all(self) -> None:
        self.small.land_all()
        self.look()
        assert not self.waiting, "nothing moves, and it waits for what others lease"

    def look(self) -> None:
        for request in [request for request in self.waiting if request.is_finished]:
            self.waiting.remove(request)
            assert request.error is None
            self.granted.append(request)

    # --- versions: only where nobody waits, whose leases would then be of others than it asked for

    @precondition(lambda self: not self.waiting and self.small.namespace.writing.writer and self.small.namespace.is_trainable())
    @rule(keys=st.sets(st.tuples(st.just(0), st.integers(0, EXPERTS - 1)), min_size=1, max_size=4))
    def update(self, keys: set[ExpertKey]) -> None:
        self.land_all()
        self.small.update(*keys)

    @precondition(lambda self: not self.waiting and self.small.namespace.steps.changed)
    @rule()
    def commit(self) -> None:
        self.land_all()
        self.small.commit((self.small.namespace.steps.committed_step or 0) + 1)

    @precondition(lambda self: self.views)
    @rule(pick=PICK)
    def refresh(self, pick: int) -> None:
        view, step = self.one(pick), self.small.namespace.steps.committed_step
        if not view.is_writer and step is not None and not any(request.view is view for request in self.waiting):
            self.small.planner.views.move(view, step)

    # --- what holds

    @invariant()
    def promises_are_kept(self) -> None:
        if not hasattr(self, "small"):
            return
        usable = self.slots - reserve_of(self.slots)
        assert all(view.lease_slots == self.promised[view] for view in self.views)
        kept = [view for view in self.views if not view.is_fenced]
        held = {copy for view in self.views if view.is_fenced for copy in view.leased}
        assert sum(map(self.kept_by, kept)) + len(held) <= usable
        assert all(len(view.leased) <= view.lease_slots + view.loan.count for view in kept)
        assert all(copy.state is not Copy.ABSENT for view in self.views for copy in view.leased)


@pytest.mark.slow
def test_who_stays_within_its_promise_is_never_refused_whatever_others_do(run_fixed: Callable[..., None]) -> None:
    run_fixed(PromiseMachine)


@pytest.mark.slow
def test_the_same_in_lives_that_no_run_had_before(capsys: pytest.CaptureFixture[str]) -> None:
    run_new(PromiseMachine, capsys)
