"""A session's memory: descriptors, upload ranges and handles."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest

from paramstore.errors import (
    CapacityError,
    LeaseError,
    ProtocolError,
)
from paramstore.wire import messages as m

AtDesk = Callable[..., None]


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
