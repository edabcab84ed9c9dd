"""A step in two halves: prepared is durable and binding, finalized is committed, and every node can go to either side of it."""

from __future__ import annotations

import asyncio
from typing import Any, Literal

import pytest

from paramstore.engine.namespace import View
from paramstore.engine.runner import CATALOG_LANE
from paramstore.engine.store import Store
from paramstore.errors import CatalogError, StepDropped, StepFailed, StepOutOfOrder, StepPrepared, WriterFenced
from paramstore.testing.catalogs import FaultyCatalog
from paramstore.testing.machine import Machine
from paramstore.testing.small_store import (
    OPTIONS,
    create,
    first_values,
    keys_of,
    lease,
    push,
    run,
    train,
    turns,
    versions,
)


async def reader(store: Store, at: int | None = None) -> View:
    return await store.admission.open("moe", mode="read", at=at, host_bytes=None)


async def writer(store: Store, at: int | None = None) -> View:
    return await store.admission.open("moe", mode="write", at=at, host_bytes=None)


async def prepared(machine: Machine, *, steps: int = 1) -> tuple[Store, View]:
    """Committed at 0 to `steps`, and the next step prepared; every record has the version of its step."""
    store, view = await committed(machine, steps)
    await train(store, view)
    await store.prepare(view, steps + 1, b"extra of %d" % (steps + 1))
    return store, view


async def restarted(machine: Machine) -> Store:
    await machine.crash()
    return machine.start()


async def committed(machine: Machine, steps: int) -> tuple[Store, View]:
    """Committed at 0 to `steps`; every record has the version of its step."""
    store = machine.start()
    view = await create(store)
    for step in range(1, steps + 1):
        await train(store, view)
        await store.commit(view, step, b"extra of %d" % step)
    return store, view


# --- prepare


def test_a_prepared_step_is_not_committed_and_nobody_opens_it() -> None:
    async def scenario() -> None:
        store, view = await prepared(Machine())
        namespace = view.namespace
        assert (namespace.committed_step, namespace.prepared_step) == (1, 2)
        assert store.steps(view) == [0, 1]
        assert store.admission.list_namespaces()[0]["prepared_step"] == 2
        assert await versions(store, await reader(store)) == [1] * 4
        with pytest.raises(StepPrepared, match=r"finalize\(2\)"):
            await reader(store, at=2)
        with pytest.raises(StepPrepared):
            store.extra(view, 2)
        assert await versions(store, view) == [2] * 4, "the writer goes on from it"

    run(scenario())


def test_records_do_not_change_between_prepare_and_finalize_and_gradients_wait() -> None:
    async def scenario() -> None:
        store, view = await prepared(Machine())
        push(store, view, keys_of(view))
        for call in (
            lambda: store.apply(view, OPTIONS, 1.0), lambda: store.prepare(view, 3, b""),
        ):  # fmt: skip
            with pytest.raises(StepPrepared, match="step 2 is prepared: finalize it, or go back to 1"):
                call()
        with pytest.raises(StepPrepared):
            await store.commit(view, 3, b"")
        await store.finalize(view, 2)
        assert len(view.namespace.pending) == 4
        await store.apply(view, OPTIONS, 1.0)
        await store.commit(view, 3, b"")
        assert await versions(store, view) == [3] * 4

    run(scenario())


def test_an_apply_called_behind_a_prepare_that_is_not_through_is_refused_too() -> None:
    async def scenario() -> None:
        store = Machine(seed=3).start()
        view = await create(store)
        await train(store, view)
        push(store, view, keys_of(view))
        preparing = store.prepare(view, 1, b"")
        with pytest.raises(StepPrepared):
            store.apply(view, OPTIONS, 1.0)
        await preparing
        await store.finalize(view, 1)
        await store.apply(view, OPTIONS, 1.0)
        await store.commit(view, 2, b"")
        assert await versions(store, await reader(store, at=1)) == [1] * 4
        assert await versions(store, await reader(store, at=2)) == [2] * 4

    run(scenario())


def test_a_prepare_that_fails_leaves_the_namespace_as_before_a_commit_that_fails() -> None:
    async def scenario() -> None:
        machine = Machine()
        store = machine.start()
        view = await create(store)
        await train(store, view)
        store._transactions._catalog = FaultyCatalog(machine.durable, fail_at=1, outcome="lost")
        with pytest.raises(CatalogError):
            await store.prepare(view, 1, b"")
        assert view.namespace.prepared_step is None
        assert len(view.namespace.changed) == 4
        assert (await store.commit(view, 1, b""))["records"] == 4

    run(scenario())


