"""Which steps the volumes prove: by hand for each rule, and for random histories against the catalog that was lost."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from paramstore.core.key import KeySpace
from paramstore.core.schema import Schema
from paramstore.errors import ParamStoreError
from paramstore.fsck.check import examine
from paramstore.fsck.proof import prove, settle_slots
from paramstore.fsck.reader import Description, Listed, Note, combine
from paramstore.fsck.scan import Found
from paramstore.fsck.survey import FoundNote
from paramstore_testkit.disks.machine import Machine
from paramstore_testkit.stores.memory_disk import commit, state_at, survey_of
from paramstore_testkit.stores.small_store import create, keys_of, run, train

DESCRIPTION = Description(Schema.param({"w": ((8,), "uint8")}), KeySpace.of(1, 2))
PLACES = frozenset({(0, 0), (0, 1)})
ONE, TWO = (0, 0), (0, 1)


def record(key: tuple[int, int], epoch: int, version: int, sequence: int, *, at: int = 0, damage: str | None = None) -> Found:
    root = epoch << 32 | version << 16 | sequence << 8 | key[1]
    return Found(0, at or root, 8192, "moe", key, epoch, version, sequence, root, damage)


def noted(
    step: int, sequence: int, state: list[Found], changed: list[Found], *, epoch: int = 1, parent: int | None = None,
    bounds: tuple[tuple[int, int], ...] = (), listed: tuple[Listed, ...] = (), slot: int | None = None, name: str = "moe",
) -> FoundNote:  # fmt: skip
    roots = [combine([(found.key, found.root) for found in records]) for records in (changed, state)]
    note = Note(name, epoch, sequence, step, parent, len(changed), roots[0], roots[1], 0, bounds, listed, DESCRIPTION, b"")
    return FoundNote(note, step if slot is None else slot, PLACES)


FIRST = [record(ONE, 1, 0, 1), record(TWO, 1, 0, 1)]
NEWER = record(TWO, 1, 1, 2)
NOTE_1 = noted(1, 1, FIRST, FIRST)
NOTE_2 = noted(2, 2, [FIRST[0], NEWER], [NEWER], parent=1, listed=(Listed(1, 1, 1, is_snapshot=True),))
ALL = [*FIRST, NEWER]


def test_a_step_and_the_one_that_its_note_lists_are_proven() -> None:
    proof = prove("moe", [NOTE_1, NOTE_2], ALL)
    assert {step: dict(proven.state) for step, proven in proof.steps.items()} == {
        1: {ONE: FIRST[0], TWO: FIRST[1]}, 2: {ONE: FIRST[0], TWO: NEWER},
    }  # fmt: skip
    assert (proof.steps[1].is_snapshot, proof.steps[2].is_snapshot) == (True, False)
    assert (proof.steps[1].changed, proof.steps[2].changed) == ({ONE, TWO}, {TWO})
    assert (proof.epoch, proof.sequence, proof.lost) == (1, 2, {})


def test_a_step_that_the_newest_note_does_not_list_is_no_step() -> None:
    unlisting = replace(NOTE_2, note=replace(NOTE_2.note, listed=()))
    assert list(prove("moe", [NOTE_1, unlisting], ALL).steps) == [2]


def test_without_its_parent_a_step_still_tells_what_it_changed() -> None:
    proof = prove("moe", [NOTE_2], ALL)
    assert proof.steps[2].changed == {TWO}
    assert "note slot 1 should have it" in proof.lost[1][0].what


LISTED_2 = Listed(2, 2, 2, is_snapshot=False)


def test_a_commit_that_did_not_come_to_its_end_takes_no_older_step_away() -> None:
    """Step 3 was noted and not published; its note lists what would have stayed with it, and 1 would not."""
    unwritten = record(ONE, 1, 1, 3)
    note = noted(3, 3, [unwritten, NEWER], [unwritten], parent=2, listed=(LISTED_2,))
    proof = prove("moe", [NOTE_1, NOTE_2, note], ALL)
    assert (sorted(proof.steps), list(proof.lost)) == ([1, 2], [3])
    assert not proof.steps[1].is_snapshot, "the newest note that lists it no more says that it is none"
    proof = prove("moe", [NOTE_1, NOTE_2, note], [*ALL, unwritten])
    assert sorted(proof.steps) == [2, 3]


def test_a_step_that_only_the_parent_of_an_unproven_one_lists_is_not_missed() -> None:
    unwritten = record(ONE, 1, 1, 3)
    note = noted(3, 3, [unwritten, NEWER], [unwritten], parent=2, listed=(LISTED_2,))
    for notes, records in (([NOTE_2, note], ALL), ([NOTE_1, NOTE_2, note], [FIRST[0], NEWER])):
        proof = prove("moe", notes, records)
        assert (list(proof.steps), list(proof.lost)) == ([2], [3]), "1 may have been dropped: its room is free then"


def test_a_step_that_was_rolled_back_does_not_come_back_for_one_that_is_lost() -> None:
    """2 was rolled back; 5 followed on 1, and a record of it is gone."""
    made_again = record(ONE, 2, 1, 3)
    note = noted(5, 3, [made_again, FIRST[1]], [made_again], epoch=2, parent=1, bounds=((1, 1),), listed=(Listed(1, 1, 1, False),))
    proof = prove("moe", [NOTE_1, NOTE_2, note], ALL)
    assert (list(proof.steps), list(proof.lost)) == ([1], [5])


def test_a_record_beyond_the_sequence_of_a_note_is_not_of_its_step() -> None:
    proof = prove("moe", [NOTE_1, NOTE_2], [*ALL, record(ONE, 1, 7, 3), record(TWO, 2, 1, 3)])
    assert sorted(proof.steps) == [1, 2]
    assert (proof.epoch, proof.sequence) == (2, 3)


def test_a_record_beyond_the_bound_of_its_epoch_is_disowned() -> None:
    made_again = record(ONE, 2, 1, 3)
    state = [made_again, FIRST[1]]
    note = noted(5, 3, state, [made_again], epoch=2, parent=1, bounds=((1, 1),))
    assert list(prove("moe", [note], [*ALL, made_again]).steps) == [5]
    wider = replace(note, note=replace(note.note, bounds=((1, 2),)))
    assert list(prove("moe", [wider], [*ALL, made_again]).steps) == []


@pytest.mark.parametrize("missing", range(3))
def test_with_any_record_of_a_step_missing_it_is_not_proven(missing: int) -> None:
    proof = prove("moe", [NOTE_1, NOTE_2], [one for one in ALL if one is not ALL[missing]])
    assert (1 in proof.steps, 2 in proof.steps) == (missing == 2, missing == 1)


def test_an_older_version_never_takes_the_place_of_a_lost_one() -> None:
    """The changed records of step 3 are whole; it is one that step 2 brought which is gone, and step 1's is there."""
    third = record(ONE, 1, 1, 3)
    note = noted(3, 3, [third, NEWER], [third], parent=2)
    assert list(prove("moe", [note], [*ALL, third]).steps) == [3]
    proof = prove("moe", [note], [*FIRST, third])
    assert list(proof.steps) == []
    assert "do not combine" in proof.lost[3][0].what


