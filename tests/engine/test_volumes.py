"""Room for namespaces: what each is entitled to, growth, refusal that names the bytes, and zero-fill while nothing else moves."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Literal

import pytest

from paramstore.config import HELD_STEPS, RETAINED_STEPS
from paramstore.core.place import Extent
from paramstore.core.schema import Schema
from paramstore.engine.admission import make_namespace
from paramstore.engine.namespace import NamespaceState
from paramstore.engine.runner import BACKGROUND_LANE, CATALOG_LANE, CPU_LANE, Runner, volume_lane
from paramstore.engine.transfers import VolumeTraffic
from paramstore.engine.volumes import PIPELINE_RECORDS_MIN, PREFILL_PIECE_BYTES, RECORDED_BYTES, VolumeSet, entitled_bytes
from paramstore.errors import CapacityError, CatalogError, VolumeError
from paramstore.storage.catalog import Catalog, Change, NamespaceContents, NamespaceRow, VolumeRow
from paramstore.storage.extents import Space
from paramstore.storage.format import Superblock, extents_start_bytes
from paramstore.storage.ledger import Ledger
from paramstore.storage.volume import Volume
from paramstore.testing.catalogs import FaultyCatalog, MemoryCatalog
from paramstore.testing.small_store import SCHEMA, run, turns
from paramstore.testing.volumes import Fault, FaultyVolume, MemoryVolume
from paramstore.testing.workers import InlineWorkers

MIB = 1 << 20
SUPERBLOCK = Superblock(bytes(16), bytes(16), 0)
START = extents_start_bytes(SUPERBLOCK)
OPAQUE = Schema.param({"w": ((512, 1024), "uint8")})


def namespace_of(schema: Schema, experts: int, name: str = "other") -> NamespaceState:
    row = NamespaceRow(name, schema.describe(), (0,), experts, epoch=1, sequence=0)
    return make_namespace(Ledger(NamespaceContents(row)))


class Shelf:
    """Volumes of `free_mib` beyond what they need for themselves, and everything around them."""

    def __init__(
        self, *, volumes: Sequence[Volume] | None = None, count: int = 1, free_mib: int = 1, may_grow: bool = True,
        catalog: Catalog | None = None, written_bytes: int = 0, bytes_written: int = 0, endurance_bytes: int | None = None,
    ) -> None:  # fmt: skip
        given = volumes or [MemoryVolume(START + free_mib * MIB, index=index) for index in range(count)]
        self.volumes = {volume.index: volume for volume in given}
        self.catalog = catalog or MemoryCatalog()
        self.catalog.load()
        self.workers = InlineWorkers(asyncio.get_running_loop())
        self.runner = Runner(self.workers)
        for lane in (CATALOG_LANE, BACKGROUND_LANE, CPU_LANE, *map(volume_lane, self.volumes)):
            self.runner.scheduler.add_lane(lane, 1)
        self.space = Space()
        self.pumps = 0
        rows = {}
        for index, volume in self.volumes.items():
            self.space.add_volume(index, start_bytes=START, size_bytes=volume.size_bytes, written_bytes=written_bytes)
            rows[index] = VolumeRow(index, bytes(16), volume.size_bytes, written_bytes, bytes_written)
        self.traffic = {index: VolumeTraffic() for index in self.volumes}
        self.set = VolumeSet(
            self.volumes, superblocks=dict.fromkeys(self.volumes, SUPERBLOCK), rows=rows, space=self.space, catalog=self.catalog,
            runner=self.runner, may_grow=may_grow, pump=self._pump, traffic=self.traffic, endurance_bytes=endurance_bytes,
        )  # fmt: skip

    def _pump(self) -> None:
        self.pumps += 1

    async def make_room(self, experts: int, *others: NamespaceState) -> None:
        for other in others:
            self.set.entitle(other)
        await self.set.make_room(namespace_of(SCHEMA, experts, name="moe"), beside=others)

    @property
    def usable_bytes(self) -> int:
        return sum(volume.size_bytes - START for volume in self.volumes.values())

    async def prefilled(self) -> None:
        while not all(self.space.written_bytes(index) == volume.size_bytes for index, volume in self.volumes.items()):
            await asyncio.sleep(0)


# --- entitlement


def test_a_training_namespace_may_keep_its_retained_and_held_steps_the_one_it_works_on_and_the_pipeline() -> None:
    record = SCHEMA.record_bytes
    copies = RETAINED_STEPS + 1 + HELD_STEPS
    assert entitled_bytes(SCHEMA, 10) == (copies * 10 + PIPELINE_RECORDS_MIN) * record
    assert entitled_bytes(SCHEMA, 1000) == (copies * 1000 + 50) * record, "five per cent of many records"
    assert entitled_bytes(SCHEMA, 1001) == (copies * 1001 + 51) * record, "in whole records"


def test_a_param_schema_is_written_once() -> None:
    assert entitled_bytes(OPAQUE, 10) == (10 + PIPELINE_RECORDS_MIN) * OPAQUE.record_bytes


# --- growth


def test_volumes_that_have_room_do_not_grow() -> None:
    async def scenario() -> None:
        shelf = Shelf(free_mib=8)
        await shelf.make_room(4)
        assert shelf.usable_bytes == 8 * MIB
        assert shelf.catalog.load().volumes == {}

    run(scenario())


@pytest.mark.parametrize("count", [1, 2, 3])
def test_volumes_grow_evenly_until_all_namespaces_have_what_they_are_entitled_to(count: int) -> None:
    async def scenario() -> None:
        shelf = Shelf(count=count)
        other = namespace_of(OPAQUE, 5)
        await shelf.make_room(100, other)
        needed = entitled_bytes(SCHEMA, 100) + entitled_bytes(OPAQUE, 5)
        assert needed <= shelf.usable_bytes <= needed + count * (SCHEMA.record_bytes + OPAQUE.record_bytes + MIB)
        assert len({volume.size_bytes for volume in shelf.volumes.values()}) == 1
        assert shelf.space.free_bytes == shelf.usable_bytes
        assert {row.size_bytes for row in shelf.catalog.load().volumes.values()} == {shelf.volumes[0].size_bytes}
        size = shelf.usable_bytes
        await shelf.make_room(100, other)
        assert shelf.usable_bytes == size

    run(scenario())


def test_every_record_that_a_namespace_is_entitled_to_finds_an_extent_on_volumes_of_several() -> None:
    async def scenario() -> None:
        shelf = Shelf(count=3)
        await shelf.make_room(100)
        count, record_bytes = entitled_bytes(SCHEMA, 100) // SCHEMA.record_bytes, SCHEMA.record_bytes
        assert shelf.space.reserve_many(count, record_bytes, owner="moe") is not None

    run(scenario())


def test_nobody_takes_what_a_namespace_is_entitled_to_until_it_is_given_up() -> None:
    async def scenario() -> None:
        shelf = Shelf()
        await shelf.make_room(100)
        record_bytes = SCHEMA.record_bytes
        while shelf.space.reserve(record_bytes, owner="other") is not None:
            pass
        assert shelf.space.missing_bytes(entitled_bytes(SCHEMA, 100) // record_bytes, record_bytes, owner="moe") == 0
        shelf.set.give_up("moe")
        assert shelf.space.reserve(record_bytes, owner="other") is not None

    run(scenario())


def test_volumes_of_a_fixed_size_refuse_and_name_the_missing_bytes() -> None:
    async def scenario() -> None:
        shelf = Shelf(may_grow=False)
        missing = entitled_bytes(SCHEMA, 100) + SCHEMA.record_bytes - MIB
        with pytest.raises(CapacityError, match=rf"{missing} bytes are missing; raise volume_size or add a volume"):
            await shelf.make_room(100)
        assert shelf.usable_bytes == MIB
        assert shelf.space.free_bytes == MIB

    run(scenario())


def test_a_device_that_is_full_refuses_and_what_grew_before_it_stays_usable() -> None:
    async def scenario() -> None:
        roomy, full = MemoryVolume(START + MIB, index=0), MemoryVolume(START + MIB, index=1, capacity_bytes=START + 2 * MIB)
        shelf = Shelf(volumes=[roomy, full])
        with pytest.raises(CapacityError, match=r"volume 1 cannot grow by \d+ bytes: .*\d+ bytes are missing"):
            await shelf.make_room(100)
        assert full.size_bytes == START + MIB
        assert shelf.space.free_bytes_of(0) == roomy.size_bytes - START
        assert shelf.space.free_bytes_of(1) == MIB
        assert shelf.catalog.load().volumes.keys() == {0}

    run(scenario())


@pytest.mark.parametrize("outcome", ["lost", "durable"])
def test_a_transaction_that_fails_while_volumes_grow_leaves_the_catalog_fit_for_the_next(
    outcome: Literal["lost", "durable"],
) -> None:
    async def scenario() -> None:
        shelf = Shelf(catalog=FaultyCatalog(MemoryCatalog(), fail_at=1, outcome=outcome))
        with pytest.raises(CatalogError):
            await shelf.make_room(100)
        assert shelf.space.free_bytes == MIB, "what the catalog may not know is not used"
        await shelf.make_room(100)
        assert shelf.space.free_bytes >= entitled_bytes(SCHEMA, 100)
        shelf.catalog.apply(Change())

    run(scenario())


# --- zero-fill


def test_new_space_is_zero_filled_piece_by_piece_and_stays_usable() -> None:
    async def scenario() -> None:
        shelf = Shelf(free_mib=20)
        shelf.set.start_prefill()
        await shelf.prefilled()
        disk = shelf.volumes[0]
        assert isinstance(disk, MemoryVolume)
        lengths = [len(write.after) for write in disk.unflushed]
        assert sum(lengths) == 20 * MIB
        assert max(lengths) == PREFILL_PIECE_BYTES
        assert not any(any(write.after) for write in disk.unflushed)
        assert shelf.space.free_bytes == 20 * MIB
        await shelf.set.close()

    run(scenario())


def test_nothing_is_zero_filled_while_anything_else_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paramstore.engine.volumes.PREFILL_PAUSE_S", 0.0)

    async def scenario() -> None:
        shelf = Shelf(free_mib=20)
        shelf.workers.pause()
        busy = asyncio.ensure_future(shelf.runner.call(CPU_LANE, lambda: None))
        await turns(2)
        shelf.set.start_prefill()
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
        shelf = Shelf(free_mib=PREFILL_PIECE_BYTES // MIB)
        shelf.workers.pause()
        shelf.set.start_prefill()
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
        shelf.set.start_prefill()
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
        shelf.set.start_prefill()
        await turns(200)
        (stats,) = shelf.space.stats()
        assert stats.quarantined_bytes == PREFILL_PIECE_BYTES
        assert stats.free_bytes == 20 * MIB - PREFILL_PIECE_BYTES
        await shelf.set.close()

    run(scenario())


def test_how_far_the_fill_came_is_remembered_at_the_end() -> None:
    async def scenario() -> None:
        catalog = MemoryCatalog()
        shelf = Shelf(free_mib=20, catalog=catalog)
        shelf.set.start_prefill()
        while shelf.space.written_bytes(0) < START + PREFILL_PIECE_BYTES:
            await asyncio.sleep(0)
        await shelf.set.close()
        (row,) = catalog.crash().load().volumes.values()
        assert row.written_bytes == shelf.space.written_bytes(0) >= START + PREFILL_PIECE_BYTES

    run(scenario())


def test_a_second_fill_that_fails_fences_the_volume_and_the_others_are_filled() -> None:
    async def scenario() -> None:
        bad = FaultyVolume(MemoryVolume(START + 20 * MIB), [Fault("write", 1, forever=True)])
        shelf = Shelf(volumes=[bad, MemoryVolume(START + 20 * MIB, index=1)])
        for _ in range(2):
            shelf.set.start_prefill()
            await turns(200)
        assert shelf.space.fences.is_fenced(0)
        shelf.set.start_prefill()
        while shelf.space.written_bytes(1) < shelf.volumes[1].size_bytes:
            await asyncio.sleep(0)
        assert bad.calls["write"] == 2
        await turns(5)
        assert shelf.set._prefilling is not None
        assert shelf.set._prefilling.done(), "a fenced volume is not waited for"
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


def test_a_volume_is_not_closed_under_a_fill_that_a_worker_has() -> None:
    async def scenario() -> None:
        disk = WatchfulVolume(START + 20 * MIB)
        shelf = Shelf(volumes=[disk], written_bytes=START)
        shelf.workers.pause()
        shelf.set.start_prefill()
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


# --- what was written over the store's life


def test_what_was_written_adds_up_over_restarts_with_the_zeros_among_it() -> None:
    async def scenario() -> None:
        catalog = MemoryCatalog()
        shelf = Shelf(free_mib=20, catalog=catalog, bytes_written=1000, endurance_bytes=40 * MIB)
        shelf.set.start_prefill()
        await shelf.prefilled()
        await turns(5)
        shelf.traffic[0].bytes_written = 5000
        assert shelf.set.bytes_written_total(0) == 1000 + 5000 + 20 * MIB
        described = shelf.set.describe(0)
        assert (described["bytes_written_total"], described["zero_filled_bytes"]) == (6000 + 20 * MIB, 20 * MIB)
        assert (described["endurance_bytes"], described["endurance_used"]) == (40 * MIB, (6000 + 20 * MIB) / (40 * MIB))
        await shelf.set.close()
        (row,) = catalog.crash().load().volumes.values()
        assert row.bytes_written == 6000 + 20 * MIB

    run(scenario())


def test_without_a_stated_endurance_no_share_of_it_is_told() -> None:
    async def scenario() -> None:
        described = Shelf().set.describe(0)
        assert (described["endurance_bytes"], described["endurance_used"]) == (None, None)

    run(scenario())


def test_growth_records_what_was_written_and_forgets_nothing_of_it() -> None:
    async def scenario() -> None:
        catalog = MemoryCatalog()
        shelf = Shelf(catalog=catalog, bytes_written=7)
        shelf.traffic[0].bytes_written = 5
        await shelf.make_room(100)
        (row,) = catalog.load().volumes.values()
        assert (row.bytes_written, row.size_bytes) == (12, shelf.volumes[0].size_bytes)

    run(scenario())


def test_much_that_a_crash_would_forget_is_recorded_at_once_and_little_is_not() -> None:
    async def scenario() -> None:
        catalog = MemoryCatalog()
        shelf = Shelf(count=2, catalog=catalog)
        shelf.traffic[0].bytes_written = RECORDED_BYTES - 1
        shelf.set.record_written()
        await turns()
        assert not catalog.load().volumes, "nothing was recorded"
        shelf.traffic[0].bytes_written = RECORDED_BYTES
        shelf.traffic[1].bytes_written = 3
        for _ in range(3):
            shelf.set.record_written()
        await turns()
        assert {row.index: row.bytes_written for row in catalog.load().volumes.values()} == {0: RECORDED_BYTES, 1: 3}
        await shelf.set.close()

    run(scenario())


def test_a_catalog_that_cannot_record_it_stops_nobody() -> None:
    async def scenario() -> None:
        catalog = FaultyCatalog(MemoryCatalog(), fail_at=1, outcome="lost")
        shelf = Shelf(catalog=catalog)
        shelf.traffic[0].bytes_written = RECORDED_BYTES
        shelf.set.record_written()
        await turns()
        shelf.set.record_written()
        await turns()
        (row,) = catalog.load().volumes.values()
        assert row.bytes_written == RECORDED_BYTES, "the next record tries again"
        await shelf.set.close()

    run(scenario())


# --- figures


def test_figures_are_told_per_volume_and_summed_per_tier() -> None:
    async def scenario() -> None:
        shelf = Shelf(count=2, free_mib=4)
        assert shelf.space.reserve(MIB) is not None
        traffic = {index: VolumeTraffic(bytes_read=10, bytes_written=5) for index in shelf.volumes}
        tiers = shelf.set.tier_stats(traffic)
        assert tiers == {
            "nvme": {"size_bytes": 2 * (START + 4 * MIB), "free_bytes": 7 * MIB, "bytes_read": 20, "bytes_written": 10}
        }  # fmt: skip
        described = [shelf.set.describe(index) for index in (0, 1)]
        assert [figures["free_bytes"] for figures in described] == [3 * MIB, 4 * MIB]
        assert [figures["written_bytes"] for figures in described] == [START + MIB, START]
        assert described[0]["mode"] == "memory"

    run(scenario())
