"""The store against a model in plain tensors: every view sees exactly what the calls so far mean, at every step."""

from __future__ import annotations

import asyncio

import pytest
import torch

from paramstore.core.optimizers import SGD, AdamW
from paramstore.core.schema import Schema
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
    WriterFenced,
)
from paramstore.optim.tensors import field_tensor
from paramstore.testing.machine import Machine, PlainSegment
from paramstore.testing.trained_store import (
    EXPERTS,
    KEYS,
    LAYERS,
    SCHEMA,
    Model,
    image_of,
    lease_ids,
    leased,
    make_writer,
    push,
    run,
)


def test_a_trained_store_equals_torch_bitwise_whatever_the_budget() -> None:
    async def scenario(host_budget_bytes: int) -> None:
        store = Machine(seed=1, host_budget_bytes=host_budget_bytes).start()
        view, model = await make_writer(store), Model()
        for step in range(1, 6):
            keys = [key for key in KEYS if (key[1] + step) % 3]
            push(store, view, keys, step)
            await store.apply(view, AdamW(lr=1e-2), 1.0)
            model.apply(keys, step)
            model.check(await leased(store, view, KEYS[:2]))
            await store.commit(view, step, b"")
        for key in KEYS:
            model.check(await leased(store, view, [key]))

    run(scenario(64 << 20))
    run(scenario(6 << 20))


def test_calls_take_effect_in_call_order_even_if_not_awaited() -> None:
    async def scenario() -> None:
        store = Machine(seed=2).start()
        view, model = await make_writer(store), Model()
        push(store, view, KEYS, 1)
        first = asyncio.ensure_future(store.apply(view, AdamW(lr=1e-2), 1.0))
        push(store, view, KEYS[:3], 2)
        second = asyncio.ensure_future(store.apply(view, AdamW(lr=1e-2), 1.0))
        commit = asyncio.ensure_future(store.commit(view, 1, b""))
        model.apply(KEYS, 1)
        model.apply(KEYS[:3], 2)
        model.check(await leased(store, view, KEYS[:6]))
        await asyncio.gather(first, second, commit)
        assert store.steps(view) == [0, 1]

    run(scenario())


def test_a_commit_leaves_pending_gradients_pending() -> None:
    async def scenario() -> None:
        store = Machine(seed=3).start()
        view, model = await make_writer(store), Model()
        push(store, view, KEYS[:2], 1)
        await store.commit(view, 1, b"")
        model.check(await leased(store, view, KEYS[:2]))
        assert store.abort(view) == 2

    run(scenario())


def test_a_reader_stands_on_its_step_until_it_refreshes() -> None:
    async def scenario() -> None:
        store = Machine(seed=4).start()
        writer, model, before = await make_writer(store), Model(), Model()
        reader = await store.admission.open("moe", mode="read", at=None, host_bytes=None)
        push(store, writer, KEYS, 1)
        await store.apply(writer, AdamW(lr=1e-2), 1.0)
        model.apply(KEYS, 1)
        before.check(await leased(store, reader, KEYS[:3]))
        await store.commit(writer, 1, b"")
        before.check(await leased(store, reader, KEYS[:3]))
        model.check(await leased(store, writer, KEYS[:3]))
        assert store.refresh(reader) == 1
        model.check(await leased(store, reader, KEYS[:3]))

    run(scenario())


def test_readers_of_too_many_old_steps_lose_the_oldest() -> None:
    async def scenario() -> None:
        store = Machine(seed=5).start()
        writer = await make_writer(store)
        readers = []
        for step in range(1, 5):
            readers.append(await store.admission.open("moe", mode="read", at=None, host_bytes=None))
            push(store, writer, KEYS, step)
            await store.apply(writer, AdamW(), 1.0)
            await store.commit(writer, step, b"")
        await store.commit(writer, 9, b"")
        with pytest.raises(StepDropped, match="refresh"):
            await leased(store, readers[0], KEYS[:1])
        await leased(store, readers[-1], KEYS[:1])
        store.refresh(readers[0])
        await leased(store, readers[0], KEYS[:1])

    run(scenario())


def test_options_of_another_optimizer_change_nothing() -> None:
    async def scenario() -> None:
        store = Machine(seed=9).start()
        view, model = await make_writer(store), Model()
        push(store, view, KEYS[:2], 1)
        with pytest.raises(SchemaMismatch, match="SGD cannot update"):
            await store.apply(view, SGD(lr=1e-2), 1.0)
        assert view.namespace.broken is None
        assert len(view.namespace.pending) == 2
        await store.apply(view, AdamW(lr=1e-2), 1.0)
        model.apply(KEYS[:2], 1)
        model.check(await leased(store, view, KEYS[:2]))

    run(scenario())


