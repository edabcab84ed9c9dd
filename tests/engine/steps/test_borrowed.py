"""Older steps of readers borrow room, and give it back before anybody would lack it."""

from __future__ import annotations

import asyncio
from random import Random
from typing import Any

import pytest

from paramstore.engine.store import Store
from paramstore.engine.tables.namespace import View
from paramstore.engine.transfers.runner import CATALOG_LANE
from paramstore.errors import CapacityError, CatalogError, StepDropped, VolumeError
from paramstore.storage.format.structures import Superblock, extents_start_bytes
from paramstore.testing.catalogs import FaultyCatalog
from paramstore.testing.volumes import MemoryVolume
from paramstore_testkit.disks.machine import Machine
from paramstore_testkit.stores.small_store import (
    EXPERTS,
    SCHEMA,
    committed,
    create,
    keys_of,
    lease,
    reader,
    run,
    train,
    turns,
    versions,
    with_spare,
)

RECORD_BYTES = SCHEMA.record_bytes


async def step_on(store: Store, view: View, step: int, *, count: int = EXPERTS) -> None:
    """Trains so many records, and commits."""
    await train(store, view, keys_of(view)[:count])
    await store.committer.commit(view, step, b"")


def borrowed(store: Store, name: str = "moe") -> int:
    return store.transfers.space.borrowed_bytes(name) // RECORD_BYTES


@pytest.mark.parametrize(("spare", "held_steps"), [(0, 0), (3, 0), (4, 0), (8, 0), (15, 0), (0, 1), (4, 2)])
def test_as_many_older_steps_stay_as_there_is_room_for_and_the_oldest_goes_first(spare: int, held_steps: int) -> None:
    async def scenario() -> None:
        store = with_spare(spare, held_steps=held_steps).start()
        view = await create(store)
        readers, values = [await reader(store)], [await versions(store, view)]
        for step in range(1, 9):
            await step_on(store, view, step)
            readers.append(await reader(store))
            values.append(await versions(store, view))
        older = held_steps + spare // EXPERTS
        assert [one.step for one in readers if one.is_dropped] == list(range(7 - older))
        assert view.namespace.steps.ledger.steps() == list(range(7 - older, 9))
        assert borrowed(store) == (older - held_steps) * EXPERTS
        for one, seen in zip(readers, values, strict=True):
            if one.is_dropped:
                with pytest.raises(StepDropped):
                    await versions(store, one)
            else:
                assert await versions(store, one) == seen

    run(scenario())


def test_a_reader_of_a_step_that_little_has_changed_since_keeps_it_for_long() -> None:
    async def scenario() -> None:
        store = with_spare(1).start()
        view = await create(store)
        old = await reader(store)
        seen = await versions(store, old)
        for step in range(1, 20):
            await step_on(store, view, step, count=1)
        assert await versions(store, old) == seen
        assert borrowed(store) == 1
        await step_on(store, view, 20, count=2)
        assert await versions(store, old) == seen, "the second record's first version belongs to a retained step still"
        await step_on(store, view, 21, count=1)
        with pytest.raises(StepDropped):
            await versions(store, old)
        assert borrowed(store) == 0

    run(scenario())


def test_what_a_reader_leased_stays_when_its_step_goes() -> None:
    async def scenario() -> None:
        store = with_spare(0, reader_slots=6).start()
        view = await create(store)
        old = await reader(store)
        leased = await lease(store, old, keys_of(view)[:2])
        for step in (1, 2):
            await step_on(store, view, step)
        with pytest.raises(StepDropped, match=r"step 0 of 'moe' was dropped: its room was needed; refresh\(\)"):
            store.access.acquire(old, 999, keys_of(view)[2:3], "param")
        assert all(copy.leases for copy in leased.copies)
        store.access.release(old, leased.lease_id)
        assert store.refresh(old) == 2
        assert await versions(store, old) == await versions(store, view)

    run(scenario())


def test_a_reader_that_has_gone_leaves_its_room_to_others_with_the_next_commit() -> None:
    async def scenario() -> None:
        store = with_spare(4).start()
        view = await create(store)
        old = await reader(store)
        for step in (1, 2):
            await step_on(store, view, step)
        assert borrowed(store) == 4
        store.close_view(old)
        await step_on(store, view, 3)
        assert (borrowed(store), view.namespace.steps.ledger.steps()) == (0, [2, 3])

    run(scenario())


