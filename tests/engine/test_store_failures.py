"""What a store does when reads, writes, flushes and applies fail: who is told, what stays, and what the way on is."""

from __future__ import annotations

import asyncio
from typing import Any, Literal

import pytest

from paramstore.core.optimizers import AdamW
from paramstore.errors import (
    CatalogError,
    StepFailed,
    VolumeError,
)
from paramstore.storage.format.structures import NOTE_SLOT_BYTES, NOTES_START_BYTES
from paramstore.testing.catalogs import FaultyCatalog
from paramstore.testing.volumes import Fault, FaultyVolume
from paramstore_testkit.disks.machine import Machine
from paramstore_testkit.stores.small_store import SCHEMA, initialize, leased, run
from paramstore_testkit.stores.trained_store import EXPERTS, KEYS, LAYERS, Model, make_writer, push, value_of


def test_a_failed_read_reaches_the_one_who_asked_and_nobody_else() -> None:
    async def scenario() -> None:
        machine = Machine(seed=16)
        store = machine.start()
        view, model = await make_writer(store), Model()
        await store.evict(view, None, None)
        located = view.namespace.steps.ledger.at(KEYS[1], 0)
        machine.disks[0].corrupt(located.extent.offset_bytes + SCHEMA.stored.field("master/w").offset_bytes)
        with pytest.raises(VolumeError, match=r"\(0, 1\)"):
            await leased(store, view, KEYS[:3])
        model.check(await leased(store, view, [KEYS[0], KEYS[2]]))
        assert not view.leased

    run(scenario())


def test_an_apply_that_fails_half_way_breaks_the_namespace_until_rollback() -> None:
    async def scenario() -> None:
        machine = Machine(seed=17, host_budget_bytes=6 << 20)
        store = machine.start()
        view, model = await make_writer(store), Model()
        await store.evict(view, None, None)
        located = view.namespace.steps.ledger.at(KEYS[5], 0)
        machine.disks[0].corrupt(located.extent.offset_bytes + SCHEMA.stored.field("exp_avg/w").offset_bytes)
        push(store, view, KEYS, 1)
        with pytest.raises(StepFailed, match=r"\(1, 1\)"):
            await store.applies.apply(view, AdamW(lr=1e-2), 1.0)
        with pytest.raises(StepFailed, match="rollback"):
            push(store, view, KEYS, 2)
        with pytest.raises(StepFailed, match="rollback"):
            await store.committer.commit(view, 1, b"")
        with pytest.raises(StepFailed):
            await leased(store, view, KEYS[:4])
        await store.rollback(view, 0)
        model.check(await leased(store, view, KEYS[:3]))

    run(scenario())


def test_a_failed_write_is_repeated_on_another_extent_and_a_second_failure_fails_the_commit() -> None:
    async def scenario(faults: list[Fault], *, survives: bool) -> None:
        machine = Machine(seed=18)
        store = machine.start()
        view, model = await make_writer(store), Model()
        await machine.crash()
        machine.volumes[0] = FaultyVolume(machine.disks[0], faults)
        store = machine.start()
        view = await store.admission.open("moe", mode="write", at=None, host_bytes=None)
        push(store, view, KEYS[:1], 1)
        await store.applies.apply(view, AdamW(lr=1e-2), 1.0)
        if survives:
            await store.committer.commit(view, 1, b"")
            model.apply(KEYS[:1], 1)
            model.check(await leased(store, view, KEYS[:1]))
            return
        with pytest.raises((VolumeError, StepFailed)):
            await store.committer.commit(view, 1, b"")
        assert view.namespace.steps.ledger.steps() == [0]

    run(scenario([Fault("write", 1)], survives=True))
    run(scenario([Fault("write", 1, forever=True)], survives=False))


def test_a_failed_flush_fails_the_commit_breaks_the_namespace_and_keeps_the_committed_step() -> None:
    async def scenario() -> None:
        machine = Machine(seed=19, volume_count=2)
        store = machine.start()
        view, model = await make_writer(store), Model()
        await machine.crash()
        machine.volumes[1] = FaultyVolume(machine.disks[1], [Fault("flush", 1)])
        store = machine.start()
        view = await store.admission.open("moe", mode="write", at=None, host_bytes=None)
        push(store, view, KEYS, 1)
        await store.applies.apply(view, AdamW(lr=1e-2), 1.0)
        with pytest.raises(VolumeError):
            await store.committer.commit(view, 1, b"")
        with pytest.raises(StepFailed, match="flush"):
            push(store, view, KEYS, 2)
        await store.rollback(view, 0)
        model.check(await leased(store, view, KEYS[:4]))
        await machine.kill()  # the volume is fenced: somebody looks at the device, and starts the daemon anew
        store = machine.start()
        view = await store.admission.open("moe", mode="write", at=None, host_bytes=None)
        push(store, view, KEYS, 1)
        await store.applies.apply(view, AdamW(lr=1e-2), 1.0)
        await store.committer.commit(view, 1, b"")
        model.apply(KEYS, 1)
        model.check(await leased(store, view, KEYS[:4]))

    run(scenario())


def test_the_first_commit_may_fail_at_its_flush_and_initialize_starts_over() -> None:
    async def scenario() -> None:
        machine = Machine(seed=22)
        faulty = FaultyVolume(machine.disks[0], [])
        machine.volumes[0] = faulty
        store = machine.start()
        view = await make_writer(store, commit=False)
        faulty.plan = (Fault("flush", faulty.calls["flush"] + 1),)
        with pytest.raises(VolumeError):
            await store.committer.commit(view, 0, b"")
        await machine.kill()
        store = machine.start()
        view = await store.admission.create("moe", SCHEMA.describe(), layers=range(LAYERS), experts=EXPERTS, host_bytes=None)
        await initialize(store, view, value_of)
        await store.committer.commit(view, 0, b"")
        Model().check(await leased(store, view, KEYS[:3]))

    run(scenario())


