"""Zero-fill of new space: piece by piece, while nothing else moves, and what becomes of it when it fails."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from paramstore.core.location import Extent
from paramstore.engine.capacity.prefill import PIECE_BYTES
from paramstore.engine.transfers.runner import CPU_LANE
from paramstore.errors import VolumeError, WaitTimeout
from paramstore.testing.catalogs import MemoryCatalog
from paramstore.testing.volumes import Fault, FaultyVolume, MemoryVolume
from paramstore_testkit.stores.small_store import run, turns
from paramstore_testkit.stores.volume_shelf import MIB, START, Shelf


def test_new_space_is_zero_filled_piece_by_piece_and_stays_usable() -> None:
    async def scenario() -> None:
        shelf = Shelf(free_mib=20)
        shelf.prefill.start()
        await shelf.prefilled()
        disk = shelf.volumes[0]
        assert isinstance(disk, MemoryVolume)
        lengths = [len(write.after) for write in disk.unflushed]
        assert sum(lengths) == 20 * MIB
        assert max(lengths) == PIECE_BYTES
        assert not any(any(write.after) for write in disk.unflushed)
        assert shelf.space.free_bytes == 20 * MIB
        await shelf.set.close()

    run(scenario())


def test_nothing_is_zero_filled_while_anything_else_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paramstore.engine.capacity.prefill.PAUSE_S", 0.0)

    async def scenario() -> None:
        shelf = Shelf(free_mib=20)
        shelf.workers.pause()
        busy = asyncio.ensure_future(shelf.runner.call(CPU_LANE, lambda: None))
        await turns(2)
        shelf.prefill.start()
        await turns()
        assert shelf.workers.waiting == 1, "only what is not the zero-fill's"
        assert shelf.space.free_bytes == 20 * MIB
        shelf.workers.resume()
        await busy
        await shelf.prefilled()
        await shelf.set.close()

    run(scenario())


def test_a_range_that_is_being_filled_is_given_to_nobody() -> None:
    async def scenario() -> None:
        shelf = Shelf(free_mib=PIECE_BYTES // MIB)
        shelf.workers.pause()
        shelf.prefill.start()
        await turns(5)
        assert shelf.space.reserve(4096) is None
        pumps = shelf.pumps
        shelf.workers.resume()
        await shelf.prefilled()
        assert shelf.pumps > pumps, "whoever waits for space goes on"
        assert shelf.space.reserve(4096) is not None
        await shelf.set.close()

    run(scenario())


def test_space_that_comes_with_growth_is_filled_too_even_if_the_fill_had_ended() -> None:
    async def scenario() -> None:
        shelf = Shelf()
        shelf.prefill.start()
        await shelf.prefilled()
        await turns(5)
        await shelf.make_room(100)
        assert shelf.space.written_bytes(0) < shelf.volumes[0].size_bytes
        await shelf.prefilled()
        await shelf.set.close()

    run(scenario())


def test_growth_starts_no_fill_where_none_is_wanted() -> None:
    async def scenario() -> None:
        shelf = Shelf()
        await shelf.make_room(100)
        await turns()
        assert shelf.space.written_bytes(0) == START
        assert isinstance(shelf.volumes[0], MemoryVolume)
        assert not shelf.volumes[0].unflushed

    run(scenario())


def test_a_fill_that_fails_gives_up_its_range_and_leaves_the_rest_usable() -> None:
    async def scenario() -> None:
        shelf = Shelf(volumes=[FaultyVolume(MemoryVolume(START + 20 * MIB), [Fault("write", 2)])])
        shelf.prefill.start()
        await turns(200)
        (stats,) = shelf.space.stats()
        assert stats.quarantined_bytes == PIECE_BYTES
        assert stats.free_bytes == 20 * MIB - PIECE_BYTES
        await shelf.set.close()

    run(scenario())


def test_how_far_the_fill_came_is_remembered_at_the_end() -> None:
    async def scenario() -> None:
        catalog = MemoryCatalog()
        shelf = Shelf(free_mib=20, catalog=catalog)
        shelf.prefill.start()
        while shelf.space.written_bytes(0) < START + PIECE_BYTES:
            await asyncio.sleep(0)
        await shelf.set.close()
        (row,) = catalog.crash().load().volumes.values()
        assert row.written_bytes == shelf.space.written_bytes(0) >= START + PIECE_BYTES

    run(scenario())


def test_a_second_fill_that_fails_fences_the_volume_and_the_others_are_filled() -> None:
    async def scenario() -> None:
        bad = FaultyVolume(MemoryVolume(START + 20 * MIB), [Fault("write", 1, forever=True)])
        shelf = Shelf(volumes=[bad, MemoryVolume(START + 20 * MIB, index=1)])
        for _ in range(2):
            shelf.prefill.start()
            await turns(200)
        assert shelf.space.fences.is_fenced(0)
        shelf.prefill.start()
        while shelf.space.written_bytes(1) < shelf.volumes[1].size_bytes:
            await asyncio.sleep(0)
        assert bad.calls["write"] == 2
        await turns(5)
        assert shelf.prefill._task is not None
        assert shelf.prefill._task.done(), "a fenced volume is not waited for"
        await shelf.set.close()

    run(scenario())


class WatchfulVolume(MemoryVolume):
    """Fails if it is closed while it is written to."""

    def __init__(self, size_bytes: int) -> None:
        super().__init__(size_bytes)
        self.is_closed = False
        self.late: list[Extent] = []

    def write(self, offset_bytes: int, data: Sequence[memoryview]) -> None:
        if self.is_closed:
            self.late.append(Extent(0, offset_bytes, 0))
            raise VolumeError("written to after it was closed")
        super().write(offset_bytes, data)

    def close(self) -> None:
        self.is_closed = True


def test_who_fills_now_fills_no_more_once_the_set_is_closed() -> None:
    async def scenario() -> None:
        disk = WatchfulVolume(START + 20 * MIB)
        shelf = Shelf(volumes=[disk], written_bytes=START)
        shelf.workers.pause()
        filling = asyncio.ensure_future(shelf.prefill.fill(0, up_to_bytes=START + 20 * MIB))
        await turns(5)
        closing = asyncio.ensure_future(shelf.set.close())
        await turns(5)
        shelf.workers.resume()
        await closing
        with pytest.raises(WaitTimeout, match="the store closes"):
            await filling
        assert disk.is_closed
        assert disk.late == []

    run(scenario())


def test_a_volume_is_not_closed_under_a_fill_that_a_worker_has() -> None:
    async def scenario() -> None:
        disk = WatchfulVolume(START + 20 * MIB)
        shelf = Shelf(volumes=[disk], written_bytes=START)
        shelf.workers.pause()
        shelf.prefill.start()
        await turns(5)
        closing = asyncio.ensure_future(shelf.set.close())
        await turns(5)
        shelf.workers._calls.reverse()  # the worker of the volume is the quicker one
        shelf.workers.resume()
        await closing
        await turns(5)
        assert disk.is_closed
        assert disk.late == []

    run(scenario())
