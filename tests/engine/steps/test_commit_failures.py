"""A commit that fails at any stage leaves the committed step as it was; of one whose outcome is unknown the disk decides."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import pytest

from paramstore.errors import CatalogError, ParamStoreError
from paramstore.limits import RETAINED_STEPS
from paramstore.storage.catalog.base import Catalog
from paramstore.storage.catalog.lmdb_catalog import LmdbCatalog
from paramstore.testing.catalogs import FaultyCatalog
from paramstore_testkit.disks.machine import Machine
from paramstore_testkit.stores.commit_site import Site, fail, on_site
from paramstore_testkit.stores.small_store import create, keys_of, run, train, versions

# --- failures


@pytest.mark.parametrize("stage", ["reserve", "record", "note", "flush", "apply"])
def test_a_failure_at_any_stage_leaves_the_committed_step_in_memory_and_on_disk(stage: str) -> None:
    async def scenario(site: Site) -> None:
        fail(site, stage)
        with pytest.raises(ParamStoreError):
            await site.store.committer.commit(site.view, 1, b"")
        assert site.view.namespace.steps.ledger.steps() == [0]
        assert site.view.namespace.steps.cut is None
        assert not any(working.cut_record for working in site.view.namespace.residency.working.values())
        view = await site.reopened()
        assert view.namespace.steps.committed_step == 0
        assert await versions(site.store, view) == [0, 0, 0, 0]

    on_site(scenario)


@pytest.mark.parametrize("stage", ["reserve", "note", "apply"])
def test_the_same_step_may_be_tried_again_after_a_commit_that_failed(stage: str) -> None:
    async def scenario(site: Site) -> None:
        fail(site, stage)
        with pytest.raises(ParamStoreError):
            await site.store.committer.commit(site.view, 1, b"")
        fail(site, "")
        assert (await site.store.committer.commit(site.view, 1, b""))["records"] == 4
        view = await site.reopened()
        assert view.namespace.steps.ledger.steps() == [0, 1]
        assert await versions(site.store, view) == [1, 1, 1, 1]

    on_site(scenario)


def test_a_cut_that_failed_before_its_transaction_is_in_the_next_one_with_what_came_after() -> None:
    async def scenario(site: Site) -> None:
        fail(site, "reserve")
        with pytest.raises(CatalogError):
            await site.store.committer.commit(site.view, 1, b"")
        fail(site, "")
        await train(site.store, site.view, keys_of(site.view)[:2])
        await site.store.committer.commit(site.view, 1, b"")
        view = await site.reopened()
        assert await versions(site.store, view) == [2, 2, 1, 1]

    on_site(scenario)


@pytest.mark.parametrize("stage", ["reserve", "record", "flush", "apply"])
def test_a_failed_commit_gives_its_note_slot_back(stage: str) -> None:
    async def scenario(site: Site) -> None:
        free = site.free_note_slots
        fail(site, stage)
        for _ in range(3):
            with pytest.raises(ParamStoreError):
                await site.store.committer.commit(site.view, 1, b"")
        assert site.free_note_slots == free

    on_site(scenario)


def test_steps_that_go_give_their_note_slots_back() -> None:
    async def scenario(site: Site) -> None:
        free = site.free_note_slots
        for step in range(1, 9):
            await site.store.committer.commit(site.view, step, b"")
            assert site.free_note_slots == free + 1 - min(step + 1, RETAINED_STEPS)

    on_site(scenario)


def test_a_rollback_gives_no_note_slot_of_a_retained_step_back() -> None:
    async def scenario(site: Site) -> None:
        await site.store.committer.commit(site.view, 1, b"")
        free = site.free_note_slots
        await site.store.rollback(site.view, 1)
        assert site.free_note_slots == free
        assert site.view.namespace.steps.ledger.steps() == [0, 1]

    on_site(scenario)


# --- an unknown outcome


@pytest.mark.parametrize("outcome", ["lost", "durable"])
@pytest.mark.parametrize("is_real", [False, True])
def test_an_unknown_outcome_is_what_the_reopened_catalog_says(
    outcome: Literal["lost", "durable"], is_real: bool, tmp_path: Path
) -> None:
    async def scenario() -> None:
        machine = Machine(seed=3)
        inner: Catalog = LmdbCatalog(tmp_path / "catalog", store_uuid=bytes(range(16))) if is_real else machine.durable
        machine.catalog = faulty = FaultyCatalog(inner, fail_at=0, outcome=outcome)
        store = machine.start()
        view = await create(store)
        await train(store, view)
        faulty._fail_at = faulty.applies + 1
        if outcome == "durable":
            assert (await store.committer.commit(view, 1, b""))["records"] == 4
            assert view.namespace.steps.ledger.steps() == [0, 1]
        else:
            with pytest.raises(CatalogError, match="outcome is unknown"):
                await store.committer.commit(view, 1, b"")
            assert view.namespace.steps.ledger.steps() == [0]
            assert (await store.committer.commit(view, 1, b""))["records"] == 4
        await train(store, view)
        await store.committer.commit(view, 2, b"")
        assert await versions(store, view) == [2, 2, 2, 2]
        inner.close()

    run(scenario())


@pytest.mark.parametrize("outcome", ["lost", "durable"])
def test_an_unknown_rollback_is_resolved_both_ways(outcome: Literal["lost", "durable"]) -> None:
    async def scenario() -> None:
        machine = Machine(seed=4)
        machine.catalog = faulty = FaultyCatalog(machine.durable, fail_at=0, outcome=outcome)
        store = machine.start()
        view = await create(store)
        await train(store, view)
        epoch = view.namespace.epoch
        faulty._fail_at = faulty.applies + 1
        if outcome == "lost":
            with pytest.raises(CatalogError):
                await store.rollback(view, 0)
            assert view.namespace.epoch == epoch
            assert await versions(store, view) == [1, 1, 1, 1], "nothing has changed"
            assert await store.rollback(view, 0) == epoch + 1
        else:
            assert await store.rollback(view, 0) == epoch + 1
        assert await versions(store, view) == [0, 0, 0, 0]

    run(scenario())


@pytest.mark.parametrize("outcome", ["lost", "durable"])
def test_a_new_namespace_whose_transaction_is_unknown_is_there_or_not_and_the_catalog_goes_on(
    outcome: Literal["lost", "durable"],
) -> None:
    async def scenario() -> None:
        machine = Machine(seed=5, volume_size_bytes=14 << 20)
        machine.catalog = faulty = FaultyCatalog(machine.durable, fail_at=0, outcome=outcome)
        store = machine.start()
        other = await create(store, "other", host_bytes=8 << 20)
        await train(store, other)
        faulty._fail_at = faulty.applies + 1
        if outcome == "durable":
            view = await create(store, "moe")
        else:
            with pytest.raises(CatalogError):
                await create(store, "moe")
            assert [row["name"] for row in store.admission.list_namespaces()] == ["other"]
            await store.committer.commit(other, 1, b"")
            view = await create(store, "moe")
        await store.committer.commit(other, 2, b"")
        assert await versions(store, view) == [0, 0, 0, 0]

    run(scenario())
