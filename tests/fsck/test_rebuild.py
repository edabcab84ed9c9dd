"""A catalog made anew means what the lost one meant; a step that is not whole does not come back."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from paramstore.errors import CatalogError
from paramstore.fsck.check import Report, examine
from paramstore.fsck.disks import Disk
from paramstore.fsck.rebuild import check_rebuildable, new_contents, restore_notes
from paramstore.fsck.scan import Found
from paramstore.fsck.swap import fill
from paramstore.storage.catalog.base import Contents
from paramstore.testing.catalogs import MemoryCatalog
from paramstore_testkit.disks.machine import Machine, PlainSegment
from paramstore_testkit.stores.memory_disk import commit, disks_of, eventful, state_at, survey_of
from paramstore_testkit.stores.small_store import create, keys_of, run, train

STORE = b"s" * 16


def machine_of(count: int = 1, seed: int = 3) -> Machine:
    return Machine(seed=seed, volume_count=count)


def report_of(machine: Machine) -> Report:
    """What fsck says of the machine's volumes once the catalog is lost."""
    return examine(survey_of(machine), None)


def rebuilt(machine: Machine) -> Contents:
    """Rebuilds the machine's catalog; the machine has the new one afterwards."""
    report = report_of(machine)
    check_rebuildable(report.found, report.proofs)
    restore_notes(report.found, report.proofs, disks_of(machine.volumes))
    assert report.found.store is not None
    machine.catalog = machine.durable = MemoryCatalog(store_uuid=report.found.store)
    fill(machine.catalog, new_contents(report.found, report.proofs))
    return machine.catalog.load()


async def bytes_at(machine: Machine, name: str, step: int) -> list[bytes]:
    """Every record of a step, read and verified by a store that runs on the machine."""
    store = machine.store
    assert store is not None
    view = await store.admission.open(name, mode="read", at=step, host_bytes=None)
    records = []
    for key in keys_of(view):
        target = PlainSegment(view.namespace.schema.record_bytes).view(0, view.namespace.schema.record_bytes)
        await store.reading.read(view, key, target)
        records.append(bytes(target))
    store.close_view(view)
    return records


@pytest.mark.parametrize("count", [1, 2])
def test_a_rebuilt_catalog_has_the_same_steps_rows_and_extra_and_opens_with_the_same_bytes(count: int) -> None:
    async def scenario() -> None:
        machine = machine_of(count)
        await eventful(machine)
        before = machine.catalog.load()
        steps = {name: sorted(namespace.steps) for name, namespace in before.namespaces.items()}
        assert steps == {"moe": [4, 7, 9], "eval": [3]}
        told = {(name, step): await bytes_at(machine, name, step) for name in steps for step in steps[name]}
        await machine.crash()
        after = rebuilt(machine)
        assert after.store_uuid == before.store_uuid
        assert {index: (row.uuid, row.size_bytes) for index, row in after.volumes.items()} == {
            index: (row.uuid, row.size_bytes) for index, row in before.volumes.items()
        }
        for name, namespace in before.namespaces.items():
            again = after.namespaces[name]
            assert again.steps == namespace.steps
            assert all(state_at(after, name, step) == state_at(before, name, step) for step in namespace.steps)
            row = namespace.namespace
            assert (again.namespace.schema, again.namespace.layers, again.namespace.experts, again.namespace.applies) == (
                row.schema, row.layers, row.experts, row.applies
            )  # fmt: skip
            assert again.namespace.epoch > row.epoch
            assert again.namespace.sequence >= row.sequence
        machine.start()
        assert {place: await bytes_at(machine, *place) for place in told} == told
        await machine.crash()

    run(scenario())