def test_a_note_slot_that_cannot_be_written_fails_one_commit_and_is_left_alone() -> None:
    class BadBlock(FaultyVolume):
        def write(self, offset_bytes: int, data: Any) -> None:
            if NOTES_START_BYTES <= offset_bytes < NOTES_START_BYTES + NOTE_SLOT_BYTES and self.plan:
                raise VolumeError(f"bad block at {offset_bytes}")
            self.inner.write(offset_bytes, data)

    async def scenario() -> None:
        machine = Machine(seed=23)
        faulty = BadBlock(machine.disks[0], [])
        machine.volumes[0] = faulty
        store = machine.start()
        view = await make_writer(store)
        await store.committer.commit(view, 1, b"")
        await store.committer.commit(view, 2, b"")  # step 0 is gone: its note slot, the lowest, is free again
        faulty.plan = (Fault("flush", 1 << 30),)
        with pytest.raises(VolumeError, match="bad block"):
            await store.committer.commit(view, 3, b"")
        await store.committer.commit(view, 3, b"")
        assert view.namespace.steps.ledger.steps() == [2, 3]

    run(scenario())


def test_a_flush_that_fails_for_one_namespace_fails_the_commit_of_every_other_beside_it() -> None:
    async def scenario() -> None:
        machine = Machine(seed=24, volume_bytes=24 << 20)
        faulty = FaultyVolume(machine.disks[0], [])
        machine.volumes[0] = faulty
        store = machine.start()
        views = []
        for name in ("a", "b"):
            view = await store.admission.create(name, SCHEMA.describe(), layers=range(LAYERS), experts=EXPERTS, host_bytes=8 << 20)
            await initialize(store, view, value_of)
            await store.committer.commit(view, 0, b"")
            push(store, view, KEYS, 1)
            await store.applies.apply(view, AdamW(lr=1e-2), 1.0)
            views.append(view)
        faulty.plan = (Fault("flush", faulty.calls["flush"] + 1),)
        outcomes = await asyncio.gather(*(store.committer.commit(view, 1, b"") for view in views), return_exceptions=True)
        assert all(isinstance(outcome, VolumeError | StepFailed) for outcome in outcomes), outcomes
        assert [view.namespace.steps.committed_step for view in views] == [0, 0]

    run(scenario())


def test_after_an_outcome_that_cannot_be_known_nothing_is_written_and_a_restart_resolves_it() -> None:
    class Dead(FaultyCatalog):
        def reopen(self) -> None:
            raise CatalogError("cannot reopen")

    async def scenario(outcome: Literal["lost", "durable"]) -> None:
        machine = Machine(seed=25)
        machine.catalog = dead = Dead(machine.durable, fail_at=1 << 30, outcome=outcome)
        store = machine.start()
        view, model = await make_writer(store), Model()
        dead._fail_at = dead.applies + 1
        push(store, view, KEYS, 1)
        await store.applies.apply(view, AdamW(lr=1e-2), 1.0)
        model.apply(KEYS, 1)
        with pytest.raises(CatalogError, match="restart the daemon"):
            await store.committer.commit(view, 1, b"")
        with pytest.raises(StepFailed, match="restart the daemon"):
            push(store, view, KEYS, 2)
        with pytest.raises(CatalogError):
            await store.rollback(view, 0)
        await machine.crash(keeps_random_writes=True)
        store = machine.start()
        view = await store.admission.open("moe", mode="write", at=None, host_bytes=None)
        assert view.namespace.steps.ledger.steps() == ([0, 1] if outcome == "durable" else [0])
        (model if outcome == "durable" else Model()).check(await leased(store, view, KEYS[:4]))

    run(scenario("durable"))
    run(scenario("lost"))


def test_when_every_write_fails_the_apply_says_why_and_little_space_is_lost() -> None:
    async def scenario() -> None:
        machine = Machine(seed=26, host_budget_bytes=6 << 20)
        faulty = FaultyVolume(machine.disks[0], [])
        machine.volumes[0] = faulty
        store = machine.start()
        view, model = await make_writer(store), Model()
        arena = view.namespace.memory.working
        await store.evict(view, None, "optim")
        while arena.slots.free_count > 2:
            arena.slots.take()
        faulty.plan = (Fault("write", faulty.calls["write"] + 1, forever=True),)
        push(store, view, KEYS, 1)
        with pytest.raises(StepFailed, match="write number"):
            await store.applies.apply(view, AdamW(lr=1e-2), 1.0)
        faulty.plan = ()
        await store.rollback(view, 0)
        (space,) = store.transfers._planner.space.stats()
        assert space.quarantined_bytes <= 4 * SCHEMA.record_bytes
        assert "write number" in str(space.fenced)
        model.check(await leased(store, view, KEYS[:2]))

    run(scenario())


def test_a_failed_flush_breaks_a_namespace_whose_record_is_on_its_way_to_that_volume() -> None:
    async def scenario() -> None:
        machine = Machine(seed=27)
        store = machine.start()
        view = await make_writer(store)
        push(store, view, KEYS[:1], 1)
        await store.applies.apply(view, AdamW(lr=1e-2), 1.0)
        machine.workers.pause()
        writing = asyncio.ensure_future(store.write_back(view, None))
        await asyncio.sleep(0)
        store.committer._prover._distrust(0, VolumeError("flush failed for somebody else"))
        machine.workers.resume()
        await writing
        with pytest.raises(StepFailed, match="somebody else"):
            await store.committer.commit(view, 1, b"")

    run(scenario())
