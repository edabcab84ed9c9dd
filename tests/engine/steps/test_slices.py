"""Whatever a commit or rollback does to every record is done in slices, between which the loop turns and others go on."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import pytest

from paramstore.core import slices
from paramstore.core.key import ExpertKey
from paramstore.core.residency import Working
from paramstore.engine.planner.cuts import CutPlanner
from paramstore.engine.planner.planner import Planner
from paramstore.engine.steps import commit
from paramstore.engine.store import Store
from paramstore.engine.tables.namespace import View
from paramstore.engine.transfers.scheduler import Transfer
from paramstore.errors import CatalogError, StepFailed
from paramstore.storage.catalog.ledger import Ledger
from paramstore.storage.space.extents import Space
from paramstore.testing.catalogs import FaultyCatalog
from paramstore_testkit.disks.machine import Machine
from paramstore_testkit.stores.small_planner import changed_keys
from paramstore_testkit.stores.small_store import (
    OPTIONS,
    create,
    first_values,
    hold_writes_back,
    keys_of,
    lease,
    push,
    reader,
    run,
    train,
    turns,
    versions,
    writer,
)

EXPERTS, SLICE = 13, 4


@pytest.fixture(autouse=True)
def _small_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slices, "SLICE", SLICE)


class Turns:
    """Counts, for each turn of the loop, how many keys or extents were handled by what it watches."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.handled: list[int] = [0]
        for owner, name in ((CutPlanner, "take"), (CutPlanner, "settle"), (Planner, "roll_back")):
            monkeypatch.setattr(owner, name, self._counting(getattr(owner, name)))
        monkeypatch.setattr(Space, "release", self._counting_one(Space.release))

    def _counting(self, inner: Callable[..., None]) -> Callable[..., None]:
        def call(planner: Any, namespace: Any, keys: list[ExpertKey], **named: Any) -> None:
            self.handled[-1] += len(keys)
            inner(planner, namespace, keys, **named)

        return call

    def _counting_one(self, inner: Callable[..., None]) -> Callable[..., None]:
        def call(space: Any, extent: Any) -> None:
            self.handled[-1] += 1
            inner(space, extent)

        return call

    async def watch(self, call: Coroutine[Any, Any, Any]) -> None:
        task = asyncio.ensure_future(call)
        while not task.done():
            self.handled.append(0)
            await asyncio.sleep(0)
        await task


async def trained(machine: Machine, *, steps: int = 2) -> tuple[Store, View]:
    store = machine.start()
    view = await create(store, experts=EXPERTS)
    for step in range(1, steps + 1):
        await train(store, view)
        await store.committer.commit(view, step, b"")
    return store, view


def test_no_turn_of_a_commit_or_rollback_of_everything_is_longer_than_two_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        store, view = await trained(Machine())
        await train(store, view)
        turns = Turns(monkeypatch)
        await turns.watch(store.committer.commit(view, 3, b""))
        assert sum(turns.handled) >= 3 * EXPERTS, "cut, settled, and freed"
        await train(store, view)
        await turns.watch(store.rollback(view, 3))
        assert sum(turns.handled) >= 5 * EXPERTS
        assert max(turns.handled) <= 2 * SLICE, "a slice may end in the turn in which the next thing begins"
        assert await versions(store, view) == [3] * EXPERTS

    run(scenario())


def test_a_commit_has_few_of_its_records_on_their_way_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        machine = Machine()
        store, view = await trained(machine)
        await train(store, view)
        written, under_way, submit = view.namespace.residency.in_state[Working.WRITING], [], store.transfers.runner.submit

        def watched(transfer: Transfer) -> None:
            under_way.append(len(written))
            submit(transfer)

        store.transfers.runner.submit = watched  # type: ignore[method-assign]
        monkeypatch.setattr(commit, "QUEUED_AT_ONCE", 1)
        monkeypatch.setattr(commit, "WRITING_MAX", 5)
        assert machine.workers is not None
        machine.workers.pause()
        committed = asyncio.ensure_future(store.committer.commit(view, 3, b""))
        for _ in range(100):
            await asyncio.sleep(0)
        assert len(written) == 5, "no more before one of them has landed"
        machine.workers.resume()
        await committed
        assert max(under_way) == 5
        assert await versions(store, view) == [3] * EXPERTS

    run(scenario())


