"""The scrubber disturbs nobody, keeps to its rate, and ends when it is told."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from random import Random
from typing import Any

import pytest

from paramstore.core.schema import CHUNK_BYTES, Schema
from paramstore.engine.tables.requests import Urgency
from paramstore.engine.transfers.hashing import Hashing
from paramstore.engine.transfers.routes import cut_pieces
from paramstore.errors import (
    TicketCancelled,
)
from paramstore.storage.format.structures import NOTE_SLOT_BYTES, SUPERBLOCK_BYTES
from paramstore.testing.clock import ManualClock
from paramstore.upkeep.scrubber import BUFFER_BYTES, PIECE_BYTES, Pause, Scrubber
from paramstore_testkit.disks.machine import Machine
from paramstore_testkit.stores.scrub_site import KEY, LARGE, RECORD_BYTES, damage, located_at, verify
from paramstore_testkit.stores.small_store import EXPERTS, create, run, train, turns


def on_manual_clock(machine: Machine, pause: Pause, clock: ManualClock) -> Scrubber:
    """A scrubber of the machine's store on a clock of its own."""
    store = machine.store
    assert store is not None
    return Scrubber(
        store.transfers, machine.volumes, store.namespaces, store_uuid=store.store_uuid, hashing=Hashing(at_once=1),
        clock=clock, pause=pause,
    )  # fmt: skip


