"""fsck on an exact namespace: the logs of its steps are checked by a reader of its own, and come back with a rebuild."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import msgspec
import pytest

from paramstore.core.apply_log import ApplyLog
from paramstore.core.optimizers import AdamW
from paramstore.errors import CorruptRecord
from paramstore.fsck.check import examine
from paramstore.fsck.compare import compare
from paramstore.fsck.proof import prove
from paramstore.fsck.reader import NO_LOG, Log, parse_log
from paramstore.fsck.rebuild import new_contents, restore_notes
from paramstore.fsck.survey import Survey
from paramstore.fsck.swap import fill
from paramstore.storage.catalog.base import Contents
from paramstore.storage.format.apply_log import pack_log
from paramstore.testing.catalogs import MemoryCatalog
from paramstore_testkit.disks.machine import Machine
from paramstore_testkit.stores.memory_disk import disks_of, survey_of
from paramstore_testkit.stores.small_store import SCHEMA, create, first_values, keys_of, run, train

EXACT = replace(SCHEMA, updates="exact")


async def trained(machine: Machine) -> dict[int, list[float]]:
    """Steps 0 to 3, in which most records miss some; what a reader sees of each that is there."""
    store = machine.start()
    view = await create(store, schema=EXACT)
    keys = keys_of(view)
    for step, touched in ((1, keys), (2, keys[:1]), (3, [])):
        await train(store, view, touched)
        await train(store, view, [])
        await store.committer.commit(view, step, b"")
    return await seen(machine)


async def seen(machine: Machine) -> dict[int, list[float]]:
    assert machine.store is not None
    values = {}
    for step in machine.store.namespaces["moe"].steps.ledger.steps():
        view = await machine.store.admission.open("moe", mode="read", at=step, host_bytes=None)
        values[step] = await first_values(machine.store, view)
        machine.store.close_view(view)
    return values


def log_of(first: int, count: int) -> ApplyLog:
    log = ApplyLog(first)
    for _ in range(count):
        log = log.appended(1, AdamW())
    return log


@pytest.mark.parametrize(("first", "count"), [(1, 1), (7, 128)])
def test_the_reader_understands_what_the_writer_writes(first: int, count: int) -> None:
    packed = pack_log(log_of(first, count))
    assert parse_log(packed) == Log(first, first + count - 1, packed)
    assert parse_log(b"") == NO_LOG


@pytest.mark.parametrize(
    "packed",
    [b"\x00", msgspec.msgpack.encode((0, 1, {"epoch": [1, 1]})), msgspec.msgpack.encode((1, 2, {"epoch": [1, 1]})),
     msgspec.msgpack.encode((1, 1, {"lr": [1, 0.5]})), msgspec.msgpack.encode((1, 1, {"epoch": ["a", 1]}))],
)  # fmt: skip
def test_what_is_no_log_is_refused(packed: bytes) -> None:
    with pytest.raises(CorruptRecord, match="apply log"):
        parse_log(packed)


@pytest.mark.parametrize(
    ("log", "applies", "oldest", "what"),
    [
        (Log(3, 9, b""), 9, 2, None), (Log(3, 9, b""), 9, 1, "begins at 3, a record of it stands at apply 1"),
        (Log(3, 9, b""), 10, 5, "ends at 9, the step stands at apply 10"),
        (Log(3, 9, b""), 9, 10, "stands at apply 10, the step at 9"),
        (NO_LOG, 0, 0, None), (NO_LOG, 1, 1, "ends at 0"),
    ],
)  # fmt: skip
def test_a_log_covers_what_lies_between_the_oldest_record_and_the_step(
    log: Log, applies: int, oldest: int, what: str | None
) -> None:
    problem = log.problem(applies, oldest)
    assert problem is None if what is None else what in (problem or "")


def test_a_rebuilt_catalog_has_the_logs_and_every_step_the_same_values() -> None:
    async def scenario() -> None:
        machine = Machine(seed=3, volume_count=2)
        before = await trained(machine)
        assert sorted(before) == [2, 3]
        assert len({tuple(values) for values in before.values()}) == 2
        contents = machine.catalog.load()
        await machine.crash()
        report = examine(survey_of(machine), None)
        restore_notes(report.found, report.proofs, disks_of(machine.volumes))
        assert report.found.store is not None
        machine.catalog = machine.durable = MemoryCatalog(store_uuid=report.found.store)
        fill(machine.catalog, new_contents(report.found, report.proofs))
        assert machine.catalog.load().namespaces["moe"].steps == contents.namespaces["moe"].steps
        store = machine.start()
        assert await seen(machine) == before
        view = await store.admission.open("moe", mode="write", at=None, host_bytes=None)
        await train(store, view, keys_of(view)[2:])
        await store.committer.commit(view, 9, b"")
        assert examine(survey_of(machine), machine.catalog.load()).findings == []
        await machine.crash()

    run(scenario())


def findings(harm: Callable[[Contents, Survey], None]) -> list[str]:
    """What is found after `harm` to the catalog or to what was read of the volumes."""
    told: list[str] = []

    async def scenario() -> None:
        machine = Machine(seed=3)
        await trained(machine)
        await machine.crash()
        contents, found = machine.catalog.load(), survey_of(machine)
        harm(contents, found)
        told.extend(finding.describe() for finding in compare(contents, found))

    run(scenario())
    return told


def test_a_healthy_store_has_no_findings() -> None:
    assert findings(lambda *_: None) == []


def test_a_catalog_with_another_log_than_the_note_is_found() -> None:
    def harm(contents: Contents, _: Survey) -> None:
        steps = contents.namespaces["moe"].steps
        steps[3] = replace(steps[3], log=pack_log(log_of(1, 6)))

    told = findings(harm)
    assert told
    assert all("which the catalog does not have like that" in one for one in told)


def test_a_log_that_does_not_reach_back_to_the_oldest_record_is_found_and_its_step_not_proven() -> None:
    short = log_of(5, 2)

    def harm(contents: Contents, found: Survey) -> None:
        steps = contents.namespaces["moe"].steps
        steps[3] = replace(steps[3], log=pack_log(short))
        for number, one in enumerate(found.notes):
            if one.note.step == 3:
                found.notes[number] = replace(one, note=replace(one.note, log=parse_log(pack_log(short))))
        proof = prove("moe", found.notes, found.records)
        assert sorted(proof.steps) == [1, 2], "of what its parent lists"
        assert [lost.what for lost in proof.lost[3]] == ["its apply log begins at 5, a record of it stands at apply 1"]

    assert findings(harm) == ["namespace moe, step 3: its apply log begins at 5, a record of it stands at apply 1"]
