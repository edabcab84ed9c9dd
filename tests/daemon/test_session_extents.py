"""Leases of extents: what a client is told of them is so, they keep bytes where they lie, and they end with its process."""

from __future__ import annotations

import asyncio
import os
import struct
from collections.abc import Callable
from typing import Any

import pytest

from paramstore.core.checksums import device_sums, header_root, pack_sums
from paramstore.core.location import Extent
from paramstore.core.schema import Schema
from paramstore.errors import (
    CapacityError,
    ConfigError,
    CorruptRecord,
    LeaseError,
    ParamStoreError,
    ProtocolError,
    SchemaMismatch,
    StepDropped,
    UnknownKey,
    VolumeError,
    WaitTimeout,
)
from paramstore.wire import messages as m

AtDesk = Callable[..., None]
SCHEMA = Schema.param({"w": ((300, 1000), "float32"), "b": ((7,), "uint8")})
"""A field of two chunks, and one that is no whole word."""
EXPERTS = 4
VOLUME = {"volume_bytes": 32 << 20, "volume_size_bytes": 32 << 20}


async def served(desk: Any, client: Any, *, schema: Schema = SCHEMA) -> int:
    """The handle of a reader of a new inference namespace `m`, whose every key has a value of its own, committed at step 1."""
    opened = await client.request(m.CreateNamespace, "m", schema.describe(), [0], EXPERTS)
    answer: m.Uploaded = await client.request(m.OpenUpload, schema.initial_bytes)
    fd = client.fds.pop()
    await client.request(m.InitializeBegin, opened["handle"])
    for expert in range(EXPERTS):
        os.pwrite(fd, bytes([expert + 1]) * (schema.initial_bytes - 1000), 0)
        await client.request(m.InitializePut, opened["handle"], (0, expert), answer.segment, 0)
    os.close(fd)
    await client.request(m.InitializeEnd, opened["handle"])
    await client.request(m.Commit, opened["handle"], 1)
    await client.request(m.CloseNamespace, opened["handle"])
    return int((await client.request(m.OpenNamespace, "m", "read"))["handle"])


def image_at(fd: int, extent: tuple[int, ...]) -> bytes:
    return os.pread(fd, SCHEMA.record_bytes, extent[1])


def pins(desk: Any) -> int:
    return int(desk.service.extents.leased_count)


def test_what_is_granted_is_where_the_records_lie_and_proves_them(at_desk: AtDesk) -> None:
    async def scenario(desk: Any) -> None:
        client = await desk.client()
        handle = await served(desk, client)
        granted = await client.request(m.AcquireExtents, handle, [(0, 2), (0, 1)])
        assert granted.volumes == [0]
        part, fd = SCHEMA.stored, client.fds[0]
        for expert, extent, sums in zip((2, 1), granted.extents, granted.sums, strict=True):
            image = image_at(fd, extent)
            located = desk.store.namespaces["m"].on_volume((0, expert))
            assert (extent[:3], extent[3:5], extent[5]) == (located.extent, located.identity, located.root)
            assert header_root(image[: part.header_bytes]) == extent[5]
            assert pack_sums(device_sums(memoryview(image), part.chunks())) == sums
            assert image[part.fields[0].offset_bytes] == expert + 1
        again = await client.request(m.AcquireExtents, handle, [(0, 2)])
        assert (again.volumes, len(client.fds), again.sums) == ([], 1, granted.sums[:1])
        assert desk.store.namespaces["m"].stats.records_read_for_sums == 2

    at_desk(scenario, **VOLUME, extent_leases=8)


def test_a_record_that_was_loaded_is_not_read_again_for_its_sums(at_desk: AtDesk) -> None:
    async def scenario(desk: Any) -> None:
        client = await desk.client()
        handle = await served(desk, client)
        await client.request(m.Evict, handle, None, "param")
        await client.request(m.Prefetch, handle, [(0, 0)], "param")
        granted = await client.request(m.AcquireExtents, handle, [(0, 0)])
        image = image_at(client.fds[0], granted.extents[0])
        assert pack_sums(device_sums(memoryview(image), SCHEMA.stored.chunks())) == granted.sums[0]
        assert desk.store.namespaces["m"].stats.records_read_for_sums == 0

    at_desk(scenario, **VOLUME, extent_leases=8)


def test_without_the_setting_nothing_is_leased_and_no_sums_are_made(at_desk: AtDesk) -> None:
    async def scenario(desk: Any) -> None:
        client = await desk.client()
        handle = await served(desk, client)
        await client.request(m.Prefetch, handle, [(0, 0)], "param")
        with pytest.raises(LeaseError, match="extent_leases"):
            await client.request(m.AcquireExtents, handle, [(0, 0)])
        assert (client.fds, desk.store.transfers.sums.records()) == ([], [])

    at_desk(scenario, **VOLUME)


