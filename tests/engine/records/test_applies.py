"""Applies that begin before their gradients are there: when updates start, what is refused meanwhile, and how they end early."""

from __future__ import annotations

import asyncio
from operator import attrgetter
from typing import Any

import pytest

from paramstore.core.key import ExpertKey
from paramstore.core.residency import Working
from paramstore.engine.store import Store
from paramstore.engine.tables.namespace import View
from paramstore.engine.transfers import arithmetic
from paramstore.engine.transfers.scheduler import Transfer
from paramstore.errors import (
    ParamStoreError,
    ProtocolError,
    RankLost,
    StepFailed,
    StepMismatch,
    StepOutOfOrder,
    StepPrepared,
    UnknownKey,
    WaitTimeout,
    WriterFenced,
)
from paramstore_testkit.disks.machine import PlainSegment
from paramstore_testkit.stores.small_ranks import call, open_ranks, outcomes, run_ranks
from paramstore_testkit.stores.small_store import OPTIONS, SCHEMA, first_values, keys_of, train, turns, versions
from paramstore_testkit.stores.update_site import Site, on_site


def begin(site: Site) -> asyncio.Task[dict[str, int]]:
    """The task of a `begin_apply`: over when the apply is."""
    task = asyncio.ensure_future(site.store.applies.begin(site.view, OPTIONS, 1.0))
    task.add_done_callback(lambda done: done.cancelled() or done.exception())
    return task


def push_last(site: Site, keys: list[ExpertKey], memory: PlainSegment | None = None) -> PlainSegment:
    memory = PlainSegment(SCHEMA.gradient_bytes) if memory is None else memory
    site.store.applies.push(site.view, [(key, memory, 0) for key in keys], is_last=True)
    return memory


def fails(*arguments: object, **named: object) -> None:
    raise MemoryError("no room")


def refused(error: type[ParamStoreError], site: Site, call: str, *arguments: Any) -> None:
    with pytest.raises(error):
        attrgetter(call)(site.store)(site.view, *arguments)


async def refused_in_time(error: type[ParamStoreError], site: Site, call: str, *arguments: Any) -> None:
    with pytest.raises(error):
        await attrgetter(call)(site.store)(site.view, *arguments)


# --- when updates start


def test_a_key_is_updated_as_soon_as_its_last_gradient_comes_and_the_rest_at_the_end() -> None:
    async def scenario(site: Site) -> None:
        keys = keys_of(site.view)
        site.store.applies.push(site.view, [(keys[0], PlainSegment(SCHEMA.gradient_bytes), 0)])
        begun = begin(site)
        await turns()
        assert site.updated == []
        push_last(site, keys[3:5])
        await turns()
        assert sorted(site.updated) == keys[3:5]
        assert site.namespace.stats.records_updated == 2
        push_last(site, keys[7:8])
        result = await site.store.applies.end(site.view)
        assert result == await begun
        assert result["records"] == 4
        assert site.namespace.stats.applies == 1
        assert await versions(site.store, site.view) == [1, 0, 0, 1, 1, 0, 0, 1, *[0] * 4]
        assert (await train(site.store, site.view))["records"] == len(keys)  # what comes behind it

    on_site(scenario)


def test_an_apply_that_claims_nothing_early_is_a_plain_one() -> None:
    async def scenario(site: Site) -> None:
        begun = begin(site)
        assert await site.store.applies.end(site.view) == {"records": 0, "bytes_read": 0, "bytes_written": 0}
        await begun
        assert site.namespace.writing.open_apply is None

    on_site(scenario)


def test_a_lease_of_a_claimed_key_waits_for_its_update_and_others_do_not() -> None:
    async def scenario(site: Site) -> None:
        keys = keys_of(site.view)
        begun = begin(site)
        site.pause()
        push_last(site, keys[:1])
        claimed = site.store.access.acquire(site.view, 901, keys[:1], "param")
        other = site.store.access.acquire(site.view, 902, keys[1:2], "param")
        await turns()
        assert not claimed.is_finished
        site.resume()
        await asyncio.gather(site.store.access.wait_lease(claimed, 5.0), site.store.access.wait_lease(other, 5.0))
        assert (claimed.copies[0].identity.version, other.copies[0].identity.version) == (1, 0)
        await site.store.applies.end(site.view)
        await begun

    on_site(scenario)


