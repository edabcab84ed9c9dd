"""What is in force at a step, and what commits and rollbacks change."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest

from paramstore.core.location import Extent, Identity, Located
from paramstore.errors import StepDropped, StepFailed
from paramstore.storage.catalog.base import DRAFT_STEP, Change, NamespaceContents, NamespaceRow, Row, StepRow
from paramstore.storage.catalog.ledger import Ledger
from paramstore.storage.catalog.publication import Publication
from paramstore_testkit.stores.settling import settle

A, B, C = (0, 0), (0, 1), (2, 0)


def located(number: int, epoch: int = 1) -> Located:
    return Located(Extent(0, number * 4096, 4096), Identity(epoch, number), number)


def step_row(step: int, sequence: int | None = None) -> StepRow:
    return StepRow(step, step if sequence is None else sequence, note_slot=step, record_count=1, extra=b"")


def new_ledger() -> Ledger:
    return Ledger(NamespaceContents(NamespaceRow("moe", {}, (0, 2), 2, epoch=1, sequence=0)))


def commit(ledger: Ledger, step: int, held: tuple[int, ...] = (), **changed: int) -> Publication:
    """Commits `step` with the records A, B, C in the extents given by number."""
    keys = {"a": A, "b": B, "c": C}
    records = {keys[name]: located(number, ledger.namespace.epoch) for name, number in changed.items()}
    publication = ledger.plan_publish(step_row(step), records, held)
    settle(ledger, publication)
    return publication


def freed(publication: Publication) -> set[int]:
    return {extent.offset_bytes // 4096 for extent in publication.freed}


# --- in force


def test_the_newest_row_not_above_the_step_is_in_force() -> None:
    contents = NamespaceContents(NamespaceRow("moe", {}, (0, 2), 2, epoch=1, sequence=9))
    contents.rows[A] = [Row(3, located(1)), Row(7, located(2)), Row(10, located(3))]
    ledger = Ledger(contents)
    assert [ledger.at(A, step) for step in (2, 3, 6, 7, 9, 10, 99)] == [
        None, located(1), located(1), located(2), located(2), located(3), located(3),
    ]  # fmt: skip
    assert ledger.at(B, 99) is None


def test_a_namespace_without_commit_has_no_step() -> None:
    ledger = new_ledger()
    assert ledger.committed_step is None
    assert ledger.steps() == []
    assert ledger.visible_steps([1, 2]) == frozenset()


def test_a_step_that_is_not_retained_is_named_with_those_that_are() -> None:
    ledger = new_ledger()
    commit(ledger, 4, a=1)
    commit(ledger, 6, a=2)
    assert ledger.step(6) == step_row(6)
    with pytest.raises(StepDropped, match="step 5 of namespace 'moe' is not retained; the steps are: 4, 6"):
        ledger.step(5)


# --- publish


def test_a_plan_changes_nothing_before_it_is_settled() -> None:
    ledger = new_ledger()
    commit(ledger, 1, a=1, b=2)
    before = copy.deepcopy(ledger._contents)
    ledger.plan_publish(step_row(2), {A: located(3)}, ())
    ledger.plan_rollback(None)
    assert ledger._contents == before


def test_the_newest_two_steps_stay_and_the_third_is_dropped_with_what_only_it_saw() -> None:
    ledger = new_ledger()
    commit(ledger, 1, a=1, b=2, c=3)
    commit(ledger, 2, a=4, b=5)
    publication = commit(ledger, 5, a=6)
    assert freed(publication) == {1, 2}
    assert set(publication.drop_rows) == {("moe", A, 1), ("moe", B, 1)}
    assert publication.drop_steps == (("moe", 1),)
    assert publication.freed_note_slots == (1,)
    assert ledger.steps() == [2, 5]
    assert ledger.at(C, 5) == located(3)


def test_a_row_superseded_long_ago_goes_when_the_last_step_that_sees_it_goes() -> None:
    ledger = new_ledger()
    commit(ledger, 1, a=1)
    commit(ledger, 2, a=2)
    assert freed(commit(ledger, 3)) == {1}
    assert freed(commit(ledger, 4)) == set()
    assert list(ledger.extents()) == [located(2).extent]


def test_a_held_step_keeps_exactly_what_it_sees() -> None:
    ledger = new_ledger()
    commit(ledger, 1, a=1, b=2)
    commit(ledger, 2, a=3)
    assert freed(commit(ledger, 3, held=(1,), a=4)) == set()
    assert freed(commit(ledger, 4, held=(1,), a=5)) == {3}
    assert ledger.steps() == [1, 3, 4]
    assert (ledger.at(A, 1), ledger.at(B, 1)) == (located(1), located(2))
    assert freed(commit(ledger, 5, a=6)) == {1, 4}
    assert ledger.steps() == [4, 5]


def test_holding_a_step_that_does_not_exist_holds_nothing() -> None:
    ledger = new_ledger()
    commit(ledger, 1, a=1)
    assert ledger.visible_steps([99]) == frozenset({1})
    commit(ledger, 2, a=2)
    commit(ledger, 3, held=(99,), a=3)
    assert ledger.steps() == [2, 3]


def test_a_commit_of_nothing_is_a_step() -> None:
    ledger = new_ledger()
    commit(ledger, 1, a=1)
    publication = commit(ledger, 2)
    assert publication.put_rows == []
    assert ledger.steps() == [1, 2]
    assert ledger.at(A, 2) == located(1)


def test_a_publication_is_one_transaction_with_the_namespace_s_new_sequence() -> None:
    ledger = new_ledger()
    publication = ledger.plan_publish(step_row(7, sequence=3), {A: located(1)}, ())
    change = publication.change()
    assert change == Change(
        put_namespaces=(NamespaceRow("moe", {}, (0, 2), 2, epoch=1, sequence=3),),
        put_rows=(("moe", A, Row(7, located(1))),),
        put_steps=(("moe", step_row(7, sequence=3)),),
    )
    assert publication.change().row_count == 3


def test_layered_are_the_keys_whose_record_differs_between_steps() -> None:
    ledger = new_ledger()
    commit(ledger, 1, a=1, b=2)
    assert ledger.layered == frozenset()
    commit(ledger, 2, b=3)
    assert ledger.layered == {B}
    commit(ledger, 3)
    commit(ledger, 4)
    assert ledger.layered == frozenset(), "the step with the other record has gone"


def test_how_many_records_of_a_key_lie_there_and_which_step_changed_it_last() -> None:
    ledger = new_ledger()
    commit(ledger, 1, a=1, b=2)
    commit(ledger, 2, b=3)
    assert [ledger.records_of(key) for key in (A, B, C)] == [(1, 1), (2, 2), (0, None)]


@pytest.mark.parametrize("row", [step_row(5, sequence=9), step_row(4, sequence=9), step_row(6, sequence=5)])
def test_a_step_or_sequence_that_does_not_grow_is_a_bug(row: StepRow) -> None:
    ledger = new_ledger()
    commit(ledger, 5, a=1)
    with pytest.raises(AssertionError):
        ledger.plan_publish(row, {}, ())


# --- rollback


def test_a_rollback_drops_what_came_after_the_step_and_nothing_else() -> None:
    ledger = new_ledger()
    commit(ledger, 1, a=1, b=2)
    commit(ledger, 2, a=3)
    publication = ledger.plan_rollback(1)
    assert publication.put_rows == []
    assert publication.drop_rows == [("moe", A, 2)]
    assert publication.drop_steps == (("moe", 2),)
    assert freed(publication) == {3}
    assert publication.freed_note_slots == (2,)
    settle(ledger, publication)
    assert ledger.committed_step == 1
    assert ledger.at(A, 99) == located(1)


def test_a_rollback_to_the_committed_step_makes_a_new_epoch_only() -> None:
    ledger = new_ledger()
    commit(ledger, 4, a=1)
    publication = ledger.plan_rollback(4)
    settle(ledger, publication)
    assert publication.freed == []
    assert ledger.namespace == NamespaceRow("moe", {}, (0, 2), 2, epoch=2, sequence=4, epoch_bounds=((1, 4),))
    assert ledger.steps() == [4]


def test_a_rollback_to_nothing_drops_everything() -> None:
    ledger = new_ledger()
    commit(ledger, 1, a=1, b=2)
    commit(ledger, 2, a=3)
    publication = ledger.plan_rollback(None)
    settle(ledger, publication)
    assert freed(publication) == {1, 2, 3}
    assert ledger.committed_step is None
    assert list(ledger.extents()) == []
    assert (ledger.namespace.epoch, ledger.namespace.epoch_bounds) == (2, ())


def test_a_rollback_to_a_step_that_is_gone_is_refused() -> None:
    ledger = new_ledger()
    commit(ledger, 1, a=1)
    with pytest.raises(StepDropped, match="step 3"):
        ledger.plan_rollback(3)


def test_bounds_disown_later_cuts_of_every_earlier_epoch() -> None:
    ledger = new_ledger()
    commit(ledger, 1, a=1, b=2)
    commit(ledger, 2, a=3)
    settle(ledger, ledger.plan_rollback(2))
    commit(ledger, 3, b=4)
    settle(ledger, ledger.plan_rollback(3))
    assert ledger.namespace.epoch_bounds == ((1, 2), (2, 3))
    settle(ledger, ledger.plan_rollback(2))
    assert ledger.namespace.epoch_bounds == ((1, 2),), "epoch 2 has no record left, so none of its records counts"
    assert (ledger.namespace.epoch, ledger.namespace.sequence) == (4, 3)


def test_an_earlier_epoch_s_bound_falls_to_the_step_rolled_back_to() -> None:
    ledger = new_ledger()
    commit(ledger, 1, a=1)
    commit(ledger, 2, a=2)
    settle(ledger, ledger.plan_rollback(2))
    settle(ledger, ledger.plan_rollback(1))
    assert ledger.namespace.epoch_bounds == ((1, 1),)


def test_what_a_rollback_left_is_still_dropped_by_later_commits() -> None:
    ledger = new_ledger()
    commit(ledger, 1, a=1)
    commit(ledger, 2, a=2)
    settle(ledger, ledger.plan_rollback(2))
    assert freed(commit(ledger, 3)) == {1}


def test_committing_goes_on_after_a_rollback() -> None:
    ledger = new_ledger()
    commit(ledger, 1, a=1)
    commit(ledger, 2, a=2)
    settle(ledger, ledger.plan_rollback(1))
    settle(ledger, ledger.plan_publish(step_row(2, sequence=3), {A: located(9)}, ()))
    assert ledger.at(A, 2) == located(9)
    assert ledger.steps() == [1, 2]


# --- retention set otherwise, snapshots


def test_as_many_steps_stay_as_the_ledger_is_told_to_retain() -> None:
    ledger = Ledger(NamespaceContents(NamespaceRow("moe", {}, (0, 2), 2, epoch=1, sequence=0)), retained_steps=3)
    for step in range(1, 6):
        commit(ledger, step, a=step)
    assert ledger.steps() == [3, 4, 5]


def test_a_snapshot_keeps_exactly_what_its_step_sees() -> None:
    ledger = new_ledger()
    commit(ledger, 1, a=1, b=2)
    settle(ledger, ledger.plan_snapshot(1))
    commit(ledger, 2, a=3)
    assert freed(commit(ledger, 3, a=4)) == set()
    assert freed(commit(ledger, 4, a=5)) == {3}
    assert ledger.steps() == [1, 3, 4]
    assert ledger.at(A, 1) == located(1)


def test_a_snapshot_that_is_dropped_takes_with_it_what_only_it_saw() -> None:
    ledger = new_ledger()
    commit(ledger, 1, a=1, b=2)
    settle(ledger, ledger.plan_snapshot(1))
    for step in (2, 3, 4):
        commit(ledger, step, a=step + 1)
    publication = ledger.plan_drop_snapshot(1, ())
    assert freed(publication) == {1}
    assert publication.freed_note_slots == (1,)
    settle(ledger, publication)
    assert ledger.steps() == [3, 4]
    assert ledger.at(B, 3) == located(2)


def test_a_dropped_snapshot_that_is_new_or_held_stays_a_step() -> None:
    ledger = new_ledger()
    commit(ledger, 1, a=1)
    for held in ((), (1,)):
        settle(ledger, ledger.plan_snapshot(1))
        publication = ledger.plan_drop_snapshot(1, held)
        assert (publication.freed, publication.drop_steps) == ([], ())
        settle(ledger, publication)
        assert (ledger.steps(), ledger.snapshots()) == ([1], [])


def test_nothing_goes_back_before_a_snapshot() -> None:
    ledger = new_ledger()
    commit(ledger, 1, a=1)
    commit(ledger, 2, a=2)
    settle(ledger, ledger.plan_snapshot(2))
    for step in (1, None):
        with pytest.raises(StepFailed, match=r"step 2 is a snapshot; drop_snapshot\(2\) first"):
            ledger.plan_rollback(step)
    assert ledger.plan_rollback(2).freed == []


def test_a_rollback_takes_the_count_of_applies_of_its_step() -> None:
    ledger = new_ledger()
    for step, applies in ((1, 10), (2, 20)):
        row = replace(step_row(step), applies=applies)
        settle(ledger, ledger.plan_publish(row, {A: located(step)}, ()))
    assert ledger.namespace.applies == 20
    assert ledger.plan_rollback(1).namespace.applies == 10
    assert ledger.plan_rollback(None).namespace.applies == 0


# --- drafts


def draft_row(sequence: int) -> StepRow:
    return replace(step_row(DRAFT_STEP, sequence), note_slot=sequence)


def test_a_draft_is_no_step_and_the_working_state_starts_from_it() -> None:
    ledger = new_ledger()
    settle(ledger, ledger.plan_draft(draft_row(1), {A: located(1)}))
    assert (ledger.committed_step, ledger.steps(), ledger.snapshots(), ledger.prepared_step) == (None, [], [], None)
    assert ledger.newest == ledger.draft == draft_row(1)
    assert (ledger.at(A, DRAFT_STEP), ledger.at(B, DRAFT_STEP)) == (located(1), None)
    with pytest.raises(StepDropped, match="step -1 of namespace 'moe' is not retained"):
        ledger.step(DRAFT_STEP)
    with pytest.raises(StepDropped):
        ledger.check_rollback(DRAFT_STEP)


def test_the_next_draft_takes_the_place_of_the_last_and_frees_its_note_slot() -> None:
    ledger = new_ledger()
    settle(ledger, ledger.plan_draft(draft_row(1), {A: located(1)}))
    second = ledger.plan_draft(draft_row(2), {B: located(2)})
    assert (second.freed_note_slots, second.freed) == ((1,), [])
    settle(ledger, second)
    assert ledger.draft == draft_row(2)
    assert (ledger.at(A, DRAFT_STEP), ledger.at(B, DRAFT_STEP)) == (located(1), located(2))
    assert list(ledger.note_slots()) == [2]


def test_the_first_commit_ends_the_draft_and_its_records_stay_in_force() -> None:
    ledger = new_ledger()
    settle(ledger, ledger.plan_draft(draft_row(1), {A: located(1), B: located(2)}))
    publication = ledger.plan_publish(step_row(0, 2), {C: located(3)}, ())
    assert (publication.drop_steps, publication.freed_note_slots, publication.freed) == ((("moe", DRAFT_STEP),), (1,), [])
    settle(ledger, publication)
    assert (ledger.draft, ledger.steps()) == (None, [0])
    assert [ledger.at(key, 0) for key in (A, B, C)] == [located(1), located(2), located(3)]
    assert [ledger.records_of(key)[1] == 0 for key in (A, B, C)] == [False, False, True]
    for step, number in ((3, 4), (4, 5)):
        gone = freed(commit(ledger, step, a=number))
    assert gone == {1}, "the draft's record of A goes when no step is left that sees it"


def test_going_back_keeps_the_draft_or_drops_it() -> None:
    for step, left in ((DRAFT_STEP, located(1)), (None, None)):
        ledger = new_ledger()
        settle(ledger, ledger.plan_draft(draft_row(1), {A: located(1)}))
        publication = ledger.plan_rollback(step)
        settle(ledger, publication)
        assert (ledger.at(A, DRAFT_STEP), ledger.draft is None) == (left, left is None)
        assert ledger.namespace.epoch == 2
        assert ledger.namespace.epoch_bounds == (((1, 1),) if left else ())
        assert bool(publication.freed) == (left is None)
