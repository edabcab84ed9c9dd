"""Advances that wait for a buffer, and an apply that waits for its turn: what comes first, and what is given up."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from paramstore.core.schema import Schema
from paramstore.engine.tables.requests import PrefetchRequest
from paramstore.engine.transfers.advance import Advance, Advances
from paramstore.errors import StepFailed
from paramstore_testkit.disks.machine import Machine
from paramstore_testkit.stores.small_planner import SmallPlanner
from paramstore_testkit.stores.small_store import OPTIONS, SCHEMA, create, first_values, keys_of, push, run, train

EXACT = replace(SCHEMA, updates="exact")


@pytest.mark.parametrize("schema", [SCHEMA, EXACT])
def test_an_apply_that_took_what_a_rollback_dropped_never_runs(schema: Schema) -> None:
    async def scenario() -> None:
        machine = Machine(seed=1)
        store = machine.start()
        view = await create(store, schema=schema)
        push(store, view, keys_of(view))
        back = asyncio.ensure_future(store.rollback(view, 0))
        while not view.namespace.writing.turn.locked():
            await asyncio.sleep(0)
        late = asyncio.ensure_future(store.applies.apply(view, OPTIONS, 1.0))
        await back
        with pytest.raises(StepFailed, match="apply on 'moe': it was rolled back meanwhile"):
            await late
        assert await first_values(store, view) == [0.0, 1.0, 2.0, 3.0]
        await train(store, view)
        await store.committer.commit(view, 1, b"")
        trained = await first_values(store, view)
        await machine.crash()
        store = machine.start()
        view = await store.admission.open("moe", mode="write", at=None, host_bytes=None)
        assert await first_values(store, view) == trained
        assert view.namespace.writing.applies == 1

    run(scenario())


def test_a_cancelled_prefetch_gives_up_the_advances_that_have_no_buffer() -> None:
    async def scenario() -> None:
        store = Machine(seed=1).start()
        view = await create(store, schema=EXACT, experts=6)
        await train(store, view, [])
        await store.evict(view, None, None)
        keys, transfers, stats = keys_of(view), store.transfers, view.namespace.stats
        advances, buffers = transfers.advancer.of("moe"), transfers._buffers.of("moe").advance
        free = [buffers.pop() for _ in range(len(buffers))]
        given_up, wanted = (store.access.prefetch(view, some, "param", None) for some in (keys[:4], keys[2:]))
        request = store.access.acquire(view, 7, [keys[1]], "param")
        store.transfers.cancel_prefetch(given_up)
        assert [waiting.copy.key for waiting in advances.waiting] == keys[1:], "what nobody else waits for"
        assert keys[0] not in view.namespace.residency.copies
        buffers.extend(free)
        transfers.advancer._give_buffers(view.namespace)
        transfers.carry_out()
        await store.access.wait_lease(request, 5.0)
        assert (await store.access.wait_prefetch(wanted))["loaded"] == 4
        assert stats.records_advanced == 5
        assert not store.transfers._planner.space.pins

    run(scenario())


def test_those_who_wait_for_a_buffer_get_it_by_urgency_deadline_and_order() -> None:
    small = SmallPlanner(param_slots=4, schema=EXACT)
    view = small.writer()
    small.update()
    for key, deadline_s in zip(small.keys, (None, 2.0, 1.0, None), strict=True):
        request = PrefetchRequest(small.namespace, "param", deadline_s)
        small.planner.leases.request_prefetch(request, view, [key])
    advances, started = Advances(), [Advance(move, move.urgency) for move in small.start()]
    for advance in started:
        advances.add(advance)
    advances.raise_urgency(started[3])
    found = []
    while (head := advances.head()) is not None:
        found.append(head.copy.key)
        del advances.waiting[head]
    assert found == [small.keys[at] for at in (3, 2, 1, 0)]
