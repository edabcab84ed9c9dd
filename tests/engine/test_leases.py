"""Views, leases, caps, queues and prefetch: all or nothing, first come first served, and refusals that change nothing."""

from __future__ import annotations

import pytest

from paramstore.core.residency import Copy, Working
from paramstore.engine.requests import Urgency
from paramstore.errors import CapacityError, LeaseError, StepDropped, StepFailed, UnknownKey, VolumeError, WriterFenced
from paramstore.testing.small_planner import SmallPlanner

A, B, C, D = ((0, expert) for expert in range(4))


def desk(**sizes: int) -> SmallPlanner:
    """Four experts and slots for all of them beside the reserve."""
    return SmallPlanner(**{"param_slots": 5, "working_slots": 2, **sizes})


# --- all or nothing


def test_a_lease_takes_all_its_slots_in_one_plan_and_is_finished_when_the_last_copy_lands() -> None:
    small = desk()
    request = small.lease(small.reader(), A, B)
    first, second = small.start()
    assert small.param_arena.slots.free_count == 3
    small.land(first)
    assert not request.is_finished
    small.land(second)
    assert request.is_finished
    assert [copy.key for copy in request.copies] == [A, B]
    assert small.planner.outbox.finished == [request]


def test_a_lease_of_resident_keys_is_finished_at_once() -> None:
    small = desk()
    view = small.reader()
    small.release(small.leased(view, A, B))
    request = small.lease(view, B, A)
    assert request.is_finished
    assert small.start() == []
    assert (small.namespace.stats.param.hits, small.namespace.stats.param.misses) == (2, 2)


def test_a_lease_that_waits_holds_no_slot() -> None:
    small = desk(param_slots=3)
    first, second = small.reader(), small.reader()
    small.namespace.param_arena.planned_slots = 8  # type: ignore[union-attr]  # caps above what there is
    held = small.leased(first, A, B)
    waiting = small.lease(second, C, D)
    assert not waiting.is_finished
    assert waiting.copies == []
    assert not second.leased
    assert small.param_arena.slots.free_count == 1
    small.release(held)
    small.land_all()
    assert waiting.is_finished
    assert [copy.key for copy in waiting.copies] == [C, D]


def test_a_key_asked_for_twice_is_loaded_once_and_released_whole() -> None:
    small = desk()
    view = small.reader()
    request = small.lease(view, A, A)
    assert len(small.start()) == 1
    small.land_all()
    assert request.is_finished
    assert request.copies[0] is request.copies[1]
    small.release(request)
    assert request.copies == []
    assert not view.leased
    assert small.planner.evict_param(small.namespace, A)


def test_two_leases_of_one_key_keep_the_copy_until_both_are_released() -> None:
    small = desk()
    one, other = small.reader(), small.reader()
    first, second = small.leased(one, A), small.leased(other, A)
    assert first.copies == second.copies
    small.release(first)
    assert not small.planner.evict_param(small.namespace, A)
    small.release(second)
    assert small.planner.evict_param(small.namespace, A)


def test_releasing_an_unknown_lease_is_ignored() -> None:
    small = desk()
    view = small.reader()
    before = small.picture()
    small.planner.leases.release(view, 77)
    assert small.picture() == before


# --- first come, first served


def crowded() -> tuple[SmallPlanner, object, object]:
    """Slots for three, A and B leased by one view, C by nobody; a second view waits for two."""
    small = desk(param_slots=3)
    small.param_arena.planned_slots = 16
    one, other = small.reader(), small.reader()
    held = small.leased(one, A, B)
    waiting = small.lease(other, C, D)
    assert not waiting.is_finished
    return small, held, waiting


def test_a_later_request_that_needs_a_slot_does_not_overtake_one_that_waits() -> None:
    small, held, waiting = crowded()
    later = small.lease(small.reader(), C)
    assert not later.is_finished
    assert small.start() == []
    assert list(small.param_arena.waiting) == [waiting, later]
    small.release(held)  # type: ignore[arg-type]
    assert [move.subject.key for move in small.start()] == [C, D]
    small.land_all()
    assert waiting.is_finished  # type: ignore[attr-defined]
    assert later.is_finished
    assert not small.param_arena.waiting