def test_reads_for_early_updates_are_less_urgent_than_what_a_backward_loads_until_the_end() -> None:
    async def scenario(site: Site) -> None:
        submitted: list[Transfer] = []
        runner = site.store.transfers.runner
        submit = runner.submit
        runner.submit = lambda transfer: (submitted.append(transfer), submit(transfer))[1]  # type: ignore[method-assign, func-returns-value]
        keys = keys_of(site.view)
        begun = begin(site)
        site.pause()
        push_last(site, keys[:2])
        await turns()
        assert [transfer.urgency.name for transfer in submitted] == ["PREFETCH", "PREFETCH"]  # type: ignore[attr-defined]
        site.store.access.acquire(site.view, 901, keys[5:6], "param")
        assert submitted[2].urgency.name == "DEMAND"  # type: ignore[attr-defined]
        ended = asyncio.ensure_future(site.store.applies.end(site.view))
        await turns()
        assert {transfer.urgency.name for transfer in submitted} == {"DEMAND"}  # type: ignore[attr-defined]
        site.resume()
        await asyncio.gather(ended, begun)

    on_site(scenario)


def test_a_prefetch_that_is_given_up_takes_no_update_along() -> None:
    async def scenario(site: Site) -> None:
        keys = keys_of(site.view)
        await train(site.store, site.view)
        begun = begin(site)
        site.pause()
        push_last(site, keys)
        await turns()
        prefetch = site.store.access.prefetch(site.view, keys, "optim", None)
        assert Working.UPDATING in {subject.state for subject in prefetch.pending}
        site.store.transfers.cancel_prefetch(prefetch)
        site.resume()
        assert (await site.store.applies.end(site.view))["records"] == len(keys)
        await begun

    on_site(scenario)


# --- room for more gradients


def test_who_waits_for_room_learns_what_was_read_as_soon_as_there_is_some() -> None:
    async def scenario(site: Site) -> None:
        keys = keys_of(site.view)
        begun = begin(site)
        site.pause()
        push_last(site, keys[:3])
        assert await site.store.applies.await_room(site.view, keys[:3], 0.0) == []
        waits = asyncio.ensure_future(site.store.applies.await_room(site.view, keys[:2], 5.0))
        await turns()
        assert not waits.done()
        site.resume()
        first = await waits
        assert first
        assert set(first) <= set(keys[:2])
        while await site.store.applies.await_room(site.view, keys[:3], 5.0) != keys[:3]:
            await turns()
        await asyncio.gather(site.store.applies.end(site.view), begun)
        with pytest.raises(StepOutOfOrder, match="no apply is open"):
            await site.store.applies.await_room(site.view, keys, 0.0)

    on_site(scenario)


def test_a_wait_for_room_that_is_too_long_says_what_is_under_way() -> None:
    async def scenario(site: Site) -> None:
        begun = begin(site)
        site.pause()
        push_last(site, keys_of(site.view)[:2])
        with pytest.raises(WaitTimeout, match=r"push on 'moe': no room in time: 2 updates are under way, from \(0, 0\) on"):
            await site.store.applies.await_room(site.view, keys_of(site.view)[:2], 0.01)
        site.resume()
        await asyncio.gather(site.store.applies.end(site.view), begun)

    on_site(scenario)


