"""What a store refuses, and that it is then as it was."""

from __future__ import annotations

import pytest

from paramstore.core.optimizers import SGD, AdamW
from paramstore.errors import (
    CapacityError,
    LeaseError,
    NamespaceExists,
    SchemaMismatch,
    StepDropped,
    StepOutOfOrder,
    UnknownKey,
    UnknownNamespace,
    WaitTimeout,
)
from paramstore_testkit.disks.machine import Machine
from paramstore_testkit.stores.small_store import SCHEMA, lease_ids, leased, run
from paramstore_testkit.stores.trained_store import EXPERTS, KEYS, LAYERS, Model, make_writer, push


def test_options_of_another_optimizer_change_nothing() -> None:
    async def scenario() -> None:
        store = Machine(seed=9).start()
        view, model = await make_writer(store), Model()
        push(store, view, KEYS[:2], 1)
        with pytest.raises(SchemaMismatch, match="SGD cannot update"):
            await store.applies.apply(view, SGD(lr=1e-2), 1.0)
        assert view.namespace.writing.broken is None
        assert len(view.namespace.writing.pending) == 2
        await store.applies.apply(view, AdamW(lr=1e-2), 1.0)
        model.apply(KEYS[:2], 1)
        model.check(await leased(store, view, KEYS[:2]))

    run(scenario())


def test_bad_requests_are_refused_and_change_nothing() -> None:
    async def scenario() -> None:
        store = Machine(seed=11).start()
        view, model = await make_writer(store), Model()
        with pytest.raises(UnknownNamespace, match="moe"):
            await store.admission.open("nope", mode="read", at=None, host_bytes=None)
        with pytest.raises(NamespaceExists, match="committed at step 0"):
            await store.admission.create("moe", SCHEMA.describe(), layers=range(LAYERS), experts=EXPERTS, host_bytes=None)
        with pytest.raises(UnknownKey, match=r"\(9, 0\)"):
            store.access.acquire(view, next(lease_ids), [(0, 0), (9, 0)], "param")
        with pytest.raises(SchemaMismatch, match="optim"):
            store.access.acquire(view, next(lease_ids), KEYS[:1], "optim")
        with pytest.raises(SchemaMismatch, match="nope"):
            store.access.prefetch(view, KEYS, "nope", None)
        with pytest.raises(UnknownKey):
            push(store, view, [*KEYS, (0, 99)], 1)
        push(store, view, KEYS[:1], 1)
        with pytest.raises(StepOutOfOrder, match="0 is committed"):
            await store.committer.commit(view, 0, b"")
        assert store.applies.abort(view) == 1
        assert (await store.committer.commit(view, 0, b""))["records"] == 0  # the same step again, nothing happened since
        with pytest.raises(CapacityError, match="extra"):
            await store.committer.commit(view, 1, bytes(70_000))
        with pytest.raises(StepOutOfOrder):
            await store.initializer.begin(view)
        with pytest.raises(StepDropped):
            await store.rollback(view, 5)
        with pytest.raises(StepDropped):
            view.namespace.steps.ledger.step(5)
        reader = await store.admission.open("moe", mode="read", at=0, host_bytes=None)
        with pytest.raises(SchemaMismatch, match="reading"):
            push(store, reader, KEYS, 1)
        model.check(await leased(store, view, KEYS[:3]))

    run(scenario())


def test_more_keys_than_slots_is_a_capacity_error_and_own_leases_a_lease_error() -> None:
    async def scenario() -> None:
        store = Machine(seed=12).start()
        view = await make_writer(store)
        cap = store.describe_view(view)["lease_slots"]
        assert cap < 2 * len(KEYS)
        view.lease_slots = 4
        with pytest.raises(CapacityError, match="was promised 4 slots when it opened"):
            store.access.acquire(view, next(lease_ids), KEYS[:5], "param")
        first = next(lease_ids)
        await store.access.wait_lease(store.access.acquire(view, first, KEYS[:3], "param"), 1.0)
        with pytest.raises(LeaseError, match="release some first"):
            store.access.acquire(view, next(lease_ids), KEYS[3:5], "param")
        store.access.release(view, first)
        await leased(store, view, KEYS[1:5])

    run(scenario())


def test_a_budget_too_small_for_a_record_is_refused_with_the_size_needed() -> None:
    async def scenario() -> None:
        store = Machine(seed=13, host_budget_bytes=1 << 20).start()
        with pytest.raises(CapacityError, match="host_budget"):
            await make_writer(store)
        assert store.admission.list_namespaces() == []

    run(scenario())


def test_a_volume_too_small_is_refused_at_create_with_the_bytes_missing() -> None:
    async def scenario() -> None:
        store = Machine(seed=14, volume_bytes=12 << 20, volume_size_bytes=12 << 20).start()
        with pytest.raises(CapacityError, match="bytes are missing"):
            await store.admission.create("big", SCHEMA.describe(), layers=range(64), experts=64, host_bytes=None)
        assert store.admission.list_namespaces() == []

    run(scenario())


def test_a_lease_that_waits_times_out_and_leaves_nothing_behind() -> None:
    async def scenario() -> None:
        machine = Machine(seed=15)
        store = machine.start()
        view = await make_writer(store)
        await store.evict(view, None, None)
        machine.workers.pause()
        request = store.access.acquire(view, next(lease_ids), KEYS[:2], "param")
        with pytest.raises(WaitTimeout, match="2 still loading"):
            await store.access.wait_lease(request, 0.0)
        assert not view.leased
        machine.workers.resume()
        await leased(store, view, KEYS[:2])

    run(scenario())