def test_pure_hits_pass_those_who_wait_for_slots() -> None:
    small, _, _ = crowded()
    hit = small.lease(small.reader(), A)
    assert hit.is_finished


def test_a_waiting_request_that_is_cancelled_lets_the_next_one_go_on() -> None:
    small, _, waiting = crowded()
    later = small.lease(small.reader(), C)
    small.planner.leases.cancel_lease(waiting, LeaseError("given up"))  # type: ignore[arg-type]
    small.land_all()
    assert later.is_finished
    assert isinstance(waiting.error, LeaseError)  # type: ignore[attr-defined]
    assert waiting.is_finished  # type: ignore[attr-defined]
    assert waiting.copies == []  # type: ignore[attr-defined]


def test_a_waiting_request_whose_view_loses_its_step_ends_with_the_reason() -> None:
    small, held, waiting = crowded()
    waiting.view.is_dropped = True  # type: ignore[attr-defined]
    later = small.lease(small.reader(), C)
    small.release(held)  # type: ignore[arg-type]
    small.land_all()
    assert isinstance(waiting.error, StepDropped)  # type: ignore[attr-defined]
    assert waiting.lease_id not in waiting.view.leases  # type: ignore[attr-defined]
    assert later.is_finished
    assert later.error is None


# --- caps


def test_the_cap_is_an_equal_share_of_the_arena_less_a_reserve() -> None:
    small = SmallPlanner(param_slots=33)
    leases, namespace = small.planner.leases, small.namespace
    small.reader()
    assert leases.lease_cap(namespace) == 31  # a sixteenth is the reserve
    views = [small.reader() for _ in range(2)]
    assert leases.lease_cap(namespace) == 10
    assert leases.lease_cap(namespace) * 3 < 33
    for view in views:
        leases.close_view(view)
    assert leases.lease_cap(namespace) == 31


@pytest.mark.parametrize("views", [1, 2, 3, 4])
def test_all_caps_together_leave_a_slot_to_move_in(views: int) -> None:
    small = desk(param_slots=5)
    for _ in range(views):
        small.reader()
    assert views * small.planner.leases.lease_cap(small.namespace) < 5


def test_more_keys_than_the_cap_are_a_capacity_error_and_nothing_changes() -> None:
    small = desk(param_slots=3)
    view = small.reader()
    small.release(small.leased(view, A))
    before = small.picture()
    with pytest.raises(CapacityError, match="3 keys of 'moe' in one lease; this session may lease 2"):
        small.lease(view, B, C, D)
    assert small.picture() == before


def test_the_refusal_says_how_many_share_the_slots_and_when_more_memory_would_help() -> None:
    small = desk(param_slots=6)  # of four keys: two versions of each would take 8
    view = small.reader()
    reason = r"\(lease_slots\): 1 session has .* share its 6 slots .*: ask in parts, or raise host_budget"
    with pytest.raises(CapacityError, match=reason):
        small.lease(view, A, B, C, D, A, B)
    other = small.reader()
    small.param_arena.planned_slots = 8
    with pytest.raises(CapacityError, match=r"may lease 3 .* 2 sessions have .*: ask in parts, or close what need not be open$"):
        small.lease(other, A, B, C, D)


def test_what_only_the_callers_own_leases_block_is_a_lease_error_and_nothing_changes() -> None:
    small = desk(param_slots=4)
    view = small.reader()
    held = small.leased(view, A, B)
    before = small.picture()
    with pytest.raises(LeaseError, match="has or waits for 2 of 3 slots; release some first"):
        small.lease(view, C, D)
    assert small.picture() == before
    assert small.lease(view, A, C)  # one it has already, one more
    small.release(held)


