"""What readers are lent beyond their promises, and what is asked back of whom before a handle opens."""

from __future__ import annotations

import pytest

from paramstore.core.schema import Schema
from paramstore.engine.planner.loans import wake_openings
from paramstore.engine.planner.promises import Opening
from paramstore.engine.tables.namespace import View, WriterGroup
from paramstore.errors import CapacityError, LeaseError, StepDropped
from paramstore_testkit.stores.small_planner import SmallPlanner

KEYS = [(0, expert) for expert in range(32)]
OPAQUE = Schema.param({"w": ((3, 5), "bfloat16")})


def desk(param_slots: int = 32, *, schema: Schema = OPAQUE) -> SmallPlanner:
    """32 slots, of which 2 are the reserve."""
    return SmallPlanner(experts=32, param_slots=param_slots, working_slots=2, extents=96, schema=schema)


def open_view(small: SmallPlanner, mode: str = "read", *, least: int = 0, slots: int | None = None) -> View:
    """slots: the promise, if it is to be another than one gets."""
    is_writer = mode == "write"
    if slots is not None:
        return small.writer(slots=slots) if is_writer else small.reader(slots=slots)
    opening = Opening(WriterGroup() if is_writer else None, least)
    return small.planner.views.open(small.namespace, opening, step=None if is_writer else 0)


def recall(small: SmallPlanner, *, least: int, most: int | None = None, is_writer: bool = False) -> tuple[int, list[View]]:
    return small.planner.views.recall(small.namespace, Opening(WriterGroup() if is_writer else None, least, most))


# --- lending


def test_a_reader_is_lent_half_of_what_promises_and_other_loans_leave() -> None:
    small = desk()
    first, second = open_view(small, slots=6), open_view(small, slots=4)
    lend = small.planner.loans.lend
    assert lend(first, 3) == 3
    assert lend(first, 100) == 10, "half of the 20 that are left"
    assert lend(second, 100) == 5, "half of the ten that are left then"
    assert lend(first, 100) == 10
    assert lend(first, 0) == 10, "no fewer than before"


def test_a_loan_may_be_leased_and_nothing_beyond_it() -> None:
    small = desk()
    view = open_view(small, slots=6)
    with pytest.raises(CapacityError, match="promised 6 slots"):
        small.lease(view, *KEYS[:8])
    small.planner.loans.lend(view, 2)
    held = small.leased(view, *KEYS[:8])
    with pytest.raises(LeaseError, match="has or waits for 8 of 8 slots"):
        small.lease(view, KEYS[8])
    small.release(held)
    small.planner.loans.take_back(view, 1)
    small.leased(view, *KEYS[:7])
    with pytest.raises(LeaseError, match="7 of 7 slots"):
        small.lease(view, KEYS[8])


def test_a_writer_is_lent_nothing_and_a_reader_whatever_share_it_is_of() -> None:
    small = desk(schema=SmallPlanner().namespace.schema)
    writer, reader = open_view(small, "write"), open_view(small)
    assert (writer.lease_slots, reader.lease_slots) == (22, 4)
    assert small.planner.loans.lend(writer, 5) == 0
    assert small.planner.loans.lend(reader, 5) == 2
    small.planner.views.close(writer)
    assert small.planner.loans.lend(reader, 50) == 13, "half of what neither writers nor readers were promised"


def test_nothing_is_lent_of_slots_that_are_only_planned() -> None:
    small = desk()
    view = open_view(small, slots=6)
    small.param_arena.planned_slots = 320
    assert small.planner.loans.lend(view, 100) == 12


def test_a_reader_that_lost_its_step_is_lent_nothing_more() -> None:
    small = desk()
    view = open_view(small)
    small.planner.views.drop_readers(small.namespace, [0])
    with pytest.raises(StepDropped):
        small.planner.loans.lend(view, 5)


# --- asking back


def test_an_opening_asks_back_what_it_lacks_of_the_largest_loans() -> None:
    small = desk()
    first, second = open_view(small, slots=6), open_view(small, slots=4)
    small.planner.loans.lend(first, 100)
    small.planner.loans.lend(second, 100)
    assert recall(small, least=3) == (5, [first]), "half of the 20 beside promises, of which 5 are not lent"
    assert (first.loan.count, first.loan.may_keep, second.loan.may_keep) == (10, 5, 5)
    assert recall(small, least=3) == (5, []), "it was asked already"
    assert recall(small, least=20) == (15, [first, second])
    assert (first.loan.may_keep, second.loan.may_keep) == (0, 0)
    with pytest.raises(CapacityError, match="min_lease_slots=21, but 20 of its 32 slots are left"):
        recall(small, least=21)


def test_what_came_back_is_promised_and_what_did_not_is_named() -> None:
    small = desk()
    first = open_view(small, slots=10)
    small.planner.loans.lend(first, 10)
    small.leased(first, *KEYS[:20])
    assert recall(small, least=12) == (2, [first])
    told = "min_lease_slots=12, but 2 slots that are lent were not given back in time: a reader was promised 10 and lent 10; close"
    with pytest.raises(CapacityError, match=told):
        open_view(small, least=12)
    assert len(small.namespace.views) == 1
    small.planner.loans.take_back(first, 8)
    assert recall(small, least=12) == (2, []), "it says so, and has them leased"
    request = next(iter(first.leases.values()))
    small.release(request)
    assert recall(small, least=12) == (0, [])
    assert open_view(small, least=12).lease_slots == 12


