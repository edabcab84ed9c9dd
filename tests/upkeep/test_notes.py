"""What a scrub says of superblocks and commit notes: every damaged copy by its name, and nothing of a step that went."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from random import Random
from typing import Any

import pytest

from paramstore.core.schema import CHUNK_BYTES, PAGE_BYTES, Schema
from paramstore.engine.store import Store
from paramstore.engine.tables.namespace import View
from paramstore.storage.format.notes import read_note, read_superblock, write_note
from paramstore.storage.format.structures import (
    NOTE_SLOT_BYTES,
    SUPERBLOCK_BYTES,
    SUPERBLOCK_COPIES,
    note_offsets,
    pack_superblock,
    unpack_superblock,
)
from paramstore.testing.volumes import Fault, FaultyVolume
from paramstore.upkeep import progress, scrubber
from paramstore.upkeep.scrubber import buffer_bytes
from paramstore_testkit.disks.machine import Machine
from paramstore_testkit.stores.small_store import EXPERTS, create, run, train
from paramstore_testkit.trial import telling

KEY = (0, 1)
Result = dict[str, Any]


async def verify(machine: Machine, namespace: str | None = None, keys: Sequence[tuple[int, int]] | None = None) -> Result:
    return await machine.service.scrubber.wait(machine.service.scrubber.start(namespace, keys, None))


def offsets_of(machine: Machine, view: View, step: int, volume: int = 0) -> list[int]:
    """Where the copies of a step's note lie."""
    row = next(row for row in view.namespace.steps.ledger._contents.steps.values() if row.step == step)
    return note_offsets(read_superblock(machine.disks[volume]), row.note_slot)


async def two_steps(machine: Machine) -> tuple[Store, View]:
    store = machine.start()
    view = await create(store, step=3)
    await train(store, view, [KEY])
    await store.committer.commit(view, 5, b"extra")
    return store, view


def test_every_copy_on_every_volume_is_read_and_a_whole_store_has_no_findings() -> None:
    async def scenario() -> None:
        machine = Machine(volume_count=2)
        store, view = await two_steps(machine)
        await train(store, view, [KEY])
        await store.committer.prepare(view, 6, b"")
        result = await verify(machine)
        assert (result["found"], result["copy_findings"]) == (0, [])
        assert result["copies"] == 2 * (2 + 2 * 3)

    run(scenario())


@pytest.mark.parametrize("step", [3, 5, 6])
@pytest.mark.parametrize("volume", [0, 1])
@pytest.mark.parametrize("copy", [0, 1])
def test_a_rotten_copy_of_any_step_s_note_is_named(step: int, volume: int, copy: int) -> None:
    async def scenario() -> None:
        machine = Machine(volume_count=2)
        store, view = await two_steps(machine)
        await train(store, view, [KEY])
        await store.committer.prepare(view, 6, b"")
        offset_bytes = offsets_of(machine, view, step, volume)[copy]
        machine.disks[volume].corrupt(offset_bytes + 30)
        result = await verify(machine)
        (finding,) = result["copy_findings"]
        assert (result["found"], result["findings"]) == (1, [])
        assert finding.pop("reason").endswith("; the other copy is whole")
        assert finding == {
            "kind": "note", "namespace": "moe", "step": step, "volume": volume, "offset_bytes": offset_bytes, "copy": copy,
        }  # fmt: skip

    run(scenario())


@pytest.mark.parametrize("copy", [0, 1])
def test_a_rotten_copy_of_a_superblock_is_named(copy: int) -> None:
    async def scenario() -> None:
        machine = Machine(volume_count=2)
        await two_steps(machine)
        machine.disks[1].corrupt(SUPERBLOCK_COPIES[copy] + 40)
        (finding,) = (await verify(machine))["copy_findings"]
        assert "checksum" in finding["reason"]
        assert finding["reason"].endswith("; the other copy is whole")
        place = (finding["kind"], finding["volume"], finding["offset_bytes"], finding["copy"])
        assert place == ("superblock", 1, SUPERBLOCK_COPIES[copy], copy)
        assert (finding["namespace"], finding["step"]) == (None, None)

    run(scenario())


def test_where_both_copies_rotted_each_says_that_none_is_whole() -> None:
    async def scenario() -> None:
        machine = Machine()
        _, view = await two_steps(machine)
        for offset_bytes in (*offsets_of(machine, view, 5), *SUPERBLOCK_COPIES):
            machine.disks[0].corrupt(offset_bytes)
        findings = (await verify(machine))["copy_findings"]
        assert [(finding["kind"], finding["copy"]) for finding in findings] == [
            ("superblock", 0), ("superblock", 1), ("note", 0), ("note", 1),
        ]  # fmt: skip
        assert all(finding["reason"].endswith("; no copy on this volume is whole") for finding in findings)

    run(scenario())