def test_a_store_with_a_rebuilt_catalog_is_clean_and_goes_on() -> None:
    async def scenario() -> None:
        machine = machine_of(2)
        await eventful(machine)
        await machine.crash()
        rebuilt(machine)
        store = machine.start()
        view = await store.admission.open("moe", mode="write", at=None, host_bytes=None)
        assert view.namespace.steps.committed_step == 9
        await commit(store, view, 20, keys_of(view)[1:], b"on")
        assert view.namespace.steps.ledger.step(20).extra == b"on"
        assert 9 in view.namespace.steps.ledger.steps()
        assert examine(survey_of(machine), machine.catalog.load()).findings == []
        await machine.crash()
        machine.start()
        assert examine(survey_of(machine), machine.catalog.load()).findings == []
        await machine.crash()

    run(scenario())


def test_two_rebuilds_of_one_store_are_equal() -> None:
    async def scenario() -> None:
        machine = machine_of(2)
        await eventful(machine)
        await machine.crash()
        first, second = report_of(machine), report_of(machine)
        assert new_contents(first.found, first.proofs) == new_contents(second.found, second.proofs)

    run(scenario())


def damaged(harm: Callable[[Machine, Report], None], *, count: int = 1) -> Report:
    """What is found of a store whose volumes were spoilt, without its catalog. `moe` stands at 9, with 7 and 4 before it."""
    reports: list[Report] = []

    async def scenario() -> None:
        machine = machine_of(count)
        await eventful(machine)
        await machine.crash()
        harm(machine, report_of(machine))
        reports.append(report_of(machine))

    run(scenario())
    return reports[0]


def newest(report: Report, key: tuple[int, int] = (0, 3)) -> Found:
    """A record that only step 9 has."""
    return report.proofs["moe"].steps[9].state[key]


def flip_a_chunk(machine: Machine, report: Report) -> None:
    record = newest(report)
    machine.disks[record.volume].corrupt(record.offset + 4096)


def flip_a_header(machine: Machine, report: Report) -> None:
    record = newest(report)
    machine.disks[record.volume].corrupt(record.offset + 130)


def erase_a_record(machine: Machine, report: Report) -> None:
    record = newest(report)
    disks_of(machine.volumes)[record.volume].write(record.offset, bytes(record.record_bytes))


def overwrite_by_another(machine: Machine, report: Report) -> None:
    record, other = newest(report), newest(report, (0, 2))
    disks = disks_of(machine.volumes)
    disks[record.volume].write(record.offset, disks[other.volume].read(other.offset, other.record_bytes))


def tear_every_note_of_the_newest_step(machine: Machine, report: Report) -> None:
    note = report.proofs["moe"].steps[9].found
    for volume, copy in note.places:
        machine.disks[volume].corrupt(report.found.superblocks[volume].note_at(note.slot, copy) + 300)


@pytest.mark.parametrize(
    "harm", [flip_a_chunk, flip_a_header, erase_a_record, overwrite_by_another, tear_every_note_of_the_newest_step]
)
def test_a_step_that_is_not_whole_is_not_claimed_and_older_ones_are(harm: Callable[[Machine, Report], None]) -> None:
    report = damaged(harm)
    assert 9 not in report.proofs["moe"].steps
    assert 7 in report.proofs["moe"].steps
    assert sorted(report.proofs["eval"].steps) == [3]
    steps = [row.step for name, row in new_contents(report.found, report.proofs).put_steps if name == "moe"]
    assert 9 not in steps
    assert 7 in steps


def test_damage_names_volume_offset_key_and_step() -> None:
    found = damaged(flip_a_chunk).lost[0]
    assert (found.namespace, found.step, found.key) == ("moe", 9, (0, 3))
    assert found.volume == 0
    assert found.offset is not None
    assert "chunk 0, at byte 4096 of it, has checksum" in found.what


