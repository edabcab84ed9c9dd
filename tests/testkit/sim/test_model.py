"""The reference model accepts what the promise allows, and nothing else."""

from __future__ import annotations

import struct

import pytest

from paramstore_testkit.sim.model import Broken, NamespaceModel, Value, pattern

A, B = (0, 0), (0, 1)


def committed(*steps: int, retained_steps: int = 2) -> NamespaceModel:
    """A namespace whose writer has committed these."""
    model = NamespaceModel("moe", [A, B], retained_steps=retained_steps)
    model.stand_at({}, 1)
    model.initialize(A)
    model.initialize(B)
    for step in steps:
        model.commit_asked(step)
        model.commit_done(step)
    return model


def test_an_apply_makes_the_next_version_by_the_rule_of_the_plain_arithmetic() -> None:
    model = committed()
    model.pending = {A: 2.0}
    before = model.working[A]
    model.claim(0.5, 1.0)
    assert model.working[A] == Value(1, 1, before.master - 1.0, 1.0, 1)
    assert model.working[B] == model.initial(B)
    assert model.pending == {}


def test_a_refused_apply_leaves_all_as_it_was() -> None:
    model = committed()
    model.pending = {A: 2.0}
    before = model.working
    model.unclaim(*model.claim(1.0, 1.0))
    assert (model.working, model.pending) == (before, {A: 2.0})


def test_a_field_is_one_number_everywhere() -> None:
    assert pattern(1.5, 3) == struct.pack("<3f", 1.5, 1.5, 1.5)


def test_after_a_crash_the_newest_step_lies_between_the_last_acknowledged_and_the_last_started() -> None:
    model = committed(1, 2)
    model.commit_asked(4)
    with pytest.raises(Broken):
        model.observe_committed(1, is_resolved=True)
    with pytest.raises(Broken):
        model.observe_committed(3, is_resolved=True)
    model.observe_committed(4, is_resolved=True)
    assert model.committed == 4
    with pytest.raises(Broken):
        model.observe_committed(2, is_resolved=True)


def test_a_step_that_was_not_there_when_all_was_resolved_never_comes() -> None:
    model = committed(1)
    model.commit_asked(2)
    model.observe_committed(1, is_resolved=True)
    with pytest.raises(Broken):
        model.observe_committed(2, is_resolved=False)


def test_the_newest_steps_must_stay_but_for_those_that_commits_under_way_may_drop() -> None:
    model = committed(1, 2, 3)
    assert model.must_have() == {2, 3}
    model.commit_asked(5)
    assert model.must_have() == {3}
    model.check_steps([3, 5])
    with pytest.raises(Broken):
        model.check_steps([5])
    with pytest.raises(Broken):
        model.check_steps([3, 4])


def test_a_commit_under_way_may_drop_a_step_that_the_rollback_behind_it_would_keep() -> None:
    model = committed(1, 2, 3, retained_steps=3)
    model.commit_asked(5)
    model.targets[2] = None
    assert model.must_have() == {2}


def test_a_writer_who_commits_the_prepared_step_by_opening_at_it_may_drop_the_oldest() -> None:
    model = committed(1, 2)
    model.prepare_asked(3)
    model.opening_asked(3)
    model.targets[3] = None
    assert model.must_have() == {2}


def test_a_prepared_step_that_is_finalized_and_opened_at_is_published_once() -> None:
    model = committed(1, 2, 3, retained_steps=3)
    model.prepare_asked(4)
    model.started[4] = model.targets[4] = None
    assert model.must_have() == {2, 3}


def test_what_a_commit_dropped_does_not_come_back_with_a_rollback() -> None:
    model = committed(1, 2, 3)
    model.targets[2] = None
    model.rolled_back(2)
    assert (model.committed, model.must_have()) == (2, {2})


def test_a_commit_that_was_rolled_back_unseen_may_have_dropped_a_step() -> None:
    model = committed(1, 2)
    model.commit_asked(3)
    model.targets[2] = None
    model.observe_committed(2, is_resolved=True)
    assert model.must_have() == {2}


def test_an_opening_under_way_may_go_back_to_its_step_whatever_others_found_meanwhile() -> None:
    model = committed(1, 2)
    model.opening_asked(1)
    model.targets[1] = None
    model.observe_committed(2, is_resolved=True)
    model.observe_committed(1, is_resolved=True)
    assert model.committed == 1


def test_a_snapshot_stays_while_nobody_may_have_dropped_it() -> None:
    model = committed(1, 2, 3)
    model.snapshots.kept[1] = None
    assert 1 in model.must_have()
    with pytest.raises(Broken):
        model.check_snapshots([])
    model.snapshots.unsure[1] = None
    assert 1 not in model.must_have()
    model.check_snapshots([])
    model.check_snapshots([1])


def test_an_identity_that_nobody_made_and_an_epoch_that_does_not_grow_are_found() -> None:
    model = committed(1)
    assert model.known(A, (1, 0)) == model.initial(A)
    with pytest.raises(Broken):
        model.known(A, (1, 1))
    with pytest.raises(Broken):
        model.stand_at(model.working, 1)
