"""The planner against a model of who may hold what: every order of leases, loads, updates, writes, cuts and rollbacks."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from paramstore.core.key import ExpertKey
from paramstore.engine.tables.moves import MoveKind
from paramstore.errors import ParamStoreError
from paramstore.policy.decayed_lfu import DecayedLfu
from paramstore.policy.lru import Lru
from paramstore_testkit.stores.small_planner import SmallPlanner
from paramstore_testkit.trials.residency_acts import ResidencyActs
from paramstore_testkit.trials.residency_daemon import chosen
from paramstore_testkit.trials.state_machines import run_new

EXPERTS = 8
KEYS = [(0, expert) for expert in range(EXPERTS)]
PICK = st.integers(0, 11)
KEY = st.sampled_from(KEYS)
SOME = st.lists(KEY, min_size=1, max_size=2) | st.lists(KEY, min_size=1, max_size=4)
VIEW_ACTS = ["open reader", "open reader", "open writer", "open writer", "close", "refresh", "end writing", "protect", "roll back"]


def lose_heat(slots: int) -> DecayedLfu:
    return DecayedLfu(threshold=1.0, beta=0.5, decay_steps=2, capacity=slots)


class ResidencyMachine(RuleBasedStateMachine, ResidencyActs):
    """Which call comes next. What each does and expects stands in `ResidencyActs`, what holds after it in `ResidencyChecks`."""

    @initialize(
        param_slots=st.integers(1, 9), working_slots=st.integers(1, 4), spare=st.integers(9, 18), is_lru=st.booleans(),
        dirty=st.lists(KEY, max_size=4, unique=True),
    )
    def start(self, param_slots: int, working_slots: int, spare: int, is_lru: bool, dirty: list[ExpertKey]) -> None:
        policy = Lru if is_lru else lambda: lose_heat(param_slots)
        small = SmallPlanner(
            experts=EXPERTS, param_slots=param_slots, working_slots=working_slots, extents=EXPERTS + spare, policy=policy
        )
        self.begin(small, dirty=dirty)

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

    # --- leases and prefetch

    @precondition(lambda self: self.model.views)
    @rule(pick=PICK, keys=SOME)
    def acquire(self, pick: int, keys: list[ExpertKey]) -> None:
        self.ask(chosen(self.model.views[-4:], pick), keys)

    @precondition(lambda self: self.model.open_views())
    @rule(pick=PICK, spare=st.integers(1, 2))
    def wait_in_a_crowd(self, pick: int, spare: int) -> None:
        views = [view for view in self.model.open_views() if not view.is_fenced and not view.is_dropped]
        if views and self.small.param_arena.slots.count > spare + 1 and not self.small.param_arena.waiting:
            self.crowd(chosen(views, pick), chosen(views, pick + 1), spare=spare)

    @precondition(lambda self: self.model.leases)
    @rule(pick=PICK, is_cancelled=st.booleans())
    def give_back(self, pick: int, is_cancelled: bool) -> None:
        if is_cancelled and self.running():
            self.cancel(pick)
        else:
            self.release(pick)

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
            self.small.land_all()
        elif what == "hold" and len(self.holds) < 4:
            self.daemon.hold(key)
        elif what == "let go" and self.holds:
            self.daemon.let_go(pick)
        elif what == "write":
            self.daemon.write(pick)
        elif what == "evict":
            self.daemon.evict(key, bool(pick % 2))

    work_more = work

    # --- applies and commits

    @rule(keys=st.sets(KEY, min_size=1), pick=PICK, outcome=st.integers(0, 7))
    def train(self, keys: set[ExpertKey], pick: int, outcome: int) -> None:
        """What an apply does next; at times another one is called meanwhile. One update in eight fails."""
        may_call = self.model.writer() is not None and not self.model.is_broken
        if may_call and (not self.daemon.claimed or (pick == 0 and len(self.daemon.claimed) < 2)):
            self.daemon.call_apply(keys)
        elif self.daemon.updating and (pick % 2 or not self.daemon.claimed):
            self.daemon.settle_update(pick, outcome)
        elif self.daemon.claimed:
            self.daemon.go_on_with_the_apply(min(keys))

    train_twice, train_thrice = train, train

    @rule(pick=PICK)
    def commit(self, pick: int) -> None:
        """What a commit does next. No apply has the turn at its cut."""
        if self.cut is not None:
            self.daemon.go_on_with_the_commit(pick)
        elif self.model.writer() and not self.model.is_broken and not self.daemon.is_applying and not self.daemon.is_updating():
            self.daemon.begin_commit()

    commit_more = commit

    # --- what holds after every rule

    @invariant()
    def all_is_accounted_for(self) -> None:
        self.check_all()

    def teardown(self) -> None:
        if hasattr(self, "small"):
            self.end()

    # What most of this is about comes more often.
    acquire_more, land_second, land_third = acquire, land, land


@pytest.mark.slow
def test_whoever_may_hold_something_gets_it_in_turn_and_nobody_else(run_fixed: Callable[..., None]) -> None:
    run_fixed(ResidencyMachine)


@pytest.mark.slow
def test_the_same_in_lives_that_no_run_had_before(capsys: pytest.CaptureFixture[str]) -> None:
    run_new(ResidencyMachine, capsys)