def test_what_a_view_waits_for_counts_against_its_cap_too() -> None:
    small = desk(param_slots=5, experts=8)
    small.param_arena.planned_slots = 7
    one, other = small.reader(), small.reader()
    small.leased(one, A, B, C)
    waiting = small.lease(other, (0, 4), (0, 5), (0, 6))
    assert not waiting.is_finished
    before = small.picture()
    with pytest.raises(LeaseError, match="has or waits for 3 of 3 slots; release some first"):
        small.lease(other, D)
    assert small.picture() == before


def test_a_view_above_a_lowered_cap_keeps_its_leases_and_gets_no_new_ones() -> None:
    small = desk(param_slots=5)
    view = small.reader()
    held = small.leased(view, A, B, C)
    small.reader()
    with pytest.raises(LeaseError):
        small.lease(view, D)
    assert len(held.copies) == 3
    assert small.lease(view, A).is_finished


@pytest.mark.parametrize("keys", [[(0, 99)], [A, (7, 0)], [A, B, (0, -1)]])
def test_an_unknown_key_is_refused_and_nothing_changes(keys: list[tuple[int, int]]) -> None:
    small = desk()
    view = small.reader()
    before = small.picture()
    with pytest.raises(UnknownKey, match="not in namespace 'moe'"):
        small.lease(view, *keys)
    with pytest.raises(UnknownKey, match="not in namespace 'moe'"):
        small.prefetch(view, *keys)
    assert small.picture() == before


# --- what a view may do


def test_a_fenced_writer_leases_nothing_and_what_it_leased_stays() -> None:
    small = desk()
    old = small.writer()
    held = small.leased(old, A)
    small.writer()
    with pytest.raises(WriterFenced, match="another writer opened namespace 'moe'"):
        small.lease(old, B)
    assert held.copies[0].leases == 1


def test_a_closed_view_gives_everything_back_and_leases_nothing() -> None:
    small = desk(param_slots=3)
    small.param_arena.planned_slots = 16
    view, other = small.reader(), small.reader()
    small.leased(view, A, B)
    waiting = small.lease(view, C, D)
    small.planner.leases.close_view(view)
    assert isinstance(waiting.error, LeaseError)
    assert not view.leased
    assert not view.leases
    assert not small.param_arena.waiting
    with pytest.raises(LeaseError, match="was closed"):
        small.lease(view, A)
    small.leased(other, C, D)


def test_closing_the_writer_drops_its_pending_gradients() -> None:
    small = desk()
    view = small.writer()
    small.namespace.pending[A] = None  # type: ignore[assignment]
    small.planner.leases.close_view(view)
    assert small.namespace.writer is None
    assert not small.namespace.pending


def test_a_writer_cannot_lease_a_key_that_has_no_value_yet() -> None:
    small = SmallPlanner(is_committed=False)
    view = small.writer()
    before = small.picture()
    with pytest.raises(StepFailed, match="has no value yet: call initialize"):
        small.lease(view, A)
    assert small.prefetch(view, A).skipped == 1
    small.planner.outbox.finished.clear()
    assert small.picture() == before


def test_bytes_that_a_failed_apply_will_never_make_are_refused_at_once() -> None:
    small = desk()
    view = small.writer()
    small.begin_apply(A)
    small.planner.mark_broken(small.namespace, "an apply failed: disk")
    before = small.picture()
    with pytest.raises(StepFailed, match=r"an apply failed: disk; rollback\(\) is the way on"):
        small.lease(view, A)
    assert small.picture() == before
    small.leased(view, B)


def test_a_prefetch_of_bytes_that_a_failed_apply_will_never_make_is_skipped() -> None:
    small = desk()
    view = small.writer()
    small.begin_apply(A)
    small.planner.mark_broken(small.namespace, "an apply failed")
    request = small.prefetch(view, A)
    assert request.is_finished
    assert request.skipped == 1
    assert small.copy(A, version=1) is None


def test_a_reader_of_a_step_without_the_record_is_told_to_refresh() -> None:
    small = desk()
    view = small.reader(step=-5)
    with pytest.raises(StepDropped, match="refresh"):
        small.lease(view, A)


