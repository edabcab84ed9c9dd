"""The memory of a namespace that nobody has open goes to whoever comes next, once nobody reads or maps it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from paramstore.engine.store import Store
from paramstore.engine.tables.namespace import View
from paramstore.engine.transfers.runner import volume_lane
from paramstore.errors import (
    CapacityError,
)
from paramstore_testkit.disks.machine import MIB, Machine
from paramstore_testkit.stores.small_store import ONE, create, first_values, keys_of, lease, reader, run, train, turns, versions


class Client:
    """A session that has mapped a namespace's memory. `answers`: whether it unmaps when asked."""

    def __init__(self, store: Store, view: View, *, answers: bool = True) -> None:
        self.store = store
        self.answers = answers
        self.asked: list[int] = []
        arena = view.namespace.memory.param
        self.mapped = [segment for segment, _, _ in arena.segments]
        for segment, memory, _ in arena.segments:
            memory.fd = segment
        store.host.give(self, self.mapped)

    def unmap(self, segments: list[int]) -> None:
        self.asked += segments
        if self.answers:
            asyncio.get_running_loop().call_later(0.005, self.store.host.unmapped, self, segments)


def test_the_memory_of_a_namespace_that_nobody_has_open_is_given_to_the_next() -> None:
    async def scenario() -> None:
        store = Machine(host_budget_bytes=ONE, volume_bytes=24 * MIB).start()
        first = await create(store, "a")
        await train(store, first)
        await store.committer.commit(first, 1, b"")
        store.close_view(first)
        second = await create(store, "b")
        assert not first.namespace.has_memory
        assert store.host.used_bytes <= ONE
        assert await versions(store, second) == [0] * 4
        store.close_view(second)
        again = await reader(store, "a")
        assert await first_values(store, again) == pytest.approx([-0.5, 0.5, 1.5, 2.5])

    run(scenario())


def test_memory_that_is_in_use_is_taken_from_nobody() -> None:
    async def scenario() -> None:
        store = Machine(host_budget_bytes=ONE, volume_bytes=24 * MIB).start()
        first = await create(store, "a")
        with pytest.raises(CapacityError, match="are left of host_budget 6 MiB: raise host_budget, or close other namespaces"):
            await create(store, "b")
        assert await first_values(store, first) == [0, 1, 2, 3]
        assert [row["name"] for row in store.admission.list_namespaces()] == ["a"]

    run(scenario())


def test_what_nobody_committed_is_lost_with_the_memory_and_space_comes_back() -> None:
    async def scenario() -> None:
        store = Machine(host_budget_bytes=ONE, volume_bytes=24 * MIB).start()
        first = await create(store, "a")
        free = store.transfers._planner.space.free_bytes
        await train(store, first)
        await store.write_back(first, None)
        await train(store, first)
        store.close_view(first)
        second = await create(store, "b", step=None)
        store.close_view(second)
        assert (await reader(store, "a")).namespace.epoch > 1
        assert await versions(store, first.namespace.views[0]) == [0] * 4
        assert store.transfers._planner.space.free_bytes == free

    run(scenario())


def test_clients_that_mapped_the_memory_are_asked_to_unmap_it_and_waited_for() -> None:
    async def scenario() -> None:
        store = Machine(host_budget_bytes=ONE, volume_bytes=24 * MIB).start()
        first = await create(store, "a")
        client = Client(store, first)
        store.close_view(first)
        second = await create(store, "b")
        assert client.asked == client.mapped
        assert store.host.used_bytes <= ONE
        assert await versions(store, second) == [0] * 4

    run(scenario())


def test_a_client_that_does_not_unmap_keeps_its_bytes_counted_and_is_not_waited_for_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("paramstore.engine.admission.UNMAP_TIMEOUT_S", 0.01)

    async def scenario() -> None:
        store = Machine(host_budget_bytes=ONE, volume_bytes=24 * MIB).start()
        first = await create(store, "a")
        client = Client(store, first, answers=False)
        store.close_view(first)
        with pytest.raises(CapacityError):
            await create(store, "b")
        assert store.host.used_bytes > 0
        store.host.unmapped(client)
        assert store.host.used_bytes == 0
        await create(store, "b")

    run(scenario())


def stall_reads(machine: Machine) -> Callable[[], None]:
    """Workers of the volume take nothing until the function that this gives is called."""
    workers = machine.workers
    assert workers is not None
    run_at_once, stalled = workers.run, list[Any]()

    def stall(lane: Any, *call: Any) -> None:
        if lane == volume_lane(0):
            stalled.append((lane, *call))
        else:
            run_at_once(lane, *call)

    def resume() -> None:
        workers.run = run_at_once  # type: ignore[method-assign]
        for call in stalled:
            workers.run(*call)

    workers.run = stall  # type: ignore[method-assign]
    return resume


@pytest.mark.parametrize("part", ["param", "optim"])
def test_memory_into_which_a_worker_still_reads_is_not_given_away_under_it(part: str) -> None:
    async def scenario() -> None:
        machine = Machine(host_budget_bytes=ONE, volume_bytes=24 * MIB)
        store = machine.start()
        first = await create(store, "a")
        await store.evict(first, None, None)
        resume = stall_reads(machine)
        store.access.prefetch(first, keys_of(first), part, None)
        store.close_view(first)
        creating = asyncio.ensure_future(create(store, "b"))
        await turns(200)
        resume()
        second = await creating
        assert await first_values(store, second) == [0, 1, 2, 3]
        store.close_view(second)
        assert await first_values(store, await reader(store, "a")) == [0, 1, 2, 3]

    run(scenario())


def test_leases_of_a_closed_view_whose_memory_went_are_no_ones_any_more() -> None:
    async def scenario() -> None:
        store = Machine(host_budget_bytes=ONE, volume_bytes=24 * MIB).start()
        first = await create(store, "a")
        request = await lease(store, first, keys_of(first)[:2])
        store.close_view(first)
        await create(store, "b")
        store.access.release(first, request.lease_id)
        assert request.copies == []

    run(scenario())