def test_a_whole_note_of_another_step_in_its_place_is_damage() -> None:
    async def scenario() -> None:
        machine = Machine()
        _, view = await two_steps(machine)
        disk = machine.disks[0]
        superblock = read_superblock(disk)
        slots = {row.step: row.note_slot for row in view.namespace.steps.ledger._contents.steps.values()}
        write_note(disk, superblock, slots[5], read_note(disk, superblock, slots[3]))
        findings = (await verify(machine))["copy_findings"]
        assert [(finding["step"], finding["copy"]) for finding in findings] == [(5, 0), (5, 1)]
        assert "the note of (namespace, step, sequence, records) ('moe', 3, " in findings[0]["reason"]

    run(scenario())


def test_a_whole_superblock_of_another_volume_is_damage() -> None:
    async def scenario() -> None:
        machine = Machine(volume_count=2)
        await two_steps(machine)
        image = memoryview(bytearray(pack_superblock(read_superblock(machine.disks[1]))))
        machine.disks[0].write(SUPERBLOCK_COPIES[1], [image])
        (finding,) = (await verify(machine))["copy_findings"]
        assert unpack_superblock(image).index == 1
        assert (finding["volume"], finding["copy"]) == (0, 1)
        assert "it is another superblock" in finding["reason"]

    run(scenario())


@pytest.mark.parametrize("nth", range(1, 7))
def test_a_copy_that_cannot_be_read_is_a_finding_and_the_scrub_goes_on(nth: int) -> None:
    async def scenario() -> None:
        machine = Machine()
        store, _ = await two_steps(machine)
        faulty = FaultyVolume(machine.disks[0], [Fault("read", nth)])
        assert machine.service.scrubber._notes is not None
        machine.service.scrubber._notes._volumes = {0: faulty}
        result = await verify(machine)
        (finding,) = result["copy_findings"]
        assert "fails as planned" in finding["reason"]
        assert finding["copy"] == (nth - 1) % 2
        assert (result["found"], result["copies"], faulty.calls["read"]) == (1, 6, 6)
        assert store.transfers.traffic[0].failures == 1

    run(scenario())


def test_what_is_chosen_limits_what_is_read() -> None:
    async def scenario() -> None:
        machine = Machine(volume_bytes=24 << 20)
        store = machine.start()
        one, _ = await create(store, "one", host_bytes=16 << 20), await create(store, "two", host_bytes=16 << 20)
        machine.disks[0].corrupt(offsets_of(machine, one, 0)[0])
        assert (await verify(machine))["copies"] == 2 + 2 * 2
        assert [finding["namespace"] for finding in (await verify(machine, "one"))["copy_findings"]] == ["one"]
        assert (await verify(machine, "two"))["copy_findings"] == []
        few = await verify(machine, "one", [KEY])
        assert (few["copies"], few["found"], few["records"]) == (0, 0, 1)

    run(scenario())


def test_findings_beyond_the_limit_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "FINDINGS_MAX", 1)

    async def scenario() -> None:
        machine = Machine()
        _, view = await two_steps(machine)
        for offset_bytes in offsets_of(machine, view, 5):
            machine.disks[0].corrupt(offset_bytes)
        result = await verify(machine)
        assert (result["found"], len(result["copy_findings"])) == (2, 1)

    run(scenario())


def test_copies_are_paid_for_and_counted_as_read() -> None:
    async def scenario() -> None:
        machine = Machine()
        store, _ = await two_steps(machine)
        before_bytes = store.transfers.traffic[0].bytes_read
        paid: list[int] = []
        pay = machine.service.scrubber._pay

        async def counted(scrub: Any, length_bytes: int) -> None:
            paid.append(length_bytes)
            await pay(scrub, length_bytes)

        machine.service.scrubber._pay = counted  # type: ignore[method-assign]
        result = await verify(machine)
        copies_bytes = 2 * SUPERBLOCK_BYTES + 4 * NOTE_SLOT_BYTES
        assert store.transfers.traffic[0].bytes_read - before_bytes == sum(paid) == result["bytes_read"] + copies_bytes

    run(scenario())


# --- beside commits


def test_a_step_dropped_while_its_note_waits_to_be_read_is_left_out() -> None:
    async def scenario() -> None:
        machine = Machine()
        store, view = await two_steps(machine)
        assert machine.service.scrubber._notes is not None
        checks = machine.service.scrubber._notes.checks([view.namespace])
        doomed = next(check for check in checks if check.step == 3)
        assert doomed.is_current()
        assert not list(doomed.findings(doomed.run()))
        await train(store, view, [KEY])
        await store.committer.commit(view, 6, b"")
        assert not doomed.is_current()
        kept = next(check for check in checks if check.step == 5)
        assert kept.is_current()
        await store.admission.snapshot(view, 5)
        assert kept.is_current()
        await store.rollback(view, 5)
        assert kept.is_current()

    run(scenario())


