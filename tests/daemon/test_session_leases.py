"""A session's leases that wait: however one ends before it is granted, it is answered and holds nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from paramstore.errors import (
    LeaseError,
    TicketCancelled,
    WaitTimeout,
)
from paramstore.wire import messages as m

AtDesk = Callable[..., None]


async def filled(desk: Any, client: Any) -> int:
    """A handle of a namespace none of whose slots can be had: the transfers stand still and everything is evicted."""
    handle: int = await desk.create(client)
    await client.request(m.Evict, handle)
    desk.machine.workers.pause()
    return handle


def test_a_cancelled_lease_request_is_answered_and_holds_nothing(at_desk: AtDesk) -> None:
    async def scenario(desk: Any) -> None:
        client = await desk.client()
        handle = await filled(desk, client)
        await client.send(m.Acquire(700, handle, [(0, 0)], "param", 5.0))
        await client.send(m.Cancel(700))
        with pytest.raises(TicketCancelled):
            await client.result(700)
        desk.machine.workers.resume()
        assert desk.figures()["leased_slots"] == 0

    at_desk(scenario)


def test_a_cancel_that_comes_after_the_bytes_leaves_the_lease(at_desk: AtDesk) -> None:
    async def scenario(desk: Any) -> None:
        client = await desk.client()
        handle = await filled(desk, client)
        await client.send(m.Acquire(700, handle, [(0, 0)], "param", 5.0))
        await desk.until(lambda: desk.machine.workers.waiting)
        (session,) = desk.sessions
        lease = session._leases.waiting[700]
        desk.machine.workers.resume()
        while not lease.is_finished:
            await asyncio.sleep(0)
        session._cancel(700)  # between the arrival of the bytes and the turn of whoever waits for them
        assert len((await client.result(700)).slots) == 1
        assert desk.figures()["leased_slots"] == 1

    at_desk(scenario)


def test_releasing_a_lease_that_is_not_granted_yet_leaves_no_slot_behind(at_desk: AtDesk) -> None:
    async def scenario(desk: Any) -> None:
        client = await desk.client()
        handle = await filled(desk, client)
        await client.send(m.Acquire(700, handle, [(0, 0)], "param", 5.0))
        await client.send(m.Release([700]))
        await desk.until(lambda: desk.machine.workers.waiting)
        desk.machine.workers.resume()
        assert len((await client.result(700)).slots) == 1
        await client.send(m.Release([700]))
        await client.request(m.CloseNamespace, handle)
        assert desk.figures()["leased_slots"] == 0

    at_desk(scenario)


def test_a_lease_request_that_times_out_holds_nothing(at_desk: AtDesk) -> None:
    async def scenario(desk: Any) -> None:
        client = await desk.client()
        handle = await filled(desk, client)
        with pytest.raises(WaitTimeout, match="still loading"):
            await client.request(m.Acquire, handle, [(0, 0)], "param", 0.01)
        desk.machine.workers.resume()
        assert desk.figures()["leased_slots"] == 0

    at_desk(scenario)


def test_a_namespace_closed_under_a_waiting_lease_fails_it(at_desk: AtDesk) -> None:
    async def scenario(desk: Any) -> None:
        client = await desk.client()
        handle = await filled(desk, client)
        await client.send(m.Acquire(700, handle, [(0, 0)], "param", 5.0))
        await client.request(m.CloseNamespace, handle)
        with pytest.raises(LeaseError):
            await client.result(700)
        desk.machine.workers.resume()
        assert desk.figures()["leased_slots"] == 0

    at_desk(scenario)


def test_a_namespace_closed_as_the_bytes_arrive_fails_the_lease(at_desk: AtDesk) -> None:
    async def scenario(desk: Any) -> None:
        client = await desk.client()
        handle = await filled(desk, client)
        await client.send(m.Acquire(700, handle, [(0, 0)], "param", 5.0))
        await desk.until(lambda: desk.machine.workers.waiting)
        (session,) = desk.sessions
        lease = session._leases.waiting[700]
        desk.machine.workers.resume()
        while not lease.is_finished:
            await asyncio.sleep(0)
        session._close_namespace(m.CloseNamespace(701, handle))
        with pytest.raises(LeaseError, match="closed"):
            await client.result(700)
        assert desk.figures()["leased_slots"] == 0

    at_desk(scenario)


@pytest.mark.parametrize(("minor", "told"), [(m.ABSENT_MINOR, [2, 1, 0]), (m.ABSENT_MINOR - 1, [0, 0, 0])])
def test_a_client_that_understands_it_is_told_how_many_keys_were_absent(at_desk: AtDesk, minor: int, told: list[int]) -> None:
    async def scenario(desk: Any) -> None:
        client = desk.connect()
        await client.request(m.Hello, m.MAGIC, m.PROTOCOL_MAJOR, minor, 1)
        handle = await desk.create(client)
        await client.request(m.Evict, handle)
        leases = [(0, 0), (0, 1)], [(0, 1), (0, 2)], [(0, 2)]
        found = [await client.request(m.Acquire, handle, keys, "param", 5.0) for keys in leases]
        assert [granted.absent for granted in found] == told

    at_desk(scenario)