def test_who_asks_for_what_cannot_be_leased_is_told_why(at_desk: AtDesk) -> None:
    async def scenario(desk: Any) -> None:
        client = await desk.client()
        trained = await desk.create(client)
        reader = await served(desk, client)
        writer = (await client.request(m.OpenNamespace, "m", "write"))["handle"]
        refused: list[tuple[int, list[m.Key], type[ParamStoreError], str]] = [
            (trained, [(0, 0)], SchemaMismatch, "is trained"), (writer, [(0, 0)], LeaseError, "mode='read'"),
            (reader, [(0, 9)], UnknownKey, "9"), (reader, [(0, 0)] * 3, CapacityError, "extent_leases=2"),
            (reader, [], ProtocolError, "array"), (99, [(0, 0)], LeaseError, "99"),
            (reader, [(0, 0)] * (m.EXTENT_KEYS_MAX + 1), ProtocolError, "array"),
        ]  # fmt: skip
        for handle, keys, error, words in refused:
            with pytest.raises(error, match=words):
                await client.request(m.AcquireExtents, handle, keys)
        assert pins(desk) == 0

    at_desk(scenario, **VOLUME, extent_leases=2)


def test_no_key_is_refused_before_anything_is_looked_at(at_desk: AtDesk) -> None:
    async def scenario(desk: Any) -> None:
        client = await desk.client()
        view = desk.sessions[0]._views[await served(desk, client)]
        with pytest.raises(ConfigError, match="one key at least"):
            desk.service.extents.begin(view, [])

    at_desk(scenario, **VOLUME, extent_leases=1)


def test_however_many_ask_one_record_is_read_for_its_sums_at_a_time_and_once(at_desk: AtDesk) -> None:
    async def scenario(desk: Any) -> None:
        client = await desk.client()
        handle = await served(desk, client)
        desk.machine.workers.pause()
        for number, keys in enumerate([[(0, 0)], [(0, 1)], [(0, 0)], [(0, 2)]]):
            await client.send(m.AcquireExtents(900 + number, handle, keys))
        await desk.until(lambda: pins(desk) == 4)
        for _ in range(10):
            await asyncio.sleep(0)
        assert desk.machine.workers.waiting == 1
        desk.machine.workers.resume()
        for number in range(4):
            await client.result(900 + number)
        assert desk.store.namespaces["m"].stats.records_read_for_sums == 3

    at_desk(scenario, **VOLUME, extent_leases=4)


def test_who_waits_for_sums_of_a_volume_that_hangs_is_told_so_and_one_read_stays_until_it_returns(at_desk: AtDesk) -> None:
    async def scenario(desk: Any) -> None:
        client = await desk.client()
        handle = await served(desk, client)
        desk.machine.workers.pause()
        for number, keys in enumerate([[(0, 0)], [(0, 0), (0, 1)], [(0, 2)]]):
            await client.send(m.AcquireExtents(900 + number, handle, keys))
            with pytest.raises(WaitTimeout, match=r"device sums of \d records of 'm': nothing in the store has moved for 0\.1 s"):
                await client.result(900 + number)
        assert (desk.machine.workers.waiting, pins(desk)) == (1, 4), "a worker reads the first, and nobody the others"
        with pytest.raises(CapacityError, match="4 are"):
            await client.request(m.AcquireExtents, handle, [(0, 3)])
        desk.machine.workers.resume()
        await desk.until(lambda: pins(desk) == 0)
        assert desk.store.namespaces["m"].stats.records_read_for_sums == 1
        await client.request(m.AcquireExtents, handle, [(0, 0), (0, 1)])

    at_desk(scenario, **VOLUME, extent_leases=4, wait_timeout_s=0.1)


def test_the_limit_is_that_of_all_sessions_together(at_desk: AtDesk) -> None:
    async def scenario(desk: Any) -> None:
        one, other = await desk.client(), await desk.client()
        handle = await served(desk, one)
        theirs = (await other.request(m.OpenNamespace, "m", "read"))["handle"]
        granted = await one.request(m.AcquireExtents, handle, [(0, 0), (0, 1)])
        with pytest.raises(CapacityError, match="2 are"):
            await other.request(m.AcquireExtents, theirs, [(0, 0), (0, 1)])
        await one.send(m.Release([granted.id, granted.id, 12345]))
        await desk.until(lambda: pins(desk) == 0)
        await other.request(m.AcquireExtents, theirs, [(0, 0), (0, 1)])

    at_desk(scenario, **VOLUME, extent_leases=3)


def test_a_superseded_extent_keeps_its_bytes_until_its_lease_ends(at_desk: AtDesk) -> None:
    async def scenario(desk: Any) -> None:
        client = await desk.client()
        handle = await served(desk, client)
        granted = await client.request(m.AcquireExtents, handle, [(0, 0)])
        space, extent = desk.store.transfers.space, Extent(*granted.extents[0][:3])
        before = space.free_bytes
        space.release(extent)  # as a transaction does that supersedes the record
        assert space.free_bytes == before
        assert not space.has_leaving, "nobody may wait for a client"
        await client.send(m.Release([granted.id]))
        await desk.until(lambda: space.free_bytes == before + extent.length_bytes)

    at_desk(scenario, **VOLUME, extent_leases=1)


