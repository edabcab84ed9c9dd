"""A session's memory: descriptors, upload ranges, handles, and leases that wait."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from typing import Any

import pytest

from paramstore.errors import (
    CapacityError,
    LeaseError,
    ProtocolError,
    TicketCancelled,
    WaitTimeout,
)
from paramstore.wire import messages as m

AtDesk = Callable[..., None]


# --- memory


def test_descriptors_come_once_per_segment_and_only_with_leases_and_uploads(at_desk: AtDesk) -> None:
    async def scenario(desk: Any) -> None:
        client = await desk.client()
        handle = await desk.create(client)
        await client.request(m.Prefetch, handle, [(0, 0)], "param")
        assert client.fds == []
        granted = await client.request(m.Acquire, handle, [(0, 0)], "param", 5.0)
        assert len(client.fds) == len(granted.segments) == 1
        again = await client.request(m.Acquire, handle, [(0, 0), (0, 1)], "param", 5.0)
        assert again.segments == []
        assert len(client.fds) == 1
        uploaded = await client.request(m.OpenUpload, 10)
        assert uploaded.length_bytes >= 10
        assert len(client.fds) == 2

    at_desk(scenario)


def test_a_lease_shows_the_bytes_and_cannot_be_written(at_desk: AtDesk) -> None:
    async def scenario(desk: Any) -> None:
        client = await desk.client()
        handle = await desk.create(client)
        granted = await client.request(m.Acquire, handle, [(0, 0)], "param", 5.0)
        ((segment, offset_bytes, epoch, version),) = granted.slots
        assert (epoch, version) == (desk.figures()["epoch"], 0)
        assert segment == granted.segments[0][0]
        assert os.pread(client.fds[0], 1024, offset_bytes) == bytes(1024)
        with pytest.raises(PermissionError):
            os.pwrite(client.fds[0], b"x", offset_bytes)

    at_desk(scenario)


@pytest.mark.parametrize(("offset_bytes", "reason"), [(1, "aligned"), (-4096, "range"), (1 << 40, "range"), (2 << 20, "range")])
def test_a_range_that_leaves_the_upload_segment_is_refused(offset_bytes: int, reason: str, at_desk: AtDesk) -> None:
    async def scenario(desk: Any) -> None:
        client = await desk.client()
        handle = await desk.create(client)
        segment = await desk.upload(client, 4096)
        for request in (
            m.Push(900, handle, [(0, 0, segment, offset_bytes)]), m.Read(901, handle, (0, 0), segment, offset_bytes),
            m.InitializePut(902, handle, (0, 0), segment, offset_bytes),
        ):  # fmt: skip
            with pytest.raises(ProtocolError, match=reason):
                await client.ask(request)
        assert desk.figures()["pending_gradients"] == 0

    at_desk(scenario)


def test_segments_of_others_are_refused(at_desk: AtDesk) -> None:
    async def scenario(desk: Any) -> None:
        client, other = await desk.client(), await desk.client()
        handle = await desk.create(client)
        await other.request(m.OpenNamespace, "moe", "read")
        theirs = await desk.upload(other, 4096)
        leased = (await client.request(m.Acquire, handle, [(0, 0)], "param", 5.0)).slots[0][0]
        for segment in (theirs, leased, 0, -5):
            with pytest.raises(ProtocolError, match="not an upload segment of this session"):
                await client.request(m.Push, handle, [(0, 0, segment, 0)])

    at_desk(scenario)


def test_an_upload_area_is_bounded_however_often_it_is_asked_for(at_desk: AtDesk) -> None:
    async def scenario(desk: Any) -> None:
        client, other = await desk.client(), await desk.client()
        await desk.create(client)

        async def ask_on() -> None:
            for _ in range(100):
                await desk.upload(client, 1 << 20)

        with pytest.raises(CapacityError, match="gradient_budget"):
            await ask_on()
        await other.request(m.OpenNamespace, "moe", "read")
        await desk.upload(other, 1 << 20)  # what one session took is not missing to another

    at_desk(scenario)


def test_handles_of_others_are_refused(at_desk: AtDesk) -> None:
    async def scenario(desk: Any) -> None:
        client, other = await desk.client(), await desk.client()
        handle = await desk.create(client)
        for request in (m.Steps(900, handle), m.Commit(901, handle, 9), m.Acquire(902, handle, [(0, 0)], "param", 1.0)):
            with pytest.raises(LeaseError, match="not open in this session"):
                await other.ask(request)
        await client.request(m.CloseNamespace, handle)
        with pytest.raises(LeaseError, match="not open"):
            await client.request(m.Steps, handle)

    at_desk(scenario)


# --- leases that wait


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
        lease = session._leases[700]
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
        lease = session._leases[700]
        desk.machine.workers.resume()
        while not lease.is_finished:
            await asyncio.sleep(0)
        session._close_namespace(m.CloseNamespace(701, handle))
        with pytest.raises(LeaseError, match="closed"):
            await client.result(700)
        assert desk.figures()["leased_slots"] == 0

    at_desk(scenario)