# --- joining loads


def test_a_request_for_a_copy_that_loads_joins_the_load() -> None:
    small = desk()
    first = small.lease(small.reader(), A)
    second = small.lease(small.reader(), A, B)
    moves = small.start()
    assert [move.subject.key for move in moves] == [A, B]
    small.land(moves[0])
    assert first.is_finished
    assert not second.is_finished
    small.land(moves[1])
    assert second.is_finished


def test_a_lease_that_joins_a_prefetch_promotes_it_to_demand() -> None:
    small = desk()
    view = small.reader()
    prefetch = small.prefetch(view, A)
    (move,) = small.start()
    assert move.urgency is Urgency.PREFETCH
    lease = small.lease(view, A)
    assert small.planner.outbox.promoted == [move]
    assert small.namespace.unused_prefetches == 0
    small.land(move)
    assert lease.is_finished
    assert (prefetch.is_finished, prefetch.loaded) == (True, 1)


def test_a_load_that_fails_ends_every_lease_that_waits_for_it_and_no_other() -> None:
    small = desk()
    one, other = small.reader(), small.reader()
    both, single = small.lease(one, A, B), small.lease(other, A)
    good = small.lease(other, B)
    move_a, move_b = small.start()
    small.land(move_a, VolumeError("broken"))
    for request in (both, single):
        assert isinstance(request.error, VolumeError)
        assert request.is_finished
        assert request.copies == []
    assert not one.leased
    small.land(move_b)
    assert good.is_finished
    assert good.error is None
    assert small.copy(A) is None
    small.release(good)
    small.check()


def test_a_cancelled_lease_leaves_its_load_to_land_for_others() -> None:
    small = desk()
    request = small.lease(small.reader(), A)
    (move,) = small.start()
    small.planner.leases.cancel_lease(request, LeaseError("given up"))
    small.land(move)
    copy = small.copy(A)
    assert copy is not None
    assert (copy.state, copy.leases) == (Copy.READY, 0)


def test_a_lease_of_a_copy_that_retired_before_it_landed_waits_for_its_bytes() -> None:
    small = desk()
    writer = small.writer()
    small.prefetch(writer, A)
    (move,) = small.start()
    small.begin_apply(A)
    reader = small.reader()  # it sees what the writer has just left
    request = small.lease(reader, A)
    assert not request.is_finished
    small.land(move)
    assert request.is_finished
    assert request.copies[0].identity == (1, 0)
    small.release(request)
    assert small.copy(A) is None


def test_a_lease_of_a_copy_that_retired_while_it_waited_for_its_source_waits_with_it() -> None:
    small = desk()
    small.hold(A)
    (load,) = small.start()
    first = small.lease(small.writer(), A)
    small.begin_apply(A)
    second = small.lease(small.reader(), A)
    assert not second.is_finished
    small.land(load)
    small.land_all()
    assert first.is_finished
    assert second.is_finished
    assert first.copies == second.copies


def test_a_retired_copy_that_has_landed_is_leased_at_once() -> None:
    small = desk()
    writer = small.writer()
    held = small.leased(writer, A)
    small.begin_apply(A)
    request = small.lease(small.reader(), A)
    assert request.is_finished
    small.release(held)
    assert small.copy(A) is request.copies[0]


# --- prefetch


def test_a_prefetch_takes_what_fits_now_and_says_how_much() -> None:
    small = desk(param_slots=3)
    view = small.reader()
    small.leased(view, A)
    request = small.prefetch(view, A, B, C, D)
    assert [move.subject.key for move in small.start()] == [B, C]
    small.land_all()
    image_bytes = small.namespace.schema.part("param").image_bytes
    assert (request.loaded, request.resident, request.skipped) == (2, 1, 1)
    assert request.bytes_loaded == 2 * image_bytes
    assert request.is_finished


