"""Which steps stay: the newest, snapshots, those of readers; and going back to any of them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Literal

import pytest

from paramstore.core.location import Extent
from paramstore.engine.store import Store
from paramstore.engine.tables.namespace import View
from paramstore.engine.transfers.runner import CATALOG_LANE
from paramstore.errors import CapacityError, CatalogError, StepDropped, StepFailed
from paramstore.testing.catalogs import FaultyCatalog
from paramstore_testkit.disks.machine import Machine
from paramstore_testkit.stores.small_store import SCHEMA, committed, create, first_values, keys_of, run, train, turns, versions

MIB = 1 << 20


async def reader(store: Store, at: int | None = None) -> View:
    return await store.admission.open("moe", mode="read", at=at, host_bytes=None)


async def reopened(machine: Machine) -> tuple[Store, View]:
    await machine.crash()
    store = machine.start()
    return store, await store.admission.open("moe", mode="write", at=None, host_bytes=None)


def used_extents(store: Store) -> set[Extent]:
    return set(store.namespaces["moe"].steps.ledger.extents())


# --- how many steps stay


@pytest.mark.parametrize("retained_steps", [2, 3, 5])
def test_as_many_of_the_newest_steps_stay_as_are_set(retained_steps: int) -> None:
    async def scenario() -> None:
        machine = Machine(retained_steps=retained_steps)
        store, view = await committed(machine, 6)
        expected = list(range(7 - retained_steps, 7))
        assert view.namespace.steps.ledger.steps() == expected
        for step in expected:
            one, other = await reader(store, at=step), await reader(store, at=step)
            assert await first_values(store, one) == await first_values(store, other)
            store.close_view(one)
            store.close_view(other)
        with pytest.raises(StepDropped):
            await reader(store, at=expected[0] - 1)
        store, view = await reopened(machine)
        assert view.namespace.steps.ledger.steps() == expected

    run(scenario())


def test_a_volume_of_fixed_size_needs_room_for_every_step_that_may_stay() -> None:
    async def scenario() -> None:
        records = (5 + 1 + 0) * 4 + 4
        size_bytes = Machine().disks[0].size_bytes  # what a volume needs before its first record, and 1 MiB and more beyond
        store = Machine(volume_size_bytes=size_bytes, retained_steps=5, held_steps=0).start()
        view = await create(store)
        assert store.transfers._planner.space.entitled_bytes("moe") == records * SCHEMA.record_bytes
        for step in range(1, 8):
            await train(store, view)
            await store.committer.commit(view, step, b"")
        assert view.namespace.steps.ledger.steps() == [3, 4, 5, 6, 7]

    run(scenario())


# --- rollback to any of them


@pytest.mark.parametrize("step", [3, 4, 5])
def test_a_rollback_goes_back_to_any_step_that_stays_and_later_ones_are_gone(step: int) -> None:
    async def scenario() -> None:
        machine = Machine(retained_steps=4)
        store, view = await committed(machine, 6)
        wanted = await first_values(store, await reader(store, at=step))
        await train(store, view)
        epoch = view.namespace.epoch
        assert await store.rollback(view, step) == epoch + 1
        assert await first_values(store, view) == wanted
        assert await versions(store, view) == [step] * 4
        assert view.namespace.steps.ledger.steps() == list(range(3, step + 1))
        assert view.namespace.writing.applies == step
        await train(store, view)
        await store.committer.commit(view, step + 1, b"again")
        assert view.namespace.steps.ledger.step(step + 1).extra == b"again"
        retrained = await first_values(store, view)
        store, view = await reopened(machine)
        assert view.namespace.steps.committed_step == step + 1
        assert await first_values(store, view) == retrained

    run(scenario())


def test_a_rollback_is_durable_when_it_returns_and_records_of_the_steps_gone_never_count_again() -> None:
    async def scenario() -> None:
        machine = Machine(retained_steps=3)
        store, view = await committed(machine, 3)
        wanted = await first_values(store, await reader(store, at=1))
        await store.rollback(view, 1)
        store, view = await reopened(machine)
        assert view.namespace.steps.ledger.steps() == [1]
        assert await first_values(store, view) == wanted
        assert dict(view.namespace.steps.ledger.namespace.epoch_bounds)[2] == 2, "sequence 2 was that of step 1"

    run(scenario())


def test_readers_of_later_steps_lose_them_and_keep_what_they_leased() -> None:
    async def scenario() -> None:
        store, view = await committed(Machine(retained_steps=3, reader_slots=6), 3)
        late, early = await reader(store, at=3), await reader(store, at=2)
        keys = keys_of(view)
        lease = store.access.acquire(late, 900, keys[:2], "param")
        await store.access.wait_lease(lease, 5.0)
        await store.rollback(view, 2)
        assert all(copy.leases for copy in lease.copies)
        with pytest.raises(StepDropped):
            store.access.acquire(late, 901, keys[2:3], "param")
        store.access.release(late, 900)
        await first_values(store, early)
        assert store.refresh(late) == 2
        assert await first_values(store, late) == await first_values(store, early)

    run(scenario())


def test_a_rollback_to_a_step_that_is_not_there_stops_no_apply() -> None:
    async def scenario() -> None:
        store, view = await committed(Machine(), 2)
        training = asyncio.ensure_future(train(store, view))
        await turns(2)
        with pytest.raises(StepDropped, match="step 0 of namespace 'moe' is not retained; the steps are: 1, 2"):
            await store.rollback(view, 0)
        await training
        assert await versions(store, view) == [3] * 4

    run(scenario())


async def rolling_back(store: Store, view: View, step: int) -> tuple[asyncio.Task[int], asyncio.Event]:
    """A rollback whose transaction waits for the event, as it would for its flush."""
    call, event = store.transfers.runner.call, asyncio.Event()

    async def waits(lane: Any, work: Callable[[], Any], **named: Any) -> Any:
        if lane == CATALOG_LANE:
            await event.wait()
        return await call(lane, work, **named)

    store.transfers.runner.call = waits  # type: ignore[method-assign]
    task = asyncio.ensure_future(store.rollback(view, step))
    await turns()
    assert view.namespace.steps.closing_steps
    return task, event


async def stands(store: Store, view: View, one: View) -> None:
    """The reader stands on a step that exists, or is told that its step is gone; and no later commit moves it."""
    if one.is_dropped:
        return
    assert one.step in view.namespace.steps.ledger.steps(), (
        f"the reader stands on {one.step}, there are {view.namespace.steps.ledger.steps()}"
    )
    before = await first_values(store, one)
    await train(store, view)
    await store.committer.commit(view, 3, b"again")
    assert await first_values(store, one) == before


def test_a_reader_that_opens_during_a_rollback_stands_on_a_step_that_stays() -> None:
    async def scenario() -> None:
        store, view = await committed(Machine(retained_steps=3), 3)
        task, event = await rolling_back(store, view, 1)
        opening = asyncio.ensure_future(reader(store))
        await turns()
        event.set()
        await task
        await stands(store, view, await opening)

    run(scenario())


def test_a_reader_that_refreshes_during_a_rollback_stands_on_a_step_that_stays() -> None:
    async def scenario() -> None:
        store, view = await committed(Machine(retained_steps=3), 3)
        moved = await reader(store, at=2)
        task, event = await rolling_back(store, view, 1)
        store.refresh(moved)
        event.set()
        await task
        await stands(store, view, moved)

    run(scenario())


# --- snapshots


def test_a_snapshot_stays_over_any_number_of_commits_and_a_crash_until_it_is_dropped() -> None:
    async def scenario() -> None:
        machine = Machine()
        store, view = await committed(machine, 2)
        wanted = await first_values(store, view)
        await store.admission.snapshot(view, 2)
        for step in range(3, 7):
            await train(store, view)
            await store.committer.commit(view, step, b"")
        assert view.namespace.steps.ledger.steps() == [2, 5, 6]
        assert view.namespace.steps.ledger.snapshots() == [2]
        store, view = await reopened(machine)
        assert view.namespace.steps.ledger.snapshots() == [2]
        assert view.namespace.steps.ledger.step(2).extra == b"extra of 2"
        assert await first_values(store, await reader(store, at=2)) == wanted
        await store.admission.snapshot(view, 2)  # it is one: nothing to do
        extents = used_extents(store)
        for one in list(view.namespace.views):
            if one is not view:
                store.close_view(one)
        await store.admission.drop_snapshot(view, 2)
        assert view.namespace.steps.ledger.steps() == [5, 6]
        assert len(used_extents(store)) == len(extents) - 4, "its space came back at once"
        with pytest.raises(StepDropped):
            await reader(store, at=2)

    run(scenario())


def test_a_snapshot_that_is_dropped_stays_while_it_is_new_or_somebody_reads_it() -> None:
    async def scenario() -> None:
        store, view = await committed(Machine(), 3)
        await store.admission.snapshot(view, 3)
        await store.admission.drop_snapshot(view, 3)
        assert view.namespace.steps.ledger.steps() == [2, 3]
        assert view.namespace.steps.ledger.snapshots() == []
        await store.admission.snapshot(view, 2)
        old = await reader(store, at=2)
        for step in (4, 5):
            await train(store, view)
            await store.committer.commit(view, step, b"")
        await store.admission.drop_snapshot(view, 2)
        assert view.namespace.steps.ledger.steps() == [2, 4, 5]
        await first_values(store, old)
        with pytest.raises(StepDropped, match="step 2 of namespace 'moe' is no snapshot"):
            await store.admission.drop_snapshot(view, 2)

    run(scenario())


def test_a_rollback_before_a_snapshot_is_refused_and_changes_nothing() -> None:
    async def scenario() -> None:
        store, view = await committed(Machine(retained_steps=3), 3)
        await store.admission.snapshot(view, 3)
        with pytest.raises(StepFailed, match=r"rollback\(2\) of namespace 'moe': step 3 is a snapshot; drop_snapshot\(3\) first"):
            await store.rollback(view, 2)
        assert view.namespace.steps.ledger.steps() == [1, 2, 3]
        await store.admission.drop_snapshot(view, 3)
        await store.rollback(view, 2)
        assert await versions(store, view) == [2] * 4

    run(scenario())


def test_a_snapshot_takes_room_for_a_step_and_is_refused_where_there_is_none() -> None:
    async def scenario() -> None:
        size_bytes = Machine().disks[0].size_bytes
        wide: Any = {"experts": 8}
        machine = Machine(volume_size_bytes=size_bytes, held_steps=0)
        store = machine.start()
        view = await create(store, **wide)
        entitled = store.transfers._planner.space.entitled_bytes("moe")
        state_bytes = 8 * SCHEMA.record_bytes
        taken: list[int] = []
        refusal: CapacityError | None = None
        while refusal is None:
            await train(store, view)
            await store.committer.commit(view, len(taken) + 1, b"")
            try:
                await store.admission.snapshot(view, len(taken) + 1)
            except CapacityError as error:
                refusal = error
            else:
                taken.append(len(taken) + 1)
            assert store.transfers._planner.space.entitled_bytes("moe") == entitled + len(taken) * state_bytes
        assert "bytes are missing; add a volume (--add-volume)" in str(refusal)
        assert taken, "there was room for some"
        assert view.namespace.steps.ledger.snapshots() == taken
        assert store.transfers._planner.space.entitled_bytes("moe") == entitled + len(taken) * state_bytes
        await train(store, view)
        await store.committer.commit(view, 100, b"")

    run(scenario())


def test_a_snapshot_waits_for_the_commit_under_way_that_may_drop_its_step() -> None:
    async def scenario() -> None:
        store, view = await committed(Machine(), 2)
        await train(store, view)
        commit = asyncio.ensure_future(store.committer.commit(view, 3, b""))
        await turns(2)
        with pytest.raises(StepDropped, match="step 1 of namespace 'moe' is not retained"):
            await store.admission.snapshot(view, 1)
        await commit
        assert view.namespace.steps.ledger.steps() == [2, 3]
        assert store.transfers._planner.space.entitled_bytes("moe") == store._volumes._entitled(view.namespace, snapshots=0)

    run(scenario())


@pytest.mark.parametrize("outcome", ["lost", "durable"])
def test_what_the_catalog_says_after_a_failed_transaction_is_what_happened(outcome: Literal["lost", "durable"]) -> None:
    async def scenario() -> None:
        machine = Machine()
        store, view = await committed(machine, 2)
        store._transactions._catalog = FaultyCatalog(machine.durable, fail_at=1, outcome=outcome)
        if outcome == "lost":
            with pytest.raises(CatalogError):
                await store.admission.snapshot(view, 1)
        else:
            await store.admission.snapshot(view, 1)
        assert view.namespace.steps.ledger.snapshots() == ([] if outcome == "lost" else [1])
        store, view = await reopened(machine)
        assert view.namespace.steps.ledger.snapshots() == ([] if outcome == "lost" else [1])

    run(scenario())
