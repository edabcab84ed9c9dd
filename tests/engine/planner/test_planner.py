"""What spans the kinds of copies: an apply's claim, the cut and what it publishes, eviction on request."""

from __future__ import annotations

import pytest

from paramstore.core.residency import Copy, Working
from paramstore.engine.planner.working_copies import may_update
from paramstore.engine.tables.requests import Urgency
from paramstore.errors import CapacityError, StepFailed
from paramstore_testkit.stores.settling import settle_cut
from paramstore_testkit.stores.small_planner import A, B, C, SmallPlanner, changed_keys
from paramstore_testkit.stores.small_planner import cut_desk as desk

# --- an apply's claim


def test_an_apply_takes_what_is_pending_and_moves_the_working_view_at_once() -> None:
    small = desk()
    view = small.writer()
    small.release(small.leased(view, A))
    small.begin_apply(A, B)
    assert not small.namespace.writing.pending
    assert [small.namespace.residency.working[key].target for key in (A, B, C)] == [(1, 1), (1, 1), (1, 0)]
    assert small.namespace.residency.working[A].identity == (1, 0), "the bytes do not exist yet"
    assert small.namespace.residency.working[A].current is None
    small.begin_apply(A)
    assert small.namespace.residency.working[A].target == (1, 2)


def test_extents_are_reserved_for_all_records_or_for_none() -> None:
    small = desk(extents=6)
    before = small.picture()
    with pytest.raises(CapacityError, match=r"needs 3 more extents of 28672 bytes; 28672 bytes are missing.*add a volume"):
        small.planner.reserve_extents(small.namespace, [A, B, C])
    assert small.picture() == before
    small.planner.reserve_extents(small.namespace, [A, B])
    assert small.space.free_bytes == 0
    small.planner.reserve_extents(small.namespace, [A, B])
    small.check()


def test_a_record_with_an_uncommitted_extent_has_its_share_of_the_volume_already() -> None:
    small = desk()
    small.update(A)
    small.write(A)
    free = small.space.free_bytes
    small.planner.reserve_extents(small.namespace, [A])
    assert small.space.free_bytes == free
    assert small.namespace.residency.working[A].reserved is None


def test_what_goes_to_a_cut_is_no_share_of_the_next_apply() -> None:
    small = desk()
    small.update(A, B, C)
    small.write(A)
    small.write(C)
    small.update(C)
    small.cut()
    small.planner.reserve_extents(small.namespace, [A, B, C])
    assert small.namespace.residency.working[A].reserved is not None, "its extent is the cut's"
    assert small.namespace.residency.working[B].reserved is not None, "its next write is the cut's"
    assert small.namespace.residency.working[C].reserved is not None, "its next write is the cut's, and frees the extent before it"


def test_an_update_makes_the_param_copy_in_the_same_pass_where_a_slot_is_free() -> None:
    small = desk()
    small.writer()
    small.begin_apply(A)
    update = small.begin_update(A)
    working, copy = update.working, update.copy
    assert copy is not None
    assert (copy.identity, copy.state) == ((1, 1), Copy.LOADING)
    assert working.current is copy
    small.settle_update(update)
    assert copy.state is Copy.READY
    assert changed_keys(small.namespace) == [A]


def test_an_update_without_a_param_slot_makes_no_copy_and_the_next_load_materialises_it() -> None:
    small = desk(param_slots=1)
    small.param_arena.planned_slots = 4
    small.leased(small.reader(), B)
    view = small.writer()
    small.begin_apply(A)
    update = small.begin_update(A)
    working, copy = update.working, update.copy
    assert copy is None
    small.settle_update(update)
    assert working.state is Working.DIRTY
    assert not small.lease(view, A).is_finished, "it waits for the slot"


def test_an_update_spares_prefetches_that_nobody_used_yet() -> None:
    small = desk(param_slots=1)
    view = small.writer()
    small.prefetch(view, B)
    small.land_all()
    small.begin_apply(A)
    copy = small.begin_update(A).copy
    assert copy is None
    assert small.copy(B) is not None


def test_an_older_apply_makes_no_copy_that_a_later_one_has_superseded() -> None:
    small = desk()
    small.begin_apply(A)
    small.begin_apply(A)
    update = small.begin_update(A)
    copy = update.copy
    assert copy is None, "nobody will see version 1"
    small.settle_update(update)
    copy = small.begin_update(A).copy
    assert copy is not None
    assert copy.identity == (1, 2)


# --- a broken namespace


def test_breaking_a_namespace_ends_only_the_leases_that_wait_for_bytes_never_made() -> None:
    small = desk()
    view = small.writer()
    small.begin_apply(A)
    unmade = small.lease(view, A)
    small.prefetch(view, B, part="optim")
    (load,) = small.start()
    loading = small.lease(view, B)
    small.planner.mark_broken(small.namespace, "an apply failed")
    assert isinstance(unmade.error, StepFailed)
    assert loading.error is None
    small.land(load)
    small.land_all()
    assert loading.is_finished
    assert loading.error is None


def test_a_broken_namespace_keeps_its_first_reason() -> None:
    small = desk()
    small.planner.mark_broken(small.namespace, "first")
    small.planner.mark_broken(small.namespace, "second")
    assert small.namespace.writing.broken == "first"


# --- the cut


def test_a_cut_fixes_what_changed_and_what_of_it_must_still_be_written() -> None:
    small = desk()
    small.update(A, B)
    small.write(A)
    cut = small.cut()
    assert cut.sequence == 2
    assert [working.key for working in cut.records] == [A, B]
    assert [working.key for working in cut.awaited()] == [B]
    assert cut.located() == {A: small.namespace.residency.working[A].uncommitted}
    assert not small.namespace.steps.changed
    assert (cut.unwritten, cut.passed) == (1, 1)