def test_older_steps_leave_half_of_the_note_slots() -> None:
    async def scenario() -> None:
        store = with_spare(400).start()
        view = await create(store)
        slots = store.history._note_slots
        readers = []
        for step in range(1, 60):
            readers.append(await reader(store))
            await step_on(store, view, step, count=1)
        assert slots.free_count >= slots.count // 2
        assert sum(not one.is_dropped for one in readers) == len(view.namespace.steps.ledger.steps()) - 1 == slots.count // 2 - 1

    run(scenario())


def test_older_steps_go_where_the_catalog_has_no_room_for_their_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        machine = with_spare(40)
        store, view = await committed(machine, 1)
        entitled = store._volumes.kept_rows([view.namespace])
        asked: list[int] = []

        def reserve(row_count: int, *, kept_rows: int = 0) -> None:
            asked.append(kept_rows)
            if kept_rows > entitled:
                raise CatalogError("disk full")

        monkeypatch.setattr(machine.catalog, "reserve", reserve)
        old = await reader(store, at=0)
        await step_on(store, view, 2)
        assert max(asked) >= entitled + EXPERTS
        assert (old.is_dropped, borrowed(store)) == (True, 0)
        await step_on(store, view, 3)

    run(scenario())


def test_a_commit_that_fails_takes_no_reader_s_step() -> None:
    async def scenario() -> None:
        machine = with_spare(4)
        store, view = await committed(machine, 1)
        first, second = await reader(store, at=0), await reader(store, at=1)
        await step_on(store, view, 2)
        assert borrowed(store) == 4
        seen = await versions(store, first)
        await train(store, view)
        store._transactions._catalog = FaultyCatalog(machine.durable, fail_at=1, outcome="lost")
        with pytest.raises(CatalogError):
            await store.committer.commit(view, 3, b"")
        store._transactions._catalog = machine.durable
        assert (first.is_dropped, borrowed(store)) == (False, 4)
        assert await versions(store, first) == seen
        await store.committer.commit(view, 3, b"")
        assert (first.is_dropped, second.is_dropped, borrowed(store)) == (True, False, 4)

    run(scenario())


def test_nothing_is_borrowed_while_a_volume_is_fenced() -> None:
    async def scenario() -> None:
        machine = Machine(volume_count=2)
        store, view = await committed(machine, 1)
        old = await reader(store, at=0)
        await step_on(store, view, 2)
        assert borrowed(store) == 4
        space = store.transfers.space
        assert space.may_borrow("moe", 4 * RECORD_BYTES, freed_bytes=0, slack_bytes=0)
        for _ in range(100):
            space.fences.fail_write(1, VolumeError("EIO"))
        assert space.fences.is_fenced(1)
        assert not space.may_borrow("moe", 4 * RECORD_BYTES, freed_bytes=0, slack_bytes=0)
        await step_on(store, view, 3)
        assert (old.is_dropped, borrowed(store)) == (True, 0)

    run(scenario())


# --- room is lost


def with_a_small_volume_and_a_large_one(*, namespaces: int = 1) -> Machine:
    """The first has room for less than a state; the second for all that the namespaces are entitled to, and more."""
    machine = with_spare(30, namespaces=namespaces)
    small_bytes = extents_start_bytes(Superblock(bytes(16), bytes(16), 0)) + 12 * RECORD_BYTES
    machine.disks = {0: MemoryVolume(small_bytes, index=0), 1: MemoryVolume(machine.disks[0].size_bytes, index=1)}
    machine.volumes = dict(machine.disks)
    return machine


async def with_older_steps(store: Store, count: int) -> tuple[View, list[View]]:
    """A namespace of which every record changes at each of so many steps, with a reader on each."""
    view = await create(store)
    readers = [await reader(store)]
    for step in range(1, count):
        await step_on(store, view, step)
        readers.append(await reader(store))
    return view, readers


def test_where_a_volume_is_lost_older_steps_go_before_an_apply_or_a_commit_is_refused() -> None:
    async def scenario() -> None:
        store = with_a_small_volume_and_a_large_one().start()
        view, readers = await with_older_steps(store, 14)
        assert borrowed(store) >= 6 * EXPERTS
        assert store.transfers.space.free_bytes_of(0) < EXPERTS * RECORD_BYTES
        for _ in range(2):
            store.transfers.space.fences.fail_write(1, VolumeError("EIO"))
        await asyncio.gather(*(train(store, view) for _ in range(2)))
        assert borrowed(store) == 0
        assert [one.step for one in readers if not one.is_dropped] == [12, 13]
        await store.committer.commit(view, 14, b"")
        assert await versions(store, view) == [15] * EXPERTS
        assert view.namespace.steps.ledger.steps() == [13, 14]

    run(scenario())


