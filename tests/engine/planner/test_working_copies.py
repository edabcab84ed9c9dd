"""Working copies: slots, loads, updates, writes and orphans; what each state forbids, and which extent is freed when."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from paramstore.core.residency import IllegalTransition, Working
from paramstore.core.schema import Schema
from paramstore.engine.planner.working_copies import may_update
from paramstore.engine.tables.copies import WorkingCopy
from paramstore.engine.tables.moves import Move, MoveKind
from paramstore.engine.tables.requests import SlotRequest, Urgency
from paramstore.errors import CapacityError, ParamStoreError, StepFailed, VolumeError, WaitTimeout
from paramstore_testkit.stores.settling import settle_cut
from paramstore_testkit.stores.small_planner import A, B, C, D, SmallPlanner, in_state
from paramstore_testkit.stores.small_planner import working_desk as desk

# --- slots and loads


def test_a_working_copy_is_loaded_into_a_slot_and_held_for_who_asked() -> None:
    small = desk()
    request = small.hold(A)
    (move,) = small.start()
    assert (move.kind, move.urgency, move.located) == (MoveKind.LOAD_WORKING, Urgency.DEMAND, small.namespace.steps.ledger.at(A, 0))
    small.land(move)
    working = small.namespace.residency.working[A]
    assert request.is_finished
    assert (working.state, working.holders) == (Working.CLEAN, 1)
    assert (working.optimizer_step, working.last_apply) == (3, 2), "as the record's header says"


def test_all_who_want_a_working_copy_join_one_load() -> None:
    small = desk()
    requests = [small.hold(A), small.hold(A)]
    prefetch = small.prefetch(small.writer(), A, part="optim")
    (move,) = small.start()
    small.land(move)
    assert all(request.is_finished for request in requests)
    assert (prefetch.is_finished, prefetch.loaded) == (True, 1)
    assert small.namespace.residency.working[A].holders == 2
    assert small.namespace.stats.optim.joins == 1


def test_a_load_that_fails_frees_the_slot_and_ends_all_who_waited() -> None:
    small = desk()
    request = small.hold(A)
    prefetch = small.prefetch(small.writer(), A, part="optim")
    (move,) = small.start()
    small.land(move, VolumeError("broken"))
    assert isinstance(request.error, VolumeError)
    assert isinstance(prefetch.error, VolumeError)
    assert prefetch.is_finished
    assert small.namespace.residency.working[A].holders == 0
    small.check()
    assert small.held(A).holders == 1, "the next one tries again"


def test_who_finds_no_slot_waits_in_the_order_they_came() -> None:
    small = desk(working_slots=1)
    holder = small.held(A)
    second, third = small.hold(B), small.hold(C)
    assert list(small.working_arena.waiting) == [second, third]
    small.unhold(holder)
    assert [move.subject.key for move in small.start()] == [B]
    small.land_all()
    assert (second.is_finished, third.is_finished) == (True, False)
    small.unhold(small.namespace.residency.working[B])
    small.land_all()
    assert third.is_finished


def test_who_gives_up_lets_those_behind_go_on_in_a_slot_that_is_there_already() -> None:
    small = desk()
    for key in (A, B):
        small.held(key)
    first, given_up, behind = small.hold(C), small.hold(D), small.hold(C)
    small.unhold(small.namespace.residency.working[A])
    small.land_all()
    assert (first.is_finished, given_up.is_finished, behind.is_finished) == (True, False, False)
    small.planner.leases.cancel_slot(given_up, WaitTimeout("given up"))
    assert (behind.is_finished, behind.error) == (True, None)
    assert small.namespace.residency.working[C].holders == 2
    assert not small.working_arena.waiting


def test_who_waits_for_a_slot_has_dirty_records_written_at_demand_longest_resident_first() -> None:
    small = desk()
    small.update(A, B)
    request = small.hold(C)
    (write,) = small.start()
    assert (write.kind, write.subject.key, write.urgency) == (MoveKind.WRITE, A, Urgency.DEMAND)
    small.land_all()
    assert request.is_finished
    assert small.namespace.residency.working[A].state is Working.ABSENT
    assert small.namespace.residency.working[B].state is Working.DIRTY, "one slot was needed, one was cleaned"


def test_a_write_under_way_on_which_a_slot_waits_is_raised_to_demand() -> None:
    small = desk()
    small.update(A, B)
    write = small.begin_write(A)
    assert write.urgency is Urgency.WRITE_BACK
    small.hold(C)
    assert small.planner.outbox.promoted == [write.subject]
    assert small.start() == [], "it will free a slot: nothing else is written"


def test_the_least_recently_used_clean_copy_is_evicted_and_nothing_is_written_for_it() -> None:
    small = desk()
    for key in (A, B, A):
        small.unhold(small.held(key))
    small.held(C)
    assert small.namespace.residency.working[B].state is Working.ABSENT
    assert small.namespace.residency.working[A].state is Working.CLEAN
    assert small.namespace.stats.optim.evictions == 1
    assert small.namespace.stats.records_written == 0


def test_a_held_dirty_or_writing_copy_is_not_evicted() -> None:
    small = desk(working_slots=3)
    held = small.held(A)
    small.update(B, C)
    small.begin_write(C)
    for key in (A, B, C):
        assert not small.planner.evict_working(small.namespace, key)
    assert held.state is Working.CLEAN
    small.land_all()
    assert small.planner.evict_working(small.namespace, C)
    assert small.planner.evict_working(small.namespace, D), "what is not there is evicted already"


def test_a_prefetch_of_a_working_copy_takes_a_clean_slot_but_has_nothing_written() -> None:
    small = desk()
    view = small.writer()
    small.update(A, B)
    assert small.prefetch(view, C, part="optim").skipped == 1
    assert small.start() == []
    small.write(A)
    small.prefetch(view, C, part="optim")
    small.land_all()
    assert small.namespace.residency.working[C].state is Working.CLEAN
    assert small.namespace.residency.working[A].state is Working.ABSENT


# --- slots where no volume takes writes any more


def fence(small: SmallPlanner) -> None:
    small.space.fences.fail_flush(0, VolumeError("as planned"))


def is_refused(request: SlotRequest) -> bool:
    """Whether the request has failed for the fence; False while it waits, or where it has its slot."""
    told = str(request.error)
    return isinstance(request.error, CapacityError) and "volume 0 is fenced (a flush failed: as planned): restart" in told


def test_who_needs_a_slot_where_all_are_dirty_and_no_volume_takes_writes_is_refused_with_the_reason() -> None:
    small = desk()
    small.update(A, B)
    fence(small)
    request = small.hold(C)
    assert is_refused(request)
    assert request in small.planner.outbox.finished
    assert not small.working_arena.waiting
    assert {key: small.namespace.residency.working[key].state for key in (A, B, C)} == {
        A: Working.DIRTY, B: Working.DIRTY, C: Working.ABSENT,
    }  # fmt: skip


def test_who_waits_for_a_write_that_fails_for_good_learns_which_record_it_was_and_which_volume_is_fenced() -> None:
    small = desk()
    small.update(A, B)
    request = small.hold(C)
    small.land_all(VolumeError("as planned"))
    assert isinstance(request.error, StepFailed)
    told, hint = str(request.error).split("; ", 1)
    assert told == "(0, 0) of 'moe': its write-back failed twice, on different extents: as planned"
    assert hint.startswith("volume 0 is fenced (2 writes failed, the last: as planned): restart the daemon")


def test_who_waits_behind_a_held_slot_gets_it_though_no_volume_takes_writes() -> None:
    small = desk()
    small.update(A)
    held = small.held(B)
    fence(small)
    request = small.hold(C)
    assert not request.is_finished
    small.unhold(held)
    small.land_all()
    assert (request.is_finished, request.error) == (True, None)


def test_who_waits_behind_a_load_waits_on_when_that_has_landed() -> None:
    small = desk()
    small.update(A)
    small.hold(B)
    fence(small)
    request = small.hold(C)
    small.land_all()
    assert not request.is_finished
    small.unhold(small.namespace.residency.working[B])
    small.land_all()
    assert (request.is_finished, request.error) == (True, None)


@pytest.mark.parametrize("error", [None, VolumeError("broken")])
def test_who_waits_behind_a_write_gets_the_slot_if_it_lands_and_else_the_reason(error: VolumeError | None) -> None:
    small = desk()
    small.update(A, B)
    write = small.begin_write(B)
    fence(small)
    request = small.hold(C)
    assert not request.is_finished
    small.land(write, error)
    small.land_all()
    assert request.is_finished
    assert is_refused(request) == (error is not None)


@pytest.mark.parametrize("error", [None, ParamStoreError("broken")])
def test_who_waits_behind_an_update_gets_the_slot_if_it_fails_and_else_the_reason(error: ParamStoreError | None) -> None:
    small = desk()
    small.update(A)
    small.begin_apply(B)
    update = small.begin_update(B)
    fence(small)
    request = small.hold(C)
    assert not request.is_finished
    small.settle_update(update, error)
    small.land_all()
    assert request.is_finished
    assert is_refused(request) == (error is None)


def test_who_needs_a_slot_waits_for_those_that_are_still_to_be_added() -> None:
    small = desk()
    small.update(A, B)
    small.working_arena.planned_slots += 1
    fence(small)
    request = small.hold(C)
    assert not request.is_finished


@pytest.mark.parametrize("is_full", [False, True])
def test_who_needs_a_slot_gets_it_from_a_volume_that_takes_writes_as_soon_as_that_has_room(is_full: bool) -> None:
    small = desk()
    small.update(A, B)
    small.space.add_volume(1, start_bytes=0, size_bytes=small.schema.record_bytes, written_bytes=0)
    fence(small)
    taken = small.space.reserve(small.schema.record_bytes) if is_full else None
    request = small.hold(C)
    if taken is not None:
        assert not request.is_finished
        small.space.release(taken)
        small.planner.go_on([small.namespace])
    (write,) = small.start()
    assert write.located is not None
    assert write.located.extent.volume == 1
    small.land_all()
    assert (request.is_finished, request.error) == (True, None)


# --- what the states forbid


Event = Callable[[SmallPlanner, WorkingCopy], object]
EVENTS: dict[str, tuple[Event, set[Working]]] = {
    "evict": (lambda s, w: s.planner.working.evict(s.namespace, w), {Working.CLEAN}),
    "write": (lambda s, w: s.planner.working.begin_write(s.namespace, w, Urgency.WRITE_BACK), {Working.DIRTY}),
    "load": (lambda s, w: s.planner.working._load(s.namespace, w, 2, urgency=Urgency.DEMAND), {Working.ABSENT}),
    "update": (lambda s, w: s.planner.working.begin_update(s.namespace, w), {Working.CLEAN, Working.DIRTY}),
}  # fmt: skip


@pytest.mark.parametrize("state", list(Working))
@pytest.mark.parametrize("name", list(EVENTS))
def test_an_event_that_the_state_forbids_is_a_bug(name: str, state: Working) -> None:
    event, allowed = EVENTS[name]
    small, working = in_state(state)
    working.holders = int(name == "update")
    if state in allowed:
        event(small, working)
        assert working.state is not state
        return
    with pytest.raises((IllegalTransition, AssertionError)):
        event(small, working)
    assert working.state is state


@pytest.mark.parametrize(
    ("state", "holders", "is_cut", "may"),
    [
        (Working.CLEAN, 1, False, True), (Working.DIRTY, 1, False, True), (Working.CLEAN, 2, False, False),
        (Working.DIRTY, 1, True, False), (Working.WRITING, 1, False, False), (Working.UPDATING, 1, False, False),
        (Working.LOADING, 1, False, False),
    ],
)  # fmt: skip
def test_an_update_needs_the_only_hold_no_write_under_way_and_no_write_that_a_cut_waits_for(
    state: Working, holders: int, is_cut: bool, may: bool
) -> None:
    small, working = in_state(state)
    working.holders = holders
    if is_cut:
        small.cut()
    assert may_update(small.namespace, working) is may


def test_who_wants_a_copy_that_is_updated_gets_it_when_the_update_lands() -> None:
    small, working = in_state(Working.UPDATING)
    request = small.hold(A)
    assert not request.is_finished
    assert working in small.planner.outbox.promoted
    small.settle_update(small.updating[working])
    assert request.is_finished
    assert working.holders == 1
    assert working.identity == (1, 1)


def test_an_update_that_fails_leaves_no_torn_bytes_behind() -> None:
    small, working = in_state(Working.UPDATING)
    request = small.hold(A)
    small.settle_update(small.updating[working], VolumeError("bug"))
    assert working.state is Working.ABSENT
    assert working.identity == (1, 0)
    assert isinstance(request.error, VolumeError)
    assert not small.namespace.steps.changed


def test_a_fill_takes_an_empty_slot_without_reading_anything() -> None:
    small = SmallPlanner(is_committed=False)
    request = small.hold(A, is_fill=True)
    assert request.is_finished
    assert small.start() == []
    assert small.namespace.residency.working[A].state is Working.UPDATING


# --- writes


def test_a_write_goes_to_a_fresh_extent_and_what_is_committed_stays_as_it_is() -> None:
    small = desk()
    committed = small.namespace.steps.ledger.at(A, 0)
    small.update(A)
    write = small.begin_write(A)
    assert write.located is not None
    assert committed is not None
    assert write.located.extent != committed.extent
    small.land(write)
    working = small.namespace.residency.working[A]
    assert working.state is Working.CLEAN
    assert working.uncommitted is not None
    assert (working.uncommitted.extent, working.uncommitted.identity) == (write.located.extent, (1, 1))
    assert small.namespace.steps.ledger.at(A, 0) == committed


def rewritten() -> tuple[SmallPlanner, WorkingCopy, Move]:
    """A was updated and written, updated again, and its second write is under way."""
    small = desk()
    small.update(A)
    small.write(A)
    small.update(A)
    return small, small.namespace.residency.working[A], small.begin_write(A)


def test_the_older_uncommitted_extent_is_freed_when_the_newer_is_complete_and_not_before() -> None:
    small, working, write = rewritten()
    older = working.uncommitted
    assert older is not None
    free = small.space.free_bytes
    small.land(write)
    assert working.uncommitted is not None
    assert working.uncommitted.identity == (1, 2)
    assert small.space.free_bytes == free + older.extent.length_bytes
    small.check()


def test_the_older_uncommitted_extent_stays_if_the_newer_write_fails_which_is_never_used_again() -> None:
    small, working, write = rewritten()
    older = working.uncommitted
    small.land(write, VolumeError("broken"))
    assert working.state is Working.DIRTY
    assert working.uncommitted == older
    assert small.space.stats()[0].quarantined_bytes == small.namespace.schema.record_bytes
    assert write.located is not None
    again = small.begin_write(A)
    assert again.located is not None
    assert again.located.extent != write.located.extent
    small.land(again)
    small.check()


def test_the_older_uncommitted_extent_that_a_cut_holds_stays_until_the_cut_is_over() -> None:
    small = desk()
    small.update(A)
    small.write(A)
    small.cut()
    free = small.space.free_bytes
    small.update(A)
    small.write(A)
    assert small.space.free_bytes == free - small.namespace.schema.record_bytes, "one more, none less"
    settle_cut(small.planner, small.namespace, is_published=False)
    assert small.space.free_bytes == free
    small.check()


def test_an_older_uncommitted_extent_that_somebody_reads_is_freed_when_they_are_done() -> None:
    small = desk(param_slots=4)
    view = small.writer()
    small.update(A)
    small.write(A)
    small.planner.evict_param(small.namespace, A)
    small.planner.evict_working(small.namespace, A)
    small.lease(view, A)
    (read,) = small.start()
    small.begin_apply(A)
    small.hold(A)
    (load,) = small.start()
    small.land(load)
    small.settle_update(small.begin_update(A, is_held=True))
    write = small.begin_write(A)
    free = small.space.free_bytes
    small.land(write)
    assert small.space.free_bytes == free, "the read under way pins it"
    small.land(read)
    assert small.space.free_bytes == free + small.namespace.schema.record_bytes


def test_a_write_uses_the_extent_that_was_reserved_for_it() -> None:
    small = desk()
    small.begin_apply(A)
    reserved = small.namespace.residency.working[A].reserved
    update = small.begin_update(A)
    working = update.working
    small.settle_update(update)
    write = small.begin_write(A)
    assert write.located is not None
    assert write.located.extent == reserved
    assert working.reserved is None


def test_a_write_without_space_is_refused_and_changes_nothing() -> None:
    small = desk(extents=6)
    small.update(A)
    small.write(A)
    small.update(A)
    while small.space.reserve(small.namespace.schema.record_bytes) is not None:
        pass
    before = small.picture()
    assert not small.planner.working.begin_write(small.namespace, small.namespace.residency.working[A], Urgency.DEMAND)
    assert small.picture() == before


def test_cleaning_starts_with_the_longest_resident_and_skips_what_is_held() -> None:
    small = desk(working_slots=4)
    small.update(A, B, C, D)
    small.namespace.residency.working[B].holders = 1
    small.planner.working.clean(small.namespace, 2, Urgency.WRITE_BACK)
    assert [move.subject.key for move in small.start()] == [A, C]
    small.planner.working.clean(small.namespace, 0, Urgency.WRITE_BACK)
    small.planner.working.clean(small.namespace, -1, Urgency.WRITE_BACK)
    assert small.start() == []


def test_a_param_schema_s_record_leaves_the_arena_as_soon_as_it_is_written() -> None:
    small = SmallPlanner(schema=Schema.param({"w": ((3, 5), "bfloat16")}), is_committed=False, param_slots=2)
    small.namespace.residency.working[A].target = small.namespace.residency.working[A].identity = None
    small.hold(A, is_fill=True)
    working = small.namespace.residency.working[A]
    working.target = (1, 0)  # type: ignore[assignment]
    small.planner.working.settle_update(small.namespace, working, (1, 0), None)  # type: ignore[arg-type]
    assert small.param_arena.slots.free_count == 1
    small.write(A)
    assert small.param_arena.slots.free_count == 2
    assert working.state is Working.ABSENT
    small.check()


def test_what_a_request_spares_is_not_written_for_it_and_frees_no_slot_for_it() -> None:
    small = desk()
    small.update(A)
    small.update(B)
    small.begin_write(A)
    small.planner.working.request_slot(SlotRequest(small.namespace, C, spared={A}))
    assert small.namespace.residency.working[B].state is Working.WRITING, "A comes free, and not for this one"

    small = desk()
    small.update(A)
    small.update(B)
    small.planner.working.request_slot(SlotRequest(small.namespace, C, spared={A}))
    assert [small.namespace.residency.working[key].state for key in (A, B)] == [Working.DIRTY, Working.WRITING]