def test_a_prefetch_that_starts_nothing_is_finished_at_once() -> None:
    small = desk()
    view = small.reader()
    small.release(small.leased(view, A))
    request = small.prefetch(view, A)
    assert request.is_finished
    assert small.planner.outbox.finished[-1] is request


def test_a_prefetch_never_evicts_a_prefetch_that_nobody_used_yet() -> None:
    small = desk(param_slots=2)
    view = small.reader()
    small.prefetch(view, A, B)
    small.land_all()
    request = small.prefetch(view, C)
    assert request.skipped == 1
    small.release(small.leased(view, A))
    assert small.prefetch(view, C).skipped == 0
    assert small.copy(A) is None, "the one that was used goes"
    assert small.copy(B) is not None


def test_a_prefetch_never_evicts_a_protected_key_and_demand_does_only_if_it_must() -> None:
    small = desk(param_slots=3)
    view = small.reader()
    for key in (A, B, C):
        small.release(small.leased(view, key))
    view.protected = frozenset({A, B})
    small.prefetch(view, D)
    small.land_all()
    assert small.copy(C) is None
    assert small.prefetch(view, C).skipped == 1, "D is an unused prefetch, A and B are protected"
    small.release(small.leased(view, C))
    assert small.copy(D) is None, "demand spares what is protected while it can"
    small.leased(view, C, D)
    assert small.copy(A) is None, "and takes it when it must, the least recently used first"
    assert small.copy(B) is not None


def test_a_prefetch_evicts_none_of_the_keys_it_was_asked_for() -> None:
    small = desk(param_slots=2)
    view = small.reader()
    for key in (A, B):
        small.release(small.leased(view, key))
    request = small.prefetch(view, A, C)
    small.land_all()
    assert (request.resident, request.loaded) == (1, 1)
    assert small.copy(A) is not None
    assert small.copy(B) is None


def test_waste_is_counted_and_throttles_further_prefetch() -> None:
    small = desk(param_slots=4)
    view = small.reader()
    stats = small.namespace.stats.param
    stats.prefetched, stats.wasted = 62, 62
    request = small.prefetch(view, A, B, C)
    small.land_all()
    assert (request.loaded, request.skipped) == (2, 1), "from 64 prefetches on, the wasted share counts"
    assert small.planner.evict_param(small.namespace, A)
    assert (stats.wasted, stats.wasted_bytes) == (63, small.namespace.schema.part("param").image_bytes)
    assert small.prefetch(view, C).skipped == 1, "one unused prefetch is there, one is allowed"
    small.release(small.leased(view, B))
    assert small.prefetch(view, C).skipped == 0


def test_a_prefetched_copy_that_was_used_is_no_waste() -> None:
    small = desk()
    view = small.reader()
    small.prefetch(view, A)
    small.land_all()
    small.release(small.leased(view, A))
    assert small.planner.evict_param(small.namespace, A)
    assert small.namespace.stats.param.wasted == 0
    assert small.namespace.unused_prefetches == 0


def test_a_prefetch_of_working_copies_loads_what_has_a_slot_and_waits_for_none() -> None:
    small = desk(working_slots=2)
    view = small.writer()
    request = small.prefetch(view, A, B, C, part="optim")
    small.land_all()
    assert (request.loaded, request.skipped, request.is_finished) == (2, 1, True)
    assert request.bytes_loaded == 2 * small.namespace.schema.record_bytes
    assert small.namespace.working[A].state is Working.CLEAN
    assert small.prefetch(view, B, part="optim").resident == 1


# --- moving readers


def test_a_reader_that_moves_sees_the_new_step_and_keeps_what_it_leased() -> None:
    small = desk()
    writer, reader = small.writer(), small.reader()
    held = small.leased(reader, A)
    small.update(A)
    small.commit(1)
    assert small.leased(reader, A).copies == held.copies
    small.planner.leases.move_view(reader, 1)
    assert held.copies[0].state is Copy.RETIRED
    assert held.copies[0].leases == 2
    newer = small.leased(reader, A)
    assert newer.copies[0].identity.version == 1
    assert newer.copies == small.leased(writer, A).copies
