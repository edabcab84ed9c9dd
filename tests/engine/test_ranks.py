"""Ranks on one store, in simulated time: collective calls, sums, deadlines, losses, fences."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Coroutine
from typing import Any

import pytest
import torch

from paramstore.core.optimizers import AdamW
from paramstore.engine.ranks import Arrival
from paramstore.engine.store import Store
from paramstore.engine.tables.collective import Call
from paramstore.engine.tables.namespace import View, WriterGroup
from paramstore.errors import (
    LeaseError,
    ProtocolError,
    RankLost,
    StepDropped,
    StepMismatch,
    StepPrepared,
    StoreUnavailable,
    WriterFenced,
)
from paramstore_testkit.disks.machine import PlainSegment
from paramstore_testkit.stores.small_ranks import (
    NAME,
    apply,
    arrive,
    call,
    commit,
    norm,
    open_ranks,
    outcomes,
    push_values,
    record,
    rollback,
    run_ranks,
)
from paramstore_testkit.stores.small_store import SCHEMA, first_values, lease, push, turns, versions

A, B = (0, 0), (0, 1)
ELEMENTS = sum(field.elements for field in SCHEMA.gradient_fields())
TIMEOUT_S = 5.0


def gradient(seed: int) -> torch.Tensor:
    """Values whose sum depends on its order."""
    return torch.randn(ELEMENTS, generator=torch.Generator().manual_seed(seed)) * 10.0 ** ((seed * 7) % 5 - 2)


# --- gradients


@pytest.mark.parametrize("size", [2, 3])
def test_gradients_are_summed_in_rank_order_whatever_the_order_of_pushes(size: int) -> None:
    async def scenario(store: Store) -> None:
        views = await open_ranks(store, size)
        pushed = [gradient(rank) for rank in range(size)]
        for rank in (2, 0, 1)[-size:]:
            push_values(store, views[rank], {A: pushed[rank]} if rank else {A: pushed[0], B: pushed[1]})
        await outcomes(apply(store, view) for view in views)
        summed = pushed[0]
        for other in pushed[1:]:
            summed = summed + other
        for key, expected in ((A, summed), (B, pushed[1])):
            master = torch.full((ELEMENTS,), float(key[1]), requires_grad=True)
            master.grad = expected
            torch.optim.AdamW([master], lr=0.5, weight_decay=0.0, fused=True).step()
            found = await record(store, views[0], key)
            assert torch.equal(found[:ELEMENTS], master.detach())

    run_ranks(scenario)


def test_every_rank_gets_the_same_norm_of_the_summed_gradients() -> None:
    async def scenario(store: Store) -> None:
        views = await open_ranks(store, 3)
        for rank, view in enumerate(views):
            push_values(store, view, {A: gradient(rank), (0, rank + 1): gradient(9)})
        found = await outcomes(norm(store, view) for view in views)
        summed = gradient(0) + gradient(1) + gradient(2)
        expected = math.sqrt(float(summed.double().square().sum()) + 3 * float(gradient(9).double().square().sum()))
        assert len(set(found)) == 1
        assert found[0] == pytest.approx(expected, rel=1e-12)

    run_ranks(scenario)


def test_the_norm_is_of_what_was_pending_when_the_last_rank_asked_for_it() -> None:
    async def scenario(store: Store) -> None:
        views = await open_ranks(store, 2)
        asked = [norm(store, view) for view in views]
        push(store, views[0], [A])
        assert await outcomes(asked) == [0.0, 0.0]
        assert (await outcomes(norm(store, view) for view in views))[0] > 0.0

    run_ranks(scenario)


def test_a_rank_pushes_a_key_once_and_each_push_counts_once() -> None:
    async def scenario(store: Store) -> None:
        one, two = await open_ranks(store, 2)
        push(store, one, [A])
        push(store, two, [A, B])
        with pytest.raises(ProtocolError, match="has a pending gradient"):
            push(store, one, [B, A])
        assert [len(store.namespaces[NAME].writing.pending[key]) for key in (A, B)] == [2, 1]
        assert [found["records"] for found in await outcomes(apply(store, view) for view in (one, two))] == [2, 2]
        assert await outcomes(norm(store, view) for view in (one, two)) == [0.0, 0.0]
        assert await versions(store, one) == [1, 1, 0, 0]

    run_ranks(scenario)


def test_calls_run_once_and_answer_all_ranks_alike() -> None:
    async def scenario(store: Store) -> None:
        views = await open_ranks(store, 3)
        for view in views:
            push(store, view, [A])
        await outcomes(apply(store, view) for view in views)
        first, *others = await outcomes(commit(store, view, 4) for view in views)
        assert (first["step"], first["records"]) == (4, 1)
        assert others == [first, first]
        assert store.namespaces[NAME].stats.commits == 2
        push(store, views[1], [A, B])
        assert await outcomes(call(store, view, "abort", store.applies.abort) for view in views) == [2, 2, 2]

    run_ranks(scenario)


# --- mismatches, deadlines


def test_a_mismatch_runs_nothing_and_all_calls_are_refused_until_the_ranks_start_over() -> None:
    async def scenario(store: Store) -> None:
        one, two = await open_ranks(store, 2)
        push(store, one, [A])
        found = await outcomes([apply(store, one), apply(store, two, AdamW(lr=0.25))])
        assert {type(error) for error in found} == {StepMismatch}
        assert "rank 0 called apply(lr=0.5), rank 1 called apply(lr=0.25)" in str(found[0])
        assert await versions(store, one) == [0, 0, 0, 0]
        for view in (one, two):
            with pytest.raises(StepMismatch, match="nothing ran"):
                commit(store, view, 4)
            with pytest.raises(StepMismatch, match="nothing ran"):
                push(store, view, [B])
        assert await first_values(store, two) == [0.0, 1.0, 2.0, 3.0], "leases and reads go on"
        await outcomes(rollback(store, view, 0) for view in (one, two))
        push(store, one, [B])
        await outcomes(apply(store, view) for view in (one, two))
        assert (await outcomes(commit(store, view, 4) for view in (one, two)))[0]["records"] == 1

    run_ranks(scenario)


def test_what_is_refused_while_a_rollback_runs_is_not_mended_by_it() -> None:
    async def scenario(store: Store) -> None:
        one, two = await open_ranks(store, 2)
        backs = [rollback(store, view, 0) for view in (one, two)]
        mixed = [apply(store, one), commit(store, two, 1)]
        assert await outcomes(backs) == [one.namespace.epoch] * 2
        assert {type(error) for error in await outcomes(mixed)} == {StepMismatch}
        with pytest.raises(StepMismatch):
            commit(store, one, 1)
        await outcomes(rollback(store, view, 0) for view in (one, two))
        assert (await outcomes(commit(store, view, 1) for view in (one, two)))[0]["step"] == 1

    run_ranks(scenario)


def test_a_rollback_that_fails_does_not_bring_the_ranks_together() -> None:
    async def scenario(store: Store) -> None:
        views = await open_ranks(store, 2)
        await outcomes([apply(store, views[0]), norm(store, views[1])])
        assert {type(error) for error in await outcomes(rollback(store, view, 9) for view in views)} == {StepDropped}
        with pytest.raises(StepMismatch):
            norm(store, views[0])

    run_ranks(scenario)


@pytest.mark.parametrize("size", [2, 3])
def test_a_straggler_is_named_at_the_deadline_and_nothing_ran(size: int) -> None:
    async def scenario(store: Store) -> None:
        views = await open_ranks(store, size)
        push(store, views[0], [A])
        started_s = asyncio.get_running_loop().time()
        found = await outcomes(apply(store, view) for view in views[:-1])
        assert asyncio.get_running_loop().time() - started_s == pytest.approx(TIMEOUT_S, abs=0.1)
        assert {type(error) for error in found} == {StepMismatch}
        assert f"rank {size - 1} did not call in time" in str(found[0])
        with pytest.raises(StepMismatch, match="did not call in time"):
            apply(store, views[-1])  # it comes too late, and hears why
        assert await versions(store, views[0]) == [0, 0, 0, 0]

    run_ranks(scenario, wait_timeout_s=TIMEOUT_S)


def test_each_call_has_its_own_deadline() -> None:
    async def scenario(store: Store) -> None:
        one, two = await open_ranks(store, 2)
        for _ in range(3):
            waiting = norm(store, one)
            await asyncio.sleep(0.8 * TIMEOUT_S)
            assert await outcomes([waiting, norm(store, two)]) == [0.0, 0.0]

    run_ranks(scenario, wait_timeout_s=TIMEOUT_S)


def test_a_rank_that_still_puts_initial_values_is_waited_for() -> None:
    async def scenario(store: Store) -> None:
        def open_first(formed: WriterGroup) -> Coroutine[Any, Any, View]:
            return store.admission.create(NAME, SCHEMA.describe(), layers=[0], experts=4, host_bytes=None, group=formed)

        opening = Call("create_namespace")
        arrivals = [store.ranks.open(Arrival(NAME, "g", rank, 2), opening, open_first) for rank in range(2)]
        one, two = [(await arrival)[rank] for rank, arrival in enumerate(arrivals)]
        await outcomes(call(store, view, "initialize", store.initializer.begin) for view in (one, two))
        ended = call(store, one, "initialize, its end", store.initializer.end)
        for key in list(one.namespace.keys):
            await asyncio.sleep(0.8 * TIMEOUT_S)
            await store.initializer.put(two, key, PlainSegment(SCHEMA.initial_bytes).view(0, SCHEMA.initial_bytes))
        assert not ended.done()
        started_s = asyncio.get_running_loop().time()
        (error,) = await outcomes([ended])  # and no longer than that
        assert asyncio.get_running_loop().time() - started_s == pytest.approx(TIMEOUT_S, abs=0.1)
        assert "rank 1 did not call in time" in str(error)

    run_ranks(scenario, is_new=True, wait_timeout_s=TIMEOUT_S)


def test_an_error_at_the_beginning_of_a_call_is_every_rank_s_and_leaves_them_in_step() -> None:
    async def scenario(store: Store) -> None:
        views = await open_ranks(store, 2)
        push(store, views[0], [A])
        await outcomes(apply(store, view) for view in views)
        await outcomes(call(store, view, "prepare", lambda one: store.committer.prepare(one, 1, b""), step=1) for view in views)
        assert {type(error) for error in await outcomes(apply(store, view) for view in views)} == {StepPrepared}
        finalized = [call(store, view, "finalize", lambda one: store.history.finalize(one, 1), step=1) for view in views]
        assert await outcomes(finalized) == [None, None]
        assert store.namespaces[NAME].steps.committed_step == 1

    run_ranks(scenario)


# --- ranks that are gone


def test_a_lost_rank_fails_what_waits_at_once_and_all_later_calls_with_its_name() -> None:
    async def scenario(store: Store) -> None:
        one, two, three = await open_ranks(store, 3)
        push(store, three, [A])
        waiting = [apply(store, view) for view in (one, two)]
        started_s = asyncio.get_running_loop().time()
        store.close_view(three, reason="is gone: pid 7")
        found = await outcomes(waiting)
        assert asyncio.get_running_loop().time() - started_s < 0.1
        assert {type(error) for error in found} == {RankLost}
        assert "rank 2 is gone: pid 7: the group is broken. All ranks open the namespace again" in str(found[0])
        for late in (lambda: commit(store, one, 4), lambda: rollback(store, two, 0), lambda: push(store, one, [A])):
            with pytest.raises(RankLost, match="rank 2"):
                late()
        assert not store.namespaces[NAME].writing.pending, "none of it can be applied any more"
        assert await first_values(store, one) == [0.0, 1.0, 2.0, 3.0]
        new = await open_ranks(store, 3)
        push(store, new[2], [A])
        assert (await outcomes(apply(store, view) for view in new))[0]["records"] == 1

    run_ranks(scenario)


def test_what_has_begun_goes_on_without_the_rank_that_died() -> None:
    async def scenario(store: Store) -> None:
        views = await open_ranks(store, 2)
        push(store, views[1], [A])
        await outcomes(apply(store, view) for view in views)
        begun = [commit(store, view, 4) for view in views]
        await turns(2)
        store.close_view(views[0])  # its view stood for both
        found = await outcomes(begun)
        assert (found[0]["step"], found[0]) == (4, found[1])

    run_ranks(scenario)


def test_an_apply_that_had_not_its_turn_when_a_rank_died_fails_with_that_rank_s_name() -> None:
    async def scenario(store: Store) -> None:
        views = await open_ranks(store, 2)
        push(store, views[1], [A])
        async with store.namespaces[NAME].writing.turn:
            begun = [apply(store, view) for view in views]
            await turns(2)
            store.close_view(views[0])
        assert [type(error) for error in await outcomes(begun)] == [RankLost, RankLost]
        assert store.namespaces[NAME].writing.broken is not None
        assert len(await open_ranks(store, 2)) == 2

    run_ranks(scenario)


def test_a_rank_whose_connection_ended_is_lost_though_its_process_may_read_on() -> None:
    async def scenario(store: Store) -> None:
        one, two = await open_ranks(store, 2)
        held = await lease(store, two, [A])
        store.end_writing(two, reason="is gone")
        with pytest.raises(RankLost):
            norm(store, one)
        assert held.copies[0].leases == 1
        store.close_view(two)
        assert store.namespaces[NAME].writing.group is one.group
        store.close_view(one)
        assert store.namespaces[NAME].writing.group is None
        with pytest.raises(RankLost):
            push(store, one, [A])

    run_ranks(scenario)


# --- fences


def test_a_new_group_fences_the_old_one_whose_waiting_calls_and_late_pushes_fail() -> None:
    async def scenario(store: Store) -> None:
        old = await open_ranks(store, 2, group="run/0")
        push(store, old[0], [A])
        waiting = apply(store, old[0])
        new = await open_ranks(store, 2, group="run/1")
        with pytest.raises(WriterFenced):
            await waiting
        for view in old:
            with pytest.raises(WriterFenced):
                push(store, view, [B])
            with pytest.raises(WriterFenced):
                commit(store, view, 4)
        assert not store.namespaces[NAME].writing.pending
        push(store, new[1], [A])
        store.close_view(old[0])
        store.close_view(old[1])
        assert (await outcomes(apply(store, view) for view in new))[0]["records"] == 1

    run_ranks(scenario)


def test_ranks_fence_a_single_writer_and_a_single_writer_them() -> None:
    async def scenario(store: Store) -> None:
        alone = await store.admission.open(NAME, mode="write", at=None, host_bytes=None)
        views = await open_ranks(store, 2)
        with pytest.raises(WriterFenced):
            push(store, alone, [A])
        again = await store.admission.open(NAME, mode="write", at=None, host_bytes=None)
        with pytest.raises(WriterFenced):
            norm(store, views[0])
        push(store, again, [A])
        assert (await store.applies.apply(again, AdamW(lr=0.5), 1.0))["records"] == 1

    run_ranks(scenario)


def test_a_group_may_open_again_under_its_name() -> None:
    async def scenario(store: Store) -> None:
        old, new = await open_ranks(store, 2), await open_ranks(store, 2, at=0)
        with pytest.raises(WriterFenced):
            norm(store, old[1])
        assert await outcomes(norm(store, view) for view in new) == [0.0, 0.0]

    run_ranks(scenario)


def test_a_rank_that_closed_its_view_is_told_so() -> None:
    async def scenario(store: Store) -> None:
        one, two = await open_ranks(store, 2)
        store.close_view(one)
        with pytest.raises(RankLost, match="rank 0 closed the namespace"):
            norm(store, two)
        with pytest.raises(LeaseError, match="was closed"):
            norm(store, one)

    run_ranks(scenario)


def test_when_the_daemon_stops_whoever_still_forms_is_told_so() -> None:
    async def scenario(store: Store) -> None:
        waiting = arrive(store, 0, 2)
        await store.close()
        with pytest.raises(StoreUnavailable, match="stopping"):
            await waiting

    run_ranks(scenario)
