"""A rollback in the planner: what it resets and frees, who is told, and which leases survive it."""

from __future__ import annotations

import pytest

from paramstore.core.location import Identity
from paramstore.core.residency import Copy, Working
from paramstore.errors import StepFailed
from paramstore_testkit.stores.settling import begin_epoch
from paramstore_testkit.stores.small_planner import A, B, C, D, SmallPlanner
from paramstore_testkit.stores.small_planner import cut_desk as desk


def test_a_rollback_resets_everything_to_the_committed_step() -> None:
    small = desk()
    view = small.writer()
    small.update(A, B)
    small.write(A)
    small.begin_apply(C)
    small.namespace.writing.pending[D] = None  # type: ignore[assignment]
    small.planner.mark_broken(small.namespace, "an apply failed")
    small.rollback()
    namespace = small.namespace
    assert namespace.epoch == 2
    assert (namespace.writing.broken, namespace.writing.pending, namespace.steps.changed) == (None, {}, [])
    assert all(working.state is Working.ABSENT for working in namespace.residency.working.values())
    assert {working.target for working in namespace.residency.working.values()} == {Identity(1, 0)}
    assert not namespace.residency.resident
    small.check()
    request = small.leased(view, A)
    assert request.copies[0].identity == (1, 0)


def test_a_version_made_after_a_rollback_is_never_taken_for_the_one_before() -> None:
    small = desk()
    view = small.writer()
    small.update(A)
    before = small.leased(view, A).copies[0]
    small.rollback()
    small.update(A)
    after = small.leased(view, A).copies[0]
    assert (before.identity, after.identity) == ((1, 1), (2, 1))
    assert before is not after


def test_a_rollback_retires_leased_copies_of_what_is_gone_and_keeps_those_of_the_step() -> None:
    small = desk()
    view = small.writer()
    kept = small.leased(view, B)
    small.update(A)
    gone = small.leased(view, A)
    small.rollback()
    assert gone.copies[0].state is Copy.RETIRED
    assert kept.copies[0].state is Copy.READY
    assert small.lease(view, B).is_finished, "still resident, still seen"
    small.release(gone)
    assert small.copy(A, version=1) is None


def test_a_lease_that_waits_for_what_a_rollback_takes_back_ends_with_the_reason() -> None:
    small = desk()
    view = small.writer()
    small.begin_apply(A)
    request = small.lease(view, A)
    small.rollback()
    assert isinstance(request.error, StepFailed)
    assert "rolled back" in str(request.error)
    small.check()


@pytest.mark.parametrize("is_writer", [False, True])
def test_a_lease_of_committed_bytes_survives_a_rollback_even_if_it_waited_for_a_working_copy(is_writer: bool) -> None:
    small = desk()
    view = small.writer() if is_writer else small.reader()
    small.hold(A)
    (load,) = small.start()
    request = small.lease(view, A)
    assert small.start() == []
    small.rollback()
    small.land(load)
    small.land_all()
    assert request.is_finished
    assert request.error is None
    assert request.copies[0].identity == (1, 0)
    small.release(request)
    small.check()


def test_who_waits_for_a_slot_at_a_rollback_is_told_and_leaves_the_queue() -> None:
    small = desk(working_slots=1)
    held = small.held(A)
    waiting, filling = small.hold(B), small.hold(C, is_fill=True)
    small.rollback()
    for request in (waiting, filling):
        assert isinstance(request.error, StepFailed)
        assert request.is_finished
    assert not small.working_arena.waiting
    small.unhold(held)
    small.check()


def test_a_rollback_frees_the_extents_of_steps_that_are_gone() -> None:
    small = desk()
    extent = small.space.reserve(small.namespace.schema.record_bytes)
    assert extent is not None
    free = small.space.free_bytes
    begin_epoch(small.planner, small.namespace, [extent])
    assert small.space.free_bytes == free + extent.length_bytes


def test_a_rollback_before_the_first_commit_leaves_no_value() -> None:
    small = SmallPlanner(is_committed=False)
    small.hold(A, is_fill=True)
    working = small.namespace.residency.working[A]
    small.planner.working.settle_update(small.namespace, working, Identity(1, 0), None)
    small.rollback()
    assert small.namespace.residency.working[A].identity is None
    small.check()