def test_extents_of_a_fenced_volume_are_leased_on(at_desk: AtDesk) -> None:
    async def scenario(desk: Any) -> None:
        client = await desk.client()
        handle = await served(desk, client)
        desk.store.transfers.space.fences.fail_flush(0, VolumeError("it fails"))
        granted = await client.request(m.AcquireExtents, handle, [(0, 3)])
        assert header_root(image_at(client.fds[0], granted.extents[0])[: SCHEMA.stored.header_bytes]) == granted.extents[0][5]

    at_desk(scenario, **VOLUME, extent_leases=1)


def test_a_damaged_record_is_not_leased(at_desk: AtDesk) -> None:
    async def scenario(desk: Any) -> None:
        client = await desk.client()
        handle = await served(desk, client)
        located = desk.store.namespaces["m"].on_volume((0, 1))
        desk.machine.disks[0].corrupt(located.extent.offset_bytes + SCHEMA.stored.fields[0].offset_bytes + 1_100_000)
        with pytest.raises(CorruptRecord, match=r"\(0, 1\)"):
            await client.request(m.AcquireExtents, handle, [(0, 0), (0, 1)])
        assert pins(desk) == 0
        await client.request(m.AcquireExtents, handle, [(0, 0)])

    at_desk(scenario, **VOLUME, extent_leases=2)


def test_a_lease_of_a_session_that_ends_meanwhile_opens_no_descriptor(at_desk: AtDesk) -> None:
    async def scenario(desk: Any) -> None:
        client, opened = await desk.client(), list[int]()
        handle = await served(desk, client)
        await client.request(m.Acquire, handle, [(0, 1)], "param", 1.0)  # so the view stays while its process lives
        desk.machine.workers.pause()
        await client.send(m.AcquireExtents(900, handle, [(0, 0)]))
        await desk.until(lambda: desk.machine.workers.waiting)
        desk.service.extents.open_volume = opened.append
        session = desk.sessions[0]
        client.close()
        await desk.until(lambda: session.is_ended)
        assert pins(desk) == 1, "a worker reads it"
        desk.machine.workers.resume()
        await desk.until(lambda: pins(desk) == 0)
        assert opened == []

    at_desk(scenario, **VOLUME, extent_leases=1)


def test_leases_end_with_their_handle(at_desk: AtDesk) -> None:
    async def scenario(desk: Any) -> None:
        client = await desk.client()
        handle = await served(desk, client)
        await client.request(m.AcquireExtents, handle, [(0, 0)])
        await client.request(m.CloseNamespace, handle)
        assert pins(desk) == 0

    at_desk(scenario, **VOLUME, extent_leases=1)


def test_a_lease_of_a_handle_that_is_closed_meanwhile_is_refused_and_leaves_nothing(at_desk: AtDesk) -> None:
    async def scenario(desk: Any) -> None:
        client = await desk.client()
        handle = await served(desk, client)
        desk.machine.workers.pause()
        await client.send(m.AcquireExtents(900, handle, [(0, 0)]))
        await desk.until(lambda: desk.machine.workers.waiting)
        await client.request(m.CloseNamespace, handle)
        assert pins(desk) == 1, "a worker reads it"
        desk.machine.workers.resume()
        with pytest.raises(LeaseError, match="was closed"):
            await client.result(900)
        assert pins(desk) == 0

    at_desk(scenario, **VOLUME, extent_leases=1)


def test_leases_outlive_the_connection_and_end_with_the_process(at_desk: AtDesk) -> None:
    async def scenario(desk: Any) -> None:
        client = await desk.client()
        handle = await served(desk, client)
        await client.request(m.AcquireExtents, handle, [(0, 0)])
        session = desk.sessions[0]
        (descriptor,) = session._leases.extents._descriptors.values()
        client.close()
        await desk.until(lambda: session.is_ended)
        await asyncio.sleep(0)
        assert pins(desk) == 1
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(descriptor)
        session._process_ended()
        assert (pins(desk), len(desk.gone)) == (0, 1)

    at_desk(scenario, **VOLUME, extent_leases=1)


def test_a_reader_whose_step_was_dropped_leases_no_more(at_desk: AtDesk) -> None:
    async def scenario(desk: Any) -> None:
        client = await desk.client()
        handle = await served(desk, client)
        desk.sessions[0]._views[handle].is_dropped = True
        with pytest.raises(StepDropped):
            await client.request(m.AcquireExtents, handle, [(0, 0)])

    at_desk(scenario, **VOLUME, extent_leases=1)


def test_a_request_with_the_id_of_a_lease_is_refused(at_desk: AtDesk) -> None:
    async def scenario(desk: Any) -> None:
        client = await desk.client()
        handle = await served(desk, client)
        granted = await client.request(m.AcquireExtents, handle, [(0, 0)])
        with pytest.raises(ProtocolError, match="in use"):
            await client.ask(m.Namespaces(granted.id))
        assert struct.calcsize("Q") * len(SCHEMA.stored.chunks()) == len(granted.sums[0])

    at_desk(scenario, **VOLUME, extent_leases=1)
