"""Who gets which namespace and whose memory: creation, reuse, fencing, steps to stand on, and memory taken back from the idle."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from paramstore.core.location import Extent, Identity, Located
from paramstore.core.schema import Schema
from paramstore.engine.admission import make_namespace
from paramstore.engine.tables.namespace import View
from paramstore.errors import (
    CapacityError,
    CatalogError,
    ConfigError,
    NamespaceExists,
    SchemaMismatch,
    StepDropped,
    StepFailed,
    WriterFenced,
)
from paramstore.storage.catalog.base import NamespaceContents, NamespaceRow, Row, StepRow
from paramstore.storage.catalog.ledger import Ledger
from paramstore.testing.catalogs import FaultyCatalog
from paramstore_testkit.disks.machine import MIB, Machine
from paramstore_testkit.stores.small_store import (
    ONE,
    SCHEMA,
    create,
    create_again,
    initialize,
    keys_of,
    push,
    reader,
    run,
    train,
    turns,
    versions,
    writer,
)

# --- creation


def test_an_uncommitted_namespace_is_reused_by_who_creates_it_again_and_its_writer_fenced() -> None:
    async def scenario() -> None:
        store = Machine().start()
        old = await create(store, step=None)
        new = await create_again(store)
        assert new.namespace is old.namespace
        assert new.namespace.epoch == 3
        with pytest.raises(WriterFenced):
            push(store, old, keys_of(old))
        await initialize(store, new)
        await store.committer.commit(new, 0, b"")
        assert await versions(store, new) == [0] * 4

    run(scenario())


@pytest.mark.parametrize(
    ("other", "told"),
    [
        ({"schema": Schema.adamw({"w": (3, 5)})}, "fields="), ({"schema": Schema.sgd({"w": (3, 5)})}, "kind='adamw', not 'sgd'"),
        ({"experts": 5}, "experts=4, not 5"), ({"layers": (0, 1)}, r"layers=\(0,\), not \(0, 1\)"),
        ({"layers": (1,)}, r"layers=\(0,\), not \(1,\)"),
    ],
)  # fmt: skip
def test_a_name_that_is_taken_by_another_schema_or_other_keys_says_what_differs(other: dict[str, Any], told: str) -> None:
    async def scenario() -> None:
        store = Machine().start()
        view = await create(store, step=None)
        with pytest.raises(NamespaceExists, match=f"'moe' exists with .*{told}.*another name"):
            await create_again(store, **other)
        assert not view.is_fenced
        await store.committer.commit(view, 0, b"")
        with pytest.raises(NamespaceExists, match=told):  # committed or not: to go on with it would be wrong
            await create_again(store, **other)

    run(scenario())


def test_a_namespace_whose_description_no_commit_note_can_hold_is_refused_before_anything_is_written() -> None:
    async def scenario() -> None:
        machine = Machine()
        store = machine.start()
        with pytest.raises(CapacityError, match="bytes of a commit note, which has room for"):
            await store.admission.create("moe", SCHEMA.describe(), layers=range(0, 8192, 2), experts=1, host_bytes=None)
        assert store.admission.list_namespaces() == []
        assert machine.catalog.load().namespaces == {}
        assert (store.host.used_bytes, machine.disks[0].size_bytes) == (0, 14 * MIB)

    run(scenario())


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"name": "no/slash"}, ConfigError), ({"layers": []}, ConfigError), ({"experts": 0}, ConfigError),
        ({"description": {"kind": "adamw"}}, SchemaMismatch), ({"description": {"kind": "sgd", "fields": []}}, SchemaMismatch),
    ],
)  # fmt: skip
def test_a_namespace_that_makes_no_sense_is_refused_and_nothing_is_left(arguments: dict[str, Any], error: type[Exception]) -> None:
    async def scenario() -> None:
        store = Machine().start()
        given = {"name": "moe", "description": SCHEMA.describe(), "layers": [0], "experts": 4, **arguments}
        name, description = given.pop("name"), given.pop("description")
        with pytest.raises(error):
            await store.admission.create(name, description, **given, host_bytes=None)
        assert store.admission.list_namespaces() == []
        assert store.host.used_bytes == 0

    run(scenario())


def test_a_creation_that_host_memory_refuses_leaves_the_volumes_as_they_were() -> None:
    async def scenario() -> None:
        machine = Machine(host_budget_bytes=ONE)
        store = machine.start()
        await create(store)
        size_bytes = machine.disks[0].size_bytes
        wide = Schema.adamw({"w": (64, 256)})  # more on the volume than there is now, and no memory is left
        with pytest.raises(CapacityError, match="are left of host_budget"):
            await store.admission.create("wide", wide.describe(), layers=[0], experts=64, host_bytes=None)
        assert machine.disks[0].size_bytes == size_bytes
        assert [row["name"] for row in store.admission.list_namespaces()] == ["moe"]

    run(scenario())


def test_a_creation_that_the_volumes_refuse_gives_its_memory_and_its_claim_back() -> None:
    async def scenario() -> None:
        machine = Machine(host_budget_bytes=4 * ONE, volume_size_bytes=14 * MIB)
        store = machine.start()
        wide = Schema.adamw({"w": (64, 1024)})
        with pytest.raises(CapacityError, match=r"bytes are missing; add a volume \(--add-volume\)"):
            await store.admission.create("wide", wide.describe(), layers=[0], experts=64, host_bytes=2 * ONE)
        assert store.host.used_bytes == 0
        view = await create(store)
        await train(store, view)
        await store.committer.commit(view, 1, b"")

    run(scenario())


def test_a_creation_that_the_catalog_refuses_gives_its_memory_back() -> None:
    async def scenario() -> None:
        machine = Machine(volume_size_bytes=14 * MIB)
        machine.catalog = faulty = FaultyCatalog(machine.durable, fail_at=2, outcome="lost")
        store = machine.start()
        assert faulty.applies == 1
        with pytest.raises(CatalogError):
            await create_again(store)
        assert store.host.used_bytes == 0
        assert store.namespaces == {}
        assert (await create(store)).namespace.steps.committed_step == 0

    run(scenario())


def test_two_who_create_the_same_namespace_at_once_get_one_and_the_later_is_its_writer() -> None:
    async def scenario() -> None:
        store = Machine().start()
        first, second = await asyncio.gather(create_again(store), create_again(store))
        assert first.namespace is second.namespace
        assert (first.is_fenced, second.is_fenced) == (True, False)
        assert second.namespace.writing.writer is second

    run(scenario())


def test_two_who_come_at_once_are_never_given_the_same_bytes() -> None:
    async def scenario() -> None:
        store = Machine(host_budget_bytes=ONE).start()
        outcomes = await asyncio.gather(create(store, "a"), create(store, "b"), return_exceptions=True)
        assert [isinstance(outcome, View) for outcome in outcomes] == [True, False]
        assert isinstance(outcomes[1], CapacityError)
        assert store.host.used_bytes <= ONE
        assert [row["name"] for row in store.admission.list_namespaces()] == ["a"]

    run(scenario())


# --- opening


def test_a_namespace_without_a_commit_has_nothing_to_read() -> None:
    async def scenario() -> None:
        store = Machine().start()
        await create(store, step=None)
        with pytest.raises(StepFailed, match="no committed step yet: only a writer can open it"):
            await reader(store)

    run(scenario())


def test_a_reader_stands_on_the_step_it_names_or_on_the_newest() -> None:
    async def scenario() -> None:
        store = Machine().start()
        view = await create(store)
        await train(store, view)
        await store.committer.commit(view, 5, b"")
        assert [(await reader(store, at=at)).step for at in (None, 5, 0)] == [5, 5, 0]
        for at in (3, 6, -1):
            with pytest.raises(StepDropped, match=rf"step {at} of namespace 'moe' is not retained; the steps are: 0, 5"):
                await reader(store, at=at)

    run(scenario())


@pytest.mark.parametrize(("mode", "at", "error"), [("append", None, ConfigError), ("write", 7, StepDropped)])
def test_a_mode_or_step_that_does_not_exist_is_refused_and_fences_nobody(mode: str, at: int | None, error: type[Exception]) -> None:
    async def scenario() -> None:
        store = Machine().start()
        view = await create(store)
        with pytest.raises(error):
            await store.admission.open("moe", mode=mode, at=at, host_bytes=None)
        assert view.namespace.writing.writer is view
        assert not view.is_fenced

    run(scenario())


def test_opening_as_writer_fences_the_one_before_and_drops_what_was_not_committed() -> None:
    async def scenario() -> None:
        store = Machine().start()
        old = await create(store)
        await train(store, old)
        push(store, old, keys_of(old))
        new = await writer(store)
        assert old.is_fenced
        assert not new.namespace.writing.pending
        assert new.namespace.writing.writer is new
        assert await versions(store, new) == [0] * 4
        store.close_view(old)
        assert new.namespace.writing.writer is new

    run(scenario())


def test_the_writer_before_is_fenced_from_the_moment_in_which_another_comes() -> None:
    async def scenario() -> None:
        store = Machine().start()
        old = await create(store)
        opening = asyncio.ensure_future(writer(store))
        await turns(1)
        with pytest.raises(WriterFenced):
            push(store, old, keys_of(old))
        await opening

    run(scenario())


def test_of_writers_that_come_at_once_none_inherits_what_another_left_pending() -> None:
    async def scenario() -> None:
        store = Machine().start()
        namespace, lock = (await create(store)).namespace, store.admission._lock

        async def come() -> View:
            view = await writer(store)
            assert not namespace.writing.pending
            return view

        await lock.acquire()
        first = asyncio.ensure_future(come())
        await turns()
        between = asyncio.ensure_future(lock.acquire())
        await turns()
        second = asyncio.ensure_future(come())  # has rolled back, and waits for the lock behind the first
        await turns()
        lock.release()
        await turns()
        assert between.done()
        if first.done() and not first.result().is_fenced:
            push(store, first.result(), keys_of(first.result()))
        await namespace.writing.turn.acquire()
        third = asyncio.ensure_future(come())  # fences the first, and cannot roll back yet
        await turns()
        lock.release()
        await turns()
        namespace.writing.turn.release()
        await asyncio.gather(first, second, third)

    run(scenario())


def test_what_was_asked_for_before_the_fence_does_not_write_after_it() -> None:
    async def scenario() -> None:
        store = Machine().start()
        old = await create(store)
        push(store, old, keys_of(old))
        opening = asyncio.ensure_future(writer(store))
        commit = asyncio.ensure_future(store.committer.commit(old, 1, b""))
        outcome = (await asyncio.gather(commit, return_exceptions=True))[0]
        new = await opening
        assert isinstance(outcome, WriterFenced)
        assert new.namespace.steps.ledger.steps() == [0]

    run(scenario())


def test_namespaces_are_listed_with_what_one_needs_to_open_them() -> None:
    async def scenario() -> None:
        store = Machine(volume_bytes=24 * MIB).start()
        await create(store, "a", host_bytes=ONE)
        view = await create(store, "b", step=7, host_bytes=ONE)
        assert [row["committed_step"] for row in store.admission.list_namespaces()] == [0, 7]
        assert store.admission.list_namespaces()[1] == {
            "name": "b", "schema": SCHEMA.describe(), "layers": [0], "experts": 4, "committed_step": 7, "prepared_step": None,
            "epoch": view.namespace.epoch,
        }  # fmt: skip

    run(scenario())


# --- what a ledger makes


def test_a_namespace_is_what_its_ledger_says() -> None:
    row = NamespaceRow("moe", SCHEMA.describe(), (2, 5), 2, epoch=4, sequence=9, applies=99)
    contents = NamespaceContents(row)
    located = Located(Extent(0, 0, SCHEMA.record_bytes), Identity(3, 8), 1)
    contents.rows[2, 1] = [Row(3, located)]
    contents.steps[3] = StepRow(3, 9, 0, 1, b"", applies=7)
    namespace = make_namespace(Ledger(contents))
    assert (namespace.name, namespace.epoch, namespace.steps.sequence, namespace.writing.applies) == ("moe", 4, 9, 7)
    assert list(namespace.keys) == [(2, 0), (2, 1), (5, 0), (5, 1)]
    assert namespace.residency.working[2, 1].identity == namespace.residency.working[2, 1].target == located.identity
    assert namespace.residency.working[2, 0].identity is None
    assert not namespace.has_memory
    assert namespace.steps.committed_step == 3


# --- slots that must be there


def test_a_writer_who_cannot_have_the_slots_it_asks_for_fences_nobody_and_rolls_nothing_back() -> None:
    async def scenario() -> None:
        store = Machine().start()
        view = await create(store)
        await train(store, view)
        await store.committer.commit(view, 1, b"")
        epoch = view.namespace.epoch
        with pytest.raises(CapacityError, match=f"min_lease_slots={view.lease_slots + 1}, but {view.lease_slots} of its"):
            await store.admission.open("moe", mode="write", at=0, host_bytes=None, min_lease_slots=view.lease_slots + 1)
        assert (view.is_fenced, view.namespace.epoch, view.namespace.steps.ledger.steps()) == (False, epoch, [0, 1])
        again = await store.admission.open("moe", mode="write", at=None, host_bytes=None, min_lease_slots=view.lease_slots)
        assert again.lease_slots == view.lease_slots
        assert view.is_fenced

    run(scenario())


def test_of_writers_that_come_at_once_who_gets_too_few_slots_fences_nobody() -> None:
    async def scenario() -> None:
        store = Machine().start()
        view = await create(store)
        least = view.lease_slots
        store.close_view(view)

        async def come(lease_id: int) -> View:
            view = await store.admission.open("moe", mode="write", at=None, host_bytes=None, min_lease_slots=least)
            store.access.acquire(view, lease_id, keys_of(view)[:1], "param")
            return view

        await store.committer.commit(await come(1), 1, b"")
        store.close_view(store.namespaces["moe"].views[0])
        first, second = await asyncio.gather(come(2), come(3), return_exceptions=True)
        assert isinstance(first, View), first  # and neither waits for the other for ever
        assert not first.is_fenced
        assert isinstance(second, CapacityError), second

    run(scenario())


def test_whoever_opens_an_inference_namespace_gets_the_slots_it_asks_for() -> None:
    async def scenario() -> None:
        store = Machine().start()
        first = await create(store, schema=Schema.param({"w": ((3, 5), "bfloat16")}))
        usable = len(keys_of(first))
        assert first.lease_slots == usable // 2
        store.close_view(first)
        for mode in ("write", "read"):
            view = await store.admission.open("moe", mode=mode, at=None, host_bytes=None, min_lease_slots=usable)
            assert view.lease_slots == usable
            store.close_view(view)

    run(scenario())