class WatchedVolume:
    """`inner`; told of every read before it happens."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.read_bytes: list[int] = []
        self.times: list[float] = []
        self.clock = ManualClock()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def read(self, offset_bytes: int, into: Sequence[memoryview]) -> None:
        self.read_bytes.append(sum(buffer.nbytes for buffer in into))
        self.times.append(self.clock.now_s())
        self.inner.read(offset_bytes, into)


# --- its manners


def test_a_record_larger_than_the_buffer_goes_through_it_in_pieces() -> None:
    async def scenario() -> None:
        machine = Machine(volume_bytes=96 << 20, host_budget_bytes=96 << 20)
        store = machine.start()
        view = await create(store, schema=LARGE, experts=2)
        volume = WatchedVolume(machine.disks[0])
        machine.service.scrubber._volumes = {0: volume}
        last = LARGE.stored.fields[-1]
        damage(machine, located_at(view, KEY, 0), last.offset_bytes + CHUNK_BYTES + 1)
        result = await verify(machine)
        assert LARGE.record_bytes > BUFFER_BYTES
        assert max(volume.read_bytes) <= BUFFER_BYTES
        assert sum(volume.read_bytes) == 2 * LARGE.record_bytes == result["bytes_read"]
        (finding,) = result["findings"]
        assert "chunk 5 " in finding["reason"]
        assert f"field '{last.name}'" in finding["reason"]

    run(scenario())


@pytest.mark.parametrize("mebibytes", [1, 2, 3, 5, 100, 10_000])
def test_no_piece_of_any_record_is_larger_than_the_buffer(mebibytes: int) -> None:
    schema = Schema.param({"a": ((mebibytes << 20,), "uint8"), "b": ((3,), "uint8"), "c": ((5 << 18,), "float32")})
    pieces = cut_pieces(schema.stored, PIECE_BYTES, len(schema.stored.fields))
    assert max(piece.end - piece.start for piece in pieces) <= BUFFER_BYTES
    assert pieces[-1].end == schema.record_bytes


@pytest.mark.parametrize("bytes_per_s", [1, RECORD_BYTES, 1 << 20, 7 << 20])
def test_it_never_reads_more_than_its_rate_allows_however_the_clock_goes(bytes_per_s: int) -> None:
    async def scenario() -> None:
        random = Random(bytes_per_s)
        machine = Machine(volume_bytes=96 << 20, host_budget_bytes=96 << 20)
        store = machine.start()
        await create(store, schema=LARGE, experts=2)
        volume = WatchedVolume(machine.disks[0])
        machine.volumes = {0: volume}  # type: ignore[dict-item]
        paused_s: list[float] = []

        async def pause(seconds: float) -> None:
            paused_s.append(seconds)
            volume.clock.advance(seconds * random.choice((0.25, 1.0, 1.0, 3.0)) + 1e-6)  # wakes early, or late

        scrubber = on_manual_clock(machine, pause, volume.clock)
        result = await scrubber.wait(scrubber.start(None, None, bytes_per_s))
        assert (result["found"], result["bytes_read"]) == (0, 2 * LARGE.record_bytes)
        assert sum(volume.read_bytes) <= bytes_per_s * volume.clock.now_s() * (1 + 1e-9)
        for first in range(len(volume.times)):
            read_bytes = 0
            for last in range(first + 1, len(volume.times)):
                read_bytes += volume.read_bytes[last]
                elapsed_s = volume.times[last] - volume.times[first]
                assert read_bytes <= bytes_per_s * elapsed_s * (1 + 1e-6) + 1e-3, (first, last)
        assert volume.read_bytes[0] <= bytes_per_s * volume.times[0] * (1 + 1e-9)
        assert paused_s
        assert result["seconds"] == volume.clock.now_s()

    run(scenario())


def test_a_rate_that_is_kept_to_the_second_wastes_none() -> None:
    async def scenario() -> None:
        machine = Machine()
        store = machine.start()
        await create(store)
        clock = ManualClock()

        async def pause(seconds: float) -> None:
            clock.advance(seconds)

        scrubber = on_manual_clock(machine, pause, clock)
        await scrubber.wait(scrubber.start(None, None, RECORD_BYTES))
        assert clock.now_s() == pytest.approx(EXPERTS)

    run(scenario())


def test_it_takes_the_lowest_class_and_one_worker() -> None:
    async def scenario() -> None:
        machine = Machine()
        store = machine.start()
        await create(store)
        assert machine.workers is not None
        await turns()  # the room for the next commit is made
        machine.workers.pause()
        scrub = machine.service.scrubber.start(None, None, None)
        await turns()
        (transfer,) = store.transfers.runner.under_way
        assert transfer.urgency == max(Urgency)
        assert machine.workers.waiting == 1
        machine.workers.resume()
        await machine.service.scrubber.wait(scrub)

    run(scenario())


def test_it_takes_no_slot_and_counts_in_no_namespace() -> None:
    async def scenario() -> None:
        machine = Machine()
        store = machine.start()
        view = await create(store)
        await store.evict(view, None, None)
        before: Any = await store.stats()
        await verify(machine)
        after: Any = await store.stats()
        assert after["namespaces"] == before["namespaces"]
        assert after["tiers"]["host"]["used_bytes"] == before["tiers"]["host"]["used_bytes"]
        read_bytes = EXPERTS * RECORD_BYTES + 2 * SUPERBLOCK_BYTES + 2 * NOTE_SLOT_BYTES
        assert after["volumes"]["0"]["bytes_read"] == before["volumes"]["0"]["bytes_read"] + read_bytes
        assert after["volumes"]["0"]["reads"] == before["volumes"]["0"]["reads"] + EXPERTS

    run(scenario())


def test_an_extent_is_pinned_while_it_is_read_and_free_to_go_between_its_pieces() -> None:
    async def scenario() -> None:
        machine = Machine(volume_bytes=96 << 20, host_budget_bytes=96 << 20)
        store = machine.start()
        await create(store, schema=LARGE, experts=2)
        space, clock, pins = store.transfers._planner.space, ManualClock(), []
        volume = WatchedVolume(machine.disks[0])
        volume.read = lambda *call: (pins.append(len(space.pins)), machine.disks[0].read(*call))  # type: ignore[method-assign]
        machine.volumes = {0: volume}  # type: ignore[dict-item]

        async def pause(seconds: float) -> None:
            assert not space.pins
            clock.advance(seconds)

        scrubber = on_manual_clock(machine, pause, clock)
        await scrubber.wait(scrubber.start(None, None, 1 << 20))
        assert pins
        assert set(pins) == {1}
        assert not space.pins

    run(scenario())


def test_a_record_replaced_between_two_pieces_is_left_out_and_its_room_is_free() -> None:
    async def scenario() -> None:
        machine = Machine(volume_bytes=96 << 20, host_budget_bytes=96 << 20)
        store = machine.start()
        view = await create(store, schema=LARGE, experts=1)
        await train(store, view)
        await store.write_back(view, None)
        clock, doomed = ManualClock(), view.namespace.residency.working[0, 0].uncommitted
        assert doomed is not None
        pauses = 0

        async def pause(seconds: float) -> None:
            nonlocal pauses
            clock.advance(seconds)
            pauses += 1
            if pauses == 4 + 2:  # in the middle of the second of two records
                await store.rollback(view, 0)
                machine.disks[0].corrupt(doomed.extent.offset_bytes + 5 * CHUNK_BYTES)

        scrubber = on_manual_clock(machine, pause, clock)
        result = await scrubber.wait(scrubber.start("moe", None, 1 << 20))
        assert (result["found"], result["records"], result["records_total"], result["superseded"]) == (0, 1, 1, 1)
        assert LARGE.record_bytes < result["bytes_read"] == result["bytes_total"] < 2 * LARGE.record_bytes
        assert not store.transfers._planner.space._is_held(doomed.extent)

    run(scenario())


def test_room_that_a_read_kept_reaches_who_waits_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        machine = Machine()
        store = machine.start()
        view = await create(store)
        await train(store, view, [KEY])
        await store.write_back(view, [KEY])
        working, space = view.namespace.residency.working[KEY], store.transfers._planner.space
        assert working.uncommitted is not None
        scrub = machine.service.scrubber.start("moe", [KEY], None)
        while working.uncommitted.extent not in space.pins:
            await asyncio.sleep(0)
        free_bytes, free_when_pumped = space.free_bytes, []
        monkeypatch.setattr(store.transfers._planner, "go_on", lambda _: free_when_pumped.append(space.free_bytes))
        space.release(working.uncommitted.extent)
        working.uncommitted = None
        assert space.free_bytes == free_bytes
        result = await machine.service.scrubber.wait(scrub)
        assert (result["found"], result["records"]) == (0, 2)
        assert free_when_pumped == [free_bytes + RECORD_BYTES]

    run(scenario())


# --- its end


def test_cancelling_ends_it_at_once_whatever_it_waits_for() -> None:
    async def scenario() -> None:
        machine = Machine()
        store = machine.start()
        view = await create(store)

        async def never(seconds: float) -> None:
            await asyncio.Event().wait()

        scrubber = on_manual_clock(machine, never, ManualClock())
        scrub = scrubber.start(None, None, 1)
        waiting = asyncio.ensure_future(scrubber.wait(scrub))
        await turns()
        progress: Any = scrubber.stats()["running"]
        assert (progress["state"], progress["records"], progress["records_total"]) == ("running", 0, EXPERTS)
        scrubber.cancel(scrub, TicketCancelled("enough"))
        with pytest.raises(TicketCancelled, match="enough"):
            await waiting
        stats: Any = scrubber.stats()
        assert stats["running"] is None
        assert (stats["last"]["state"], stats["last"]["bytes_read"]) == ("cancelled", 0)
        assert view.namespace.writing.broken is None

    run(scenario())


def test_a_hanging_device_delays_no_cancel_and_the_next_scrub_waits_for_it() -> None:
    async def scenario() -> None:
        machine = Machine()
        store = machine.start()
        await create(store)
        assert machine.workers is not None
        await turns()  # the room for the next commit is made
        machine.workers.pause()
        scrub = machine.service.scrubber.start(None, None, None)
        await turns()
        machine.service.scrubber.cancel(scrub, TicketCancelled("enough"))
        with pytest.raises(TicketCancelled):
            await machine.service.scrubber.wait(scrub)
        assert len(store.transfers._planner.space.pins) == 1
        second = machine.service.scrubber.start(None, None, None)
        await turns()
        assert machine.workers.waiting == 1
        machine.workers.resume()
        assert (await machine.service.scrubber.wait(second))["records"] == EXPERTS
        assert not store.transfers._planner.space.pins

    run(scenario())


def test_a_piece_that_no_worker_has_begun_is_given_up() -> None:
    async def scenario() -> None:
        machine = Machine()
        store = machine.start()
        await create(store)
        assert machine.workers is not None
        await turns()  # the room for the next commit is made
        machine.workers.pause()
        busy = [asyncio.ensure_future(store.transfers.runner.call(("volume", 0), lambda: None)) for _ in range(2)]
        await turns()
        scrub = machine.service.scrubber.start(None, None, None)
        await turns()
        assert len(store.transfers._planner.space.pins) == 1
        machine.service.scrubber.cancel(scrub, TicketCancelled("enough"))
        with pytest.raises(TicketCancelled):
            await machine.service.scrubber.wait(scrub)
        assert not store.transfers._planner.space.pins
        assert machine.workers.waiting == 2
        machine.workers.resume()
        await asyncio.gather(*busy)

    run(scenario())


def test_cancelling_one_that_is_over_changes_nothing() -> None:
    async def scenario() -> None:
        machine = Machine()
        store = machine.start()
        await create(store)
        scrub = machine.service.scrubber.start(None, None, None)
        result = await machine.service.scrubber.wait(scrub)
        machine.service.scrubber.cancel(scrub, TicketCancelled("too late"))
        assert await machine.service.scrubber.wait(scrub) == result

    run(scenario())


def test_who_stops_waiting_ends_nothing() -> None:
    async def scenario() -> None:
        machine = Machine()
        store = machine.start()
        await create(store)
        scrub = machine.service.scrubber.start(None, None, None)
        waiting = asyncio.ensure_future(machine.service.scrubber.wait(scrub))
        await turns(1)
        waiting.cancel()
        await asyncio.wait([waiting])
        assert (await machine.service.scrubber.wait(scrub))["records"] == EXPERTS

    run(scenario())
