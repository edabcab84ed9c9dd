"""A volume that fails: what is refused, what goes on, and what a restart finds. The rule is decision 13."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from paramstore.core.residency import Working
from paramstore.core.schema import Schema
from paramstore.engine.store import Store
from paramstore.engine.tables.namespace import View
from paramstore.errors import CapacityError, StepFailed, VolumeError
from paramstore.storage.format.structures import Superblock, extents_start_bytes
from paramstore.testing.volumes import Fault, FaultyVolume
from paramstore_testkit.disks.machine import Machine
from paramstore_testkit.stores.small_store import ONE, SCHEMA, create, first_values, keys_of, lease, run, train, versions

RECORDS_START_BYTES = extents_start_bytes(Superblock(bytes(16), bytes(16), 0))
MIB = 1 << 20
LARGE, MANY = Schema.adamw({"w": (256, 128)}, param_dtype="float32"), 6
"""Schema and keys of a namespace that has slots for fewer, if its host memory is `ONE`."""
FIRST_VALUES = [-0.5, 0.5, 1.5, 2.5]
"""Of every record, after one apply."""


class BadSurface(FaultyVolume):
    """While `is_bad`, no record can be written to it; notes can, and flushes succeed."""

    is_bad = False

    def write(self, offset_bytes: int, data: Any) -> None:
        if self.is_bad and offset_bytes >= RECORDS_START_BYTES:
            self.fired += 1
            raise VolumeError(f"volume {self.index}: bad surface at {offset_bytes}")
        super().write(offset_bytes, data)


class Site:
    """A store with a writer of four records, committed as step 0, all dirty at version 1."""

    def __init__(self, *, volume_count: int, **machine: Any) -> None:
        self.machine = Machine(seed=2, volume_count=volume_count, **machine)
        self.volumes = [BadSurface(disk, []) for disk in self.machine.disks.values()]
        self.machine.volumes = dict(enumerate(self.volumes))
        self.store: Store = self.machine.start()
        self.view: View

    async def prepare(self) -> None:
        self.view = await create(self.store)
        await train(self.store, self.view)

    def fail_flush(self, volume: int) -> None:
        self.volumes[volume].plan = (Fault("flush", self.volumes[volume].calls["flush"] + 1),)

    async def told(self, volume: int) -> Any:
        stats: Any = await self.store.stats()
        return stats["volumes"][str(volume)]["fenced"]

    async def restart(self, name: str = "moe") -> None:
        """Restarts the daemon, and opens this namespace."""
        await self.machine.kill()
        self.store = self.machine.start()
        self.view = await self.store.admission.open(name, mode="write", at=None, host_bytes=None)

    def written_to(self) -> set[int]:
        """Volumes of the records that no step has published."""
        located = (copy.uncommitted for copy in self.view.namespace.residency.working.values())
        return {found.extent.volume for found in located if found is not None}


def on_site(scenario: Callable[[Site], Coroutine[Any, Any, None]], *, volume_count: int = 2, **machine: Any) -> None:
    async def prepared() -> None:
        site = Site(volume_count=volume_count, **machine)
        await site.prepare()
        await scenario(site)

    run(prepared())


# --- a failed flush


def test_after_a_failed_flush_no_step_is_committed_until_a_restart_and_reads_go_on() -> None:
    async def scenario(site: Site) -> None:
        store, view = site.store, site.view
        site.fail_flush(1)
        with pytest.raises(VolumeError):
            await store.committer.commit(view, 1, b"")
        await store.rollback(view, 0)
        await train(store, view)
        flushes = [volume.calls["flush"] for volume in site.volumes]
        for _ in range(2):
            with pytest.raises(VolumeError, match=r"volume 1 is fenced \(a flush failed: .*restart the daemon after looking at"):
                await store.committer.commit(view, 1, b"")
        assert [volume.calls["flush"] for volume in site.volumes] == flushes, "no later flush is asked, so none is believed"
        assert view.namespace.steps.ledger.steps() == [0]
        assert view.namespace.writing.broken is None
        assert view.namespace.steps.cut is None
        reader = await store.admission.open("moe", mode="read", at=None, host_bytes=None)
        assert await versions(store, reader) == [0, 0, 0, 0]
        assert await first_values(store, view) == pytest.approx(FIRST_VALUES)
        assert "flush number" in await site.told(1)
        assert await site.told(0) is None
        await site.restart()
        assert await site.told(1) is None
        await train(site.store, site.view)
        await site.store.committer.commit(site.view, 1, b"")
        await site.machine.crash()
        site.store = site.machine.start()
        assert site.store.namespaces["moe"].steps.committed_step == 1

    on_site(scenario)


def test_a_namespace_that_had_nothing_to_do_with_the_failed_flush_commits_no_step_either() -> None:
    async def scenario(site: Site) -> None:
        other = await create(site.store, "other", host_bytes=8 * MIB)
        site.fail_flush(0)
        with pytest.raises(VolumeError):
            await site.store.committer.commit(site.view, 1, b"")
        assert other.namespace.writing.broken is None
        with pytest.raises(VolumeError, match="volume 0 is fenced"):
            await site.store.committer.commit(other, 1, b"")
        assert other.namespace.writing.broken is None, "it may be trained on, and read"
        assert await train(site.store, other) is not None

    on_site(scenario, volume_bytes=24 * MIB)


def test_records_go_to_the_other_volumes_after_a_failed_flush() -> None:
    async def scenario(site: Site) -> None:
        site.fail_flush(0)
        with pytest.raises(VolumeError):
            await site.store.committer.commit(site.view, 1, b"")
        await site.store.rollback(site.view, 0)
        await train(site.store, site.view)
        writes = site.volumes[0].calls["write"]
        await site.store.write_back(site.view, None)
        assert site.volumes[0].calls["write"] == writes
        assert site.written_to() == {1}

    on_site(scenario)


def test_on_a_store_of_one_volume_an_apply_says_that_it_is_fenced() -> None:
    async def scenario(site: Site) -> None:
        site.fail_flush(0)
        with pytest.raises(VolumeError):
            await site.store.committer.commit(site.view, 1, b"")
        await site.store.rollback(site.view, 0)
        with pytest.raises(StepFailed, match=r"volume 0 is fenced \(a flush failed: .*\): restart the daemon"):
            await train(site.store, site.view)
        await site.store.rollback(site.view, 0)
        request = await lease(site.store, site.view, keys_of(site.view)[:1])
        site.store.access.release(site.view, request.lease_id)

    on_site(scenario, volume_count=1)


# --- failed writes


def test_two_failed_writes_fence_a_volume_and_the_commit_goes_on_with_the_others() -> None:
    async def scenario(site: Site) -> None:
        site.volumes[0].is_bad = True
        answer = await site.store.committer.commit(site.view, 1, b"")
        assert answer["records"] == 4
        assert "2 writes failed, the last: volume 0: bad surface" in await site.told(0)
        fired = site.volumes[0].fired
        for step in range(2, 5):
            await train(site.store, site.view)
            await site.store.write_back(site.view, None)
            assert site.written_to() == {1}
            await site.store.committer.commit(site.view, step, b"")
        assert site.volumes[0].fired == fired, "a fenced volume is not written to again"
        await site.machine.crash()
        site.store = site.machine.start()
        view = await site.store.admission.open("moe", mode="write", at=None, host_bytes=None)
        assert await versions(site.store, view) == [4, 4, 4, 4]

    on_site(scenario)


def test_a_record_whose_write_failed_goes_to_another_volume() -> None:
    async def scenario(site: Site) -> None:
        key = keys_of(site.view)[0]
        working = site.view.namespace.residency.working[key]
        assert working.reserved is not None
        bad, good = working.reserved.volume, 1 - working.reserved.volume
        site.volumes[bad].plan = (Fault("write", site.volumes[bad].calls["write"] + 1),)
        await site.store.write_back(site.view, [key])
        assert working.uncommitted is not None
        assert working.uncommitted.extent.volume == good
        assert await site.told(bad) is None, "one failed write fences nothing"

    on_site(scenario)


def test_an_extent_that_was_reserved_before_its_volume_was_fenced_is_not_written_to() -> None:
    async def scenario(site: Site) -> None:
        reserved = {
            working.reserved.volume for working in site.view.namespace.residency.working.values() if working.reserved is not None
        }
        assert reserved == {0, 1}
        for number in range(2):
            site.store.transfers._planner.space.fences.fail_write(0, VolumeError(f"failure {number}"))
        writes = site.volumes[0].calls["write"]
        await site.store.write_back(site.view, None)
        assert site.volumes[0].calls["write"] == writes
        assert site.written_to() == {1}
        await site.store.committer.commit(site.view, 1, b"")

    on_site(scenario)


def test_when_every_volume_is_fenced_by_writes_the_commit_fails_and_a_restart_mends_it() -> None:
    async def scenario(site: Site) -> None:
        for volume in site.volumes:
            volume.is_bad = True
        with pytest.raises((CapacityError, StepFailed), match=r"volume 0 is fenced .*volume 1 is fenced .*restart the daemon"):
            await site.store.committer.commit(site.view, 1, b"")
        with pytest.raises(CapacityError, match="volume 0 is fenced"):
            await site.store.committer.commit(site.view, 1, b"")
        assert site.view.namespace.steps.ledger.steps() == [0]
        assert {working.state for working in site.view.namespace.residency.working.values()} == {Working.DIRTY}
        for volume in site.volumes:
            volume.is_bad = False
        await site.restart()
        assert await versions(site.store, site.view) == [0, 0, 0, 0]
        await train(site.store, site.view)
        await site.store.committer.commit(site.view, 1, b"")
        (stats, _) = site.store.transfers._planner.space.stats()
        assert (stats.quarantined_bytes, stats.write_failures) == (0, 0)

    on_site(scenario)


def test_reads_of_a_fenced_volume_go_on() -> None:
    async def scenario(site: Site) -> None:
        await site.store.committer.commit(site.view, 1, b"")
        for number in range(2):
            for index in range(2):
                site.store.transfers._planner.space.fences.fail_write(index, VolumeError(f"failure {number}"))
        await site.store.evict(site.view, None, None)
        assert await versions(site.store, site.view) == [1, 1, 1, 1]
        assert await first_values(site.store, site.view) == pytest.approx(FIRST_VALUES)

    on_site(scenario)


# --- slots


def test_an_apply_that_needs_a_slot_where_no_record_can_be_written_any_more_says_which_volume_is_fenced() -> None:
    async def scenario(site: Site) -> None:
        store, view = site.store, await create(site.store, "many", schema=LARGE, experts=MANY, host_bytes=ONE)
        assert view.namespace.memory.working.slots.count < MANY
        await train(store, view)
        for number in range(2):
            store.transfers.fail_note(0, VolumeError(f"note {number}"))
        with pytest.raises(StepFailed, match=r"volume 0 is fenced \(2 writes failed, the last: note 1\): restart the daemon"):
            await train(store, view)
        assert not view.namespace.memory.working.waiting
        assert set(view.namespace.residency.in_state[Working.DIRTY]) == set(view.namespace.residency.resident.values())
        reader = await store.admission.open("many", mode="read", at=None, host_bytes=None)
        assert await versions(store, reader) == [0] * MANY
        await store.rollback(view, 0)
        assert await versions(store, view) == [0] * MANY
        await site.restart("many")
        await train(site.store, site.view)
        await site.store.committer.commit(site.view, 1, b"")
        assert await versions(site.store, site.view) == [1] * MANY

    on_site(scenario, volume_count=1, wait_timeout_s=3600.0)


def test_an_apply_whose_own_writes_fail_says_which_volume_is_fenced() -> None:
    async def scenario(site: Site) -> None:
        view = await create(site.store, "many", schema=LARGE, experts=MANY, host_bytes=ONE)
        site.volumes[0].is_bad = True
        with pytest.raises(StepFailed, match=r"volume 0 is fenced .* volume 0: bad surface .*: restart the daemon"):
            await train(site.store, view)
        await site.store.rollback(view, 0)
        assert await versions(site.store, view) == [0] * MANY

    on_site(scenario, volume_count=1, wait_timeout_s=3600.0)


# --- notes


def test_a_commit_note_that_fails_counts_as_a_failed_write_of_its_volume() -> None:
    async def scenario(site: Site) -> None:
        transfers = site.store.transfers
        for number in range(2):
            assert await site.told(1) is None
            transfers.fail_note(1, VolumeError(f"note {number}"))
        assert await site.told(1) == "2 writes failed, the last: note 1"
        assert transfers.traffic[1].failures == 2

    on_site(scenario)


# --- room


def test_a_volume_that_is_fenced_does_not_grow_and_the_others_make_up_for_it() -> None:
    async def scenario(site: Site) -> None:
        site.fail_flush(0)
        with pytest.raises(VolumeError):
            await site.store.committer.commit(site.view, 1, b"")
        sizes = [volume.size_bytes for volume in site.volumes]
        free = site.store.transfers._planner.space.free_bytes
        view = await site.store.admission.create("new", SCHEMA.describe(), layers=[0], experts=400, host_bytes=8 * MIB)
        assert site.volumes[0].size_bytes == sizes[0]
        assert site.volumes[1].size_bytes > sizes[1]
        assert free < 3 * 400 * SCHEMA.record_bytes <= site.store.transfers._planner.space.free_bytes
        assert view.namespace.steps.committed_step is None

    on_site(scenario)


def test_where_every_volume_is_fenced_no_namespace_gets_room() -> None:
    async def scenario(site: Site) -> None:
        for index in range(2):
            site.store.transfers._planner.space.fences.fail_flush(index, VolumeError("as planned"))
        with pytest.raises(CapacityError, match=r"^volume 0 is fenced \(a flush failed: as planned\), volume 1 .*none may grow$"):
            await site.store.admission.create("new", SCHEMA.describe(), layers=[0], experts=400, host_bytes=8 * MIB)

    on_site(scenario)


def test_on_volumes_of_a_fixed_size_the_refusal_of_a_namespace_names_the_fence() -> None:
    async def scenario(site: Site) -> None:
        site.fail_flush(0)
        with pytest.raises(VolumeError):
            await site.store.committer.commit(site.view, 1, b"")
        with pytest.raises(CapacityError, match=r"^volume 0 is fenced .*restart the daemon .* bytes are missing; add a volume"):
            await site.store.admission.create("new", SCHEMA.describe(), layers=[0], experts=42, host_bytes=8 * MIB)
        await site.restart()
        await site.store.admission.create("new", SCHEMA.describe(), layers=[0], experts=42, host_bytes=8 * MIB)

    on_site(scenario, volume_size_bytes=14 * MIB)
