"""A new writer, a rollback, a failed transaction: what each leaves of what was under way, and whom it may disturb."""

from __future__ import annotations

import asyncio

import pytest

from paramstore.errors import CatalogError, LeaseError, StepFailed, StepPrepared
from paramstore_testkit.disks.machine import Machine
from paramstore_testkit.stores.small_store import OPTIONS, committed, create, keys_of, push, restarted, run, train, versions, writer


@pytest.mark.parametrize("way", ["rollback", "open"])
def test_whoever_takes_over_does_not_wait_for_the_whole_apply_under_way(way: str) -> None:
    async def scenario() -> None:
        store = Machine(volume_bytes=64 << 20).start()
        old = await create(store, experts=100)
        push(store, old, keys_of(old))
        applying = asyncio.ensure_future(store.applies.apply(old, OPTIONS, 1.0))
        while old.namespace.stats.records_updated < 5:
            await asyncio.sleep(0)
        await (store.history.rollback(old.namespace) if way == "rollback" else writer(store))
        with pytest.raises(StepFailed):
            await applying
        assert old.namespace.stats.records_updated < 30

    run(scenario())


def test_an_opening_that_is_refused_for_a_later_snapshot_fences_nobody() -> None:
    async def scenario() -> None:
        store, old = await committed(Machine(volume_bytes=32 << 20), 2)
        await store.admission.snapshot(old, 2)
        with pytest.raises(StepFailed, match="step 2 is a snapshot"):
            await writer(store, at=1)
        await train(store, old)

    run(scenario())


def test_an_opening_while_a_step_is_being_prepared_is_refused_or_waits_for_it() -> None:
    async def scenario() -> None:
        store, old = await committed(Machine(), 1)
        await train(store, old)
        preparing = asyncio.ensure_future(store.committer.prepare(old, 2, b""))
        await asyncio.sleep(0)
        with pytest.raises(StepPrepared):
            await writer(store)
        assert not old.is_fenced
        view = await writer(store, at=2)
        await preparing
        assert view.namespace.steps.committed_step == 2
        assert await versions(store, view) == [2] * 4

    run(scenario())


def test_a_prepare_behind_a_rollback_that_waits_is_refused() -> None:
    async def scenario() -> None:
        store, view = await committed(Machine(), 1)
        await train(store, view)
        rolling_back = asyncio.ensure_future(store.rollback(view, 1))
        await asyncio.sleep(0)
        preparing = asyncio.ensure_future(store.committer.prepare(view, 2, b""))
        with pytest.raises(StepFailed, match="it was rolled back meanwhile"):
            await preparing
        await rolling_back
        assert view.namespace.steps.prepared_step is None
        await train(store, view)
        await store.committer.commit(view, 2, b"")

    run(scenario())


@pytest.mark.parametrize("reserve_fails", ["lmdb", "internal"])
def test_a_transaction_that_happened_counts_whatever_making_room_after_it_meets(reserve_fails: str) -> None:
    async def scenario() -> None:
        machine = Machine()
        store, view = await committed(machine, 1)
        await train(store, view)
        catalog = store._transactions._catalog
        error = CatalogError("no room") if reserve_fails == "lmdb" else RuntimeError("a bug")

        def reserve(row_count: int, *, kept_rows: int = 0) -> None:
            raise error

        catalog.reserve = reserve  # type: ignore[method-assign]
        await store.committer.commit(view, 2, b"")
        del catalog.reserve  # type: ignore[attr-defined]
        assert view.namespace.steps.ledger.steps() == [1, 2]
        store = await restarted(machine)
        assert (await writer(store)).namespace.steps.ledger.steps() == [1, 2]

    run(scenario())


def test_a_large_rollback_has_the_catalog_s_room_made_before_it() -> None:
    async def scenario() -> None:
        store, view = await committed(Machine(retained_steps=16), 15)
        asked: list[int] = []
        catalog = store._transactions._catalog
        reserve = catalog.reserve
        catalog.reserve = lambda row_count: (asked.append(row_count), reserve(row_count))[1]  # type: ignore[method-assign]
        await store.rollback(view, 0)
        assert asked
        assert asked[0] >= 15 * 4

    run(scenario())


def test_an_apply_whose_writer_closes_before_its_turn_leaves_nobody_waiting_for_its_bytes() -> None:
    async def scenario() -> None:
        store, view = await committed(Machine(wait_timeout_s=1.0), 1)
        push(store, view, keys_of(view))
        applying = asyncio.ensure_future(store.applies.apply(view, OPTIONS, 1.0))
        prefetch = store.access.prefetch(view, keys_of(view), "param", None)
        store.close_view(view)
        with pytest.raises(LeaseError):
            await applying
        assert prefetch.is_finished
        assert isinstance(prefetch.error, StepFailed)
        view = await writer(store)
        assert await versions(store, view) == [1] * 4
        await train(store, view)

    run(scenario())
