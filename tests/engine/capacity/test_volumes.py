"""Room for namespaces: what each is entitled to, growth, refusal that names the bytes, and zero-fill while nothing else moves."""

from __future__ import annotations

import errno
import os
from typing import Literal

import pytest

from paramstore.core.schema import Schema
from paramstore.engine.capacity.entitlements import PIPELINE_RECORDS_MIN, entitled_bytes
from paramstore.engine.capacity.volumes import RECORDED_BYTES
from paramstore.engine.transfers.record_reads import VolumeTraffic
from paramstore.errors import CapacityError, CatalogError, ParamStoreError
from paramstore.limits import HELD_STEPS, RETAINED_STEPS
from paramstore.storage.catalog.base import STEP_ROWS_BOUND, Change
from paramstore.testing.catalogs import FaultyCatalog, MemoryCatalog
from paramstore.testing.volumes import MemoryVolume
from paramstore_testkit.stores.small_host import namespace_of
from paramstore_testkit.stores.small_store import SCHEMA, run, turns
from paramstore_testkit.stores.volume_shelf import MIB, START, Shelf

OPAQUE = Schema.param({"w": ((512, 1024), "uint8")})


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
        other = namespace_of(OPAQUE, "other", 5)
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
        with pytest.raises(CapacityError, match=rf"{missing} bytes are missing; add a volume \(--add-volume\), or restart without"):
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


# --- room in the catalog


class NarrowCatalog(MemoryCatalog):
    """Has room for so many kept rows. number: what the system says where there are more."""

    def __init__(self, row_count: int, *, number: int = errno.ENOSPC) -> None:
        super().__init__()
        self.row_count = row_count
        self.number = number
        self.kept_rows = 0

    def reserve(self, row_count: int, *, kept_rows: int = 0) -> None:
        if kept_rows > self.row_count:
            raise CatalogError(f"no room for {kept_rows} rows") from OSError(self.number, os.strerror(self.number))
        self.kept_rows = kept_rows


def test_a_namespace_has_its_catalog_rows_before_volumes_grow_beside_those_of_all_others() -> None:
    async def scenario() -> None:
        catalog = NarrowCatalog(1 << 30)
        shelf = Shelf(catalog=catalog)
        await shelf.make_room(100)
        alone, steps = catalog.kept_rows, RETAINED_STEPS + 1 + HELD_STEPS
        assert alone >= steps * (100 + STEP_ROWS_BOUND)
        await shelf.make_room(100, namespace_of(OPAQUE, 5))
        assert catalog.kept_rows >= alone + 5 + steps * STEP_ROWS_BOUND
        await shelf.set.keep_catalog_room([namespace_of(OPAQUE, 5)])
        assert 5 + steps * STEP_ROWS_BOUND <= catalog.kept_rows < alone

    run(scenario())


@pytest.mark.parametrize(
    ("number", "kind"),
    [(errno.ENOSPC, CapacityError), (errno.EDQUOT, CapacityError), (errno.EIO, CatalogError), (errno.EROFS, CatalogError)],
)
def test_a_namespace_whose_catalog_rows_find_no_room_is_refused_and_nothing_grew(number: int, kind: type[ParamStoreError]) -> None:
    async def scenario() -> None:
        shelf = Shelf(catalog=NarrowCatalog(100, number=number))
        with pytest.raises(kind, match=r"no room for \d+ rows"):
            await shelf.make_room(100)
        assert shelf.usable_bytes == MIB
        assert shelf.space.entitled_bytes("moe") == 0

    run(scenario())


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
def test_a_store_without_the_room_opens_and_the_log_says_so(number: int, caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        await Shelf(catalog=NarrowCatalog(100, number=number)).set.keep_catalog_room([namespace_of(OPAQUE, 5)])

    run(scenario())
    assert "a commit may fail for want of room in the catalog: no room for" in caplog.text


# --- what was written over the store's life


def test_what_was_written_adds_up_over_restarts_with_the_zeros_among_it() -> None:
    async def scenario() -> None:
        catalog = MemoryCatalog()
        shelf = Shelf(free_mib=20, catalog=catalog, bytes_written=1000, endurance_bytes=40 * MIB)
        shelf.prefill.start()
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
