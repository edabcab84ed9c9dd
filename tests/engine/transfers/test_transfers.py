"""Every decision is carried out and settled once: bytes verified, failures told, extents pinned meanwhile, traffic counted."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from paramstore.core.residency import Copy, Working
from paramstore.core.schema import Schema
from paramstore.engine.store import Store
from paramstore.engine.tables.namespace import NamespaceState, View
from paramstore.engine.tables.requests import Urgency
from paramstore.engine.transfers.record_reads import VolumeTraffic
from paramstore.errors import CorruptRecord, TicketCancelled, VolumeError
from paramstore.storage.format.structures import unpack_header
from paramstore.testing.volumes import Fault, FaultyVolume, page_aligned
from paramstore_testkit.disks.machine import Machine, PlainSegment
from paramstore_testkit.stores.settling import cut_of
from paramstore_testkit.stores.small_store import SCHEMA, create, first_values, keys_of, lease, run, train, turns, versions

A, B, C, D = ((0, expert) for expert in range(4))
HALF = Schema.adamw({"w": (3, 5), "v": (7,)}, param_dtype="bfloat16")
OPAQUE = Schema.param({"w": ((3, 5), "bfloat16")})


class Site:
    """A store whose committed records lie on the volume alone; the traffic is counted from here."""

    def __init__(self, schema: Schema) -> None:
        self.machine = Machine()
        self.volume = FaultyVolume(self.machine.disks[0], [])
        self.machine.volumes[0] = self.volume
        self.store: Store = self.machine.start()
        self.schema = schema
        self.view: View

    async def prepare(self) -> None:
        self.view = await create(self.store, schema=self.schema)
        await self.store.evict(self.view, None, None)
        self.store.transfers.traffic[0] = VolumeTraffic()

    @property
    def namespace(self) -> NamespaceState:
        return self.view.namespace

    @property
    def traffic(self) -> VolumeTraffic:
        return self.store.transfers.traffic[0]

    def pause(self) -> None:
        assert self.machine.workers is not None
        self.machine.workers.pause()

    async def resume(self) -> None:
        assert self.machine.workers is not None
        self.machine.workers.resume()
        while not self.store.transfers.runner.is_idle:
            await asyncio.sleep(0)

    def corrupt(self, key: tuple[int, int], offset_bytes: int) -> None:
        located = self.namespace.steps.ledger.at(key, 0)
        assert located is not None
        self.machine.disks[0].corrupt(located.extent.offset_bytes + offset_bytes)

    def fail(self, operation: Any) -> None:
        self.volume.plan = (Fault(operation, self.volume.calls[operation] + 1),)


def on_site(scenario: Callable[[Site], Coroutine[Any, Any, None]], schema: Schema = SCHEMA) -> None:
    async def prepared() -> None:
        site = Site(schema)
        await site.prepare()
        await scenario(site)

    run(prepared())


# --- reads


@pytest.mark.parametrize(("schema", "field"), [(SCHEMA, "master/w"), (HALF, "master/v"), (OPAQUE, "w")])
def test_param_reaches_its_slot_from_the_volume_whatever_the_schema(schema: Schema, field: str) -> None:
    async def scenario(site: Site) -> None:
        assert await first_values(site.store, site.view) == [0, 1, 2, 3]
        stored = schema.stored
        moved = stored.fields[len(schema.specs)].offset_bytes if schema.is_trainable else stored.image_bytes
        assert site.traffic == VolumeTraffic(bytes_read=4 * moved, reads=4)
        assert site.namespace.stats.bytes_read == 4 * moved
        await site.store.evict(site.view, None, None)
        site.corrupt(B, stored.field(field).offset_bytes)
        with pytest.raises(CorruptRecord, match=rf"record \(0, 1\) of namespace 'moe', .*field '{field}'"):
            await lease(site.store, site.view, [B])

    on_site(scenario, schema)


@pytest.mark.parametrize("offset", [0, 100, 4000])
def test_a_header_that_is_not_the_record_s_fails_the_load(offset: int) -> None:
    async def scenario(site: Site) -> None:
        site.corrupt(A, offset)
        with pytest.raises(CorruptRecord, match=r"record \(0, 0\) of namespace 'moe', version 0 of epoch \d+, at volume 0, offset"):
            await lease(site.store, site.view, [A])
        assert (site.traffic.reads, site.traffic.failures) == (1, 1)
        assert not site.namespace.residency.copies
        assert await first_values(site.store, site.view, [B, C, D]) == [1, 2, 3]

    on_site(scenario)


def test_a_record_in_the_place_of_another_is_found_out() -> None:
    async def scenario(site: Site) -> None:
        disk = site.machine.disks[0]
        one, other = site.namespace.steps.ledger.at(A, 0), site.namespace.steps.ledger.at(B, 0)
        assert one is not None
        assert other is not None
        image = page_aligned(SCHEMA.record_bytes)
        disk.read(one.extent.offset_bytes, [image])
        disk.write(other.extent.offset_bytes, [image])
        with pytest.raises(CorruptRecord, match="another record lies there"):
            await lease(site.store, site.view, [B])

    on_site(scenario)


def test_moments_are_verified_when_the_working_copy_is_loaded_and_not_before() -> None:
    async def scenario(site: Site) -> None:
        site.corrupt(A, SCHEMA.stored.field("exp_avg_sq/v").offset_bytes)
        assert await first_values(site.store, site.view, [A]) == [0]
        with pytest.raises(CorruptRecord, match="field 'exp_avg_sq/v'"):
            await site.store.access.wait_prefetch(site.store.access.prefetch(site.view, [A], "optim", None))
        assert site.namespace.residency.working[A].state is Working.ABSENT

    on_site(scenario)


def test_a_failed_read_is_told_counted_and_frees_the_slot() -> None:
    async def scenario(site: Site) -> None:
        site.fail("read")
        with pytest.raises(VolumeError, match="read number"):
            await lease(site.store, site.view, [A])
        assert site.traffic == VolumeTraffic(failures=1)
        assert site.namespace.memory.param.slots.free_count == site.namespace.memory.param.slots.count
        assert await first_values(site.store, site.view) == [0, 1, 2, 3]

    on_site(scenario)


def test_an_extent_is_given_to_nobody_while_it_is_read() -> None:
    async def scenario(site: Site) -> None:
        reader = await site.store.admission.open("moe", mode="read", at=0, host_bytes=None)
        site.pause()
        site.store.access.acquire(reader, 1, [A], "param")
        located = site.namespace.steps.ledger.at(A, 0)
        assert located is not None
        space = site.store.transfers._planner.space
        free = space.free_bytes
        space.release(located.extent)
        assert space.free_bytes == free
        await site.resume()
        assert space.free_bytes == free + located.extent.length_bytes

    on_site(scenario)


def test_reading_back_fills_the_target_with_a_verified_record() -> None:
    async def scenario(site: Site) -> None:
        target = PlainSegment(SCHEMA.record_bytes).view(0, SCHEMA.record_bytes)
        assert await site.store.reading.read(site.view, C, target) == (site.namespace.residency.working[C].identity)
        header = unpack_header(target[: SCHEMA.stored.header_bytes], SCHEMA.stored)
        assert (header.key, header.namespace, header.optimizer_step) == (C, "moe", 0)
        site.corrupt(C, SCHEMA.stored.field("exp_avg/w").offset_bytes)
        with pytest.raises(CorruptRecord):
            await site.store.reading.read(site.view, C, target)
        site.fail("read")
        with pytest.raises(VolumeError):
            await site.store.reading.read(site.view, D, target)
        assert not site.store.transfers._planner.space.pins

    on_site(scenario)


def test_param_made_from_a_working_copy_lets_it_go_and_reads_nothing() -> None:
    async def scenario(site: Site) -> None:
        await train(site.store, site.view)
        await site.store.write_back(site.view, None)
        await site.store.evict(site.view, None, "param")
        before = site.traffic.bytes_read
        assert await first_values(site.store, site.view) == pytest.approx([-0.5, 0.5, 1.5, 2.5])
        assert site.traffic.bytes_read == before
        assert (await site.store.evict(site.view, None, "optim")) == {"evicted": 4, "skipped": []}

    on_site(scenario)


# --- writes


def test_a_written_record_says_what_it_is() -> None:
    async def scenario(site: Site) -> None:
        await train(site.store, site.view, [A])
        await train(site.store, site.view, [A])
        await site.store.write_back(site.view, None)
        located = site.namespace.residency.working[A].uncommitted
        assert located is not None
        image = page_aligned(SCHEMA.record_bytes)
        site.machine.disks[0].read(located.extent.offset_bytes, [image])
        header = unpack_header(image[: SCHEMA.stored.header_bytes], SCHEMA.stored)
        assert (header.store_uuid, header.namespace, header.key) == (site.store.store_uuid, "moe", A)
        assert header.identity == located.identity == (site.namespace.epoch, 2)
        assert (header.optimizer_step, header.last_apply) == (2, 2)
        assert header.sequence == site.namespace.steps.sequence + 1, "of the cut that will include it"
        assert (site.traffic.writes, site.traffic.bytes_written) == (1, SCHEMA.record_bytes)

    on_site(scenario)


def test_a_record_written_for_a_cut_bears_the_sequence_of_that_cut_and_a_later_one_the_next() -> None:
    async def scenario(site: Site) -> None:
        await train(site.store, site.view, [A, B])
        planner, namespace = site.store.transfers._planner, site.namespace
        cut = cut_of(planner, namespace)
        namespace.residency.working[B].publish_in = cut.sequence + 1  # as if it had been updated after the cut
        for key, sequence in ((A, cut.sequence), (B, cut.sequence + 1)):
            assert planner.working.begin_write(namespace, namespace.residency.working[key], Urgency.DEMAND)
            site.store.transfers.carry_out()
            _, transfer = site.store.transfers._under_way[namespace.residency.working[key]]
            assert transfer.run.__self__.header.sequence == sequence  # type: ignore[attr-defined]

    on_site(scenario)


def test_a_failed_write_is_counted_and_its_extent_given_up() -> None:
    async def scenario(site: Site) -> None:
        await train(site.store, site.view, [A])
        site.fail("write")
        await site.store.write_back(site.view, None)
        assert (site.traffic.failures, site.traffic.writes) == (1, 1)
        assert site.store.transfers._planner.space.stats()[0].quarantined_bytes == SCHEMA.record_bytes
        await site.store.committer.commit(site.view, 1, b"")
        await site.store.evict(site.view, None, None)
        assert await versions(site.store, site.view) == [1, 0, 0, 0]

    on_site(scenario)


# --- prefetches that are given up


def test_a_prefetch_that_is_cancelled_gives_up_what_has_not_started() -> None:
    async def scenario(site: Site) -> None:
        site.pause()
        request = site.store.access.prefetch(site.view, keys_of(site.view), "param", None)
        waiting = asyncio.ensure_future(site.store.access.wait_prefetch(request))
        await turns(2)
        site.store.transfers.cancel_prefetch(request)
        with pytest.raises(TicketCancelled, match="the prefetch was cancelled"):
            await waiting
        states = {key: [copy.state for copy in copies] for key, copies in site.namespace.residency.copies.items()}
        assert states == {A: [Copy.LOADING], B: [Copy.LOADING]}, "two workers had theirs already"
        await site.resume()
        assert site.traffic == VolumeTraffic(bytes_read=site.traffic.bytes_read, reads=2), "given up is no failure"
        assert site.namespace.memory.param.slots.count - site.namespace.memory.param.slots.free_count == 2

    on_site(scenario)


def test_a_cancelled_prefetch_takes_nothing_from_whoever_else_waits() -> None:
    async def scenario(site: Site) -> None:
        site.pause()
        prefetch = site.store.access.prefetch(site.view, keys_of(site.view), "param", None)
        other = site.store.access.prefetch(site.view, [C], "param", None)
        leased = asyncio.ensure_future(lease(site.store, site.view, [D]))
        await turns(2)
        site.store.transfers.cancel_prefetch(prefetch)
        await site.resume()
        assert (await leased).copies[0].key == D
        assert other.loaded == 1
        assert other.error is None

    on_site(scenario)


def test_a_cancelled_prefetch_of_working_copies_leaves_those_that_an_update_wants() -> None:
    async def scenario(site: Site) -> None:
        site.pause()
        prefetch = site.store.access.prefetch(site.view, keys_of(site.view), "optim", None)
        training = asyncio.ensure_future(train(site.store, site.view, [D]))
        await turns()
        site.store.transfers.cancel_prefetch(prefetch)
        await site.resume()
        await training
        assert (await versions(site.store, site.view)) == [0, 0, 0, 1]
        assert C not in site.namespace.residency.resident

    on_site(scenario)


def test_a_cancelled_prefetch_of_a_working_copy_leaves_one_that_a_lease_waits_for() -> None:
    async def scenario(site: Site) -> None:
        site.pause()
        prefetch = site.store.access.prefetch(site.view, keys_of(site.view), "optim", None)
        leased = asyncio.ensure_future(lease(site.store, site.view, [D]))
        await turns(2)
        site.store.transfers.cancel_prefetch(prefetch)
        await site.resume()
        assert (await leased).copies[0].key == D
        assert list(site.namespace.residency.resident) == [A, B, D], "two had started, one was wanted"

    on_site(scenario)


def test_a_finished_prefetch_cannot_be_cancelled_any_more() -> None:
    async def scenario(site: Site) -> None:
        request = site.store.access.prefetch(site.view, [A], "param", None)
        await site.store.access.wait_prefetch(request)
        site.store.transfers.cancel_prefetch(request)
        assert request.error is None

    on_site(scenario)
