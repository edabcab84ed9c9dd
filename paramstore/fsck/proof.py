"""Decides which steps of a namespace the volumes prove, without a catalog. Pure.

- The newest whole note that nothing disowns names the steps that could be opened when it was written: itself and those it
  lists. No other step can have been in the catalog then or later. An exception: if its own step is not proven, that step may
  never have been published, and then the steps that its parent's note lists count too.
- A note is disowned by a note or a record of a later epoch whose sequence is not above its own: if the note had been
  published, the later epoch would have counted on from it.
- A record belongs to a note's step if its sequence is not above the note's bound for its epoch; if a key has several such
  versions, the newest does. A step is proven if every key has a record, all are whole, and they combine to the note's two roots.
- A draft, the values of an initialization that is not over, is a step that nobody opens: keys may be missing from it, and it
  is proven if the others are whole and combine to its note's roots. So it comes back as a draft and never as a whole namespace.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from paramstore.core.key import ExpertKey
from paramstore.fsck.findings import Finding
from paramstore.fsck.reader import Listed, Note, combine
from paramstore.fsck.scan import Found
from paramstore.fsck.survey import FoundNote
from paramstore.storage.catalog.base import DRAFT_STEP

State = Mapping[ExpertKey, Found]
"""The record of every key at one step."""
DAMAGED_SHOWN = 16
"""Most damaged or missing records of one step that become findings of their own."""


@dataclass(frozen=True, slots=True)
class ProvenStep:
    """A step that the volumes prove. changed: the keys whose record this step brought."""

    found: FoundNote
    state: State
    changed: frozenset[ExpertKey]
    is_snapshot: bool


@dataclass(slots=True)
class Proof:
    """What is known of a namespace. newest: the note from which all the rest follows; None if there is none.

    lost: the steps that should be there and are not proven, with the reasons. epoch, sequence: the highest that were seen.
    """

    name: str
    epoch: int
    sequence: int
    newest: FoundNote | None = None
    steps: dict[int, ProvenStep] = field(default_factory=dict)
    lost: dict[int, list[Finding]] = field(default_factory=dict)


def prove(name: str, notes: Sequence[FoundNote], records: Sequence[Found]) -> Proof:
    """Proves the steps of one namespace. notes, records: all that were found; those of other namespaces are passed over."""
    own_notes = sorted((found for found in notes if found.note.namespace == name), key=lambda found: found.note.age)
    own_records = [record for record in records if record.namespace == name]
    ages = [found.note.age for found in own_notes] + [(record.epoch, record.sequence) for record in own_records]
    proof = Proof(name, epoch=max(age[0] for age in ages), sequence=max(age[1] for age in ages))
    valid = [found for found in own_notes if not _is_disowned(found.note, ages)]
    if not valid:
        return proof
    proof.newest = newest = valid[-1]
    by_key = _by_key(own_records)
    for listed in sorted(newest.note.listed):
        older = _note_of(listed, valid)
        if older is None:
            what = f"its commit note is whole on no volume; note slot {listed.slot} should have it"
            proof.lost[listed.step] = [Finding(namespace=name, step=listed.step, what=what)]
        else:
            _prove_step(proof, older, by_key, is_snapshot=listed.is_snapshot)
    _prove_step(proof, newest, by_key, is_snapshot=False)
    _prove_what_stayed(proof, newest.note, valid, by_key)
    _prove_a_draft(proof, newest.note, valid, by_key)
    return proof


def _prove_what_stayed(
    proof: Proof, newest: Note, notes: Sequence[FoundNote], by_key: Mapping[ExpertKey, Sequence[Found]]
) -> None:
    """Proves older steps if the newest step is not proven, since it may never have been published: then what its parent's note
    lists could still be opened, and so on back to a step that is proven. What is missing of these was dropped, and is not lost; if
    it were a snapshot, the newest note would list it."""
    expected, note = proof.steps.keys() | proof.lost.keys(), newest
    while note.step not in proof.steps:
        parent = next((listed for listed in note.listed if listed.step == note.parent), None)
        found = _note_of(parent, notes) if parent is not None else None
        if found is None or found.note.age >= note.age:
            return
        note = found.note
        for listed in sorted(note.listed):
            older = _note_of(listed, notes)
            if older is not None and listed.step not in expected:
                _prove_step(proof, older, by_key, is_snapshot=False)
                proof.lost.pop(listed.step, None)


def _prove_a_draft(
    proof: Proof, newest: Note, notes: Sequence[FoundNote], by_key: Mapping[ExpertKey, Sequence[Found]]
) -> None:
    """Proves the newest draft that can be proven, if nothing else is and nothing but drafts can have come before. It may be older
    than one that was published: whoever resumes the initialization gives the missing values again."""
    if newest.parent is not None or proof.steps:
        return
    for found in reversed([found for found in notes if found.note.step == DRAFT_STEP and found.note.age < newest.age]):
        _prove_step(proof, found, by_key, is_snapshot=False)
        if DRAFT_STEP in proof.steps:
            proof.lost.pop(DRAFT_STEP, None)
            return


def settle_slots(proofs: Mapping[str, Proof]) -> None:
    """Gives each note slot to one step. If two claim it, a commit was writing its note when the store went down: the newest step
    of a namespace comes before older ones, and the other is lost."""
    owners: dict[int, str] = {}
    claims = [(step != max(proof.steps), name, step) for name, proof in proofs.items() for step in proof.steps]
    for _, name, step in sorted(claims):
        proven = proofs[name].steps[step]
        owner = owners.setdefault(proven.found.slot, f"step {step} of {name!r}")
        if owner != f"step {step} of {name!r}":
            del proofs[name].steps[step]
            proofs[name].lost[step] = [_finding(proven.found.note, f"its note slot {proven.found.slot} is that of {owner} by now")]


def _is_disowned(note: Note, ages: Sequence[tuple[int, int]]) -> bool:
    return any(epoch > note.epoch and sequence <= note.sequence for epoch, sequence in ages)


def _note_of(listed: Listed, notes: Sequence[FoundNote]) -> FoundNote | None:
    """Finds the newest note of a listed step in its slot."""
    wanted = (listed.slot, listed.step, listed.sequence)
    return next((found for found in reversed(notes) if (found.slot, found.note.step, found.note.sequence) == wanted), None)


def _by_key(records: Sequence[Found]) -> dict[ExpertKey, list[Found]]:
    """Records by key, newest first; of equal ones, those that are whole first."""
    by_key: dict[ExpertKey, list[Found]] = {}
    for record in sorted(records, key=lambda record: (record.age, record.damage is None), reverse=True):
        by_key.setdefault(record.key, []).append(record)
    return by_key


def _prove_step(proof: Proof, found: FoundNote, by_key: Mapping[ExpertKey, Sequence[Found]], *, is_snapshot: bool) -> None:
    note = found.note
    state, problems = _state(note, by_key)
    if not problems and combine([(key, record.root) for key, record in state.items()]) != note.state_root:
        problems.append(_finding(note, "its records do not combine to its note's root: not all are the newest"))
    if not problems and note.description.schema.updates == "exact":
        lacks = note.log.problem(note.applies, min((record.version for record in state.values()), default=note.applies))
        problems.extend([] if lacks is None else [_finding(note, lacks)])
    changed = None if problems else _changed(note, state, proof.steps.get(note.parent) if note.parent is not None else None)
    if not problems and changed is None:
        problems.append(_finding(note, f"its note speaks of {note.record_count} changed records, which are not these"))
    if changed is None:
        proof.lost[note.step] = problems
    else:
        proof.steps[note.step] = ProvenStep(found, state, changed, is_snapshot)


def _state(note: Note, by_key: Mapping[ExpertKey, Sequence[Found]]) -> tuple[dict[ExpertKey, Found], list[Finding]]:
    """Finds the record of each key at the note's step, and what is wrong with these records."""
    bounds = {**dict(note.bounds), note.epoch: note.sequence}
    state: dict[ExpertKey, Found] = {}
    problems: list[Finding] = []
    wrong = 0
    for key in note.description.keys:
        record = next((one for one in by_key.get(key, ()) if one.sequence <= bounds.get(one.epoch, -1)), None)
        if record is not None and record.damage is None:
            state[key] = record
            continue
        if record is None and note.step == DRAFT_STEP:
            continue  # its value was never given; if it was and is gone, the roots will not match
        wrong += 1
        if wrong > DAMAGED_SHOWN:
            continue
        if record is None:
            problems.append(_finding(note, "no record of it was found", key=key))
        else:
            problems.append(_finding(note, record.damage or "", key=key, volume=record.volume, offset=record.offset))
    if wrong > DAMAGED_SHOWN:
        problems.append(_finding(note, f"{wrong - DAMAGED_SHOWN} more records are missing or damaged"))
    return state, problems


def _changed(note: Note, state: State, parent: ProvenStep | None) -> frozenset[ExpertKey] | None:
    """Finds the keys that the step changed; None if no set of them is what the note says."""
    if parent is not None:
        keys = [key for key, record in state.items() if parent.state.get(key) != record]
    else:  # the last of its epoch's, since a parent of that epoch has a lower sequence
        own = sorted((key for key, record in state.items() if record.epoch == note.epoch), key=lambda key: state[key].sequence)
        keys = own[len(own) - note.record_count :]
    if len(keys) != note.record_count or combine([(key, state[key].root) for key in keys]) != note.combined_root:
        return None
    return frozenset(keys)


def _finding(
    note: Note, what: str, *, key: ExpertKey | None = None, volume: int | None = None, offset: int | None = None
) -> Finding:
    return Finding(what=what, namespace=note.namespace, step=note.step, key=key, volume=volume, offset=offset)
