"""Whatever in a catalog the volumes do not bear out is named with its place; a healthy store has no findings."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from paramstore.core.location import Identity
from paramstore.fsck.compare import compare
from paramstore.fsck.findings import Finding
from paramstore.fsck.reader import SUPERBLOCK_AT
from paramstore.storage.catalog.base import Contents, Row, StepRow, VolumeRow
from paramstore_testkit.disks.machine import Machine
from paramstore_testkit.stores.memory_disk import disks_of, eventful, survey_of
from paramstore_testkit.stores.small_store import run

KEY = (0, 3)


def findings(harm: Callable[[Contents, Machine], None] = lambda *_: None) -> list[Finding]:
    """What is found of a store of two volumes after `harm` to its catalog or volumes."""
    found: list[Finding] = []

    async def scenario() -> None:
        machine = Machine(seed=3, volume_count=2)
        await eventful(machine)
        await machine.crash()
        contents = machine.catalog.load()
        harm(contents, machine)
        survey = survey_of(machine)
        found.extend([*survey.findings, *compare(contents, survey)])

    run(scenario())
    return found


def newest(contents: Contents) -> Row:
    return contents.namespaces["moe"].rows[KEY][-1]


def change_newest(contents: Contents, **changes: object) -> None:
    rows = contents.namespaces["moe"].rows
    rows[KEY] = [*rows[KEY][:-1], Row(newest(contents).first_step, newest(contents).located._replace(**changes))]


def change_step(contents: Contents, step: int, **changes: object) -> None:
    steps = contents.namespaces["moe"].steps
    steps[step] = replace(steps[step], **changes)  # type: ignore[arg-type]


def test_a_healthy_store_has_no_findings() -> None:
    assert findings() == []


def test_a_wrong_identity_names_what_lies_there() -> None:
    found = findings(lambda contents, _: change_newest(contents, identity=Identity(9, 9)))
    assert [(one.key, one.step) for one in found] == [(KEY, 9)]
    assert "the catalog has ('moe', (0, 3), 9, 9)" in found[0].what


def test_a_wrong_root_is_found_at_the_record_and_at_every_step_that_has_it() -> None:
    found = findings(lambda contents, _: change_newest(contents, root=1))
    assert [(one.key, one.step) for one in found] == [(KEY, 9), (None, 9)]
    assert "has root" in found[0].what
    assert "do not combine" in found[1].what


def test_a_record_that_is_not_there_is_named_with_its_place() -> None:
    places: list[tuple[int, int]] = []

    def erase(contents: Contents, machine: Machine) -> None:
        extent = newest(contents).located.extent
        places.append((extent.volume, extent.offset_bytes))
        disks_of(machine.volumes)[extent.volume].write(extent.offset_bytes, bytes(extent.length_bytes))

    (found,) = findings(erase)
    assert (found.volume, found.offset) == places[0]
    assert (found.namespace, found.key, found.step, found.what) == ("moe", KEY, 9, "no whole record header lies there")


def test_a_flipped_bit_in_a_chunk_is_found_in_every_record_of_every_step() -> None:
    def flip(contents: Contents, machine: Machine) -> None:
        for namespace in contents.namespaces.values():
            for rows in namespace.rows.values():
                for row in rows:
                    machine.disks[row.located.extent.volume].corrupt(row.located.extent.offset_bytes + 4096)

    def count(contents: Contents) -> int:
        return sum(len(rows) for namespace in contents.namespaces.values() for rows in namespace.rows.values())

    counts: list[int] = []
    found = findings(lambda contents, machine: (counts.append(count(contents)), flip(contents, machine))[1])
    assert len(found) == counts[0]
    assert all("chunk 0" in one.what for one in found)


@pytest.mark.parametrize("copy", [0, 1])
def test_a_torn_copy_of_a_note_is_named(copy: int) -> None:
    def tear(contents: Contents, machine: Machine) -> None:
        slot = contents.namespaces["moe"].steps[7].note_slot
        machine.disks[1].corrupt(survey_of(machine).superblocks[1].note_at(slot, copy) + 200)

    (found,) = findings(tear)
    assert (found.volume, found.namespace, found.step) == (1, "moe", 7)
    assert f"copy {copy} of its commit note: there is no whole note in slot" in found.what


@pytest.mark.parametrize(
    "changes", [{"sequence": 99}, {"record_count": 99}, {"extra": b"other"}, {"applies": 99}, {"note_slot": 63}]
)
def test_a_step_that_its_note_contradicts_is_named_on_every_volume(changes: dict[str, object]) -> None:
    found = findings(lambda contents, _: change_step(contents, 7, **changes))
    assert [(one.volume, one.step) for one in found] == [(0, 7), (0, 7), (1, 7), (1, 7)]


def test_a_slot_with_the_note_of_another_step_names_that_step() -> None:
    def exchange(contents: Contents, _: Machine) -> None:
        change_step(contents, 7, note_slot=contents.namespaces["eval"].steps[3].note_slot)

    assert {one.what.split(": ")[1].split(", ")[0].split("a note of ")[1] for one in findings(exchange)} == {"step 3 of 'eval'"}


def test_of_a_volume_without_a_superblock_one_thing_is_said_and_nothing_of_its_records() -> None:
    counts: list[int] = []

    def erase(contents: Contents, machine: Machine) -> None:
        rows = [row for moe in contents.namespaces.values() for of_key in moe.rows.values() for row in of_key]
        counts.append(sum(row.located.extent.volume == 1 for row in rows))
        for copy in SUPERBLOCK_AT:
            machine.disks[1].corrupt(copy + 30)

    found = [one for one in findings(erase) if not one.what.startswith("no whole superblock")]
    assert counts[0] > 0
    assert [(one.volume, one.key, one.what) for one in found] == [
        (1, None, f"it was not read, since it has no whole superblock of its own: nothing is known of its {counts[0]} records")
    ]


def test_a_step_without_a_note_is_named() -> None:
    def invent(contents: Contents, _: Machine) -> None:
        contents.namespaces["moe"].steps[8] = StepRow(8, 77, 50, 1, b"")

    assert {one.step for one in findings(invent)} == {8}


def test_a_row_too_few_shows_in_the_root_of_its_steps() -> None:
    def forget(contents: Contents, _: Machine) -> None:
        del contents.namespaces["moe"].rows[KEY]

    assert [(one.step, one.what) for one in findings(forget)] == [
        (step, "the catalog's rows do not combine to its note's root") for step in (4, 7, 9)
    ]


OTHER_SCHEMA = {"kind": "param", "fields": [["w", [1], "uint8"]]}


@pytest.mark.parametrize("changes", [{"experts": 5}, {"layers": (1,)}, {"schema": OTHER_SCHEMA}])
def test_another_description_than_the_notes_is_named(changes: dict[str, object]) -> None:
    def describe(contents: Contents, _: Machine) -> None:
        moe = contents.namespaces["moe"]
        moe.namespace = replace(moe.namespace, **changes)  # type: ignore[arg-type]

    assert {one.what for one in findings(describe)} == {"its note describes other keys or another schema than the catalog"}


def test_a_catalog_whose_epoch_went_back_is_an_old_copy() -> None:
    def go_back(contents: Contents, _: Machine) -> None:
        moe = contents.namespaces["moe"]
        moe.namespace = replace(moe.namespace, epoch=1)

    (found,) = findings(go_back)
    assert "it is an old copy" in found.what


def test_rows_that_share_bytes_are_named() -> None:
    def share(contents: Contents, _: Machine) -> None:
        other = contents.namespaces["moe"].rows[0, 2][-1].located.extent
        change_newest(contents, extent=other)

    assert any("overlaps" in one.what for one in findings(share))


def test_missing_foreign_and_truncated_volumes_are_named() -> None:
    def confuse(contents: Contents, machine: Machine) -> None:
        contents.volumes[0] = replace(contents.volumes[0], size_bytes=1 << 40)
        contents.volumes[4] = VolumeRow(4, b"x" * 16, 1, 0)
        contents.volumes[1] = replace(contents.volumes[1], uuid=b"y" * 16)
        contents.store_uuid = b"z" * 16

    said = [(one.volume, one.what) for one in findings(confuse)]
    assert [volume for volume, _ in said] == [None, 0, 1, 4]
    assert "belong to store" in said[0][1]
    assert "truncated" in said[1][1]
    assert "the catalog has 7979" in said[2][1]
    assert "missing" in said[3][1]


def test_a_volume_that_the_catalog_does_not_know_is_named() -> None:
    def forget(contents: Contents, _: Machine) -> None:
        del contents.volumes[1]

    (found,) = findings(forget)
    assert (found.volume, found.what) == (1, "the catalog does not know it")
