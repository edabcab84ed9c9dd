"""What a machine keeps over a crash, what it loses, and that a seed repeats it."""

from __future__ import annotations

import asyncio

import pytest

from paramstore.engine.store import Store
from paramstore.engine.tables.namespace import View
from paramstore.errors import VolumeError
from paramstore.testing.volumes import Fault, FaultyVolume
from paramstore_testkit.disks.machine import Machine, PlainMemory, PlainSegment
from paramstore_testkit.stores.small_store import create, run, train, turns, versions


async def writer(store: Store) -> View:
    return await store.admission.open("moe", mode="write", at=None, host_bytes=None)


def test_what_was_committed_is_there_after_a_crash_and_what_was_only_written_is_not() -> None:
    async def scenario() -> None:
        machine = Machine(seed=1)
        store = machine.start()
        view = await create(store)
        await train(store, view)
        await store.write_back(view, None)
        assert machine.disks[0].unflushed
        await machine.crash()
        assert machine.store is None
        assert not machine.disks[0].unflushed
        store = machine.start()
        assert await versions(store, await writer(store)) == [0] * 4

    run(scenario())


def test_a_crash_stops_every_task_of_the_store_and_no_other() -> None:
    async def scenario() -> None:
        machine = Machine(seed=2)
        bystander = asyncio.ensure_future(asyncio.sleep(0.01, "alive"))
        store = machine.start()
        view = await create(store)
        assert machine.workers is not None
        machine.workers.pause()
        training = asyncio.ensure_future(train(store, view))
        await turns(3)
        await machine.crash()
        assert training.cancelled()
        assert await bystander == "alive"

    run(scenario())


def test_nothing_that_workers_had_reaches_the_disks_after_a_crash() -> None:
    async def scenario() -> None:
        machine = Machine(seed=3)
        store = machine.start()
        view = await create(store)
        await train(store, view)
        workers = machine.workers
        assert workers is not None
        workers.pause()
        writing = asyncio.ensure_future(store.write_back(view, None))
        await turns(3)
        assert workers.waiting
        await machine.crash()
        workers.resume()
        await turns()
        assert not machine.disks[0].unflushed
        assert writing.cancelled()

    run(scenario())


@pytest.mark.parametrize("keeps_random_writes", [False, True])
def test_a_seed_repeats_run_crash_and_what_is_left(keeps_random_writes: bool) -> None:
    async def left(seed: int) -> bytes:
        machine = Machine(seed=seed)
        store = machine.start()
        view = await create(store)
        await train(store, view)
        await store.write_back(view, None)
        await machine.crash(keeps_random_writes=keeps_random_writes)
        return bytes(machine.disks[0]._bytes[9 << 20 :])

    async def scenario() -> None:
        assert await left(4) == await left(4)
        if keeps_random_writes:
            assert await left(4) != await left(6)

    run(scenario())


def test_a_volume_can_be_replaced_by_a_faulty_one_until_the_next_crash() -> None:
    async def scenario() -> None:
        machine = Machine(seed=6)
        await create(machine.start())
        await machine.crash()
        machine.volumes[0] = FaultyVolume(machine.disks[0], [Fault("read", 1, forever=True)])
        with pytest.raises(VolumeError):
            machine.start()
        await machine.crash()
        store = machine.start()
        assert await versions(store, await writer(store)) == [0] * 4

    run(scenario())


def test_plain_memory_is_memory_and_no_more() -> None:
    memory = PlainMemory()
    segments = [memory.shared(8192), memory.private(8192), memory.upload(8192)]
    for number, segment in enumerate(segments, start=1):
        assert isinstance(segment, PlainSegment)
        assert (segment.length_bytes, segment.resident_bytes(), segment.fd) == (8192, 8192, None)
        segment.touch()
        segment.view(4096, 4096)[:] = bytes([number]) * 4096
    assert [segment.view(4096, 1)[0] for segment in segments] == [1, 2, 3]
    view = segments[0].view(0, 4096)
    segments[0].close()
    view[0] = 1  # its last view keeps it
    assert memory.describe()["page_advice"] == ""
