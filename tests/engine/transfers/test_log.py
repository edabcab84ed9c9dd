"""Whoever listens gets a row of every transfer that was submitted meanwhile and ended; nobody else pays for it."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from paramstore.engine.store import Store
from paramstore.engine.transfers import log
from paramstore.engine.transfers.log import TransferRow
from paramstore_testkit.disks.machine import Machine
from paramstore_testkit.stores.small_store import EXPERTS, SCHEMA, create, first_values, run, train, turns


def started() -> Store:
    return Machine().start()


def rows_of(result: dict[str, Any]) -> list[TransferRow]:
    rows: list[TransferRow] = result["transfers"]
    return rows


def test_a_listener_gets_what_moved_since_it_began_in_order() -> None:
    async def scenario() -> None:
        store = started()
        view = await create(store)
        listener = object()
        store.transfers.log.listen(listener)
        await train(store, view)
        await store.committer.commit(view, 1, b"")
        await store.evict(view, None, None)
        await first_values(store, view)
        result = store.transfers.log.end(listener)
        rows = rows_of(result)
        kinds = [row.kind for row in rows]
        assert kinds.count("update") == kinds.count("write") == kinds.count("load_param") == EXPERTS
        assert {(row.layer, row.expert) for row in rows if row.kind == "write"} == {(0, expert) for expert in range(EXPERTS)}
        assert {row.bytes_moved for row in rows if row.kind == "write"} == {SCHEMA.record_bytes}
        masters = SCHEMA.stored.fields[2].offset_bytes
        assert {(row.bytes_moved, row.urgency) for row in rows if row.kind == "load_param"} == {(masters, "demand")}
        assert all(row.submitted_s <= row.started_s <= row.ended_s for row in rows)
        assert [row.ended_s for row in rows] == sorted(row.ended_s for row in rows)
        assert result["dropped"] == 0

    run(scenario())


def test_nothing_is_kept_when_nobody_listens() -> None:
    async def scenario() -> None:
        store = started()
        view = await create(store)
        await train(store, view)
        listener = object()
        assert rows_of(store.transfers.log.end(listener)) == []
        store.transfers.log.listen(listener)
        assert rows_of(store.transfers.log.end(listener)) == []

    run(scenario())


def test_each_listener_gets_its_own_rows() -> None:
    async def scenario() -> None:
        store = started()
        view = await create(store)
        one, other = object(), object()
        store.transfers.log.listen(one)
        await train(store, view)
        store.transfers.log.listen(other)
        await train(store, view)
        first, second = rows_of(store.transfers.log.end(one)), rows_of(store.transfers.log.end(other))
        assert len(first) == 2 * len(second)
        assert first[-len(second) :] == second
        store.transfers.log.listen(one)
        assert rows_of(store.transfers.log.end(one)) == []

    run(scenario())


def test_a_listener_is_told_of_rows_that_there_was_no_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    async def moved() -> dict[str, Any]:
        store = started()
        view = await create(store)
        store.transfers.log.listen(view)
        await train(store, view)
        return store.transfers.log.end(view)

    async def scenario() -> None:
        every = rows_of(await moved())
        monkeypatch.setattr(log, "ROWS_MAX", 3)
        result = await moved()
        assert [row.expert for row in rows_of(result)] == [row.expert for row in every[-3:]]
        assert result["dropped"] == len(every) - 3 > 0

    run(scenario())


def test_missed_steps_are_rows_of_their_own() -> None:
    async def scenario() -> None:
        store = started()
        view = await create(store, schema=replace(SCHEMA, updates="exact"))
        await train(store, view, [])
        await store.evict(view, None, None)
        store.transfers.log.listen(view)
        await first_values(store, view)
        rows = rows_of(store.transfers.log.end(view))
        assert [row.kind for row in rows] == ["advance"] * 2 * EXPERTS
        read, made = SCHEMA.record_bytes, SCHEMA.part("param").image_bytes
        assert [row.bytes_moved for row in rows] == [read, made] * EXPERTS, "read into a buffer, and made there"

    run(scenario())


def test_a_transfer_that_ends_after_the_last_listener_leaves_no_row() -> None:
    async def scenario() -> None:
        store = started()
        view = await create(store)
        store.transfers.log.listen(view)
        training = asyncio.ensure_future(train(store, view))
        await turns(2)
        store.transfers.log.end(view)
        await training
        assert not store.transfers.log._rows

    run(scenario())