def test_a_step_made_again_after_a_rollback_is_not_the_one_that_was_there() -> None:
    async def scenario() -> None:
        machine = Machine()
        store, view = await two_steps(machine)
        assert machine.service.scrubber._notes is not None
        (_, _, old) = machine.service.scrubber._notes.checks([view.namespace])
        assert old.step == 5
        await store.rollback(view, 3)
        await train(store, view, [KEY])
        await store.committer.commit(view, 5, b"")
        assert not old.is_current()
        assert (await verify(machine))["found"] == 0

    run(scenario())


def test_a_note_whose_step_goes_while_it_is_read_is_no_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        machine = Machine()
        store, view = await two_steps(machine)
        for offset_bytes in offsets_of(machine, view, 5):
            machine.disks[0].corrupt(offset_bytes)
        in_worker, rolled_back = machine.service.scrubber._in_worker, []

        async def slowly(scrub: Any, volume: int, run: Any, piece: Any, **more: Any) -> Any:
            outcome = await in_worker(scrub, volume, run, piece, **more)
            if getattr(piece, "step", None) == 5:
                rolled_back.append(await store.rollback(view, 3))
            return outcome

        monkeypatch.setattr(machine.service.scrubber, "_in_worker", slowly)
        result = await verify(machine)
        assert rolled_back
        assert (result["found"], result["copies"]) == (0, 4)

    run(scenario())


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(12))
def test_beside_random_commits_rollbacks_and_snapshots_no_note_is_found_damaged(seed: int) -> None:
    async def scenario() -> None:
        random = Random(seed)
        machine = Machine(seed=seed, volume_count=1 + seed % 2, volume_bytes=20 << 20)
        store = machine.start()
        view = await create(store)
        results: list[Result] = []

        async def scrub_on() -> None:
            while True:
                results.append(await verify(machine))

        scrubbing = asyncio.ensure_future(scrub_on())
        for step in range(1, 150):
            choice = random.choice(("commit", "commit", "prepare", "rollback", "snapshot", "drop"))
            if choice in ("commit", "prepare"):
                await train(store, view, [(0, random.randrange(EXPERTS))])
                make = store.committer.commit if choice == "commit" else store.committer.prepare
                await make(view, step, b"x" * random.randrange(60_000))
                if choice == "prepare":
                    await store.history.finalize(view, step)
            elif choice == "rollback" and not view.namespace.steps.ledger.snapshots():
                await store.rollback(view, random.choice(view.namespace.steps.ledger.steps()))
            elif choice == "snapshot" and len(view.namespace.steps.ledger.snapshots()) < 2:
                await store.admission.snapshot(view, random.choice(view.namespace.steps.ledger.steps()))
            elif choice == "drop" and view.namespace.steps.ledger.snapshots():
                await store.admission.drop_snapshot(view, random.choice(view.namespace.steps.ledger.snapshots()))
        while not results:
            await asyncio.sleep(0)
        scrubbing.cancel()
        assert [result["copy_findings"] + result["findings"] for result in results] == [[]] * len(results)

    with telling(lambda: f"seed {seed}"):
        run(scenario())


# --- the buffer


@pytest.mark.slow
@pytest.mark.parametrize("gibibytes", [383, 384, 600])
def test_the_buffer_holds_every_piece_of_a_record_of_any_size(gibibytes: int) -> None:
    part = Schema.param({"a": ((gibibytes << 30,), "uint8"), "b": ((3,), "uint8")}).stored
    pieces = scrubber.cut_pieces.__wrapped__(part, scrubber.PIECE_BYTES, len(part.fields))
    longest_bytes = max(piece.end - piece.start for piece in pieces)
    assert longest_bytes <= buffer_bytes(part)
    assert (longest_bytes > scrubber.BUFFER_BYTES) == (gibibytes >= 384)


def test_a_piece_longer_than_the_usual_buffer_gets_a_longer_one(monkeypatch: pytest.MonkeyPatch) -> None:
    schema = Schema.param({"a": (((2 << 20) + 5,), "uint8")})
    monkeypatch.setattr(scrubber, "BUFFER_BYTES", PAGE_BYTES)
    monkeypatch.setattr(scrubber, "PIECE_BYTES", PAGE_BYTES)

    async def scenario() -> None:
        machine = Machine(volume_bytes=64 << 20)
        store = machine.start()
        view = await create(store, schema=schema, experts=2)
        located = view.namespace.steps.ledger.at(KEY, 0)
        assert located is not None
        machine.disks[0].corrupt(located.extent.offset_bytes + schema.stored.fields[0].offset_bytes + CHUNK_BYTES)
        result = await verify(machine)
        (finding,) = result["findings"]
        assert (finding["key"], "chunk 1 " in finding["reason"]) == (KEY, True)

    run(scenario())
