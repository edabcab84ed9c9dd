"""Working copies that are loaded, written, updated or held when a rollback comes: freed by whoever is done with them last."""

from __future__ import annotations

import pytest

from paramstore.core.residency import Working
from paramstore.errors import ParamStoreError, StepFailed, VolumeError
from paramstore_testkit.stores.small_planner import A, in_state
from paramstore_testkit.stores.small_planner import working_desk as desk


@pytest.mark.parametrize("error", [None, VolumeError("broken")])
def test_a_load_under_way_at_a_rollback_is_freed_when_the_worker_returns(error: ParamStoreError | None) -> None:
    small = desk()
    request = small.hold(A)
    (move,) = small.start()
    small.rollback()
    assert small.working_arena.slots.free_count == 1
    assert small.namespace.residency.working[A].state is Working.ABSENT
    assert not small.namespace.residency.resident
    small.land(move, error)
    assert request.error is not None
    assert small.working_arena.slots.free_count == 2
    small.check()


def test_a_prefetch_under_way_at_a_rollback_ends_with_a_typed_error_when_its_load_returns() -> None:
    small = desk()
    prefetch = small.prefetch(small.writer(), A, part="optim")
    (move,) = small.start()
    small.rollback()
    small.land(move)
    assert type(prefetch.error) is StepFailed
    assert prefetch.is_finished
    small.check()


@pytest.mark.parametrize("error", [None, VolumeError("broken")])
def test_a_write_under_way_at_a_rollback_frees_slot_and_extent_when_it_returns(error: ParamStoreError | None) -> None:
    small = desk()
    small.update(A)
    write = small.begin_write(A)
    small.rollback()
    assert small.working_arena.slots.free_count == 1
    small.land(write, error)
    assert small.namespace.residency.working[A].uncommitted is None
    small.check()


@pytest.mark.parametrize("error", [None, VolumeError("broken")])
def test_an_update_under_way_at_a_rollback_is_discarded_when_it_returns(error: ParamStoreError | None) -> None:
    small, working = in_state(Working.UPDATING)
    small.rollback()
    small.settle_update(small.updating[working], error)
    assert small.namespace.residency.working[A] is not working
    assert small.namespace.residency.working[A].identity == (1, 0)
    assert not small.namespace.steps.changed
    small.check()


def test_a_held_copy_is_freed_by_its_last_holder_after_a_rollback() -> None:
    small = desk()
    working = small.held(A)
    assert small.held(A) is working
    small.rollback()
    small.unhold(working)
    assert small.working_arena.slots.free_count == 1
    small.unhold(working)
    assert small.working_arena.slots.free_count == 2
    small.check()


def test_the_slot_of_an_orphan_is_not_taken_for_the_key_s_new_one() -> None:
    small = desk()
    old = small.held(A)
    small.rollback()
    new = small.held(A)
    assert new is not old
    assert new.slot != old.slot
    small.unhold(old)
    assert small.namespace.residency.resident == {A: new}
    assert small.working_arena.slots.free_count == 1
