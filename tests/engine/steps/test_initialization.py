"""Drafts: what an initialization has saved is there after any crash, for one that resumes and for nobody else."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Literal

import pytest

from paramstore.engine.store import Store
from paramstore.errors import (
    CapacityError,
    CatalogError,
    StepDropped,
    StepFailed,
    StepOutOfOrder,
    VolumeError,
    WriterFenced,
)
from paramstore.storage.catalog.base import DRAFT_STEP
from paramstore.testing.catalogs import FaultyCatalog
from paramstore.testing.volumes import Fault, FaultyVolume
from paramstore.wire.messages import EXTRA_BYTES_MAX
from paramstore_testkit.disks.machine import Machine
from paramstore_testkit.stores.drafted_store import SOURCE, drafted, opened, put
from paramstore_testkit.stores.scrub_site import damage, verify
from paramstore_testkit.stores.small_store import EXPERTS, SCHEMA, create, first_values, keys_of, run, train, versions

ALL = [(0, expert) for expert in range(EXPERTS)]


async def restarted(machine: Machine) -> Store:
    await machine.crash()
    return machine.start()


def free_bytes(store: Store) -> int:
    return store.transfers._planner.space.free_bytes


@pytest.mark.parametrize("step_by_step", [False, True])
@pytest.mark.parametrize("volume_count", [1, 2])
def test_after_a_power_cut_an_initialization_goes_on_with_what_was_saved_and_no_more(step_by_step: bool, volume_count: int) -> None:
    async def scenario() -> None:
        machine = Machine(seed=1, volume_count=volume_count)
        store = machine.start()
        view = await drafted(store, (0, 2), step_by_step=step_by_step)
        await put(store, view, [(0, 1)])
        store = await restarted(machine)
        view, present, extra = await opened(store)
        assert (present, extra) == ([(0, 0), (0, 2)], SOURCE), "what was put after the save is gone, the rest is there"
        with pytest.raises(StepFailed, match=r"\(0, 2\) of 'moe' has its initial value already"):
            await put(store, view, [(0, 2)])
        await put(store, view, [(0, 1), (0, 3)])
        await store.initializer.end(view)
        await store.committer.commit(view, 0, b"")
        assert await first_values(store, view) == [0.0, 1.0, 2.0, 3.0]
        store = await restarted(machine)
        view = await store.admission.open("moe", mode="write", at=None, host_bytes=None)
        assert await first_values(store, view) == [0.0, 1.0, 2.0, 3.0]

    run(scenario())


def test_attempts_may_be_as_many_as_it_takes() -> None:
    async def scenario() -> None:
        machine = Machine(seed=2)
        for expert in range(EXPERTS):
            store = machine.start()
            view, present, _ = await opened(store)
            assert present == ALL[:expert]
            await put(store, view, [(0, expert)])
            await store.committer.save_draft(view, SOURCE)
            await machine.crash()
        store = machine.start()
        view, present, _ = await opened(store)
        assert present == ALL
        await store.initializer.end(view)
        await store.committer.commit(view, 7, b"whole")
        assert view.namespace.steps.ledger.steps() == [7]
        assert await versions(store, view) == [0] * EXPERTS
        await train(store, view)
        await store.committer.commit(view, 8, b"")
        await store.committer.commit(view, 9, b"")
        store = await restarted(machine)
        view = await store.admission.open("moe", mode="write", at=8, host_bytes=None)
        assert await versions(store, view) == [1] * EXPERTS

    run(scenario())


def test_nobody_takes_a_half_for_a_whole() -> None:
    async def scenario() -> None:
        machine = Machine(seed=3)
        await drafted(machine.start())
        for is_found in (False, True):
            store = await restarted(machine) if is_found else machine.store
            assert store is not None
            listed = store.admission.list_namespaces()[0]
            assert (listed["committed_step"], listed["prepared_step"]) == (None, None)
            for at in (None, DRAFT_STEP, 0):
                with pytest.raises((StepFailed, StepDropped)):
                    await store.admission.open("moe", mode="read", at=at, host_bytes=None)
            with pytest.raises(StepDropped):
                await store.admission.open("moe", mode="write", at=DRAFT_STEP, host_bytes=None)
            writer = await store.admission.open("moe", mode="write", at=None, host_bytes=None)
            for step in (0, DRAFT_STEP):
                with pytest.raises((StepFailed, StepOutOfOrder)):
                    await store.committer.commit(writer, step, b"")
            with pytest.raises(StepFailed):
                await store.committer.prepare(writer, 0, b"")
            for refused in (store.admission.snapshot(writer, DRAFT_STEP), store.rollback(writer, DRAFT_STEP)):
                with pytest.raises(StepDropped):
                    await refused
            with pytest.raises(StepDropped):
                writer.namespace.steps.ledger.step(DRAFT_STEP)
            with pytest.raises(StepFailed, match=r"\(0, 1\)"):
                await store.initializer.end(writer)
            assert writer.namespace.steps.ledger.steps() == []

    run(scenario())


def test_the_first_commit_takes_the_drafts_place_and_its_note_slot_is_free_again() -> None:
    async def scenario() -> None:
        machine = Machine(seed=4)
        store = machine.start()
        slots = store.committer._prover._note_slots
        free_before, free_bytes_before = slots.free_count, free_bytes(store)
        view = await drafted(store, step_by_step=True)
        assert slots.free_count == free_before - 1, "one draft at a time has a note"
        await put(store, view, [(0, 1), (0, 3)])
        await store.initializer.end(view)
        await store.committer.commit(view, 0, b"")
        assert slots.free_count == free_before - 1
        assert view.namespace.steps.ledger.draft is None
        assert free_bytes(store) == free_bytes_before - EXPERTS * SCHEMA.record_bytes, "each record lies on the volume once"
        with pytest.raises(StepOutOfOrder, match="its values are set"):
            await opened_again(store, view)

    async def opened_again(store: Store, view: object) -> None:
        await store.initializer.begin(view, is_resumed=True)  # type: ignore[arg-type]

    run(scenario())


def test_starting_over_drops_the_draft_for_good_and_gives_its_room_back() -> None:
    async def scenario() -> None:
        machine = Machine(seed=5)
        store = machine.start()
        free_before = free_bytes(store)
        await drafted(store)
        assert free_bytes(store) < free_before
        view, present, extra = await opened(store, is_resumed=False)
        assert (present, extra) == ([], None)
        assert free_bytes(store) == free_before
        await put(store, view, [(0, 3)])
        store = await restarted(machine)
        _, present, extra = await opened(store)
        assert (present, extra) == ([], None)

    run(scenario())


@pytest.mark.parametrize("outcome", ["lost", "durable"])
def test_a_save_whose_transaction_fails_has_taken_place_or_not(outcome: Literal["lost", "durable"]) -> None:
    async def scenario() -> None:
        machine = Machine(seed=6)
        catalog = FaultyCatalog(machine.durable, fail_at=0, outcome="lost")
        machine.catalog = catalog
        store = machine.start()
        view = await drafted(store, (0,))
        await put(store, view, [(0, 1)])
        catalog.fail_next(outcome)
        if outcome == "lost":
            with pytest.raises(CatalogError):
                await store.committer.save_draft(view, b"second")
            await store.committer.save_draft(view, b"third")
        else:
            await store.committer.save_draft(view, b"third")
        store = await restarted(machine)
        _, present, extra = await opened(store)
        assert (present, extra) == ([(0, 0), (0, 1)], b"third")

    run(scenario())


@pytest.mark.parametrize("operation", ["write", "flush"])
def test_a_save_that_meets_a_failing_volume_leaves_the_draft_before_it(operation: Literal["write", "flush"]) -> None:
    async def scenario() -> None:
        machine = Machine(seed=7)
        machine.volumes[0] = volume = FaultyVolume(machine.disks[0], [])
        store = machine.start()
        view = await drafted(store, (0,))
        await put(store, view, [(0, 1)])
        volume.plan = (Fault(operation, volume.calls[operation] + 1, forever=True),)
        with pytest.raises(VolumeError):
            await store.committer.save_draft(view, b"second")
        store = await restarted(machine)
        _, present, extra = await opened(store)
        assert (present, extra) == ([(0, 0)], SOURCE)

    run(scenario())


def test_saves_run_beside_puts_and_each_has_what_was_put_before_it() -> None:
    async def scenario() -> None:
        machine = Machine(seed=8)
        store = machine.start()
        view, _, _ = await opened(store)
        saves = []
        for key in ALL:
            await put(store, view, [key])
            saves.append(asyncio.ensure_future(store.committer.save_draft(view, repr(key).encode())))
        counts = [(await save)["records"] for save in saves]
        assert sum(map(int, map(str, counts))) == EXPERTS, "a record belongs to one save"
        store = await restarted(machine)
        _, present, extra = await opened(store)
        assert (present, extra) == (ALL, repr(ALL[-1]).encode())

    run(scenario())


def test_a_save_is_refused_where_nothing_is_initialized() -> None:
    async def scenario() -> None:
        store = Machine().start()
        view = await create(store)
        with pytest.raises(StepOutOfOrder, match="its values are set"):
            await store.committer.save_draft(view, b"")
        fresh = await store.admission.create("new", SCHEMA.describe(), layers=[0], experts=2, host_bytes=None)
        with pytest.raises(StepOutOfOrder, match="not being initialized"):
            await store.committer.save_draft(fresh, b"")
        with pytest.raises(CapacityError, match="extra"):
            await store.committer.save_draft(fresh, bytes(EXTRA_BYTES_MAX + 1))

    run(scenario())


def test_a_second_importer_fences_the_first_and_goes_on_from_its_draft() -> None:
    async def scenario() -> None:
        store = Machine(seed=9).start()
        first = await drafted(store)
        second, present, _ = await opened(store)
        assert present == [(0, 0), (0, 2)]
        with pytest.raises(WriterFenced):
            await put(store, first, [(0, 1)])
        with pytest.raises(WriterFenced):
            await store.committer.save_draft(first, b"")
        await put(store, second, [(0, 1)])

    run(scenario())


def test_a_draft_gives_up_its_memory_to_others_and_stays() -> None:
    async def scenario() -> None:
        machine = Machine(seed=10, host_budget_bytes=8 << 20)
        store = machine.start()
        view = await drafted(store)
        store.close_view(view)
        await store.admission._give_up_memory(store.namespaces["moe"])
        _, present, _ = await opened(store)
        assert present == [(0, 0), (0, 2)]

    run(scenario())


def test_what_a_draft_holds_is_verified_like_any_record_and_its_note_too() -> None:
    async def scenario() -> None:
        machine = Machine(seed=11)
        store = machine.start()
        view = await drafted(store)
        whole = await verify(machine)
        assert (whole["found"], whole["records"]) == (0, 2)
        assert whole["copies"] == 2 + 2, "of the superblock and of the draft's note"
        located = view.namespace.steps.ledger.at((0, 2), DRAFT_STEP)
        assert located is not None
        damage(machine, located, SCHEMA.stored.fields[0].offset_bytes)
        (finding,) = (await verify(machine))["findings"]
        assert finding["key"] == (0, 2)

    run(scenario())


def test_the_keys_of_a_writer_that_finds_a_draft_can_be_read() -> None:
    async def scenario() -> None:
        machine = Machine(seed=12)
        await drafted(machine.start())
        store = await restarted(machine)
        view, present, _ = await opened(store)
        assert await first_values(store, view, present) == [0.0, 2.0]
        target = memoryview(bytearray(SCHEMA.record_bytes))
        with pytest.raises(StepFailed, match="has no value yet"):
            await store.reading.read(view, (0, 1), target)
        assert len(keys_of(view)) == EXPERTS

    run(scenario())


@pytest.mark.parametrize("updates", ["touched", "exact"])
def test_nothing_is_trained_while_first_values_are_given(updates: str) -> None:
    async def scenario() -> None:
        machine = Machine(seed=1)
        store = machine.start()
        schema = replace(SCHEMA, updates=updates)
        view = await store.admission.create("moe", schema.describe(), layers=[0], experts=EXPERTS, host_bytes=None)
        await store.initializer.begin(view)
        await put(store, view, ALL[:2])
        with pytest.raises(StepFailed, match="'moe' is being initialized: end that first"):
            await train(store, view, ALL[:1])
        assert list(view.namespace.writing.pending) == ALL[:1]
        await store.committer.save_draft(view, SOURCE)
        store = await restarted(machine)
        view = await store.admission.create("moe", schema.describe(), layers=[0], experts=EXPERTS, host_bytes=None)
        assert (await store.initializer.begin(view, is_resumed=True))["extra"] == SOURCE
        await put(store, view, ALL[2:])
        await store.initializer.end(view)
        assert (await train(store, view))["records"] == EXPERTS
        await store.committer.commit(view, 0, b"")
        assert await versions(store, view) == [1] * EXPERTS

    run(scenario())