def test_a_record_dirty_at_the_cut_is_not_updated_before_its_write_has_landed() -> None:
    small = desk()
    small.update(A)
    cut = small.cut()
    working = small.held(A)
    assert not may_update(small.namespace, working)
    write = small.begin_write(A, urgency=Urgency.DEMAND)
    assert not may_update(small.namespace, working)
    small.land(write)
    assert may_update(small.namespace, working)
    assert not cut.unwritten
    assert cut.located()[A] == working.uncommitted


def test_a_write_that_lands_for_the_cut_frees_the_uncommitted_extent_before_it() -> None:
    small = desk()
    small.update(A)
    small.write(A)
    small.update(A)
    cut = small.cut()
    free = small.space.free_bytes
    small.begin_write(A)
    small.land_all()
    assert small.space.free_bytes == free
    assert cut.located()[A].identity == (1, 2)


def test_a_published_cut_gives_its_extents_to_the_ledger_and_keeps_what_came_after_uncommitted() -> None:
    small = desk()
    small.update(A, B)
    small.write(A)
    small.write(B)
    cut = small.cut()
    small.update(A)
    small.write(A)
    fixed = cut.located()[A]
    small.publish(cut, 1)
    ledger, working = small.namespace.steps.ledger, small.namespace.residency.working
    assert ledger.at(A, 1) == fixed
    assert working[B].uncommitted is None
    assert working[A].uncommitted is not None
    assert working[A].uncommitted.identity == (1, 2)
    assert changed_keys(small.namespace) == [A]
    small.check()


def test_a_failed_cut_leaves_the_newest_records_uncommitted_and_frees_the_others() -> None:
    small = desk()
    small.update(A, B)
    small.write(A)
    small.write(B)
    small.cut()
    small.update(A)
    small.write(A)
    settle_cut(small.planner, small.namespace, is_published=False)
    working = small.namespace.residency.working
    assert working[A].uncommitted is not None
    assert working[B].uncommitted is not None
    assert (working[A].uncommitted.identity, working[B].uncommitted.identity) == ((1, 2), (1, 1))
    assert changed_keys(small.namespace) == [A, B]
    assert small.namespace.steps.committed_step == 0
    small.check()
    small.commit(1)
    assert {key for key in small.keys if small.namespace.steps.ledger.records_of(key)[1] == 1} == {A, B}
    small.check()


def test_a_failed_cut_leaves_unwritten_records_free_to_be_updated() -> None:
    small = desk()
    small.update(A)
    small.cut()
    settle_cut(small.planner, small.namespace, is_published=False)
    assert may_update(small.namespace, small.held(A))
    assert changed_keys(small.namespace) == [A]


def test_whoever_waits_for_the_cut_is_woken_when_it_is_over() -> None:
    small = desk()
    waiter = object()
    small.cut()
    small.namespace.steps.cut_waiters.append(waiter)
    settle_cut(small.planner, small.namespace, is_published=False)
    assert small.planner.outbox.woken == [waiter]
    assert not small.namespace.steps.cut_waiters


def test_sequences_are_never_used_twice() -> None:
    small = desk()
    first = small.cut()
    settle_cut(small.planner, small.namespace, is_published=False)
    assert small.cut().sequence == first.sequence + 1


def test_readers_of_too_many_old_steps_lose_the_oldest_before_a_commit() -> None:
    small = desk()
    readers = []
    for step in (1, 2, 3):
        readers.append(small.reader(step - 1))
        small.update(A)
        small.commit(step)
    assert [reader.is_dropped for reader in readers] == [False, False, False], "steps 2 and 3 are retained, 0 and 1 held"
    small.update(A)
    small.commit(4)
    assert [reader.is_dropped for reader in readers] == [True, False, False], "1 and 2 are held now"
    assert small.namespace.steps.ledger.steps() == [1, 2, 3, 4]
    small.check()


# --- eviction on request


def test_eviction_on_request_tells_whether_the_key_is_gone() -> None:
    small = desk()
    view = small.reader()
    assert small.planner.evict_param(small.namespace, A)
    held = small.leased(view, A)
    assert not small.planner.evict_param(small.namespace, A)
    small.release(held)
    assert small.planner.evict_param(small.namespace, A)
    assert small.copy(A) is None


def test_slots_that_a_failed_apply_gives_back_go_to_those_who_wait() -> None:
    small = SmallPlanner(param_slots=3, working_slots=2)
    writer, reader = small.writer(), small.reader()
    first, second, third = small.keys[:3]
    small.leased(reader, second)
    small.begin_apply(first, third)
    lost = small.lease(writer, first)
    small.leased(small.reader(), small.keys[3])
    waiting = small.lease(small.reader(), third)
    assert list(small.param_arena.waiting) == [waiting]
    small.planner.mark_broken(small.namespace, "an apply failed")
    assert isinstance(lost.error, StepFailed)
    small.land_all()
    assert waiting.is_finished


def test_a_slot_that_a_later_apply_frees_reaches_who_waits_for_it() -> None:
    small = SmallPlanner(param_slots=1, working_slots=1)
    writer, reader = small.writer(), small.reader()
    small.begin_apply((0, 0))
    prefetch = small.prefetch(writer, (0, 0))  # takes the slot, and waits for what the apply will make
    request = small.lease(reader, (0, 1))
    small.begin_apply((0, 0))  # nobody wants those bytes any more
    assert prefetch.is_finished
    assert not small.param_arena.waiting
    small.land_all()
    assert request.is_finished