def test_where_a_volume_is_lost_older_steps_of_another_namespace_go_too() -> None:
    async def scenario() -> None:
        store = with_a_small_volume_and_a_large_one(namespaces=2).start()
        other = await create(store, "other")
        view, readers = await with_older_steps(store, 14)
        assert borrowed(store) >= 6 * EXPERTS
        for _ in range(2):
            store.transfers.space.fences.fail_write(1, VolumeError("EIO"))
        for step in range(1, 3):
            await step_on(store, other, step)
        assert (borrowed(store), [one.step for one in readers if not one.is_dropped]) == (0, [12, 13])
        assert await versions(store, view) == [13] * EXPERTS

    run(scenario())


def test_where_note_slots_are_used_up_older_steps_give_back_theirs() -> None:
    async def scenario() -> None:
        store = with_spare(400).start()
        view, readers = await with_older_steps(store, 12)
        slots = store.history._note_slots
        while slots.free_count:
            slots.take()
        await step_on(store, view, 12)
        assert [one.step for one in readers if not one.is_dropped] == [11]
        assert slots.free_count == 10 - 1 + 1, "of ten older steps, without the new one's, and that of the step that it replaced"

    run(scenario())


def test_several_updates_that_lack_room_at_once_have_it_given_back_once() -> None:
    async def scenario() -> None:
        store = with_spare(8).start()
        view, readers = await with_older_steps(store, 5)
        assert borrowed(store) == 8
        async with view.namespace.writing.turn:
            found = await asyncio.gather(*(store.history.find_room(view.namespace) for _ in range(3)))
        assert found == [True, True, True]
        assert (borrowed(store), [one.step for one in readers if not one.is_dropped]) == (0, [3, 4])
        async with view.namespace.writing.turn:
            assert not await store.history.find_room(view.namespace)

    run(scenario())


async def held_up(store: Store, *, give_back: bool) -> tuple[asyncio.Event, asyncio.Task[bool]]:
    """Begins to give back room, in a transaction that waits for the event. give_back: as for another namespace."""
    call, event = store.transfers.runner.call, asyncio.Event()

    async def waits(lane: Any, work: Any, **named: Any) -> Any:
        if lane == CATALOG_LANE:
            await event.wait()
        return await call(lane, work, **named)

    store.transfers.runner.call = waits  # type: ignore[method-assign]
    namespace = store.namespaces["moe"]
    task = asyncio.ensure_future(store.history.give_back(namespace) if give_back else store.history.find_room(namespace))
    await turns()
    assert namespace.steps.closing_steps
    return event, task


@pytest.mark.parametrize("give_back", [False, True])
def test_what_gives_room_back_goes_on_where_who_waits_is_cancelled_and_later_changes_wait_for_it(give_back: bool) -> None:
    async def scenario() -> None:
        store = with_spare(8).start()
        view, readers = await with_older_steps(store, 5)
        event, task = await held_up(store, give_back=give_back)
        task.cancel()
        rollback = asyncio.ensure_future(store.rollback(view, 4))
        await turns()
        assert not rollback.done()
        event.set()
        await rollback
        assert [one.step for one in readers if not one.is_dropped] == [3, 4] == view.namespace.steps.ledger.steps()
        assert borrowed(store) == 0
        for step in (5, 6, 7):
            await step_on(store, view, step)
        assert await versions(store, view) == [7] * EXPERTS

    run(scenario())


def test_two_who_lack_room_join_what_gives_it_back() -> None:
    async def scenario() -> None:
        store = with_spare(8).start()
        view, _ = await with_older_steps(store, 5)
        event, task = await held_up(store, give_back=True)
        other = asyncio.ensure_future(store.history.give_back(view.namespace))
        await turns()
        event.set()
        assert await asyncio.gather(task, other) == [True, True]

    run(scenario())


