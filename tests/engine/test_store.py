"""The store against a model in plain tensors: every view sees exactly what the calls so far mean, at every step."""

from __future__ import annotations

import asyncio

import pytest
import torch

from paramstore.core.optimizers import AdamW
from paramstore.core.schema import Schema
from paramstore.errors import (
    SchemaMismatch,
    WriterFenced,
)
from paramstore_testkit.disks.machine import Machine
from paramstore_testkit.oracles.experts import check_expert
from paramstore_testkit.stores.settling import cut_of, settle_cut
from paramstore_testkit.stores.small_store import initialize, leased, read_record, run
from paramstore_testkit.stores.trained_store import EXPERTS, KEYS, LAYERS, Model, make_writer, push


def test_a_trained_store_equals_torch_bitwise_whatever_the_budget() -> None:
    async def scenario(host_budget_bytes: int) -> None:
        store = Machine(seed=1, host_budget_bytes=host_budget_bytes).start()
        view, model = await make_writer(store), Model()
        for step in range(1, 6):
            keys = [key for key in KEYS if (key[1] + step) % 3]
            push(store, view, keys, step)
            await store.applies.apply(view, AdamW(lr=1e-2), 1.0)
            model.apply(keys, step)
            model.check(await leased(store, view, KEYS[:2]))
            await store.committer.commit(view, step, b"")
        for key in KEYS:
            model.check(await leased(store, view, [key]))

    run(scenario(64 << 20))
    run(scenario(6 << 20))


def test_calls_take_effect_in_call_order_even_if_not_awaited() -> None:
    async def scenario() -> None:
        store = Machine(seed=2).start()
        view, model = await make_writer(store), Model()
        push(store, view, KEYS, 1)
        first = asyncio.ensure_future(store.applies.apply(view, AdamW(lr=1e-2), 1.0))
        push(store, view, KEYS[:3], 2)
        second = asyncio.ensure_future(store.applies.apply(view, AdamW(lr=1e-2), 1.0))
        commit = asyncio.ensure_future(store.committer.commit(view, 1, b""))
        model.apply(KEYS, 1)
        model.apply(KEYS[:3], 2)
        model.check(await leased(store, view, KEYS[:6]))
        await asyncio.gather(first, second, commit)
        assert view.namespace.steps.ledger.steps() == [0, 1]

    run(scenario())


def test_a_commit_leaves_pending_gradients_pending() -> None:
    async def scenario() -> None:
        store = Machine(seed=3).start()
        view, model = await make_writer(store), Model()
        push(store, view, KEYS[:2], 1)
        await store.committer.commit(view, 1, b"")
        model.check(await leased(store, view, KEYS[:2]))
        assert store.applies.abort(view) == 2

    run(scenario())


def test_a_reader_stands_on_its_step_until_it_refreshes() -> None:
    async def scenario() -> None:
        store = Machine(seed=4, reader_slots=6).start()
        writer, model, before = await make_writer(store), Model(), Model()
        reader = await store.admission.open("moe", mode="read", at=None, host_bytes=None)
        push(store, writer, KEYS, 1)
        await store.applies.apply(writer, AdamW(lr=1e-2), 1.0)
        model.apply(KEYS, 1)
        before.check(await leased(store, reader, KEYS[:3]))
        await store.committer.commit(writer, 1, b"")
        before.check(await leased(store, reader, KEYS[:3]))
        model.check(await leased(store, writer, KEYS[:3]))
        assert store.refresh(reader) == 1
        model.check(await leased(store, reader, KEYS[:3]))

    run(scenario())


def test_rollback_takes_back_everything_since_the_committed_step() -> None:
    async def scenario() -> None:
        store = Machine(seed=6, host_budget_bytes=6 << 20).start()
        view, model = await make_writer(store), Model()
        push(store, view, KEYS, 1)
        await store.applies.apply(view, AdamW(lr=1e-2), 1.0)
        await store.write_back(view, None)
        push(store, view, KEYS[:1], 2)
        epoch = view.namespace.epoch
        assert await store.rollback(view, 0) == epoch + 1
        model.check(await leased(store, view, KEYS[:2]))
        assert store.applies.abort(view) == 0
        push(store, view, KEYS[:2], 3)
        await store.applies.apply(view, AdamW(lr=1e-2), 1.0)
        model.apply(KEYS[:2], 3)
        model.check(await leased(store, view, KEYS[:2]))

    run(scenario())


def test_a_new_writer_fences_the_old_and_starts_at_the_committed_step() -> None:
    async def scenario() -> None:
        store = Machine(seed=7).start()
        old, model = await make_writer(store), Model()
        push(store, old, KEYS, 1)
        await store.applies.apply(old, AdamW(lr=1e-2), 1.0)
        new = await store.admission.open("moe", mode="write", at=None, host_bytes=None)
        with pytest.raises(WriterFenced):
            push(store, old, KEYS, 2)
        with pytest.raises(WriterFenced):
            await store.committer.commit(old, 1, b"")
        model.check(await leased(store, new, KEYS[:2]))

    run(scenario())