def test_of_two_records_of_one_identity_the_whole_one_counts() -> None:
    torn = replace(NEWER, offset=4096, damage="torn")
    for records in ([*ALL, torn], [torn, *ALL]):
        assert prove("moe", [NOTE_2], records).steps[2].state[TWO] is NEWER


def test_a_damaged_record_is_named_with_its_place() -> None:
    torn = replace(NEWER, damage="chunk 0 is wrong")
    (found,) = prove("moe", [NOTE_1, NOTE_2], [*FIRST, torn]).lost[2]
    assert (found.key, found.step, found.volume, found.offset, found.what) == (TWO, 2, 0, torn.offset, "chunk 0 is wrong")


def test_a_note_whose_changed_records_are_others_is_not_proven() -> None:
    for parents in ([NOTE_1], []):
        wrong = replace(NOTE_2, note=replace(NOTE_2.note, combined_root=1))
        assert 2 in prove("moe", [*parents, wrong], ALL).lost


def test_a_note_that_a_later_epoch_did_not_count_on_is_disowned() -> None:
    later = record(ONE, 2, 1, 2)
    assert list(prove("moe", [NOTE_1, NOTE_2], [*ALL, later]).steps) == [1]
    counted_on = record(ONE, 2, 1, 3)
    assert sorted(prove("moe", [NOTE_1, NOTE_2], [*ALL, counted_on]).steps) == [1, 2]


