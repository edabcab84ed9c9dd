"""The wait of who opens for slots that readers were lent: whom it waits for, whom it holds up, and what its end leaves behind."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from paramstore.core.schema import Schema
from paramstore.engine.capacity.recall import RECALL_WAIT_S
from paramstore.engine.planner.loans import LoanPlanner
from paramstore.engine.store import Store
from paramstore.engine.tables.namespace import View, WriterGroup
from paramstore.errors import CapacityError
from paramstore_testkit.disks.machine import Machine
from paramstore_testkit.stores.small_store import create, keys_of, lease, run

OPAQUE = Schema.param({"w": ((3, 5), "bfloat16")})
EXPERTS = 16
"""17 slots: the reserve has 1, all others are one share."""
WAIT_S = 0.02


async def served(*, wait_s: float = WAIT_S) -> tuple[Store, View]:
    """A store with a namespace that one reader has open, with a promise of 4 and a loan of 6."""
    store = Machine().start()
    store.close_view(await create(store, schema=OPAQUE, experts=EXPERTS))
    store.admission._recall_wait_s = wait_s
    reader = await opened(store)
    assert reader.namespace.memory.param.slots.count == EXPERTS + 1
    reader.lease_slots = 4
    assert store.lend(reader, 100) == 6
    return store, reader


async def opened(store: Store, *, mode: str = "read", least: int = 0, **named: Any) -> View:
    return await store.admission.open("moe", mode=mode, at=None, host_bytes=None, min_lease_slots=least, **named)


async def asked_back(view: View, kept: int) -> None:
    while view.loan.may_keep != kept:
        await asyncio.sleep(0)


@pytest.mark.parametrize(("wait_timeout_s", "wait_s"), [(60.0, RECALL_WAIT_S), (3.0, 1.5)])
def test_the_wait_is_five_seconds_and_half_of_what_a_client_waits_at_most(wait_timeout_s: float, wait_s: float) -> None:
    async def scenario() -> None:
        assert Machine(wait_timeout_s=wait_timeout_s).start().admission._recall_wait_s == wait_s

    run(scenario())


def test_who_needs_nothing_back_waits_for_nobody() -> None:
    async def scenario() -> None:
        store, reader = await served(wait_s=1000.0)
        other = await opened(store)
        assert (other.lease_slots, reader.loan.may_keep) == (6, 6), "half of twelve, of which six are not lent"

    run(scenario())


def test_others_open_and_lease_while_one_waits() -> None:
    async def scenario() -> None:
        store, reader = await served(wait_s=1000.0)
        waiting = asyncio.create_task(opened(store, least=9))
        await asked_back(reader, 3)
        store.close_view(await create(store, name="other"))
        small = await opened(store, least=1)  # three have not been asked back, and three were never lent
        await lease(store, small, keys_of(small)[: small.lease_slots])
        assert not waiting.done()
        store.close_view(small)
        store.take_back(reader, 3)
        assert (await waiting).lease_slots == 9

    run(scenario())


@pytest.mark.parametrize("mode", ["read", "write"])
def test_who_needs_what_a_client_holds_that_is_gone_waits_for_its_end(mode: str) -> None:
    async def scenario() -> None:
        store, reader = await served(wait_s=1000.0)
        view = reader if mode == "read" else await opened(store, mode="write")
        await lease(store, view, keys_of(view)[: view.lease_slots])
        store.end_writing(view, reason="is gone")  # its connection closed, and the process has not ended
        waiting = asyncio.create_task(opened(store, mode=mode, least=16 if mode == "read" else 12))
        for _ in range(20):
            await asyncio.sleep(0)
        assert not waiting.done()
        store.take_back(reader, 0)
        store.close_view(view)
        assert (await waiting).lease_slots == (16 if mode == "read" else 12)

    run(scenario())


def test_a_client_that_is_gone_and_never_ends_is_waited_for_a_bounded_time() -> None:
    async def scenario() -> None:
        store, reader = await served()
        await lease(store, reader, keys_of(reader)[:4])
        store.end_writing(reader, reason="is gone")
        with pytest.raises(CapacityError, match=r"min_lease_slots=16, but 12 of its 17 slots are left .* still holds 4"):
            await opened(store, least=16)
        assert (await opened(store, least=12)).lease_slots == 12

    run(scenario())


def test_a_writer_that_another_fenced_is_not_waited_for() -> None:
    async def scenario() -> None:
        store, reader = await served(wait_s=1000.0)
        store.close_view(reader)
        writer = await opened(store, mode="write")
        await lease(store, writer, keys_of(writer)[:8])
        await opened(store, mode="write", least=4)
        assert writer.is_fenced
        assert not LoanPlanner.is_ending(writer.namespace)
        with pytest.raises(CapacityError, match="still holds 8"):
            await opened(store, mode="write", least=16)

    run(scenario())


def test_a_writer_that_waits_in_vain_has_fenced_nobody() -> None:
    async def scenario() -> None:
        store, reader = await served()
        store.take_back(reader, 0)
        writer = await opened(store, mode="write")
        assert writer.lease_slots == 6
        store.lend(reader, 3)
        await lease(store, writer, keys_of(writer)[:6])
        with pytest.raises(CapacityError, match="min_lease_slots=6, but 3 slots that are lent were not given back in time"):
            await opened(store, mode="write", least=6)
        assert not writer.is_fenced
        assert (writer.namespace.openings, reader.loan.may_keep) == (0, 3)

    run(scenario())


def test_two_that_open_at_once_are_not_promised_the_same_slots() -> None:
    async def scenario() -> None:
        store, reader = await served()
        both = [asyncio.create_task(opened(store, least=8)) for _ in range(2)]
        await asked_back(reader, 4)
        store.take_back(reader, 4)
        results = await asyncio.gather(*both, return_exceptions=True)
        assert [type(result) for result in results] == [View, CapacityError]
        assert reader.namespace.openings == 0

    run(scenario())


def test_two_ranks_are_promised_what_comes_back_together() -> None:
    async def scenario() -> None:
        store, reader = await served(wait_s=1000.0)
        waiting = asyncio.create_task(opened(store, mode="write", least=5, group=WriterGroup("job", 2)))
        await asked_back(reader, 2)
        store.take_back(reader, 2)
        assert (await waiting).lease_slots == 5

    run(scenario())


def test_an_opening_that_is_given_up_asks_nothing_back_any_more() -> None:
    async def scenario() -> None:
        store, reader = await served(wait_s=1000.0)
        waiting = asyncio.create_task(opened(store, least=12))
        await asked_back(reader, 0)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        assert (reader.loan.may_keep, reader.namespace.openings, reader.namespace.loan_waiters) == (6, 0, [])
        assert store.lend(reader, 6) == 6

    run(scenario())


def test_who_asks_for_no_slots_waits_once_for_a_client_that_does_not_answer() -> None:
    async def scenario() -> None:
        store, reader = await served()
        loop = asyncio.get_running_loop()
        for view in [await opened(store) for _ in range(2)]:  # nothing has to come back, or only what is asked for first
            view.lease_slots = 3
        await opened(store)
        assert reader.loan.is_silent
        store.admission._recall_wait_s = 1000.0
        asked_s = loop.time()
        await opened(store)
        assert loop.time() - asked_s < 100.0
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(opened(store, least=2), 0.1)
        store.take_back(reader, 0)
        assert not reader.loan.is_silent
        assert (await opened(store, least=2)).lease_slots >= 2

    run(scenario())