def test_a_store_reopens_at_the_last_committed_step() -> None:
    async def scenario() -> None:
        machine = Machine(seed=8)
        store = machine.start()
        view, model = await make_writer(store), Model()
        push(store, view, KEYS, 1)
        await store.applies.apply(view, AdamW(lr=1e-2), 1.0)
        await store.committer.commit(view, 7, b"state at 7")
        model.apply(KEYS, 1)
        push(store, view, KEYS, 2)
        await store.applies.apply(view, AdamW(lr=1e-2), 1.0)
        await store.write_back(view, None)
        await machine.crash()
        again = machine.start()
        view = await again.admission.open("moe", mode="write", at=None, host_bytes=None)
        assert view.namespace.steps.ledger.steps() == [0, 7]
        assert view.namespace.steps.ledger.step(7).extra == b"state at 7"
        for key in KEYS:
            model.check(await leased(again, view, [key]))
        push(again, view, KEYS, 2)
        await again.applies.apply(view, AdamW(lr=1e-2), 1.0)
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
            await store.applies.apply(view, AdamW(), 1.0)
            await store.committer.commit(view, step, b"")
            free.append((await store.stats())["tiers"]["nvme"]["free_bytes"])
        assert view.namespace.steps.ledger.steps() == [6, 7]
        assert free[2] == free[-1]

    run(scenario())


def test_reading_a_record_gives_masters_and_moments() -> None:
    async def scenario() -> None:
        store = Machine(seed=10, host_budget_bytes=6 << 20).start()
        view, model = await make_writer(store), Model()
        push(store, view, KEYS, 1)
        await store.applies.apply(view, AdamW(lr=1e-2), 1.0)
        model.apply(KEYS, 1)
        reader = await store.admission.open("moe", mode="read", at=None, host_bytes=None)
        for key in KEYS:
            identity, found = await read_record(store, view, key)
            assert identity.version == 1
            check_expert(found, model.working[key], key=key, step="working")
            assert (await read_record(store, reader, key))[0].version == 0

    run(scenario())


def test_endless_prefetch_does_not_starve_an_update_over_a_two_slot_arena() -> None:
    async def scenario() -> None:
        machine = Machine(seed=20, host_budget_bytes=6 << 20)
        store = machine.start()
        view, model = await make_writer(store), Model()
        arena = view.namespace.memory.working
        while arena.slots.free_count + len(view.namespace.residency.resident) > 2:
            if not arena.slots.free_count:
                await store.evict(view, None, "optim")
            arena.slots.take()
        is_over = False

        async def prefetch_for_ever() -> None:
            while not is_over:
                await store.access.wait_prefetch(store.access.prefetch(view, KEYS, "optim", None))
                await asyncio.sleep(0)

        prefetching = asyncio.ensure_future(prefetch_for_ever())
        for step in range(1, 4):
            push(store, view, KEYS, step)
            await store.applies.apply(view, AdamW(lr=1e-2), 1.0)
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
        values = {
            key: {"w": torch.full((3, 5), number, dtype=torch.bfloat16), "v": torch.full((7,), number, dtype=torch.uint8)}
            for number, key in enumerate(KEYS)
        }
        await initialize(store, view, lambda key: values[key])
        with pytest.raises(SchemaMismatch, match="gradients"):
            store.applies.push(view, [])
        await store.committer.commit(view, 1, b"")
        reader = await store.admission.open("served", mode="read", at=None, host_bytes=None)
        for seen_by in (view, reader):
            found = await leased(store, seen_by, KEYS[:2])
            assert all(torch.equal(found[key][name], values[key][name]) for key in found for name in found[key])

    run(scenario())


def test_a_writer_that_waits_for_a_commit_keeps_nobody_else_from_opening() -> None:
    async def scenario() -> None:
        store = Machine(seed=28, volume_bytes=24 << 20).start()
        slow = await make_writer(store)
        cut_of(store.transfers._planner, slow.namespace)  # a commit that takes its time
        waiting = asyncio.ensure_future(store.admission.open("moe", mode="write", at=None, host_bytes=None))
        await asyncio.sleep(0)
        reader = await store.admission.open("moe", mode="read", at=None, host_bytes=None)
        Model().check(await leased(store, reader, KEYS[:2]))
        assert not waiting.done()
        settle_cut(store.transfers._planner, slow.namespace, is_published=False)
        store.transfers.carry_out()
        new = await waiting
        with pytest.raises(WriterFenced):
            push(store, slow, KEYS, 1)
        push(store, new, KEYS, 1)

    run(scenario())