def test_records_and_notes_of_other_namespaces_count_for_nothing() -> None:
    other = replace(NEWER, namespace="eval", version=9)
    assert sorted(prove("moe", [NOTE_1, NOTE_2, noted(9, 9, FIRST, FIRST, name="eval")], [*ALL, other]).steps) == [1, 2]


def test_records_without_a_note_prove_nothing() -> None:
    proof = prove("moe", [], ALL)
    assert (proof.newest, proof.steps) == (None, {})


def test_a_note_slot_that_two_steps_claim_is_that_of_the_newer() -> None:
    eval_1 = replace(NOTE_1, note=replace(NOTE_1.note, namespace="eval"))
    proofs = {
        "moe": prove("moe", [NOTE_1, NOTE_2], ALL),
        "eval": prove("eval", [eval_1], [replace(one, namespace="eval") for one in FIRST]),
    }
    settle_slots(proofs)
    assert (list(proofs["moe"].steps), list(proofs["eval"].steps)) == ([2], [1])
    assert "is that of step 1 of 'eval'" in proofs["moe"].lost[1][0].what


# --- random histories


async def history(machine: Machine, choice: random.Random, *, lives: int) -> None:
    """A namespace under commits, partial updates, write-backs, rollbacks, readers, snapshots and crashes; after each the
    volumes prove every step that the catalog has, with the same records."""
    step = 0
    for life in range(lives):
        store = machine.start()
        view = await (create(store) if life == 0 else store.admission.open("moe", mode="write", at=None, host_bytes=None))
        keys = keys_of(view)
        for _ in range(choice.randint(1, 6)):
            act = choice.choice(["commit", "commit", "train", "write_back", "rollback", "reader", "snapshot"])
            try:
                if act == "commit":
                    step += choice.randint(1, 3)
                    await commit(store, view, step, choice.sample(keys, choice.randint(1, len(keys))), b"%d" % step)
                elif act == "train":
                    await train(store, view, choice.sample(keys, choice.randint(1, len(keys))))
                elif act == "write_back":
                    await store.write_back(view, None)
                elif act == "rollback":
                    await store.rollback(view, choice.choice(view.namespace.steps.ledger.steps()))
                elif act == "snapshot":
                    await store.admission.snapshot(view, choice.choice(view.namespace.steps.ledger.steps()))
                else:
                    await store.admission.open(
                        "moe", mode="read", at=choice.choice(view.namespace.steps.ledger.steps()), host_bytes=None
                    )
            except ParamStoreError:
                continue  # refused, as by a snapshot or a limit
            check(machine)
        await machine.crash(keeps_random_writes=choice.random() < 0.5)
        check(machine)


def check(machine: Machine) -> None:
    contents = machine.catalog.load()
    report = examine(survey_of(machine), contents)
    assert report.findings == []
    moe = report.proofs["moe"]
    for step, row in contents.namespaces["moe"].steps.items():
        located = state_at(contents, "moe", step)
        assert {key: (one.volume, one.offset, one.root) for key, one in moe.steps[step].state.items()} == {
            key: (one.extent.volume, one.extent.offset_bytes, one.root) for key, one in located.items()
        }
        assert (moe.steps[step].found.slot, moe.steps[step].found.note.extra) == (row.note_slot, row.extra)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(12))
def test_whatever_happened_the_volumes_prove_every_step_of_the_catalog(seed: int) -> None:
    run(history(Machine(seed=seed, volume_count=1 + seed % 2), random.Random(seed), lives=4))
