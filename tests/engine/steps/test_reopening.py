"""Where a namespace goes on after a prepared step: at it or before it, over a crash too; and readers that come meanwhile."""

from __future__ import annotations

from typing import Literal

import pytest

from paramstore.errors import CatalogError, StepDropped, StepFailed, StepOutOfOrder, StepPrepared, WriterFenced
from paramstore.testing.catalogs import FaultyCatalog
from paramstore_testkit.disks.machine import Machine
from paramstore_testkit.stores.small_store import (
    create,
    first_values,
    keys_of,
    prepared,
    push,
    reader,
    restarted,
    run,
    train,
    turns,
    versions,
    writer,
)

# --- going to either side of it


def test_over_a_crash_a_prepared_step_stays_prepared() -> None:
    async def scenario() -> None:
        machine = Machine(seed=1)
        await prepared(machine)
        for _ in range(2):
            store = await restarted(machine)
            row = store.admission.list_namespaces()[0]
            assert (row["committed_step"], row["prepared_step"]) == (1, 2)
            assert await versions(store, await reader(store)) == [1] * 4

    run(scenario())


def test_a_new_writer_has_to_say_where_it_goes_on_and_fences_nobody_before() -> None:
    async def scenario() -> None:
        store, view = await prepared(Machine())
        with pytest.raises(StepPrepared, match="step 2 is prepared: finalize it, or go back to 1"):
            await writer(store)
        assert view.namespace.writing.writer is view
        assert not view.is_fenced
        await store.history.finalize(view, 2)

    run(scenario())


@pytest.mark.parametrize("crashes", [False, True])
def test_a_new_writer_at_the_prepared_step_commits_it(crashes: bool) -> None:
    async def scenario() -> None:
        machine = Machine(seed=2)
        store, old = await prepared(machine)
        if crashes:
            store = await restarted(machine)
        view = await writer(store, at=2)
        assert (view.namespace.steps.committed_step, view.namespace.steps.prepared_step) == (2, None)
        assert await versions(store, view) == [2] * 4
        if not crashes:
            with pytest.raises(WriterFenced):
                await store.history.finalize(old, 2)
        await train(store, view)
        await store.committer.commit(view, 3, b"")
        store = await restarted(machine)
        assert await versions(store, await reader(store)) == [3] * 4

    run(scenario())


@pytest.mark.parametrize("outcome", ["lost", "durable"])
def test_opening_at_the_prepared_step_is_one_transaction(outcome: Literal["lost", "durable"]) -> None:
    async def scenario() -> None:
        machine = Machine()
        store, view = await prepared(machine)
        namespace, epoch = view.namespace, view.namespace.epoch
        push(store, view, keys_of(view))
        store._transactions._catalog = FaultyCatalog(machine.durable, fail_at=1, outcome=outcome)
        if outcome == "lost":
            with pytest.raises(CatalogError):
                await writer(store, at=2)
            assert (namespace.steps.committed_step, namespace.steps.prepared_step, namespace.epoch) == (1, 2, epoch)
        view = await writer(store, at=2)
        assert (namespace.steps.committed_step, namespace.steps.prepared_step, namespace.epoch) == (2, None, epoch + 1)
        assert not namespace.writing.pending
        assert await versions(store, view) == [2] * 4

    run(scenario())


@pytest.mark.parametrize("crashes", [False, True])
@pytest.mark.parametrize("at", [0, 1])
def test_a_new_writer_at_an_older_step_drops_the_prepared_one(crashes: bool, at: int) -> None:
    async def scenario() -> None:
        machine = Machine(seed=4)
        store, _ = await prepared(machine)
        if crashes:
            store = await restarted(machine)
        view = await writer(store, at=at)
        assert (view.namespace.steps.committed_step, view.namespace.steps.prepared_step) == (at, None)
        assert await versions(store, view) == [at] * 4
        await train(store, view)
        await store.committer.commit(view, 2, b"another")
        store = await restarted(machine)
        view = await writer(store)
        assert view.namespace.steps.ledger.step(2).extra == b"another"
        assert await versions(store, view) == [at + 1] * 4

    run(scenario())


def test_a_rollback_drops_the_prepared_step_and_gives_its_space_back() -> None:
    async def scenario() -> None:
        store, view = await prepared(Machine())
        await store.rollback(view, 1)
        assert view.namespace.steps.prepared_step is None
        record_bytes = view.namespace.schema.record_bytes
        assert store.transfers._planner.space.held_bytes("moe") == 2 * 4 * record_bytes
        assert await versions(store, view) == [1] * 4
        with pytest.raises(StepOutOfOrder):
            await store.history.finalize(view, 2)
        await train(store, view)
        await store.committer.prepare(view, 2, b"")
        await store.history.finalize(view, 2)
        assert await versions(store, await reader(store)) == [2] * 4

    run(scenario())


def test_a_writer_without_a_prepared_step_may_go_on_from_any_step_there_is() -> None:
    async def scenario() -> None:
        store = Machine().start()
        view = await create(store)
        await train(store, view)
        await store.committer.commit(view, 1, b"")
        view = await writer(store, at=0)
        assert view.namespace.steps.ledger.steps() == [0]
        assert await first_values(store, view) == [0.0, 1.0, 2.0, 3.0]
        with pytest.raises(StepDropped):
            await writer(store, at=1)

    run(scenario())


def test_the_memory_of_a_namespace_that_nobody_has_open_goes_without_its_prepared_step() -> None:
    async def scenario() -> None:
        store, view = await prepared(Machine())
        store.close_view(view)
        await store.admission._give_up_memory(view.namespace)
        await turns()
        assert view.namespace.steps.prepared_step == 2
        view = await writer(store, at=2)
        assert await versions(store, view) == [2] * 4

    run(scenario())


def test_a_broken_namespace_can_still_finalize_what_was_prepared_before() -> None:
    async def scenario() -> None:
        store, view = await prepared(Machine())
        store.transfers._planner.mark_broken(view.namespace, "a flush failed")
        await store.history.finalize(view, 2)
        assert view.namespace.steps.committed_step == 2
        with pytest.raises(StepFailed):
            await store.committer.commit(view, 3, b"")

    run(scenario())


def test_a_snapshot_and_a_prepared_step_do_not_meet() -> None:
    async def scenario() -> None:
        store, view = await prepared(Machine(volume_bytes=32 << 20))
        with pytest.raises(StepPrepared):
            await store.admission.snapshot(view, 2)
        await store.admission.snapshot(view, 1)
        assert view.namespace.steps.ledger.snapshots() == [1]
        assert view.namespace.steps.prepared_step == 2
        await store.admission.drop_snapshot(view, 1)
        assert view.namespace.steps.ledger.steps() == [0, 1]
        await store.history.finalize(view, 2)
        assert view.namespace.steps.ledger.steps() == [1, 2]

    run(scenario())