@pytest.mark.parametrize("step", [0, 1, -1, 1 << 62])
def test_a_prepared_step_is_above_the_committed_one(step: int) -> None:
    async def scenario() -> None:
        store = Machine().start()
        view = await create(store, step=1)
        with pytest.raises(StepOutOfOrder, match=r"prepare\("):
            await store.prepare(view, step, b"")
        await store.prepare(view, 2, b"")

    run(scenario())


def test_the_first_step_is_committed_and_not_prepared() -> None:
    async def scenario() -> None:
        store = Machine().start()
        view = await create(store, step=None)
        with pytest.raises(StepOutOfOrder, match="commit the first step"):
            await store.prepare(view, 0, b"")
        await store.commit(view, 0, b"")

    run(scenario())


# --- finalize


def test_finalizing_commits_the_step_and_lets_go_what_it_hides() -> None:
    async def scenario() -> None:
        store, view = await prepared(Machine())
        held_before = store._planner.space.held_bytes("moe")
        await store.finalize(view, 2)
        assert (view.namespace.committed_step, view.namespace.prepared_step) == (2, None)
        assert store.steps(view) == [1, 2]
        assert store.extra(view, 2) == b"extra of 2"
        assert store._planner.space.held_bytes("moe") == held_before * 2 // 3
        assert await versions(store, await reader(store)) == [2] * 4

    run(scenario())


def test_finalizing_once_more_is_no_error_and_another_step_is() -> None:
    async def scenario() -> None:
        store, view = await prepared(Machine())
        with pytest.raises(StepOutOfOrder, match="step 2 is prepared, 1 is committed"):
            await store.finalize(view, 1)
        await store.finalize(view, 2)
        await store.finalize(view, 2)
        with pytest.raises(StepOutOfOrder, match="step None is prepared, 2 is committed"):
            await store.finalize(view, 3)

    run(scenario())


@pytest.mark.parametrize("outcome", ["lost", "durable"])
def test_a_finalize_whose_transaction_raised_is_what_the_disk_says(outcome: Literal["lost", "durable"]) -> None:
    async def scenario() -> None:
        machine = Machine()
        store, view = await prepared(machine)
        store._transactions._catalog = FaultyCatalog(machine.durable, fail_at=1, outcome=outcome)
        if outcome == "lost":
            with pytest.raises(CatalogError):
                await store.finalize(view, 2)
            assert (view.namespace.committed_step, view.namespace.prepared_step) == (1, 2)
            assert not view.namespace.closing_steps
        await store.finalize(view, 2)
        assert (view.namespace.committed_step, view.namespace.prepared_step) == (2, None)

    run(scenario())


def test_the_oldest_of_too_many_readers_loses_its_step_at_finalize_and_not_before() -> None:
    async def scenario() -> None:
        machine = Machine(held_steps=1)
        store, view = await prepared(machine)
        first = await reader(store, at=0)
        leased = await lease(store, first, keys_of(first)[:1])
        await store.finalize(view, 2)
        second = await reader(store, at=1)
        await train(store, view)
        await store.prepare(view, 3, b"")
        await lease(store, first, keys_of(first)[1:2])
        await store.finalize(view, 3)
        with pytest.raises(StepDropped):
            await lease(store, first, keys_of(first)[:1])
        await lease(store, second, keys_of(second)[:1])
        assert leased.copies

    run(scenario())


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
        assert view.namespace.writer is view
        assert not view.is_fenced
        await store.finalize(view, 2)

    run(scenario())


@pytest.mark.parametrize("crashes", [False, True])
def test_a_new_writer_at_the_prepared_step_commits_it(crashes: bool) -> None:
    async def scenario() -> None:
        machine = Machine(seed=2)
        store, old = await prepared(machine)
        if crashes:
            store = await restarted(machine)
        view = await writer(store, at=2)
        assert (view.namespace.committed_step, view.namespace.prepared_step) == (2, None)
        assert await versions(store, view) == [2] * 4
        if not crashes:
            with pytest.raises(WriterFenced):
                await store.finalize(old, 2)
        await train(store, view)
        await store.commit(view, 3, b"")
        store = await restarted(machine)
        assert await versions(store, await reader(store)) == [3] * 4

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
        assert (view.namespace.committed_step, view.namespace.prepared_step) == (at, None)
        assert await versions(store, view) == [at] * 4
        await train(store, view)
        await store.commit(view, 2, b"another")
        store = await restarted(machine)
        view = await writer(store)
        assert store.extra(view, 2) == b"another"
        assert await versions(store, view) == [at + 1] * 4

    run(scenario())


