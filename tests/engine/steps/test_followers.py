"""Whoever follows a writer: waits for the next committed step, and is told how much a refresh has changed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from random import Random

import pytest

from paramstore.core.schema import Schema
from paramstore.engine.store import Store
from paramstore.engine.tables.namespace import StepRequest, View
from paramstore.errors import CatalogError, LeaseError, ParamStoreError, StepDropped, TicketCancelled, WaitTimeout, WriterFenced
from paramstore.testing.catalogs import FaultyCatalog
from paramstore_testkit.disks.machine import Machine
from paramstore_testkit.stores import small_store
from paramstore_testkit.stores.small_store import (
    committed,
    create,
    first_values,
    keys_of,
    prepared,
    reader,
    run,
    train,
    turns,
    with_spare,
)
from paramstore_testkit.trial import telling

Told = asyncio.Task[dict[str, int]]


def follow(store: Store, view: View, *, after: int | None = None, sequence: int | None = None, timeout_s: float = 15.0) -> Told:
    return asyncio.create_task(store.followers.wait(store.followers.begin(view, after, sequence), timeout_s))


async def commit(store: Store, view: View, step: int, keys: int = 1) -> None:
    """Commits a step that changes the first `keys` keys."""
    await train(store, view, keys_of(view)[:keys])
    await store.committer.commit(view, step, b"")


async def step_of(told: Told) -> int:
    return (await told)["step"]


# --- waiting


def test_a_wait_ends_with_the_next_commit_and_not_before_it_is_durable() -> None:
    async def scenario() -> None:
        machine = Machine()
        store, view = await committed(machine, 1)
        told = follow(store, await reader(store))
        await train(store, view)
        await turns()
        assert not told.done()
        await store.committer.commit(view, 2, b"")
        found = await told
        assert found == {"step": 2, "sequence": view.namespace.steps.ledger.step(2).sequence}
        assert 2 in [row.step for contents in machine.durable.load().namespaces.values() for row in contents.steps.values()]

    run(scenario())


def test_a_follower_that_is_slower_than_the_commits_is_told_of_the_newest_alone() -> None:
    async def scenario() -> None:
        store, view = await committed(Machine(), 1)
        follower = await reader(store)
        for step in (2, 3, 7):
            await commit(store, view, step)
        assert await step_of(follow(store, follower)) == 7
        assert await step_of(follow(store, follower, after=3)) == 7
        assert store.refresh(follower) == 7
        with pytest.raises(WaitTimeout, match="no step of 'moe' after step 7 within 0 s; the newest is 7"):
            await follow(store, follower, timeout_s=0.0)

    run(scenario())


def test_a_writer_is_told_of_the_first_step_and_of_those_above_a_number() -> None:
    async def scenario() -> None:
        store = Machine().start()
        view = await create(store, step=None)
        first, later = follow(store, view), follow(store, view, after=4)
        await store.committer.commit(view, 4, b"")
        assert await step_of(first) == 4
        await turns()
        assert not later.done()
        await commit(store, view, 5)
        assert await step_of(later) == 5
        with pytest.raises(WaitTimeout, match=r"after step 9 .* the newest is 5"):
            await follow(store, view, after=9, timeout_s=0.0)

    run(scenario())


def test_a_step_that_is_prepared_is_told_of_when_it_is_finalized() -> None:
    async def scenario() -> None:
        store, view = await prepared(Machine())
        told = follow(store, await reader(store))
        await turns()
        assert not told.done()
        await store.history.finalize(view, 2)
        assert await step_of(told) == 2

    run(scenario())


def test_nobody_looks_while_no_steps_change() -> None:
    async def scenario() -> None:
        store, view = await committed(Machine(), 1)
        views, looks = store.transfers._planner.views, 0
        newer_step: Callable[[StepRequest], object] = views.newer_step

        def counted(request: StepRequest) -> object:
            nonlocal looks
            looks += 1
            return newer_step(request)

        views.newer_step = counted  # type: ignore[method-assign,assignment]
        told = follow(store, view, after=9)
        for step in (2, 3):
            await train(store, view)
            await turns(500)
            assert looks == step - 1
            await store.committer.commit(view, step, b"")
            await turns()
        assert looks == 3
        told.cancel()

    run(scenario())


# --- rollbacks


def test_after_a_rollback_a_reader_that_lost_its_step_is_told_at_once_and_a_number_has_to_be_passed() -> None:
    async def scenario() -> None:
        store, view = await committed(Machine(retained_steps=4), 3)
        lost, kept = await reader(store), await reader(store, at=1)
        sequences = {step: view.namespace.steps.ledger.step(step).sequence for step in (2, 3)}
        by_view, above, by_commit = follow(store, lost), follow(store, kept, after=3), follow(store, kept, sequence=sequences[3])
        await store.rollback(view, 2)
        assert await step_of(by_view) == 2
        assert await by_commit == {"step": 2, "sequence": sequences[2]}
        again = follow(store, kept, sequence=sequences[3])
        assert await step_of(again) == 2
        await commit(store, view, 3)
        assert await step_of(follow(store, lost)) == 3, "the number that it stands on has come again, for other bytes"
        assert await step_of(follow(store, kept, sequence=sequences[3])) == 3
        await turns()
        assert not above.done()
        await commit(store, view, 4)
        assert await step_of(above) == 4

    run(scenario())


def test_a_rollback_that_fails_tells_nobody_of_a_lower_step() -> None:
    async def scenario() -> None:
        machine = Machine(retained_steps=4)
        store, view = await committed(machine, 3)
        follower = await reader(store)
        told = follow(store, follower)
        store._transactions._catalog = FaultyCatalog(machine.durable, fail_at=1, outcome="lost")
        rolling_back = asyncio.create_task(store.rollback(view, 2))
        while not view.namespace.steps.closing_steps:
            await asyncio.sleep(0)
        asked_meanwhile = follow(store, follower)
        with pytest.raises(CatalogError):
            await rolling_back
        await turns()
        assert not told.done()
        assert not asked_meanwhile.done()
        store.close_view(follower)
        for ended in (told, asked_meanwhile):
            with pytest.raises(LeaseError):
                await ended

    run(scenario())


def test_a_refresh_while_a_rollback_is_under_way_counts_all_keys() -> None:
    async def scenario() -> None:
        store, view = await committed(Machine(retained_steps=4), 3)
        follower = await reader(store)
        rolling_back = asyncio.create_task(store.rollback(view, 1))
        while not view.namespace.steps.closing_steps:
            await asyncio.sleep(0)
        moved = await store.refresh_counted(follower)
        assert (moved["step"], moved["keys"]) == (1, len(keys_of(view)))
        await rolling_back

    run(scenario())


# --- ends


@pytest.mark.parametrize("is_held", [True, False], ids=["while it waits", "before"])
@pytest.mark.parametrize("end", ["closed", "fenced", "cancelled"])
def test_a_wait_ends_at_once_with_its_view_or_by_a_cancel_and_leaves_nothing_behind(end: str, is_held: bool) -> None:
    async def scenario() -> None:
        store, view = await committed(Machine(), 1)
        request = store.followers.begin(view, 1, None)
        told = asyncio.create_task(store.followers.wait(request, 15.0))
        await turns(5 if is_held else 0)
        error: type[ParamStoreError]
        if end == "closed":
            store.close_view(view)
            error = LeaseError
        elif end == "fenced":
            store.ranks.fence(view.group)  # type: ignore[arg-type]  # a writer has one
            error = WriterFenced
        else:
            store.followers.cancel(request)
            assert view.awaited == [], "it counts no more from now on"
            error = TicketCancelled
        await turns(5)
        assert told.done()
        with pytest.raises(error):
            await told
        assert view.awaited == []

    run(scenario())


def test_another_writer_ends_the_wait_of_the_one_before() -> None:
    async def scenario() -> None:
        store, view = await committed(Machine(), 1)
        told = follow(store, view, after=1)
        await turns(5)
        await small_store.writer(store)
        with pytest.raises(WriterFenced):
            await told

    run(scenario())


def test_waits_that_are_over_stand_nowhere() -> None:
    async def scenario() -> None:
        store, view = await committed(Machine(), 1)
        follower = await reader(store)
        told, late, dropped = follow(store, follower), follow(store, follower, after=9, timeout_s=0.001), follow(store, follower)
        await turns(5)
        assert len(follower.awaited) == 3
        dropped.cancel()
        with pytest.raises(WaitTimeout):
            await late
        await commit(store, view, 2)
        assert await step_of(told) == 2
        assert follower.awaited == []

    run(scenario())


# --- what a refresh changes


def test_a_refresh_to_a_step_goes_there_or_nowhere() -> None:
    async def scenario() -> None:
        store, view = await committed(with_spare(0), 1)
        follower = await reader(store)
        await commit(store, view, 2, keys=1)
        await commit(store, view, 3, keys=2)
        param_bytes = view.namespace.schema.part("param").image_bytes
        assert await store.refresh_counted(follower, 2) == {"step": 2, "keys": 1, "bytes": param_bytes}
        assert follower.step == 2
        await commit(store, view, 4)
        await commit(store, view, 5)
        assert follower.is_dropped
        for step in (2, 6):
            with pytest.raises(StepDropped):
                store.refresh(follower, step)
            assert follower.is_dropped
        assert store.refresh(follower, 4) == follower.step == 4
        assert not follower.is_dropped

    run(scenario())



def test_a_refresh_counts_the_keys_that_have_other_bytes() -> None:
    async def scenario() -> None:
        store, view = await committed(Machine(), 1)
        param_bytes = view.namespace.schema.part("param").image_bytes
        follower = await reader(store)
        await commit(store, view, 2, keys=2)
        assert await store.refresh_counted(follower) == {"step": 2, "keys": 2, "bytes": 2 * param_bytes}
        assert await store.refresh_counted(follower) == {"step": 2, "keys": 0, "bytes": 0}
        await store.committer.commit(view, 3, b"nothing has changed")
        assert await store.refresh_counted(follower) == {"step": 3, "keys": 0, "bytes": 0}

    run(scenario())


def test_a_refresh_from_a_step_that_is_gone_counts_the_same_and_all_keys_after_a_rollback() -> None:
    async def scenario() -> None:
        store, view = await committed(with_spare(0), 1)
        follower = await reader(store)
        for step, keys in ((2, 1), (3, 2), (4, 1), (5, 0)):
            await commit(store, view, step, keys)
        assert follower.is_dropped
        assert (await store.refresh_counted(follower))["keys"] == 2
        await commit(store, view, 6)
        assert (await store.refresh_counted(follower))["keys"] == 1
        await store.rollback(view, 5)
        assert (await store.refresh_counted(follower))["keys"] == len(keys_of(view))
        assert (await store.refresh_counted(follower))["keys"] == 0
        for step in (7, 8, 9):
            await commit(store, view, step)
        assert follower.is_dropped
        assert (await store.refresh_counted(follower))["keys"] == 1, "that rollback was before it came there"

    run(scenario())


@pytest.mark.parametrize("updates", ["touched", "exact"])
@pytest.mark.parametrize("seed", range(4))
def test_the_count_is_that_of_other_identities_whatever_was_committed_between(updates: str, seed: int) -> None:
    random = Random(seed)

    async def scenario() -> None:
        store = Machine(seed=seed, held_steps=random.choice((0, 1, 4)), retained_steps=random.choice((1, 2, 4))).start()
        view = await create(store, schema=Schema.adamw({"w": (3, 5)}, param_dtype="float32", updates=updates), experts=6)
        keys, step = keys_of(view), 0
        readers = [await reader(store) for _ in range(3)]
        seen = {one: {key: one.locate(key)[0] for key in keys} for one in readers}
        for _ in range(40):
            if random.random() < 0.6:
                step += 1
                for _ in range(random.randrange(3)):
                    await train(store, view, random.sample(keys, random.randint(1, 3)))
                await store.committer.commit(view, step, b"")
                continue
            one = random.choice(readers)
            found, before = await store.refresh_counted(one), seen[one]
            seen[one] = {key: one.locate(key)[0] for key in keys}
            assert found["keys"] == sum(before[key] != seen[one][key] for key in keys)

    with telling(lambda: f"seed {seed}"):
        run(scenario())


def test_after_a_refresh_what_is_used_and_has_changed_is_read_from_the_volume_and_nothing_else() -> None:
    async def scenario() -> None:
        store, view = await committed(Machine(), 1)
        follower, keys, traffic = await reader(store), keys_of(view), store.transfers.traffic[0]
        used, changed = keys[:3], [keys[0], keys[3]]
        await store.evict(view, None, None)
        before = traffic.bytes_read
        await first_values(store, follower, used)
        read_bytes = (traffic.bytes_read - before) // len(used)
        assert read_bytes >= view.namespace.schema.part("param").image_bytes, "they came from the volume"

        await train(store, view, changed)
        await store.committer.commit(view, 2, b"")
        await store.evict(view, changed, None)  # what training has left of them in memory, too
        before = traffic.bytes_read
        moved = await store.refresh_counted(follower)
        assert moved["keys"] == len(changed)
        assert traffic.bytes_read == before, "a refresh moves nothing by itself"
        values = await first_values(store, follower, used)
        assert traffic.bytes_read - before == read_bytes
        assert values == await first_values(store, view, used)

    run(scenario())