@pytest.mark.parametrize("count", [1, 2])
def test_records_that_changed_places_are_found_where_they_are(count: int) -> None:
    def exchange(machine: Machine, report: Report) -> None:
        one, other = newest(report), newest(report, (0, 2))
        disks = disks_of(machine.volumes)
        images = [disks[record.volume].read(record.offset, record.record_bytes) for record in (one, other)]
        disks[one.volume].write(one.offset, images[1])
        disks[other.volume].write(other.offset, images[0])

    async def scenario() -> None:
        machine = machine_of(count)
        await eventful(machine)
        told = await bytes_at(machine, "moe", 9)
        catalog = machine.catalog.load()
        await machine.crash()
        exchange(machine, report_of(machine))
        assert {finding.key for finding in examine(survey_of(machine), catalog).findings} == {(0, 2), (0, 3)}
        rebuilt(machine)
        machine.start()
        assert await bytes_at(machine, "moe", 9) == told
        await machine.crash()

    run(scenario())


def test_a_note_that_only_one_copy_of_one_volume_has_proves_its_step_and_is_written_again() -> None:
    async def scenario() -> None:
        machine = machine_of(2)
        await eventful(machine)
        await machine.crash()
        report = report_of(machine)
        note = report.proofs["moe"].steps[9].found
        for volume, copy in note.places - {(1, 1)}:
            machine.disks[volume].corrupt(report.found.superblocks[volume].note_at(note.slot, copy) + 300)
        report = report_of(machine)
        assert report.proofs["moe"].steps[9].found.places == {(1, 1)}
        disks = disks_of(machine.volumes)
        assert restore_notes(report.found, report.proofs, disks) == [(0, "moe", 9), (1, "moe", 9)]
        assert [disk.writes for disk in disks.values()] == [
            [report.found.superblocks[0].note_at(note.slot, copy) for copy in (0, 1)],
            [report.found.superblocks[1].note_at(note.slot, 0)],
        ]
        assert all(disk.unflushed == () for disk in machine.disks.values())
        rebuilt(machine)
        machine.start()
        await bytes_at(machine, "moe", 9)
        await machine.crash()

    run(scenario())


def test_whole_notes_are_not_written_again() -> None:
    async def scenario() -> None:
        machine = machine_of(2)
        await eventful(machine)
        await machine.crash()
        report = report_of(machine)
        machine.volumes[1].write(20 << 20 >> 1, [memoryview(bytearray(4096))])  # seen by whoever looks, and on no disk yet
        assert machine.disks[1].unflushed != ()
        disks = disks_of(machine.volumes)
        assert restore_notes(report.found, report.proofs, disks) == []
        assert all(disk.writes == [] for disk in disks.values())
        assert all(disk.unflushed == () for disk in machine.disks.values()), "what was read counts only once it is durable"

    run(scenario())


async def with_a_lost_transaction(machine: Machine) -> None:
    """Step 2 has its notes on every volume, and the power fails before its transaction: the catalog stands at step 1."""
    store = machine.start()
    view = await create(store)
    await commit(store, view, 1, keys_of(view)[:1])
    before = machine.durable
    machine.catalog = machine.durable = before.crash()
    before.reopen()
    before.load()
    await commit(store, view, 2, keys_of(view)[1:2])
    await machine.crash()
    assert sorted(machine.catalog.load().namespaces["moe"].steps) == [0, 1]


def test_a_step_whose_transaction_was_lost_comes_back_with_the_one_before_it() -> None:
    async def scenario() -> None:
        machine = machine_of()
        await with_a_lost_transaction(machine)
        assert sorted(report_of(machine).proofs["moe"].steps) == [1, 2]
        assert examine(survey_of(machine), machine.catalog.load()).findings == []

    run(scenario())


def test_an_unpublished_step_that_a_later_epoch_did_not_count_on_does_not_come_back() -> None:
    async def scenario() -> None:
        machine = machine_of()
        await with_a_lost_transaction(machine)
        store = machine.start()
        view = await store.admission.open("moe", mode="write", at=None, host_bytes=None)
        assert view.namespace.steps.committed_step == 1
        await train(store, view, keys_of(view)[2:3])
        await store.write_back(view, None)
        machine.disks[0].flush()
        await machine.crash()
        assert sorted(report_of(machine).proofs["moe"].steps) == [0, 1]

    run(scenario())