def test_a_rollback_drops_the_prepared_step_and_gives_its_space_back() -> None:
    async def scenario() -> None:
        store, view = await prepared(Machine())
        await store.rollback(view, 1)
        assert view.namespace.prepared_step is None
        record_bytes = view.namespace.schema.record_bytes
        assert store._planner.space.held_bytes("moe") == 2 * 4 * record_bytes
        assert await versions(store, view) == [1] * 4
        with pytest.raises(StepOutOfOrder):
            await store.finalize(view, 2)
        await train(store, view)
        await store.prepare(view, 2, b"")
        await store.finalize(view, 2)
        assert await versions(store, await reader(store)) == [2] * 4

    run(scenario())


def test_a_writer_without_a_prepared_step_may_go_on_from_any_step_there_is() -> None:
    async def scenario() -> None:
        store = Machine().start()
        view = await create(store)
        await train(store, view)
        await store.commit(view, 1, b"")
        view = await writer(store, at=0)
        assert store.steps(view) == [0]
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
        assert view.namespace.prepared_step == 2
        view = await writer(store, at=2)
        assert await versions(store, view) == [2] * 4

    run(scenario())


def test_a_broken_namespace_can_still_finalize_what_was_prepared_before() -> None:
    async def scenario() -> None:
        store, view = await prepared(Machine())
        store._planner.mark_broken(view.namespace, "a flush failed")
        await store.finalize(view, 2)
        assert view.namespace.committed_step == 2
        with pytest.raises(StepFailed):
            await store.commit(view, 3, b"")

    run(scenario())


def test_a_snapshot_and_a_prepared_step_do_not_meet() -> None:
    async def scenario() -> None:
        store, view = await prepared(Machine(volume_bytes=32 << 20))
        with pytest.raises(StepPrepared):
            await store.snapshot(view, 2)
        await store.snapshot(view, 1)
        assert store.snapshots(view) == [1]
        assert view.namespace.prepared_step == 2
        await store.drop_snapshot(view, 1)
        assert store.steps(view) == [0, 1]
        await store.finalize(view, 2)
        assert store.steps(view) == [1, 2]

    run(scenario())


# --- readers that come while a rollback runs


class SlowCatalog:
    """A committer's runner; what goes to the catalog's lane waits for `is_open`, as a transaction waits for its flush."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self.is_open = asyncio.Event()

    async def call(self, lane: Any, work: Any) -> Any:
        if lane == CATALOG_LANE:
            await self.is_open.wait()
        return await self._inner.call(lane, work)


async def rolling_back(store: Store, view: View, step: int) -> tuple[asyncio.Task[int], SlowCatalog]:
    """A rollback whose transaction has not happened yet."""
    catalog = SlowCatalog(store._transactions._runner)
    store._transactions._runner = catalog  # type: ignore[assignment]
    task = asyncio.ensure_future(store.rollback(view, step))
    await turns()
    assert view.namespace.closing_steps
    return task, catalog


async def stands(store: Store, view: View, reader: View) -> None:
    """The reader stands on a step that exists, or is told that its step is gone; and no later commit moves it."""
    if reader.is_dropped:
        return
    assert reader.step in store.steps(view), f"the reader stands on {reader.step}, there are {store.steps(view)}"
    before = await first_values(store, reader)
    await train(store, view)
    await store.commit(view, 3, b"again")
    assert await first_values(store, reader) == before


def test_a_reader_that_opens_during_a_rollback_stands_on_a_step_that_stays() -> None:
    async def scenario() -> None:
        store, view = await committed(Machine(retained_steps=3), 3)
        task, catalog = await rolling_back(store, view, 1)
        opening = asyncio.ensure_future(store.admission.open("moe", mode="read", at=None, host_bytes=None))
        await turns()
        catalog.is_open.set()
        await task
        await stands(store, view, await opening)

    run(scenario())


def test_a_reader_that_refreshes_during_a_rollback_stands_on_a_step_that_stays() -> None:
    async def scenario() -> None:
        store, view = await committed(Machine(retained_steps=3), 3)
        reader = await store.admission.open("moe", mode="read", at=2, host_bytes=None)
        task, catalog = await rolling_back(store, view, 1)
        store.refresh(reader)
        catalog.is_open.set()
        await task
        await stands(store, view, reader)

    run(scenario())