@pytest.mark.parametrize("way", ["abort", "rollback", "failure", "end"])
def test_a_wait_for_room_ends_with_its_apply(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(site: Site) -> None:
        keys = keys_of(site.view)
        begun = begin(site)
        site.pause()
        push_last(site, keys[:2])
        waits = asyncio.ensure_future(site.store.applies.await_room(site.view, keys[:2], 5.0))
        await turns()
        if way == "abort":
            with pytest.raises(StepFailed):
                site.store.applies.abort(site.view)
        elif way == "rollback":
            rolled = asyncio.ensure_future(site.store.rollback(site.view, 0))
        elif way == "failure":
            monkeypatch.setattr("paramstore.engine.records.update.update", fails)
        ended = asyncio.ensure_future(site.store.applies.end(site.view)) if way == "end" else None
        site.resume()
        if ended is not None:
            assert await waits
            await asyncio.gather(ended, begun)
            return
        with pytest.raises(StepFailed):
            assert not await waits
        with pytest.raises(StepFailed):
            await begun
        if way == "rollback":
            await rolled

    on_site(scenario)


def begin_as(store: Store, views: list[View]) -> list[asyncio.Future[Any]]:
    begun = [call(store, view, "begin_apply", lambda one: store.applies.begin(one, OPTIONS, 1.0)) for view in views]
    for future in begun:
        future.add_done_callback(lambda done: done.cancelled() or done.exception())
    return begun


def push_last_as(store: Store, view: View, keys: list[ExpertKey]) -> None:
    store.applies.push(view, [(key, PlainSegment(view.namespace.schema.gradient_bytes), 0) for key in keys], is_last=True)


def test_a_rank_that_ends_a_layer_lets_the_others_gradients_of_it_be_updated() -> None:
    async def scenario(store: Store) -> None:
        first, second = await open_ranks(store, 2)
        begin_as(store, [first, second])
        keys = keys_of(first)
        push_last_as(store, first, keys[:3])
        push_last_as(store, second, keys[:1])
        assert await store.applies.await_room(first, keys[:3], 5.0) == keys[:1]
        with pytest.raises(WaitTimeout, match=r"2 keys, from \(0, 1\) on, wait for rank 1 to push them or end their layers"):
            await store.applies.await_room(first, keys[1:3], 5.0)
        with pytest.raises(UnknownKey):
            store.applies.end_layers(second, [0, 7])
        assert await store.applies.await_room(first, keys[1:3], 0.0) == []
        store.applies.end_layers(second, [0])
        assert await store.applies.await_room(first, keys[1:3], 5.0)
        with pytest.raises(StepOutOfOrder, match="or its layer ended"):
            push_last_as(store, second, keys[3:4])
        store.applies.end_layers(second, [0])  # again, and by those who pushed: no matter
        store.applies.end_layers(first, [0])
        results = await outcomes(call(store, view, "end_apply", store.applies.end) for view in (first, second))
        assert [result["records"] for result in results] == [3, 3]
        with pytest.raises(StepOutOfOrder, match="no apply is open"):
            store.applies.end_layers(first, [0])

    run_ranks(scenario)


def test_a_wait_for_room_that_a_lost_rank_owes_ends_at_once() -> None:
    async def scenario(store: Store) -> None:
        first, second = await open_ranks(store, 2)
        begin_as(store, [first, second])
        push_last_as(store, first, keys_of(first)[:2])
        waits = asyncio.ensure_future(store.applies.await_room(first, keys_of(first)[:2], 1e6))
        await turns()
        store.close_view(second)
        with pytest.raises(RankLost, match="rank 1 closed the namespace"):
            await waits
        assert asyncio.get_running_loop().time() < 1e5

    run_ranks(scenario)


def test_a_rank_that_ends_the_apply_has_ended_its_layers_before_the_others_call() -> None:
    async def scenario(store: Store) -> None:
        first, second = await open_ranks(store, 2)
        begin_as(store, [first, second])
        keys = keys_of(first)
        push_last_as(store, first, keys[:2])
        waits = asyncio.ensure_future(store.applies.await_room(first, keys[:2], 1e6))
        await turns()
        ended = call(store, second, "end_apply", store.applies.end)
        assert set(await waits) <= set(keys[:2])
        results = await outcomes([ended, call(store, first, "end_apply", store.applies.end)])
        assert [result["records"] for result in results] == [2, 2]
        assert asyncio.get_running_loop().time() < 1e5

    run_ranks(scenario)


@pytest.mark.parametrize("name", ["abort", "rollback", "commit"])
@pytest.mark.parametrize("comes_first", ["the wait", "the call"])
def test_a_rank_waits_for_no_room_that_another_owes_who_waits_for_it(name: str, comes_first: str) -> None:
    async def scenario(store: Store) -> None:
        first, second = await open_ranks(store, 2)
        begin_as(store, [first, second])
        keys = keys_of(first)
        push_last_as(store, first, keys[:2])
        push_last_as(store, second, keys[:1])
        assert await store.applies.await_room(first, keys[:2], 1e6) == keys[:1]
        begin = {
            "abort": store.applies.abort, "rollback": lambda one: store.rollback(one, 0),
            "commit": lambda one: store.committer.commit(one, 1, b""),
        }  # fmt: skip
        if comes_first == "the call":
            other = call(store, second, name, begin[name])
            waits = asyncio.ensure_future(store.applies.await_room(first, keys[1:2], 1e6))
        else:
            waits = asyncio.ensure_future(store.applies.await_room(first, keys[1:2], 1e6))
            await turns()
            other = call(store, second, name, begin[name])
        with pytest.raises(StepMismatch, match=r"no room will come: rank 1 made a collective call before pushing \(0, 1\)"):
            await waits
        assert asyncio.get_running_loop().time() < 1e5
        other.add_done_callback(lambda done: done.cancelled() or done.exception())

    run_ranks(scenario)


# --- what is refused


def test_a_key_is_pushed_once_while_an_apply_is_open_and_nothing_changes_by_more() -> None:
    async def scenario(site: Site) -> None:
        keys = keys_of(site.view)
        memory = PlainSegment(SCHEMA.gradient_bytes)
        site.store.applies.push(site.view, [(keys[0], memory, 0)])
        begun = begin(site)
        with pytest.raises(ProtocolError):
            push_last(site, keys[:1])  # elsewhere than where its sum lies
        push_last(site, keys[:1], memory)
        with pytest.raises(StepOutOfOrder, match=r"\(0, 0\) was pushed already since begin_apply"):
            push_last(site, [keys[1], keys[0]])
        with pytest.raises(StepOutOfOrder):
            site.store.applies.push(site.view, [(keys[0], memory, 0)])
        assert (await site.store.applies.end(site.view))["records"] == 1
        await begun
        with pytest.raises(StepOutOfOrder, match="no apply is open"):
            push_last(site, keys[:1])
        refused(StepOutOfOrder, site, "applies.end")

    on_site(scenario)


def test_what_would_see_half_an_apply_is_refused() -> None:
    async def scenario(site: Site) -> None:
        begun = begin(site)
        await turns()
        refused(StepOutOfOrder, site, "applies.begin", OPTIONS, 1.0)
        refused(StepOutOfOrder, site, "applies.apply", OPTIONS, 1.0)
        refused(StepOutOfOrder, site, "committer.prepare", 1, b"")
        assert (await site.store.committer.commit(site.view, 1, b""))["records"] == 0  # nothing has begun: of the applies before it
        push_last(site, keys_of(site.view)[:1])
        refused(StepOutOfOrder, site, "committer.commit", 2, b"")
        refused(StepOutOfOrder, site, "applies.norm")
        target = PlainSegment(SCHEMA.record_bytes).view(0, SCHEMA.record_bytes)
        await refused_in_time(StepOutOfOrder, site, "reading.read", keys_of(site.view)[0], target)
        await refused_in_time(StepOutOfOrder, site, "write_back", None)
        await refused_in_time(StepOutOfOrder, site, "evict", None, None)
        reader = await site.store.admission.open("moe", mode="read", at=None, host_bytes=None)
        assert (await site.store.evict(reader, None, "param"))["skipped"] == []  # it changes no record
        await refused_in_time(StepOutOfOrder, site, "admission.snapshot", 1)
        ended = asyncio.ensure_future(site.store.applies.end(site.view))
        commit = site.store.committer.commit(site.view, 2, b"")  # called behind it
        committed = await asyncio.ensure_future(commit)  # a task, as a session's
        assert committed["records"] == 1
        await asyncio.gather(ended, begun)
        assert await versions(site.store, site.view) == [1, *[0] * 11]

    on_site(scenario)


def test_no_apply_is_opened_while_a_step_is_prepared() -> None:
    async def scenario(site: Site) -> None:
        await site.store.committer.prepare(site.view, 1, b"")
        refused(StepPrepared, site, "applies.begin", OPTIONS, 1.0)

    on_site(scenario)


# --- ends that are none


def test_abort_before_the_first_claim_leaves_all_as_it_was() -> None:
    async def scenario(site: Site) -> None:
        begun = begin(site)
        site.store.applies.push(site.view, [(keys_of(site.view)[0], PlainSegment(SCHEMA.gradient_bytes), 0)])
        assert site.store.applies.abort(site.view) == 1
        with pytest.raises(StepFailed, match="given up: abort"):
            await begun
        assert site.namespace.writing.broken is None
        assert (await train(site.store, site.view))["records"] == 12
        assert await versions(site.store, site.view) == [1] * 12

    on_site(scenario)


def test_abort_after_a_claim_breaks_the_namespace_until_rollback() -> None:
    async def scenario(site: Site) -> None:
        begun = begin(site)
        push_last(site, keys_of(site.view)[:2])
        with pytest.raises(StepFailed, match=r"given up half-way: abort; rollback"):
            site.store.applies.abort(site.view)
        with pytest.raises(StepFailed):
            await begun
        refused(StepFailed, site, "applies.apply", OPTIONS, 1.0)
        await site.store.rollback(site.view, 0)
        assert await versions(site.store, site.view) == [0] * 12
        assert await first_values(site.store, site.view) == list(range(12))
        assert (await train(site.store, site.view))["records"] == 12

    on_site(scenario)


@pytest.mark.parametrize("is_claimed", [True, False], ids=["after a claim", "before any"])
def test_rollback_ends_an_open_apply(is_claimed: bool) -> None:
    async def scenario(site: Site) -> None:
        begun = begin(site)
        await turns()
        if is_claimed:
            push_last(site, keys_of(site.view)[:2])
            await turns()
        await site.store.rollback(site.view, 0)
        with pytest.raises(StepFailed):
            await begun
        assert site.namespace.writing.broken is None
        assert site.namespace.writing.open_apply is None
        assert (await train(site.store, site.view))["records"] == 12
        assert await versions(site.store, site.view) == [1] * 12

    on_site(scenario)


def test_a_closed_apply_that_is_rolled_back_before_its_turn_changes_nothing() -> None:
    async def scenario(site: Site) -> None:
        rolled = asyncio.ensure_future(site.store.rollback(site.view, 0))  # takes the turn first
        begun = begin(site)
        await asyncio.sleep(0)
        push_last(site, keys_of(site.view)[:1])
        ended = asyncio.ensure_future(site.store.applies.end(site.view))
        assert await rolled > 0
        for task in (begun, ended):
            with pytest.raises(StepFailed, match="rolled back meanwhile"):
                await task
        assert await versions(site.store, site.view) == [0] * 12
        assert (await train(site.store, site.view))["records"] == 12

    on_site(scenario)


@pytest.mark.parametrize("is_fenced", [True, False], ids=["fenced", "closed"])
def test_an_open_apply_ends_with_its_writer(is_fenced: bool) -> None:
    async def scenario(site: Site) -> None:
        begun = begin(site)
        push_last(site, keys_of(site.view)[:2])
        await turns()
        if not is_fenced:
            site.store.close_view(site.view)
            with pytest.raises(StepFailed, match="its writer closed the namespace"):
                await begun
        site.view = await site.store.admission.open("moe", mode="write", at=None, host_bytes=None)
        with pytest.raises((StepFailed, WriterFenced)):
            await begun
        assert (await train(site.store, site.view))["records"] == 12
        assert await versions(site.store, site.view) == [1] * 12

    on_site(scenario)


def test_an_update_that_fails_breaks_the_namespace_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(site: Site) -> None:
        begun = begin(site)
        await turns()
        monkeypatch.setattr("paramstore.engine.records.update.update", fails)
        push_last(site, keys_of(site.view)[:2])
        with pytest.raises(StepFailed, match="apply on 'moe' failed"):
            await begun
        with pytest.raises(StepFailed):
            push_last(site, keys_of(site.view)[4:5])
        refused(StepFailed, site, "applies.end")
        monkeypatch.setattr("paramstore.engine.records.update.update", arithmetic.update)
        await site.store.rollback(site.view, 0)
        assert (await train(site.store, site.view))["records"] == 12

    on_site(scenario)


def test_the_daemons_end_ends_an_open_apply() -> None:
    async def scenario(site: Site) -> None:
        begun = begin(site)
        push_last(site, keys_of(site.view)[:2])
        await turns()
        await site.machine.service.close()
        with pytest.raises(ParamStoreError):
            await begun

    on_site(scenario)
