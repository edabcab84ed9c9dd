"""Initial values: each is taken once, within an initialization, and its write is under way on return."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from paramstore.core.residency import Working
from paramstore.engine.tables.namespace import View
from paramstore.engine.transfers.runner import BACKGROUND_LANE
from paramstore.errors import CapacityError, StepFailed, UnknownKey
from paramstore.optim.tensors import field_tensor
from paramstore_testkit.disks.machine import PlainSegment
from paramstore_testkit.stores.small_store import SCHEMA, create, first_values, run, turns
from paramstore_testkit.stores.update_site import Site


async def begun(site: Site) -> View:
    """Another namespace whose initialization has begun."""
    view = await site.store.admission.create("new", SCHEMA.describe(), layers=[0], experts=3, host_bytes=None)
    await site.store.initializer.begin(view)
    return view


def initial(value: float = 1.0) -> memoryview:
    memory = PlainSegment(SCHEMA.initial_bytes).view(0, SCHEMA.initial_bytes)
    for field in SCHEMA.initial_fields():
        field_tensor(memory, field).fill_(value)
    return memory


def on_two(scenario: Callable[[Site], Coroutine[Any, Any, None]], **machine: Any) -> None:
    async def prepared() -> None:
        await scenario(Site(**machine))

    run(prepared())


def test_an_initial_value_is_taken_once_and_its_write_is_under_way_on_return() -> None:
    async def scenario(site: Site) -> None:
        site.view = await begun(site)
        value = initial()
        await site.store.initializer.put(site.view, (0, 1), value)
        working = site.namespace.residency.working[0, 1]
        assert working.state in (Working.WRITING, Working.CLEAN)
        assert working.identity == (site.namespace.epoch, 0)
        value[:] = bytes(len(value))
        with pytest.raises(StepFailed, match=r"\(0, 1\) of 'new' has its initial value already"):
            await site.store.initializer.put(site.view, (0, 1), value)
        with pytest.raises(UnknownKey):
            await site.store.initializer.put(site.view, (0, 3), value)
        with pytest.raises(StepFailed, match=r"initialize on 'new': \(0, 0\) was never given a value"):
            await site.store.initializer.end(site.view)
        assert await first_values(site.store, site.view, [(0, 1)]) == [1.0], "the upload range was free to be used again"

    on_two(scenario)


def test_an_initial_value_outside_of_an_initialization_is_refused() -> None:
    async def scenario(site: Site) -> None:
        site.view = await create(site.store)
        with pytest.raises(StepFailed, match="has its initial value already"):
            await site.store.initializer.put(site.view, (0, 0), initial())

    on_two(scenario)


def test_an_initial_value_waits_for_space_that_the_zero_fill_has_just_taken() -> None:
    async def scenario(site: Site) -> None:
        site.view = await begun(site)
        space, runner = site.store.transfers._planner.space, site.store.transfers.runner
        extent = space.next_unwritten(0, 1 << 30)
        assert extent is not None
        while space.reserve(SCHEMA.record_bytes, owner="new") is not None:
            pass

        async def fill() -> None:
            await runner.call(BACKGROUND_LANE, lambda: None)
            space.finish_prefill(extent)

        filling = asyncio.ensure_future(fill())
        await turns(1)
        await site.store.initializer.put(site.view, (0, 1), initial())
        assert site.namespace.residency.working[0, 1].identity is not None
        await filling

    on_two(scenario)


def test_an_initial_value_that_no_volume_can_hold_is_refused() -> None:
    async def scenario(site: Site) -> None:
        site.view = await begun(site)
        space = site.store.transfers._planner.space
        while space.reserve(SCHEMA.record_bytes, owner="new") is not None:
            pass
        with pytest.raises(CapacityError, match=r"add a volume"):
            await site.store.initializer.put(site.view, (0, 1), initial())
        assert site.namespace.residency.working[0, 1].state is Working.ABSENT

    on_two(scenario)
