"""Write-back: ahead of eviction and no more than it needs, on request, and over failures and full volumes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec
import pytest

from paramstore.core.residency import Working
from paramstore.engine.records.cleaner import Cleaner
from paramstore.engine.store import Store
from paramstore.engine.tables.namespace import NamespaceState, View
from paramstore.engine.tables.requests import Urgency
from paramstore.errors import CapacityError, ParamStoreError, SchemaMismatch, StepFailed, UnknownKey
from paramstore.testing.volumes import Fault, FaultyVolume
from paramstore_testkit.disks.machine import Machine
from paramstore_testkit.stores.small_store import OPTIONS, SCHEMA, create, keys_of, lease, push, run, train, turns, versions

A, B, C, D = ((0, expert) for expert in range(4))


class Site:
    """A store whose every record is dirty in its slot, at version 1."""

    def __init__(self, **machine: Any) -> None:
        self.machine = Machine(**machine)
        self.volume = FaultyVolume(self.machine.disks[0], [])
        self.machine.volumes[0] = self.volume
        self.store: Store = self.machine.start()
        self.view: View

    @property
    def cleaner(self) -> Cleaner:
        return self.store._cleaner

    @property
    def namespace(self) -> NamespaceState:
        return self.view.namespace

    def states(self) -> list[Working]:
        return [working.state for working in self.namespace.residency.working.values()]

    def fail_writes(self, *numbers: int) -> None:
        """The writes of these numbers from now on fail, from 1."""
        self.volume.plan = tuple(Fault("write", self.volume.calls["write"] + number) for number in numbers)

    def leave_extents(self, count: int) -> None:
        space = self.store.transfers._planner.space
        record_bytes = self.namespace.schema.record_bytes
        while space.missing_bytes(count + 1, record_bytes, owner=self.namespace.name) == 0:
            assert space.reserve(record_bytes, owner=self.namespace.name) is not None

    async def idle(self) -> None:
        while not self.store.transfers.runner.is_idle:
            await asyncio.sleep(0)


def on_site(scenario: Callable[[Site], Coroutine[Any, Any, None]], **machine: Any) -> None:
    async def prepared() -> None:
        site = Site(**machine)
        site.view = await create(site.store)
        await train(site.store, site.view)
        assert site.states() == [Working.DIRTY] * 4
        await scenario(site)

    run(prepared())


# --- ahead of eviction


def test_cleaning_ahead_writes_only_what_eviction_will_need() -> None:
    async def scenario(site: Site) -> None:
        slots = site.namespace.memory.working.slots
        while slots.free_count:
            slots.take()
        site.cleaner.clean_ahead(site.namespace, 0)
        assert site.states().count(Working.WRITING) == 0
        site.cleaner.clean_ahead(site.namespace, 2)
        assert site.states() == [Working.DIRTY, Working.DIRTY, Working.WRITING, Working.WRITING], "what goes first"
        site.cleaner.clean_ahead(site.namespace, 2)
        assert site.states().count(Working.WRITING) == 2, "those under way count"
        await site.idle()
        site.cleaner.clean_ahead(site.namespace, 3)
        assert site.states() == [Working.DIRTY, Working.WRITING, Working.CLEAN, Working.CLEAN], "clean ones count too"
        await site.idle()

    on_site(scenario)


def test_cleaning_ahead_needs_nothing_while_slots_are_free() -> None:
    async def scenario(site: Site) -> None:
        await site.store.evict(site.view, [A, B], None)
        site.cleaner.clean_ahead(site.namespace, 2)
        assert site.states() == [Working.ABSENT, Working.ABSENT, Working.DIRTY, Working.DIRTY]
        site.cleaner.clean_ahead(site.namespace, 3)
        assert site.states() == [Working.ABSENT, Working.ABSENT, Working.DIRTY, Working.WRITING]
        await site.idle()

    on_site(scenario)


# --- one record


def test_a_write_is_joined_by_who_wants_the_same_and_raised_to_their_class() -> None:
    async def scenario(site: Site) -> None:
        assert site.machine.workers is not None
        site.machine.workers.pause()
        first = asyncio.ensure_future(site.cleaner.write(site.namespace, A, Urgency.WRITE_BACK))
        await turns(1)
        _, transfer = site.store.transfers._under_way[site.namespace.residency.working[A]]
        second = asyncio.ensure_future(site.cleaner.write(site.namespace, A, Urgency.DEMAND))
        await turns(1)
        assert transfer.urgency is Urgency.DEMAND
        site.machine.workers.resume()
        assert await asyncio.gather(first, second) == [True, True]
        assert site.volume.calls["write"] > 0
        assert not await site.cleaner.write(site.namespace, A, Urgency.DEMAND), "there is nothing left to write"

    on_site(scenario)


@pytest.mark.parametrize(("failures", "survives"), [((1,), True), ((1, 2), False)])
def test_a_failed_write_is_tried_once_more_on_another_extent(failures: tuple[int, ...], survives: bool) -> None:
    async def scenario(site: Site) -> None:
        site.fail_writes(*failures)
        if survives:
            assert await site.cleaner.write(site.namespace, A, Urgency.DEMAND)
            assert site.namespace.residency.working[A].state is Working.CLEAN
        else:
            with pytest.raises(StepFailed, match=r"\(0, 0\) of 'moe': its write-back failed twice, on different extents"):
                await site.cleaner.write(site.namespace, A, Urgency.DEMAND)
            assert site.namespace.residency.working[A].state is Working.DIRTY
        (stats,) = site.store.transfers._planner.space.stats()
        assert stats.quarantined_bytes == len(failures) * SCHEMA.record_bytes

    on_site(scenario)


def test_a_record_that_a_rollback_discards_is_written_no_more() -> None:
    async def scenario(site: Site) -> None:
        writing = asyncio.ensure_future(site.cleaner.write(site.namespace, A, Urgency.DEMAND))
        await turns(1)
        await site.store.rollback(site.view, 0)
        outcome = (await asyncio.gather(writing, return_exceptions=True))[0]
        assert outcome is True or isinstance(outcome, StepFailed)
        assert site.states() == [Working.ABSENT] * 4

    on_site(scenario)


# --- full volumes


def test_a_write_without_space_or_hope_is_refused_and_names_the_flag() -> None:
    async def scenario(site: Site) -> None:
        await site.store.write_back(site.view, None)
        await train(site.store, site.view, [A])
        site.leave_extents(0)
        with pytest.raises(CapacityError, match=r"28672 bytes is free for namespace 'moe': add a volume \(--add-volume\)$"):
            await site.cleaner.write(site.namespace, A, Urgency.DEMAND)
        assert site.namespace.residency.working[A].state is Working.DIRTY

    on_site(scenario)


@pytest.mark.parametrize("extents", [1, 2])
def test_records_written_through_few_extents_wait_for_each_other(extents: int) -> None:
    async def scenario(site: Site) -> None:
        await site.store.write_back(site.view, None)
        await train(site.store, site.view)
        site.leave_extents(extents)
        writes = [site.cleaner.write(site.namespace, key, Urgency.DEMAND) for key in keys_of(site.view)]
        assert await asyncio.gather(*writes) == [True] * 4
        assert site.states() == [Working.CLEAN] * 4

    on_site(scenario)


def test_a_commit_writes_through_few_extents_whichever_records_get_them_first() -> None:
    async def scenario(site: Site) -> None:
        await site.store.write_back(site.view, None)
        await train(site.store, site.view)
        site.leave_extents(1)
        site.store.transfers._planner.working.begin_write(site.namespace, site.namespace.residency.working[D], Urgency.WRITE_BACK)
        await site.store.committer.commit(site.view, 1, b"")
        assert await versions(site.store, site.view) == [2] * 4
        assert site.view.namespace.steps.ledger.steps() == [0, 1]

    on_site(scenario)


# --- on request


def test_write_back_writes_what_is_dirty_and_says_how_much() -> None:
    async def scenario(site: Site) -> None:
        assert await site.store.write_back(site.view, [B, B]) == {"written": 1, "bytes": SCHEMA.record_bytes}
        assert site.states() == [Working.DIRTY, Working.CLEAN, Working.DIRTY, Working.DIRTY]
        assert await site.store.write_back(site.view, None) == {"written": 3, "bytes": 3 * SCHEMA.record_bytes}
        assert await site.store.write_back(site.view, None) == {"written": 0, "bytes": 0}
        assert site.view.namespace.steps.ledger.steps() == [0], "written is not committed"
        with pytest.raises(UnknownKey):
            await site.store.write_back(site.view, [(9, 9)])

    on_site(scenario)


def test_eviction_writes_dirty_records_first_and_names_what_is_in_use() -> None:
    async def scenario(site: Site) -> None:
        held = await lease(site.store, site.view, [A])
        answer = await site.store.evict(site.view, [A, B], None)
        assert answer["skipped"] == [[0, 0]]
        assert site.states() == [Working.ABSENT, Working.ABSENT, Working.DIRTY, Working.DIRTY]
        assert sorted(site.namespace.residency.copies) == [A, C, D]
        site.store.access.release(site.view, held.lease_id)
        assert (await site.store.evict(site.view, None, None))["skipped"] == []
        assert not site.namespace.residency.copies
        assert not site.namespace.residency.resident
        assert await versions(site.store, site.view) == [1] * 4, "nothing was lost"

    on_site(scenario)


@pytest.mark.parametrize(("part", "params", "working"), [("param", 0, 4), ("optim", 4, 0)])
def test_one_part_can_be_evicted_alone(part: str, params: int, working: int) -> None:
    async def scenario(site: Site) -> None:
        answer = await site.store.evict(site.view, None, part)
        assert answer == {"evicted": 4, "skipped": []}
        assert (len(site.namespace.residency.copies), len(site.namespace.residency.resident)) == (params, working)

    on_site(scenario)


def test_eviction_refuses_what_is_not_there_and_changes_nothing() -> None:
    async def scenario(site: Site) -> None:
        with pytest.raises(UnknownKey):
            await site.store.evict(site.view, [A, (9, 9)], None)
        with pytest.raises(SchemaMismatch):
            await site.store.evict(site.view, [A], "gradients")
        assert site.states() == [Working.DIRTY] * 4
        assert len(site.namespace.residency.copies) == 4

    on_site(scenario)


def test_a_write_back_that_fails_tells_the_caller() -> None:
    async def scenario(site: Site) -> None:
        site.volume.plan = (Fault("write", 1, forever=True),)
        with pytest.raises(ParamStoreError, match="volume 0 is fenced"):
            await site.store.write_back(site.view, None)
        await site.idle()
        assert site.states() == [Working.DIRTY] * 4

    on_site(scenario)


# --- the limit on dirty bytes


def limit(site: Site, records: int) -> None:
    site.namespace.memory.working.dirty_limit_bytes = records * SCHEMA.record_bytes


def test_without_a_limit_nothing_is_written_before_eviction_or_a_commit_needs_it() -> None:
    async def scenario(site: Site) -> None:
        site.cleaner.clean_ahead(site.namespace, 0)
        await site.idle()
        assert site.states() == [Working.DIRTY] * 4

    on_site(scenario)


def test_what_is_dirty_beyond_the_limit_is_written_in_the_background_those_first_that_changed_longest_ago() -> None:
    async def scenario(site: Site) -> None:
        await train(site.store, site.view, [A, C])
        limit(site, 3)
        site.machine.workers.pause()
        site.cleaner.clean_ahead(site.namespace, 0)
        assert site.states() == [Working.DIRTY, Working.DIRTY, Working.DIRTY, Working.WRITING], "D was updated before B"
        _, transfer = site.store.transfers._under_way[site.namespace.residency.working[D]]
        assert transfer.urgency is Urgency.WRITE_BACK
        limit(site, 2)
        site.cleaner.clean_ahead(site.namespace, 0)
        assert site.states() == [Working.DIRTY, Working.WRITING, Working.DIRTY, Working.WRITING]
        site.cleaner.clean_ahead(site.namespace, 0)
        assert site.states().count(Working.WRITING) == 2, "what is being written is not dirty"
        site.machine.workers.resume()

    on_site(scenario)


def test_an_apply_leaves_no_more_dirty_than_the_limit_and_the_commit_after_it_writes_the_rest() -> None:
    async def scenario(site: Site) -> None:
        limit(site, 1)
        await train(site.store, site.view)
        await site.idle()
        assert sorted(site.states()) == [Working.CLEAN] * 3 + [Working.DIRTY]
        answer = await site.store.committer.commit(site.view, 1, b"")
        assert (answer["records"], answer["bytes_written"]) == (4, SCHEMA.record_bytes)
        assert await versions(site.store, site.view) == [2] * 4

    on_site(scenario)


def test_a_record_that_an_apply_called_already_will_change_is_not_written_for_the_limit() -> None:
    async def scenario(site: Site) -> None:
        limit(site, 0)
        push(site.store, site.view, [A, B, C])
        apply = site.store.applies.apply(site.view, OPTIONS, 1.0)
        site.cleaner.clean_ahead(site.namespace, 0)
        assert site.states() == [Working.DIRTY] * 3 + [Working.WRITING]
        await apply

    on_site(scenario)


def test_a_limit_on_volumes_without_space_writes_what_it_can_and_fails_nobody() -> None:
    async def scenario(site: Site) -> None:
        await site.store.write_back(site.view, None)
        await train(site.store, site.view)
        for working in site.namespace.residency.working.values():
            if working.reserved is not None:
                site.store.transfers._planner.space.release(working.reserved)
                working.reserved = None
        site.leave_extents(1)
        limit(site, 0)
        site.cleaner.clean_ahead(site.namespace, 0)
        assert site.states().count(Working.WRITING) == 1
        await site.idle()

    on_site(scenario)


def test_the_figures_tell_what_a_commit_would_wait_for_and_the_limit() -> None:
    async def scenario() -> None:
        machine = Machine()
        machine.config = msgspec.structs.replace(machine.config, dirty_limit_bytes=3 * SCHEMA.record_bytes)
        store = machine.start()
        view = await create(store)
        push(store, view, keys_of(view))
        await store.applies.apply(view, OPTIONS, 1.0)
        while not store.transfers.runner.is_idle:
            await asyncio.sleep(0)
        stats: Any = await store.stats()
        figures = stats["namespaces"]["moe"]
        assert figures["dirty_bytes"] == figures["dirty_limit_bytes"] == 3 * SCHEMA.record_bytes

    run(scenario())
