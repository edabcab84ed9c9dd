"""Views, leases, caps and queues: all or nothing, first come first served, and refusals that change nothing."""

from __future__ import annotations

import pytest

from paramstore.core.schema import Schema
from paramstore.engine.planner.promises import Opening
from paramstore.errors import CapacityError, LeaseError, StepDropped, StepFailed, UnknownKey, WriterFenced
from paramstore_testkit.stores.small_planner import A, B, C, D, SmallPlanner
from paramstore_testkit.stores.small_planner import lease_desk as desk

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
    small.namespace.memory.param.planned_slots = 8  # type: ignore[union-attr]  # caps above what there is
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


def test_more_keys_than_the_cap_are_a_capacity_error_and_nothing_changes() -> None:
    small = desk(param_slots=3)
    view = small.reader()
    small.release(small.leased(view, A))
    before = small.picture()
    with pytest.raises(CapacityError, match="3 keys of 'moe' in one lease; this handle was promised 2 slots"):
        small.lease(view, B, C, D)
    assert small.picture() == before


def test_the_refusal_names_the_holders_and_what_helps() -> None:
    small = desk(param_slots=6)  # of four keys: two versions of each would take 8
    small.writer(slots=3)
    view, fenced = small.reader(slots=2), small.writer(slots=3)
    small.leased(fenced, A)
    small.writer(slots=0)
    holders = "Of the 6 there are a reader was promised 2, a writer still holds 1: "
    with pytest.raises(CapacityError, match=f"3 keys .* was promised 2 .*{holders}ask in parts, open with min_lease_slots"):
        small.lease(view, A, B, C)
    with pytest.raises(CapacityError, match="or raise host_budget"):
        small.lease(view, A, B, C, D)
    small.param_arena.planned_slots = 8
    with pytest.raises(CapacityError, match=r"or raise reader_slots$"):
        small.lease(view, A, B, C, D)


def test_a_view_that_was_promised_nothing_leases_nothing_and_may_prefetch() -> None:
    small = desk()
    small.writer(slots=4)
    view = small.reader(slots=0)
    with pytest.raises(CapacityError, match=r"promised 0 slots .* a writer was promised 4: close another and open again, open"):
        small.lease(view, A)
    assert small.prefetch(view, A).pending, "slots that nobody leases may be used"


@pytest.mark.parametrize(("most", "ways"), [(0, "open"), (2, "ask in parts, or open")])
def test_who_asked_for_no_more_is_told_to_ask_for_more_and_nothing_that_cannot_help(most: int, ways: str) -> None:
    small = desk(param_slots=16)
    view = small.planner.views.open(small.namespace, Opening(most=most), step=0)
    said = (
        rf"3 keys .* promised {most} slots .*\(lease_slots\), and asked for no more \(max_lease_slots={most}\)\. Of .*: "
        rf"{ways} with a greater max_lease_slots \(expert_memory, of a model that is served\)$"
    )
    with pytest.raises(CapacityError, match=said):
        small.lease(view, A, B, C)


def test_who_got_less_than_it_asked_for_at_most_is_told_what_helps() -> None:
    small = desk(param_slots=8)
    view = small.planner.views.open(small.namespace, Opening(most=2), step=0)
    with pytest.raises(CapacityError, match=r"promised 1 slots .*\(lease_slots\)\. Of .*: ask in parts, open with min_lease_slots"):
        small.lease(view, A, B, C)


def test_readers_of_an_inference_namespace_are_told_of_no_setting_that_it_has_not() -> None:
    small = SmallPlanner(experts=4, param_slots=6, schema=Schema.param({"w": ((3, 5), "bfloat16")}))
    view = small.reader(slots=1)
    with pytest.raises(CapacityError, match=r": ask in parts, open with min_lease_slots, or raise host_budget \(host_bytes"):
        small.lease(view, A, B)


def test_a_key_that_is_asked_for_twice_takes_one_slot() -> None:
    small = desk()
    view = small.reader(slots=2)
    assert small.leased(view, A, A, B, B)
    assert small.leased(view, B, A, A)
    with pytest.raises(LeaseError, match="1 more keys of 'moe': this handle has or waits for 2 of 2 slots"):
        small.lease(view, C, C)


def test_more_keys_than_the_cap_are_a_capacity_error_even_if_some_are_leased_already() -> None:
    """To release those would help nothing: the lease itself is too large."""
    small = desk(param_slots=3)
    view = small.reader()
    small.leased(view, A)
    before = small.picture()
    with pytest.raises(CapacityError, match="3 keys of 'moe' in one lease; this handle was promised 2 slots"):
        small.lease(view, A, B, C)
    assert small.picture() == before


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
    one, other = small.reader(slots=3), small.reader(slots=3)
    small.leased(one, A, B, C)
    waiting = small.lease(other, (0, 4), (0, 5), (0, 6))
    assert not waiting.is_finished
    before = small.picture()
    with pytest.raises(LeaseError, match="has or waits for 3 of 3 slots; release some first"):
        small.lease(other, D)
    assert small.picture() == before


def test_what_a_view_waits_for_and_has_already_counts_once() -> None:
    small = desk(param_slots=3)
    small.param_arena.planned_slots = 16
    one, other = small.reader(slots=2), small.reader(slots=2)
    small.leased(one, A, B)
    small.leased(other, C)
    waiting = small.lease(other, C, D)
    assert not waiting.is_finished
    assert not small.lease(other, D, C).is_finished
    with pytest.raises(LeaseError, match="1 more keys of 'moe': this handle has or waits for 2 of 2 slots"):
        small.lease(other, A)


def test_a_request_that_waited_for_other_versions_than_it_would_get_is_refused_for_its_own_leases() -> None:
    """It was within its promise as long as it would have shared A's copy: now that is another one."""
    small = desk(param_slots=3)
    small.param_arena.planned_slots = 16
    writer, reader = small.writer(slots=2), small.reader(slots=2)
    small.leased(writer, A)
    held = small.leased(reader, B, C)
    waiting = small.lease(writer, A, D)
    assert not waiting.is_finished
    small.update(A)
    small.release(held)
    small.land_all()
    assert isinstance(waiting.error, LeaseError)
    assert len(writer.leased) == 1
    assert not small.param_arena.waiting


def test_an_arena_for_which_the_machine_had_no_memory_refuses_what_it_can_never_hold() -> None:
    small = desk(param_slots=5)
    view = small.reader(slots=4)
    small.param_arena.planned_slots = 3
    with pytest.raises(CapacityError, match=r"4 keys .* was promised 4 slots .* Of the 3 there are"):
        small.lease(view, A, B, C, D)
    assert view.lease_slots == 4


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
    small.planner.views.close(view)
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
    small.namespace.writing.pending[A] = None  # type: ignore[assignment]
    small.planner.views.close(view)
    assert small.namespace.writing.writer is None
    assert not small.namespace.writing.pending


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