def test_a_commit_that_came_first_keeps_room_from_being_given_back() -> None:
    async def scenario() -> None:
        store = with_spare(8).start()
        view, readers = await with_older_steps(store, 5)
        await view.namespace.writing.turn.acquire()
        await asyncio.sleep(0)
        commit = asyncio.ensure_future(store.committer.commit(view, 5, b""))
        await turns()
        view.namespace.writing.turn.release()  # the commit is woken, and has not begun
        assert not await store.history.give_back(view.namespace)
        await commit
        assert [one.step for one in readers if not one.is_dropped] == view.namespace.steps.ledger.steps()[:-1]

    run(scenario())


# --- others need the room


def test_a_snapshot_of_an_older_step_keeps_it_where_its_rows_are_there_already() -> None:
    async def scenario() -> None:
        store = with_spare(EXPERTS).start()
        view = await create(store)
        old = await reader(store)
        for step in (1, 2):
            await step_on(store, view, step)
        assert borrowed(store) == 4
        async with view.namespace.writing.turn:
            snapshot = asyncio.ensure_future(store.admission.snapshot(view, 0))
            await turns()
        await snapshot
        assert (old.is_dropped, borrowed(store)) == (False, 0)
        for step in range(3, 6):
            await step_on(store, view, step)
        assert view.namespace.steps.ledger.steps() == [0, 4, 5]
        assert await versions(store, old) == [0] * EXPERTS

    run(scenario())


def test_a_new_namespace_and_a_snapshot_get_back_what_older_steps_have_borrowed() -> None:
    async def scenario() -> None:
        store = with_spare(EXPERTS, namespaces=2).start()
        view = await create(store)
        old = await reader(store)
        for step in (1, 2, 3):
            await step_on(store, view, step)
        assert borrowed(store) == 4
        other = await create(store, "other")
        assert borrowed(store) == 4, "there was room beside it"
        await store.admission.snapshot(other, 0)
        assert (old.is_dropped, borrowed(store)) == (True, 0)
        assert view.namespace.steps.ledger.steps() == [2, 3]
        for step in range(4, 8):
            await step_on(store, view, step)
            await step_on(store, other, step)
        assert other.namespace.steps.ledger.steps() == [0, 6, 7]

    run(scenario())


def test_while_a_writer_s_call_is_under_way_room_is_not_given_back_and_the_refusal_says_so() -> None:
    async def scenario() -> None:
        store = with_spare(0, namespaces=2).start()
        view = await create(store)
        old = await reader(store)
        for step in (1, 2, 3):
            await step_on(store, view, step)
        assert borrowed(store) == 4
        async with view.namespace.writing.turn:
            with pytest.raises(CapacityError, match="until their commits are published: try again then"):
                await create(store, "other")
        assert (old.is_dropped, borrowed(store)) == (False, 4)
        await create(store, "other")
        assert (old.is_dropped, borrowed(store)) == (True, 0)

    run(scenario())


@pytest.mark.parametrize("seed", range(12))
def test_two_namespaces_on_tight_volumes_never_lack_what_they_are_entitled_to(seed: int) -> None:
    """Readers come and go on all steps, records change in part; no apply and no commit is refused, and readers see their steps."""

    async def scenario() -> None:
        random = Random(seed)
        store = with_spare(random.randrange(12), namespaces=2, held_steps=random.choice((0, 0, 1)), seed=seed).start()
        views = [await create(store, name) for name in ("moe", "eval")]
        readers: list[tuple[View, list[int]]] = []
        for step in range(1, 25):
            for view in random.sample(views, 2):
                name, ledger = view.namespace.name, view.namespace.steps.ledger
                if random.random() < 0.6:
                    one = await reader(store, name, at=random.choice(ledger.steps()))
                    readers.append((one, await versions(store, one)))
                applies = [train(store, view, random.sample(keys_of(view), random.randint(1, EXPERTS))) for _ in range(2)]
                await applies[0]
                commit = asyncio.ensure_future(store.committer.commit(view, step, b""))
                await asyncio.gather(commit, applies[1])
                if random.random() < 0.2:
                    await store.rollback(view, random.choice(ledger.steps()[-2:]))
            if readers and random.random() < 0.5:
                store.close_view(readers.pop(random.randrange(len(readers)))[0])
            for one, seen in readers:
                if not one.is_dropped:
                    assert await versions(store, one) == seen
        for view in views:
            assert len(await versions(store, view)) == EXPERTS

    run(scenario())
