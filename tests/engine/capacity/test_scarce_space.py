"""A namespace on volumes with no more room than it is entitled to, everything retained and held: nothing that is well fails."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

import pytest

from paramstore.core.optimizers import AdamW
from paramstore.core.schema import Schema
from paramstore.engine.store import Store
from paramstore.engine.tables.namespace import View
from paramstore.engine.transfers import arithmetic
from paramstore.engine.transfers.runner import BACKGROUND_LANE, volume_lane
from paramstore.engine.transfers.scheduler import Transfer
from paramstore.errors import CapacityError, ParamStoreError, StepFailed, VolumeError
from paramstore_testkit.disks.machine import Machine
from paramstore_testkit.stores.small_store import create, hold_writes_back, keys_of, push, run, train, turns, versions

WIDE = Schema.adamw({"w": (16, 1024)})
RECORD_BYTES = WIDE.record_bytes
OPTIONS = AdamW(lr=1e-3)
MIB = 1 << 20
ROOMY_BYTES = 32 * MIB
"""Room for both namespaces, if nobody had borrowed any."""


async def reader(store: Store) -> View:
    return await store.admission.open("moe", mode="read", at=None, host_bytes=None)


class Site:
    """Steps 0 to 3 are committed; 0 and 1 are held by readers, 2 and 3 retained; somebody else uses all space beyond that."""

    def __init__(self, *, experts: int = 8, **machine: Any) -> None:
        self.experts = experts
        settings = {"held_steps": 2, "host_budget_bytes": 128 * MIB, "wait_timeout_s": 2.0, "reader_slots": 14, **machine}
        self.machine = Machine(**settings)
        self.store: Store = self.machine.start()
        self.view: View
        self.readers: list[View] = []
        self.kept: list[Transfer] = []
        """Transfers kept from their worker, as a slow disk would."""
        self._submit = self.store.transfers.runner.submit

    async def prepare(self) -> None:
        self.view = await create(self.store, schema=WIDE, experts=self.experts)
        self.readers.append(await reader(self.store))
        for step in (1, 2, 3):
            await train(self.store, self.view)
            await self.store.committer.commit(self.view, step, b"")
            if step == 1:
                self.readers.append(await reader(self.store))
        while self.space.reserve(RECORD_BYTES, owner="other") is not None:
            pass

    @property
    def space(self) -> Any:
        return self.store.transfers._planner.space

    @property
    def held_records(self) -> int:
        return int(self.space.held_bytes("moe")) // RECORD_BYTES

    def keep(self, kind: str) -> None:
        """Reads or writes of the volume stay where they are until `let_go`."""

        def submit(transfer: Transfer) -> None:
            is_meant = transfer.lane == volume_lane(0) and kind in getattr(transfer.run, "__qualname__", "")
            self.kept.append(transfer) if is_meant else self._submit(transfer)

        self.store.transfers.runner.submit = submit  # type: ignore[method-assign]

    def let_go(self) -> None:
        self.store.transfers.runner.submit = self._submit  # type: ignore[method-assign]
        kept, self.kept = self.kept, []
        for transfer in kept:
            self._submit(transfer)


def on_site(scenario: Any, **site: Any) -> None:
    async def prepared() -> None:
        made = Site(**site)
        await made.prepare()
        await scenario(made)
        assert made.view.namespace.writing.broken is None

    run(prepared())


def test_an_apply_beside_a_commit_leaves_the_extent_that_the_cut_s_own_writes_need() -> None:
    async def scenario(site: Site) -> None:
        store, view, keys = site.store, site.view, keys_of(site.view)
        await train(store, view)
        await store.write_back(view, None)
        await train(store, view, keys[4:])  # dirty beside an older uncommitted extent: their writes need the pipeline share
        push(store, view, keys[:4])
        commit = asyncio.ensure_future(store.committer.commit(view, 4, b""))
        await turns(1)
        apply = asyncio.ensure_future(store.applies.apply(view, OPTIONS, 1.0))
        await asyncio.gather(commit, apply)
        assert await versions(store, view) == [5, 5, 5, 5, 5, 5, 5, 5]

    on_site(scenario)


def test_an_update_that_waited_for_space_starts_only_when_nobody_else_holds_the_slot() -> None:
    async def scenario(site: Site) -> None:
        store, view, keys = site.store, site.view, keys_of(site.view)
        namespace = view.namespace
        follower = await reader(store)
        await train(store, view)
        push(store, view, keys)
        commit = asyncio.ensure_future(store.committer.commit(view, 4, b""))
        await turns(1)
        apply = asyncio.ensure_future(store.applies.apply(view, OPTIONS, 1.0))
        while namespace.steps.cut is None:
            await turns(1)
        published = asyncio.get_running_loop().create_future()
        namespace.steps.cut_waiters.append(published)
        await published
        store.refresh(follower)  # in the very moment in which the apply may go on
        lease = store.access.acquire(follower, 999, keys[4:6], "param")
        assert site.machine.workers is not None
        site.machine.workers.pause()
        await turns(20)
        site.machine.workers.resume()
        await store.access.wait_lease(lease, 2.0)
        store.access.release(follower, 999)
        await asyncio.gather(commit, apply)
        assert all(working.holders == 0 for working in namespace.residency.working.values())
        assert await versions(store, view) == [5] * 8

    on_site(scenario)


def test_an_apply_waits_for_extents_that_are_still_being_read() -> None:
    async def scenario(site: Site) -> None:
        store, view = site.store, site.view
        site.readers.append(await store.admission.open("moe", mode="read", at=2, host_bytes=None))
        await train(store, view)
        await store.evict(view, None, "param")
        site.keep("Read")
        prefetch = store.access.prefetch(site.readers[0], keys_of(view), "param", None)
        assert len(prefetch.pending) == 8
        await store.committer.commit(view, 4, b"")  # the oldest reader loses its step, whose extents are being read
        assert site.space.has_leaving
        apply = asyncio.ensure_future(train(store, view))
        await turns(50)
        assert not apply.done()
        site.let_go()
        await apply
        assert await versions(store, view) == [5] * 8

    on_site(scenario)


async def orphan_writes(site: Site) -> None:
    """Rolls back while seven records are being written, for which an apply would wait; they are kept from their worker."""
    store, view = site.store, site.view
    await train(store, view)
    kept = site.kept = hold_writes_back(store, failing=keys_of(view)[0])
    with pytest.raises(StepFailed, match="failed twice"):
        await store.committer.commit(view, 4, b"")
    await store.rollback(view, 3)
    assert store.transfers._planner.working.orphan_writes == len(kept) == 7


def test_an_apply_waits_for_writes_that_a_rollback_orphaned() -> None:
    async def scenario(site: Site) -> None:
        store, view = site.store, site.view
        await orphan_writes(site)
        apply = asyncio.ensure_future(train(store, view))
        await turns(50)
        assert not apply.done()
        site.let_go()
        await apply
        assert store.transfers._planner.working.orphan_writes == 0
        assert await versions(store, view) == [4] * 8

    on_site(scenario)


def test_an_apply_that_waits_for_orphaned_writes_learns_at_once_that_they_failed() -> None:
    """What they were to give back is quarantined, and comes free no more."""

    async def scenario(site: Site) -> None:
        store, view = site.store, site.view
        await orphan_writes(site)
        apply = asyncio.ensure_future(train(store, view))
        await turns(50)
        assert not apply.done()

        def fail(piece: object) -> None:
            raise VolumeError("bad surface")

        for transfer in site.kept:
            transfer.run = fail
        site.let_go()
        with pytest.raises(StepFailed, match=r"volume 0 is fenced \(\d writes failed, the last: bad surface\): restart the daemon"):
            await apply
        await store.rollback(view, 3)

    on_site(scenario, wait_timeout_s=3600.0)


def test_a_write_waits_for_the_range_that_the_zero_fill_has_just_taken() -> None:
    async def scenario(site: Site) -> None:
        store, view = site.store, site.view
        await train(store, view, keys_of(view)[:1])
        working = view.namespace.residency.working[keys_of(view)[0]]
        assert working.reserved is not None
        extent, working.reserved = working.reserved, None
        site.space.release(extent)
        volume = site.space._volumes[0]
        volume.carve(extent.offset_bytes, extent.offset_bytes + extent.length_bytes)
        volume.prefilling.add(extent)
        while site.space.reserve(RECORD_BYTES, owner="moe") is not None:
            pass

        async def fill() -> None:
            await store.transfers.runner.behind(BACKGROUND_LANE)
            site.space.finish_prefill(extent)

        filling = asyncio.ensure_future(fill())
        await turns(1)
        assert (await store.write_back(view, None))["written"] == 1
        await filling

    on_site(scenario)


def test_nothing_is_waited_for_where_no_space_will_come() -> None:
    async def scenario(site: Site) -> None:
        while site.space.reserve(RECORD_BYTES, owner="moe") is not None:
            pass
        with pytest.raises(StepFailed, match="bytes are missing on the volumes: add a volume"):
            await train(site.store, site.view)
        await site.store.rollback(site.view, 3)

    on_site(scenario)


def test_a_namespace_is_not_created_on_space_that_another_has_borrowed() -> None:
    async def scenario(site: Site) -> None:
        store = site.store
        store._volumes._may_grow = False
        with pytest.raises(CapacityError, match=r"other namespaces hold \d+ bytes that namespace 'new' needs.*: try again then"):
            await store.admission.create("new", WIDE.describe(), layers=[0], experts=4, host_bytes=12 * MIB)
        assert "new" not in store.namespaces
        assert site.space.entitled_bytes("new") == 0

    on_site(scenario, volume_bytes=ROOMY_BYTES)


def test_a_namespace_whose_share_is_borrowed_makes_the_volumes_grow() -> None:
    async def scenario(site: Site) -> None:
        size_bytes = site.machine.disks[0].size_bytes
        view = await create(site.store, "new", schema=WIDE, experts=4, host_bytes=12 * MIB)
        assert site.machine.disks[0].size_bytes > size_bytes
        assert site.space.shortage_bytes("new") == 0
        await train(site.store, view)

    on_site(scenario, volume_bytes=ROOMY_BYTES)


def test_the_shares_of_namespaces_are_kept_over_a_restart() -> None:
    async def scenario(site: Site) -> None:
        entitled = site.space.entitled_bytes("moe")
        await site.machine.crash()
        store = site.machine.start()
        space = store.transfers._planner.space
        assert space.entitled_bytes("moe") == entitled
        while space.reserve(RECORD_BYTES, owner="other") is not None:
            pass
        site.view = await store.admission.open("moe", mode="write", at=None, host_bytes=None)
        await train(store, site.view)
        await store.committer.commit(site.view, 4, b"")

    on_site(scenario)


@pytest.mark.parametrize("fail_at", [2, 4, 6, 9, 11])
def test_a_piece_of_a_shared_record_that_fails_ends_the_record_once_and_a_rollback_mends_it(
    fail_at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    count = [0]

    def update(*arguments: Any, **options: Any) -> None:
        count[0] += 1
        if count[0] == fail_at:
            raise ParamStoreError("as planned")
        arithmetic.update(*arguments, **options)

    async def scenario() -> None:
        store = Machine(host_budget_bytes=64 * MIB).start()
        view = await create(store, schema=WIDE, experts=5)
        monkeypatch.setattr("paramstore.engine.records.update.update", update)
        monkeypatch.setattr("paramstore.engine.records.update.cut_update", partial(arithmetic.cut_update, piece_elements=4096))
        with pytest.raises(StepFailed, match="as planned"):
            await train(store, view)
        while not store.transfers.runner.is_idle:
            await asyncio.sleep(0)
        await store.rollback(view, 0)
        assert await versions(store, view) == [0] * 5
        await train(store, view)
        await store.committer.commit(view, 1, b"")
        namespace = view.namespace
        slots = namespace.memory.working.slots
        assert slots.count - slots.free_count == len(namespace.residency.resident)
        assert all(working.holders == 0 for working in namespace.residency.working.values())

    run(scenario())