def test_rollback_takes_back_everything_since_the_committed_step() -> None:
    async def scenario() -> None:
        store = Machine(seed=6, host_budget_bytes=6 << 20).start()
        view, model = await make_writer(store), Model()
        push(store, view, KEYS, 1)
        await store.apply(view, AdamW(lr=1e-2), 1.0)
        await store.write_back(view, None)
        push(store, view, KEYS[:1], 2)
        epoch = view.namespace.epoch
        assert await store.rollback(view, 0) == epoch + 1
        model.check(await leased(store, view, KEYS[:2]))
        assert store.abort(view) == 0
        push(store, view, KEYS[:2], 3)
        await store.apply(view, AdamW(lr=1e-2), 1.0)
        model.apply(KEYS[:2], 3)
        model.check(await leased(store, view, KEYS[:2]))

    run(scenario())


def test_a_new_writer_fences_the_old_and_starts_at_the_committed_step() -> None:
    async def scenario() -> None:
        store = Machine(seed=7).start()
        old, model = await make_writer(store), Model()
        push(store, old, KEYS, 1)
        await store.apply(old, AdamW(lr=1e-2), 1.0)
        new = await store.admission.open("moe", mode="write", at=None, host_bytes=None)
        with pytest.raises(WriterFenced):
            push(store, old, KEYS, 2)
        with pytest.raises(WriterFenced):
            await store.commit(old, 1, b"")
        model.check(await leased(store, new, KEYS[:2]))

    run(scenario())


def test_a_store_reopens_at_the_last_committed_step() -> None:
    async def scenario() -> None:
        machine = Machine(seed=8)
        store = machine.start()
        view, model = await make_writer(store), Model()
        push(store, view, KEYS, 1)
        await store.apply(view, AdamW(lr=1e-2), 1.0)
        await store.commit(view, 7, b"state at 7")
        model.apply(KEYS, 1)
        push(store, view, KEYS, 2)
        await store.apply(view, AdamW(lr=1e-2), 1.0)
        await store.write_back(view, None)
        await machine.crash()
        again = machine.start()
        view = await again.admission.open("moe", mode="write", at=None, host_bytes=None)
        assert again.steps(view) == [0, 7]
        assert again.extra(view, 7) == b"state at 7"
        for key in KEYS:
            model.check(await leased(again, view, [key]))
        push(again, view, KEYS, 2)
        await again.apply(view, AdamW(lr=1e-2), 1.0)
        model.apply(KEYS, 2)
        for key in KEYS:
            model.check(await leased(again, view, [key]))

    run(scenario())


def test_only_two_steps_are_retained_and_space_comes_back() -> None:
    async def scenario() -> None:
        store = Machine(seed=9).start()
        view = await make_writer(store)
        free = []
        for step in range(1, 8):
            push(store, view, KEYS, step)
            await store.apply(view, AdamW(), 1.0)
            await store.commit(view, step, b"")
            free.append((await store.stats())["tiers"]["nvme"]["free_bytes"])
        assert store.steps(view) == [6, 7]
        assert free[2] == free[-1]

    run(scenario())