def test_without_a_minimum_an_opening_gets_what_did_come_back() -> None:
    small = desk()
    first = open_view(small, slots=10)
    small.planner.loans.lend(first, 10)
    assert open_view(small).lease_slots == 10, "half of 20, as if nothing were lent"
    assert open_view(small).lease_slots == 0, "five, of which none has come back"


def test_a_writer_asks_back_beside_what_the_one_before_holds() -> None:
    small = desk(schema=SmallPlanner().namespace.schema)
    reader = open_view(small, slots=8)
    small.planner.loans.lend(reader, 11)
    old = open_view(small, "write")
    assert old.lease_slots == 11, "what is not lent of 22"
    small.leased(old, *KEYS[:3])
    owed, asked = recall(small, least=0, is_writer=True)
    assert (owed, asked, reader.loan.may_keep) == (11, [reader], 0), "the writer before keeps 3, and 19 are for the next"


def test_nothing_is_lent_while_a_handle_opens_and_afterwards_what_is_left_may_be_kept() -> None:
    small = desk()
    first = open_view(small, slots=10)
    small.planner.loans.lend(first, 8)
    for _ in range(2):
        small.planner.loans.begin_opening(small.namespace)
    recall(small, least=16)
    assert (small.planner.loans.lend(first, 10), first.loan.may_keep) == (8, 4)
    assert small.planner.loans.end_opening(small.namespace) == []
    assert small.planner.loans.lend(first, 10) == 8, "another opens still"
    assert small.planner.loans.end_opening(small.namespace) == [first]
    assert first.loan.may_keep == 8
    assert small.planner.loans.lend(first, 10) == 10


def test_whatever_a_client_says_that_it_keeps_it_never_has_more_or_less_than_nothing() -> None:
    small = desk()
    view = open_view(small, slots=10)
    small.planner.loans.lend(view, 8)
    for kept, left in ((1 << 62, 8), (3, 3), (5, 3), (-(1 << 62), 0)):
        small.planner.loans.take_back(view, kept)
        assert (view.loan.count, view.loan.may_keep) == (left, left)


# --- what ends a loan, and who is told


def test_a_loan_ends_with_its_handle_and_a_lost_session_keeps_what_it_leased() -> None:
    small = desk()
    closed, lost = open_view(small, slots=10), open_view(small, slots=2)
    small.planner.loans.lend(closed, 9)
    small.planner.loans.lend(lost, 4)
    small.leased(lost, *KEYS[:5])
    small.planner.views.close(closed)
    small.planner.views.end_writing(lost)
    with pytest.raises(CapacityError, match=r"but 25 of its 32 slots are left .*: a reader still holds 5"):
        open_view(small, least=26)
    assert open_view(small, least=25).lease_slots == 25


@pytest.mark.parametrize("how", ["given back", "released late", "released within", "closed", "lost"])
def test_who_waits_for_slots_looks_again_when_some_may_have_come_back(how: str) -> None:
    small = desk()
    view = open_view(small, slots=10)
    small.planner.loans.lend(view, 4)
    few, many = small.leased(view, *KEYS[:2]), small.leased(view, *KEYS[2:13])
    if how.startswith("released"):
        small.planner.loans.take_back(view, 2)
    small.planner.take_decisions()
    small.planner.loans.await_loans(small.namespace, "future")
    if how == "given back":
        small.planner.loans.take_back(view, 2)
    elif how == "released late":
        small.release(few)
    elif how == "released within":
        small.release(many)
        small.planner.outbox.woken.clear()
        small.planner.loans.await_loans(small.namespace, "another")
        small.release(few)
        assert small.planner.outbox.woken == [], "the promise is kept for it, whether it leases or not"
        return
    elif how == "closed":
        small.planner.views.close(view)
    else:
        small.planner.views.end_writing(view)
    assert "future" in small.planner.outbox.woken
    small.planner.outbox.woken.clear()
    wake_openings(small.planner.outbox, small.namespace)
    assert small.planner.outbox.woken == []


def test_what_a_lost_reader_holds_beyond_its_share_comes_off_the_share_of_writers() -> None:
    """Whatever a writer is promised it gets, though the loan of a session that is gone never comes back."""
    small = desk(schema=SmallPlanner().namespace.schema)
    lost = open_view(small)
    held = lost.lease_slots + small.planner.loans.lend(lost, 28)
    small.leased(lost, *KEYS[:held])
    small.planner.views.end_writing(lost)
    writer = open_view(small, "write")
    assert writer.lease_slots == 30 - held > 0
    small.leased(writer, *KEYS[held : held + writer.lease_slots])
    assert open_view(small).lease_slots == 0, "the share of readers is held whole"


def test_who_did_not_answer_is_asked_last_and_is_not_awaited_until_it_answers() -> None:
    small = desk()
    silent, other = open_view(small, slots=6), open_view(small, slots=6)
    small.planner.loans.lend(silent, 8)
    small.planner.loans.lend(other, 4)
    recall(small, least=9)
    assert (silent.loan.may_keep, other.loan.may_keep) == (5, 4)
    small.planner.loans.note_silence(small.namespace)
    assert not small.planner.loans.is_awaited(small.namespace)
    recall(small, least=12)
    assert (silent.loan.may_keep, other.loan.may_keep) == (5, 1)
    assert small.planner.loans.is_awaited(small.namespace)
    small.planner.loans.take_back(silent, 5)
    assert not silent.loan.is_silent