def test_a_store_without_any_record_gets_a_catalog_of_its_volumes_alone() -> None:
    async def scenario() -> None:
        machine = machine_of(2)
        machine.start()
        await machine.crash()
        contents = rebuilt(machine)
        assert (contents.namespaces, sorted(contents.volumes)) == ({}, [0, 1])
        await create(machine.start())
        await machine.crash()

    run(scenario())


def test_nothing_is_rebuilt_where_no_step_is_proven() -> None:
    def erase(machine: Machine, report: Report) -> None:
        for record in report.found.records:
            machine.disks[record.volume].corrupt(record.offset)

    report = damaged(erase)
    with pytest.raises(CatalogError, match="no step of eval, moe is proven"):
        check_rebuildable(report.found, report.proofs)


def test_nothing_is_rebuilt_where_records_are_left_and_no_note_tells_of_which_step() -> None:
    """An empty catalog would give their room away."""

    def erase(machine: Machine, report: Report) -> None:
        superblock = report.found.superblocks[0]
        start = superblock.note_at(0, 0)
        disks_of(machine.volumes)[0].write(start, bytes(superblock.extents_at - start))

    report = damaged(erase)
    assert report.found.records
    with pytest.raises(CatalogError, match="records of eval, moe are there, but no commit note"):
        check_rebuildable(report.found, report.proofs)


def test_nothing_is_rebuilt_without_every_volume_that_was_given() -> None:
    def erase(machine: Machine, report: Report) -> None:
        disks_of(machine.volumes)[1].write(0, bytes(1 << 20))

    report = damaged(erase, count=2)
    with pytest.raises(CatalogError, match="volume 1 is not usable"):
        check_rebuildable(report.found, report.proofs)


def test_without_any_superblock_nothing_is_rebuilt() -> None:
    report = damaged(lambda machine, _: disks_of(machine.volumes)[0].write(0, bytes(1 << 20)))
    with pytest.raises(CatalogError, match="no store is known"):
        check_rebuildable(report.found, report.proofs)


def test_a_namespace_that_did_not_come_back_may_be_made_anew_beside_its_remains() -> None:
    async def scenario() -> None:
        machine = Machine(seed=1)
        store = machine.start()
        await create(store, "kept")
        view = await create(store, step=0)  # `moe`
        await commit(store, view, 1, keys_of(view))
        view = await store.admission.open("moe", mode="write", at=None, host_bytes=None)
        await commit(store, view, 2, keys_of(view))
        await machine.crash()
        found = survey_of(machine)
        (disk,) = disks_of(machine.volumes).values()
        for one in found.records:  # a byte of each rots
            if one.namespace == "moe":
                machine.disks[0].corrupt(one.offset + 4096)
        report = examine(survey_of(machine), None)
        assert (sorted(report.proofs["kept"].steps), report.proofs["moe"].steps) == ([0], {})
        restore_notes(report.found, report.proofs, {0: disk})
        machine.catalog = machine.durable = MemoryCatalog(store_uuid=found.store or b"")
        fill(machine.catalog, new_contents(report.found, report.proofs))
        store = machine.start()
        await create(store)
        contents = machine.catalog.load()
        assert sorted(contents.namespaces["moe"].steps) == [0]
        again = examine(survey_of(machine), contents)
        assert [one.describe() for one in again.findings] == []
        assert sorted(again.proofs["moe"].steps) == [0]
        await machine.crash()

    run(scenario())


def test_the_size_of_a_volume_is_that_of_its_whole_pages() -> None:
    """A file may be longer by less than a page; no daemon uses that."""
    report = damaged(lambda machine, _: None)
    (disk,) = report.found.disks.values()
    report.found.disks = {0: Longer(disk)}
    (row,) = new_contents(report.found, report.proofs).put_volumes
    assert row.size_bytes == disk.size_bytes


class Longer:
    """`inner`, as a file that is longer by a few bytes."""

    def __init__(self, inner: Disk) -> None:
        self.index, self.place, self.size_bytes = inner.index, inner.place, inner.size_bytes + 100
        self.read = inner.read