def in_the_middle(planner: type, name: str, monkeypatch: pytest.MonkeyPatch) -> asyncio.Event:
    """An event that is set when the second slice of `name` is done."""
    reached, inner, count = asyncio.Event(), getattr(planner, name), iter(range(1000))

    def call(self: Any, *given: Any, **named: Any) -> None:
        inner(self, *given, **named)
        if next(count) == 1:
            reached.set()

    monkeypatch.setattr(planner, name, call)
    return reached


def test_while_a_rollback_is_half_way_the_writer_is_refused_and_readers_read(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        store, view = await trained(Machine())
        older = await reader(store, at=1)
        before = await first_values(store, older)
        await train(store, view)
        push(store, view, keys_of(view))
        middle = in_the_middle(Planner, "roll_back", monkeypatch)
        rollback = asyncio.ensure_future(store.rollback(view, 2))
        await middle.wait()
        assert not rollback.done()
        for call in (
            lambda: store.access.acquire(view, 900, keys_of(view)[:1], "param"), lambda: push(store, view, keys_of(view)),
            lambda: store.applies.apply(view, OPTIONS, 1.0),
        ):  # fmt: skip
            with pytest.raises(StepFailed, match="is being rolled back: ask again when that call has returned"):
                call()
        request = await lease(store, older, keys_of(view)[-1:])
        store.access.release(older, request.lease_id)
        await rollback
        assert await first_values(store, older) == before
        assert await versions(store, view) == [2] * EXPERTS
        assert not view.namespace.writing.pending
        await train(store, view)
        await store.committer.commit(view, 3, b"")
        assert await versions(store, view) == [3] * EXPERTS

    run(scenario())


def test_a_lease_that_waits_for_slots_gets_what_stands_after_the_rollback(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        store, view = await trained(Machine())
        expected = await first_values(store, view)
        await train(store, view)
        keys, arena = keys_of(view), view.namespace.memory.param
        held = await lease(store, view, keys[:-1])
        await store.evict(view, keys[-1:], "param")
        while arena.slots.free_count:
            arena.slots.take()
        waiting = store.access.acquire(view, 901, keys[-1:], "param")
        assert not waiting.is_finished
        middle = in_the_middle(Planner, "roll_back", monkeypatch)
        rollback = asyncio.ensure_future(store.rollback(view, 2))
        await middle.wait()
        store.access.release(view, held.lease_id)
        assert not waiting.is_finished, "slots that come free half-way are nobody's yet"
        await rollback
        await store.access.wait_lease(waiting, 5.0)
        store.access.release(view, 901)
        assert await first_values(store, view, keys[-1:]) == expected[-1:]

    run(scenario())


def test_an_apply_beside_a_commit_that_settles_half_way_is_in_the_next_step(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        machine = Machine()
        store, view = await trained(machine)
        await train(store, view)
        middle = in_the_middle(CutPlanner, "settle", monkeypatch)
        commit = asyncio.ensure_future(store.committer.commit(view, 3, b""))
        await middle.wait()
        assert view.namespace.steps.committed_step == 3, "it is durable, and can be opened"
        assert await versions(store, await reader(store)) == [3] * EXPERTS
        await train(store, view)
        await commit
        await store.committer.commit(view, 4, b"")
        await machine.crash()
        store = machine.start()
        for step in (3, 4):
            assert await versions(store, await reader(store, at=step)) == [step] * EXPERTS

    run(scenario())


def test_a_commit_that_fails_lets_go_of_everything_in_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        machine = Machine()
        store, view = await trained(machine)
        await train(store, view)
        catalog = store._transactions._catalog
        store._transactions._catalog = FaultyCatalog(machine.durable, fail_at=1, outcome="lost")
        turns = Turns(monkeypatch)
        with pytest.raises(CatalogError):
            await turns.watch(store.committer.commit(view, 3, b""))
        assert max(turns.handled) <= 2 * SLICE
        assert changed_keys(view.namespace) == sorted(keys_of(view))
        store._transactions._catalog = catalog
        store = await again(machine)
        assert await versions(store, await writer(store)) == [2] * EXPERTS

    run(scenario())


async def again(machine: Machine) -> Store:
    await machine.crash()
    return machine.start()


def test_a_cancelled_rollback_is_whole_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        store, view = await trained(Machine())
        await train(store, view)
        middle = in_the_middle(Planner, "roll_back", monkeypatch)
        rollback = asyncio.ensure_future(store.rollback(view, 2))
        await middle.wait()
        rollback.cancel()
        with pytest.raises(asyncio.CancelledError):
            await rollback
        assert not view.namespace.writing.is_rolling_back
        assert await versions(store, view) == [2] * EXPERTS

    run(scenario())


def test_an_update_that_settles_while_a_rollback_is_half_way_leaves_nothing_to_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        store, view = await trained(Machine())
        last, late = keys_of(view)[-1], []
        settle = Planner.settle_update

        def keep(planner: Any, namespace: Any, update: Any, error: Any) -> None:
            if update.working.key == last and not late:
                late.append(lambda: settle(planner, namespace, update, error))
            else:
                settle(planner, namespace, update, error)

        monkeypatch.setattr(Planner, "settle_update", keep)
        push(store, view, [last])
        apply = asyncio.ensure_future(store.applies.apply(view, OPTIONS, 1.0))
        while not late:
            await asyncio.sleep(0)
        apply.cancel()  # its worker goes on
        await asyncio.gather(apply, return_exceptions=True)
        middle = in_the_middle(Planner, "roll_back", monkeypatch)
        rollback = asyncio.ensure_future(store.rollback(view, 2))
        await middle.wait()
        late[0]()
        await rollback
        assert not view.namespace.steps.changed
        await train(store, view, keys_of(view)[:1])
        await store.committer.commit(view, 3, b"")
        assert await versions(store, view) == [3, *[2] * (EXPERTS - 1)]

    run(scenario())


def test_no_reader_gets_a_step_that_a_rollback_has_durably_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        store, view = await trained(Machine())
        moving = await reader(store, at=1)
        reached, settling = asyncio.Event(), Ledger.settling

        def noticed(ledger: Ledger, publication: Any) -> Iterator[None]:
            for _ in settling(ledger, publication):
                reached.set()
                yield

        monkeypatch.setattr(Ledger, "settling", noticed)
        rollback = asyncio.ensure_future(store.rollback(view, 1))
        await reached.wait()
        assert view.namespace.steps.ledger.steps() == [0, 1, 2][-len(view.namespace.steps.ledger.steps()) :], "2 is there still"
        assert store.refresh(moving) == 1
        with pytest.raises(StepFailed, match="is being rolled back"):
            store.access.acquire(view, 902, keys_of(view)[-1:], "param")
        opened = await reader(store)
        await rollback
        assert (opened.step, moving.step) == (1, 1)
        assert await versions(store, opened) == [1] * EXPERTS

    run(scenario())


def test_a_write_that_lands_while_a_failed_commit_is_let_go_belongs_to_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        machine = Machine()
        store, view = await trained(machine)
        await train(store, view)
        first, submit = keys_of(view)[0], store.transfers.runner.submit
        kept = hold_writes_back(store, failing=first)
        middle = in_the_middle(CutPlanner, "settle", monkeypatch)
        committed = asyncio.ensure_future(store.committer.commit(view, 3, b""))
        await middle.wait()
        cut = view.namespace.steps.cut
        assert cut is not None
        for transfer in kept:
            submit(transfer)
        with pytest.raises(StepFailed, match="failed twice"):
            await committed
        await turns()
        store.transfers.runner.submit = submit  # type: ignore[method-assign]
        working = view.namespace.residency.working
        assert sum(working[key].uncommitted is not None for key in keys_of(view)) == EXPERTS - 1
        assert not any(copy.cut_record for copy in working.values())
        assert (cut.unwritten, changed_keys(view.namespace)) == (0, sorted(keys_of(view)))
        await train(store, view, [first])
        await store.committer.commit(view, 3, b"")
        await machine.crash()
        assert await versions(machine.start(), await reader(machine.store)) == [4, *[3] * (EXPERTS - 1)]

    run(scenario())


def test_a_commit_that_is_cancelled_in_its_cut_leaves_none(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        store, view = await trained(Machine())
        await train(store, view)
        middle = in_the_middle(CutPlanner, "take", monkeypatch)
        commit = asyncio.ensure_future(store.committer.commit(view, 3, b""))
        await middle.wait()
        commit.cancel()
        with pytest.raises(asyncio.CancelledError):
            await commit
        assert view.namespace.steps.cut is None
        assert not store.transfers.space.pins
        await store.committer.commit(view, 3, b"")
        assert await versions(store, await reader(store)) == [3] * EXPERTS

    run(scenario())
