"""Leases and prefetches that join loads, and what a prefetch may take; a reader that moves keeps what it leased."""

from __future__ import annotations

from paramstore.core.residency import Copy, Working
from paramstore.engine.tables.requests import Urgency
from paramstore.errors import LeaseError, VolumeError
from paramstore_testkit.stores.small_planner import A, B, C, D
from paramstore_testkit.stores.small_planner import lease_desk as desk

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
    assert small.planner.outbox.promoted == [move.subject]
    assert small.namespace.residency.prefetched == set()
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
    assert small.namespace.residency.prefetched == set()


def test_a_prefetch_of_working_copies_loads_what_has_a_slot_and_waits_for_none() -> None:
    small = desk(working_slots=2)
    view = small.writer()
    request = small.prefetch(view, A, B, C, part="optim")
    small.land_all()
    assert (request.loaded, request.skipped, request.is_finished) == (2, 1, True)
    assert request.bytes_loaded == 2 * small.namespace.schema.record_bytes
    assert small.namespace.residency.working[A].state is Working.CLEAN
    assert small.prefetch(view, B, part="optim").resident == 1


# --- moving readers


def test_a_reader_that_moves_sees_the_new_step_and_keeps_what_it_leased() -> None:
    small = desk()
    writer, reader = small.writer(), small.reader()
    held = small.leased(reader, A)
    small.update(A)
    small.commit(1)
    assert small.leased(reader, A).copies == held.copies
    small.planner.views.move(reader, 1)
    assert held.copies[0].state is Copy.RETIRED
    assert held.copies[0].leases == 2
    newer = small.leased(reader, A)
    assert newer.copies[0].identity.version == 1
    assert newer.copies == small.leased(writer, A).copies
