"""A store with nothing resident, which records the updates that start: for tests of applies and of loads."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from paramstore.core.key import ExpertKey
from paramstore.core.residency import Working
from paramstore.engine.records.access import Access
from paramstore.engine.store import Store
from paramstore.engine.tables.namespace import NamespaceState, View
from paramstore_testkit.disks.machine import Machine
from paramstore_testkit.stores.small_store import SCHEMA, create, run


class Site:
    """A store with nothing resident. updated: keys in the order in which their updates started."""

    def __init__(self, **machine: Any) -> None:
        self.machine = Machine(**machine)
        self.store: Store = self.machine.start()
        self.view: View
        self.updated: list[ExpertKey] = []
        self.in_slots: list[int] = []
        self.writing: list[int] = []
        """Number of records being written at the start of each update."""
        planner = self.store.transfers._planner
        plan_update = planner.plan_update

        def watched(namespace: NamespaceState, working: Any, claims: Any) -> Any:
            self.updated.append(working.key)
            self.in_slots.append(len(namespace.residency.resident))
            self.writing.append(len(namespace.residency.in_state[Working.WRITING]))
            return plan_update(namespace, working, claims)

        planner.plan_update = watched  # type: ignore[method-assign]

    @property
    def namespace(self) -> NamespaceState:
        return self.view.namespace

    @property
    def access(self) -> Access:
        return self.store.access

    def pause(self) -> None:
        assert self.machine.workers is not None
        self.machine.workers.pause()

    def resume(self) -> None:
        assert self.machine.workers is not None
        self.machine.workers.resume()

    async def evict(self, *keys: ExpertKey) -> None:
        await self.store.evict(self.view, keys or None, None)

    async def idle(self) -> None:
        while not self.store.transfers.runner.is_idle:
            await asyncio.sleep(0)

    def unhold(self, *keys: ExpertKey) -> None:
        for key in keys:
            self.store.transfers._planner.working.unhold(self.namespace, self.namespace.residency.working[key])
            self.store.transfers._planner.after_working(self.namespace, self.namespace.residency.working[key])
        self.store.transfers.carry_out()

    def leave_slots(self, count: int) -> None:
        """Leaves the working arena only so many slots; nothing is resident."""
        while self.namespace.memory.working.slots.free_count > count:
            self.namespace.memory.working.slots.take()

    def corrupt(self, key: ExpertKey, field: str) -> None:
        located = self.namespace.on_volume(key)
        assert located is not None
        self.machine.disks[0].corrupt(located.extent.offset_bytes + SCHEMA.stored.field(field).offset_bytes)


def on_site(scenario: Callable[[Site], Coroutine[Any, Any, None]], *, experts: int = 12, **machine: Any) -> None:
    async def prepared() -> None:
        site = Site(**machine)
        site.view = await create(site.store, experts=experts)
        await site.evict()
        await scenario(site)

    run(prepared())