def test_reading_a_record_gives_masters_and_moments() -> None:
    async def scenario() -> None:
        store = Machine(seed=10, host_budget_bytes=6 << 20).start()
        view, model = await make_writer(store), Model()
        push(store, view, KEYS, 1)
        await store.apply(view, AdamW(lr=1e-2), 1.0)
        model.apply(KEYS, 1)
        reader = await store.admission.open("moe", mode="read", at=None, host_bytes=None)
        for key in KEYS:
            target = PlainSegment(SCHEMA.record_bytes)
            identity = await store.read(view, key, target.view(0, SCHEMA.record_bytes))
            assert identity.version == 1
            moments = field_tensor(target.view(0, SCHEMA.record_bytes), SCHEMA.stored.field("exp_avg/w"))
            assert torch.equal(moments.view(3, 5), model.optimizers[key].state[model.params[key]["w"]]["exp_avg"])
            assert (await store.read(reader, key, target.view(0, SCHEMA.record_bytes))).version == 0

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
            store.acquire(view, next(lease_ids), [(0, 0), (9, 0)], "param")
        with pytest.raises(SchemaMismatch, match="optim"):
            store.acquire(view, next(lease_ids), KEYS[:1], "optim")
        with pytest.raises(SchemaMismatch, match="nope"):
            store.prefetch(view, KEYS, "nope", None)
        with pytest.raises(UnknownKey):
            push(store, view, [*KEYS, (0, 99)], 1)
        push(store, view, KEYS[:1], 1)
        with pytest.raises(StepOutOfOrder, match="0 is committed"):
            await store.commit(view, 0, b"")
        assert store.abort(view) == 1
        assert (await store.commit(view, 0, b""))["records"] == 0  # the same step again, nothing happened since
        with pytest.raises(CapacityError, match="extra"):
            await store.commit(view, 1, bytes(70_000))
        with pytest.raises(StepOutOfOrder):
            await store.initialize_begin(view)
        with pytest.raises(StepDropped):
            await store.rollback(view, 5)
        with pytest.raises(StepDropped):
            store.extra(view, 5)
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
        view.namespace.param_arena.planned_slots = 5
        with pytest.raises(CapacityError, match="may lease 4"):
            store.acquire(view, next(lease_ids), KEYS[:5], "param")
        first = next(lease_ids)
        await store.wait_lease(store.acquire(view, first, KEYS[:3], "param"), 1.0)
        with pytest.raises(LeaseError, match="release some first"):
            store.acquire(view, next(lease_ids), KEYS[3:5], "param")
        store.release(view, first)
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
        request = store.acquire(view, next(lease_ids), KEYS[:2], "param")
        with pytest.raises(WaitTimeout, match="2 still loading"):
            await store.wait_lease(request, 0.0)
        assert not view.leased
        machine.workers.resume()
        await leased(store, view, KEYS[:2])

    run(scenario())


def test_endless_prefetch_does_not_starve_an_update_over_a_two_slot_arena() -> None:
    async def scenario() -> None:
        machine = Machine(seed=20, host_budget_bytes=6 << 20)
        store = machine.start()
        view, model = await make_writer(store), Model()
        arena = view.namespace.working_arena
        while arena.slots.free_count + len(view.namespace.resident) > 2:
            if not arena.slots.free_count:
                await store.evict(view, None, "optim")
            arena.slots.take()
        is_over = False

        async def prefetch_for_ever() -> None:
            while not is_over:
                await store.wait_prefetch(store.prefetch(view, KEYS, "optim", None))
                await asyncio.sleep(0)

        prefetching = asyncio.ensure_future(prefetch_for_ever())
        for step in range(1, 4):
            push(store, view, KEYS, step)
            await store.apply(view, AdamW(lr=1e-2), 1.0)
            model.apply(KEYS, step)
        is_over = True
        await prefetching
        model.check(await leased(store, view, KEYS[:4]))

    run(scenario())


def test_a_param_schema_serves_what_it_was_given_and_takes_no_gradients() -> None:
    async def scenario() -> None:
        schema = Schema.param({"w": ((3, 5), "bfloat16"), "v": ((7,), "uint8")})
        store = Machine(seed=21).start()
        view = await store.admission.create("served", schema.describe(), layers=range(LAYERS), experts=EXPERTS, host_bytes=None)
        await store.initialize_begin(view)
        values = {}
        for number, key in enumerate(KEYS):
            values[key] = {"w": torch.full((15,), number, dtype=torch.bfloat16), "v": torch.full((7,), number, dtype=torch.uint8)}
            initial = image_of(values[key], schema.initial_fields(), schema.initial_bytes)
            await store.initialize_put(view, key, initial.view(0, schema.initial_bytes))
        await store.initialize_end(view)
        with pytest.raises(SchemaMismatch, match="gradients"):
            store.push(view, [])
        await store.commit(view, 1, b"")
        reader = await store.admission.open("served", mode="read", at=None, host_bytes=None)
        for seen_by in (view, reader):
            found = await leased(store, seen_by, KEYS[:3])
            assert all(torch.equal(found[key][name], values[key][name]) for key in found for name in found[key])

    run(scenario())


def test_a_writer_that_waits_for_a_commit_keeps_nobody_else_from_opening() -> None:
    async def scenario() -> None:
        store = Machine(seed=28, volume_bytes=24 << 20).start()
        slow = await make_writer(store)
        store._planner.cut(slow.namespace)  # a commit that takes its time
        waiting = asyncio.ensure_future(store.admission.open("moe", mode="write", at=None, host_bytes=None))
        await asyncio.sleep(0)
        reader = await store.admission.open("moe", mode="read", at=None, host_bytes=None)
        Model().check(await leased(store, reader, KEYS[:2]))
        assert not waiting.done()
        store._planner.settle_cut(slow.namespace, is_published=False)
        store._transfers.drain()
        new = await waiting
        with pytest.raises(WriterFenced):
            push(store, slow, KEYS, 1)
        push(store, new, KEYS, 1)

    run(scenario())
