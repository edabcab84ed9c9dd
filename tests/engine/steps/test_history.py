"""A step in two halves: prepared is durable and binding, finalized is committed."""

from __future__ import annotations

from typing import Literal

import pytest

from paramstore.errors import CatalogError, StepDropped, StepOutOfOrder, StepPrepared
from paramstore.testing.catalogs import FaultyCatalog
from paramstore_testkit.disks.machine import Machine
from paramstore_testkit.stores.small_store import (
    OPTIONS,
    create,
    keys_of,
    lease,
    prepared,
    push,
    reader,
    run,
    train,
    versions,
    with_spare,
)

# --- prepare


def test_a_prepared_step_is_not_committed_and_nobody_opens_it() -> None:
    async def scenario() -> None:
        store, view = await prepared(Machine())
        namespace = view.namespace
        assert (namespace.steps.committed_step, namespace.steps.prepared_step) == (1, 2)
        assert view.namespace.steps.ledger.steps() == [0, 1]
        assert store.admission.list_namespaces()[0]["prepared_step"] == 2
        assert await versions(store, await reader(store)) == [1] * 4
        with pytest.raises(StepPrepared, match=r"finalize\(2\)"):
            await reader(store, at=2)
        with pytest.raises(StepPrepared):
            view.namespace.steps.ledger.step(2)
        assert await versions(store, view) == [2] * 4, "the writer goes on from it"

    run(scenario())


def test_records_do_not_change_between_prepare_and_finalize_and_gradients_wait() -> None:
    async def scenario() -> None:
        store, view = await prepared(Machine())
        push(store, view, keys_of(view))
        for call in (
            lambda: store.applies.apply(view, OPTIONS, 1.0), lambda: store.committer.prepare(view, 3, b""),
        ):  # fmt: skip
            with pytest.raises(StepPrepared, match="step 2 is prepared: finalize it, or go back to 1"):
                call()
        with pytest.raises(StepPrepared):
            await store.committer.commit(view, 3, b"")
        await store.history.finalize(view, 2)
        assert len(view.namespace.writing.pending) == 4
        await store.applies.apply(view, OPTIONS, 1.0)
        await store.committer.commit(view, 3, b"")
        assert await versions(store, view) == [3] * 4

    run(scenario())


def test_an_apply_called_behind_a_prepare_that_is_not_through_is_refused_too() -> None:
    async def scenario() -> None:
        store = Machine(seed=3).start()
        view = await create(store)
        await train(store, view)
        push(store, view, keys_of(view))
        preparing = store.committer.prepare(view, 1, b"")
        with pytest.raises(StepPrepared):
            store.applies.apply(view, OPTIONS, 1.0)
        await preparing
        await store.history.finalize(view, 1)
        await store.applies.apply(view, OPTIONS, 1.0)
        await store.committer.commit(view, 2, b"")
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
            await store.committer.prepare(view, 1, b"")
        assert view.namespace.steps.prepared_step is None
        assert len(view.namespace.steps.changed) == 4
        assert (await store.committer.commit(view, 1, b""))["records"] == 4

    run(scenario())


@pytest.mark.parametrize("step", [0, 1, -1, 1 << 62])
def test_a_prepared_step_is_above_the_committed_one(step: int) -> None:
    async def scenario() -> None:
        store = Machine().start()
        view = await create(store, step=1)
        with pytest.raises(StepOutOfOrder, match=r"prepare\("):
            await store.committer.prepare(view, step, b"")
        await store.committer.prepare(view, 2, b"")

    run(scenario())


def test_the_first_step_is_committed_and_not_prepared() -> None:
    async def scenario() -> None:
        store = Machine().start()
        view = await create(store, step=None)
        with pytest.raises(StepOutOfOrder, match="commit the first step"):
            await store.committer.prepare(view, 0, b"")
        await store.committer.commit(view, 0, b"")

    run(scenario())


# --- finalize


def test_finalizing_commits_the_step_and_lets_go_what_it_hides() -> None:
    async def scenario() -> None:
        store, view = await prepared(Machine())
        held_before = store.transfers._planner.space.held_bytes("moe")
        await store.history.finalize(view, 2)
        assert (view.namespace.steps.committed_step, view.namespace.steps.prepared_step) == (2, None)
        assert view.namespace.steps.ledger.steps() == [1, 2]
        assert view.namespace.steps.ledger.step(2).extra == b"extra of 2"
        assert store.transfers._planner.space.held_bytes("moe") == held_before * 2 // 3
        assert await versions(store, await reader(store)) == [2] * 4

    run(scenario())


def test_finalizing_once_more_is_no_error_and_another_step_is() -> None:
    async def scenario() -> None:
        store, view = await prepared(Machine())
        with pytest.raises(StepOutOfOrder, match="step 2 is prepared, 1 is committed"):
            await store.history.finalize(view, 1)
        await store.history.finalize(view, 2)
        await store.history.finalize(view, 2)
        with pytest.raises(StepOutOfOrder, match="step None is prepared, 2 is committed"):
            await store.history.finalize(view, 3)

    run(scenario())


@pytest.mark.parametrize("outcome", ["lost", "durable"])
def test_a_finalize_whose_transaction_raised_is_what_the_disk_says(outcome: Literal["lost", "durable"]) -> None:
    async def scenario() -> None:
        machine = Machine()
        store, view = await prepared(machine)
        store._transactions._catalog = FaultyCatalog(machine.durable, fail_at=1, outcome=outcome)
        if outcome == "lost":
            with pytest.raises(CatalogError):
                await store.history.finalize(view, 2)
            assert (view.namespace.steps.committed_step, view.namespace.steps.prepared_step) == (1, 2)
            assert not view.namespace.steps.closing_steps
        await store.history.finalize(view, 2)
        assert (view.namespace.steps.committed_step, view.namespace.steps.prepared_step) == (2, None)

    run(scenario())


def test_the_oldest_of_too_many_readers_loses_its_step_at_finalize_and_not_before() -> None:
    async def scenario() -> None:
        machine = with_spare(0, held_steps=1, reader_slots=4)
        store, view = await prepared(machine)
        first = await reader(store, at=0)
        leased = await lease(store, first, keys_of(first)[:1])
        await store.history.finalize(view, 2)
        second = await reader(store, at=1)
        await train(store, view)
        await store.committer.prepare(view, 3, b"")
        await lease(store, first, keys_of(first)[1:2])
        await store.history.finalize(view, 3)
        with pytest.raises(StepDropped):
            await lease(store, first, keys_of(first)[:1])
        await lease(store, second, keys_of(second)[:1])
        assert leased.copies

    run(scenario())
