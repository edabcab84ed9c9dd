"""A `param` copy of a record with missed steps is made in a buffer: of the right source, by urgency, and nothing gets dirty."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from paramstore.core.key import ExpertKey
from paramstore.core.location import Identity
from paramstore.core.residency import Copy, Working
from paramstore.engine.store import Store
from paramstore.engine.tables.moves import MoveKind
from paramstore.engine.tables.namespace import NamespaceState, View
from paramstore.errors import CorruptRecord, StepFailed
from paramstore_testkit.disks.machine import Machine
from paramstore_testkit.stores.small_planner import SmallPlanner
from paramstore_testkit.stores.small_store import OPTIONS, SCHEMA, create, first_values, keys_of, lease, run, train, turns

EXACT = replace(SCHEMA, updates="exact")
A, B, C, D = ((0, expert) for expert in range(4))


# --- which source, which copy


def desk(**sizes: int) -> SmallPlanner:
    return SmallPlanner(**{"param_slots": 5, "working_slots": 2, "schema": EXACT, **sizes})  # type: ignore[arg-type]


def apply_without_gradients(small: SmallPlanner, count: int = 1) -> None:
    for _ in range(count):
        small.update()


def test_a_record_that_missed_steps_is_advanced_from_its_extent() -> None:
    small = desk()
    view = small.writer()
    apply_without_gradients(small, 2)
    request = small.lease(view, A)
    (move,) = small.start()
    assert (move.kind, move.located, move.source) == (MoveKind.ADVANCE, small.namespace.steps.ledger.at(A, 0), None)
    copy = request.copies[0]
    assert (copy.identity, copy.base, len(copy.missed)) == (Identity(1, 2), Identity(1, 0), 2)


def test_a_record_in_its_working_slot_is_advanced_from_there_and_held_meanwhile() -> None:
    small = desk()
    view = small.writer()
    small.update(A)
    apply_without_gradients(small)
    working = small.namespace.residency.working[A]
    request = small.lease(view, A)
    (move,) = small.start()
    assert (move.kind, move.located, move.source, working.holders) == (MoveKind.ADVANCE, None, working, 1)
    assert len(request.copies[0].missed) == 1
    small.land(move)
    assert request.is_finished
    assert working.holders == 0


def test_what_took_part_in_the_last_apply_needs_no_advance() -> None:
    small = desk()
    view = small.writer()
    apply_without_gradients(small)
    small.update(A)
    small.planner.evict_param(small.namespace, A)
    small.lease(view, A)
    (move,) = small.start()
    assert move.kind is MoveKind.MATERIALISE


def test_a_lease_makes_nothing_dirty_and_leaves_nothing_to_commit() -> None:
    small = desk()
    view = small.writer()
    apply_without_gradients(small)
    small.leased(view, A, B)
    assert small.namespace.steps.changed == []
    assert all(working.state is Working.ABSENT for working in small.namespace.residency.working.values())


def test_every_apply_leaves_the_copies_behind_and_the_next_lease_retires_them() -> None:
    small = desk()
    view = small.writer()
    first = small.leased(view, A)
    old = first.copies[0]
    apply_without_gradients(small)
    second = small.leased(view, A)
    new = second.copies[0]
    assert (new.identity, old.state) == (Identity(1, 1), Copy.RETIRED)
    small.release(first)
    small.release(second)
    assert small.namespace.residency.copies[A] == [new]
    small.check()


def test_what_was_prefetched_before_an_apply_and_not_used_is_waste_and_does_not_keep_others_from_prefetching() -> None:
    small = desk(param_slots=3)
    view = small.writer()
    for keys in ((A, B, C), (B, C, D)):
        request = small.prefetch(view, *keys)
        small.land_all()
        assert (request.loaded, request.skipped) == (3, 0)
        apply_without_gradients(small)
    stats = small.namespace.stats.param
    assert (stats.prefetched, stats.wasted, len(small.namespace.residency.prefetched)) == (6, 6, 0)
    small.check()


def test_what_was_prefetched_for_a_reader_stays_for_it() -> None:
    small = desk()
    small.writer()
    reader = small.reader(0)
    small.prefetch(reader, A)
    small.land_all()
    apply_without_gradients(small)
    assert small.namespace.stats.param.wasted == 0
    assert small.lease(reader, A).is_finished


def test_a_lease_needs_no_room_beside_the_copies_that_it_takes_the_place_of() -> None:
    small = desk(param_slots=4)
    view = small.writer()
    for _ in range(3):
        small.release(small.leased(view, A, B, C))
        apply_without_gradients(small)
    assert small.namespace.stats.param.evictions == 0
    small.check()


def test_a_lease_waits_for_an_apply_called_before_it_and_advances_the_later_one() -> None:
    small = desk()
    view = small.writer()
    small.begin_apply(A)
    small.begin_apply()
    request = small.lease(view, A)
    assert small.start() == []
    small.namespace.writing.applies += 1
    update = small.begin_update(A)
    copy = update.copy
    assert copy is None, "nobody sees the version in between"
    small.settle_update(update)
    small.start()
    assert [move.kind for move in small.under_way] == [MoveKind.ADVANCE]
    small.land_all()
    assert (request.copies[0].identity, request.copies[0].base) == (Identity(1, 2), Identity(1, 1))


def test_in_a_broken_namespace_a_lease_goes_on_whose_record_is_there_and_one_fails_whose_bytes_are_never_made() -> None:
    small = desk()
    view = small.writer()
    apply_without_gradients(small)
    small.prefetch(view, A, part="optim")
    (load,) = small.start()
    reachable = small.lease(view, A)
    small.begin_apply(B)
    unmade = small.lease(view, B)
    small.planner.mark_broken(small.namespace, "an apply failed")
    assert isinstance(unmade.error, StepFailed)
    assert not reachable.is_finished
    small.land(load)
    small.land_all()
    assert reachable.is_finished
    assert reachable.error is None


def test_readers_of_different_steps_see_different_copies_of_one_record() -> None:
    small = desk()
    small.writer()
    for step in (1, 2):
        apply_without_gradients(small)
        small.commit(step)
    older, newer = small.reader(1), small.reader(2)
    assert (older.locate(A)[0], newer.locate(A)[0]) == (Identity(1, 1), Identity(1, 2))
    one, other = small.leased(older, A), small.leased(newer, A)
    assert [len(request.copies[0].missed) for request in (one, other)] == [1, 2]


def test_the_writer_and_a_reader_of_the_same_state_share_a_copy() -> None:
    small = desk()
    view = small.writer()
    apply_without_gradients(small)
    small.commit(1)
    reader = small.reader(1)
    assert small.leased(view, A).copies == small.leased(reader, A).copies


def test_a_copy_made_before_a_rollback_serves_after_it_and_one_from_beyond_does_not() -> None:
    small = desk()
    view = small.writer()
    apply_without_gradients(small)
    small.commit(1)
    kept = small.leased(view, A).copies[0]
    apply_without_gradients(small)
    gone = small.leased(view, B).copies[0]
    small.rollback(1)
    view = small.writer()
    assert small.namespace.writing.log.last == 1
    assert small.leased(view, A).copies == [kept]
    assert gone.state is Copy.RETIRED
    assert small.leased(view, B).copies[0].identity == Identity(1, 1), "of the epoch in which the apply was made"
    apply_without_gradients(small)
    assert small.namespace.wanted(small.namespace.residency.working[B]) == Identity(2, 2)


# --- carried out


class Site:
    """A store with an exact namespace committed at step 0; `seen`: the `param` values as a lease gives them."""

    def __init__(self, **machine: Any) -> None:
        self.machine = Machine(**machine)
        self.store: Store = self.machine.start()
        self.view: View

    @property
    def namespace(self) -> NamespaceState:
        return self.view.namespace

    async def idle(self, count: int = 1) -> None:
        for _ in range(count):
            await train(self.store, self.view, [])


def on_site(scenario: Callable[[Site], Coroutine[Any, Any, None]], *, experts: int = 6, **machine: Any) -> None:
    async def prepared() -> None:
        site = Site(**machine)
        site.view = await create(site.store, schema=EXACT, experts=experts)
        await train(site.store, site.view)  # moments that are not zero
        await site.store.committer.commit(site.view, 1, b"")
        await site.store.evict(site.view, None, None)
        await scenario(site)

    run(prepared())


def dense(values: Sequence[float], idle: int) -> list[float]:
    """The first element of each record after one step with a gradient of 1 and `idle` steps with none."""
    return [_dense(float(value), idle) for value in values]


def _dense(value: float, idle: int) -> float:
    master = torch.full((15,), value)  # as the field has: torch's kernel rounds what is left over from its vectors otherwise
    average, square = torch.zeros_like(master), torch.zeros_like(master)
    for number in range(1 + idle):
        gradient = torch.ones_like(master) if number == 0 else torch.zeros_like(master)
        torch._fused_adamw_(
            [master], [gradient], [average], [square], [], [torch.tensor(float(number + 1))], lr=OPTIONS.lr, beta1=OPTIONS.betas[0],
            beta2=OPTIONS.betas[1], weight_decay=OPTIONS.weight_decay, eps=OPTIONS.eps, amsgrad=False, maximize=False,
        )  # fmt: skip
    return master[0].item()


@pytest.mark.parametrize("is_resident", [False, True])
def test_a_lease_has_what_the_dense_optimizer_has_and_the_record_is_as_it_was(is_resident: bool) -> None:
    async def scenario(site: Site) -> None:
        await site.idle(3)
        keys = keys_of(site.view)
        if is_resident:
            await site.store.access.wait_prefetch(site.store.access.prefetch(site.view, keys, "optim", None))
        assert await first_values(site.store, site.view) == dense(range(6), 3)
        assert site.namespace.steps.changed == []
        stats = site.namespace.stats
        assert (stats.records_advanced, stats.missed_steps_made, stats.records_caught_up) == (6, 18, 0)
        assert await first_values(site.store, site.view) == dense(range(6), 3)
        assert stats.records_advanced == 6, "they are there now"

    on_site(scenario)


def test_an_update_makes_the_missed_steps_first_and_its_param_with_them() -> None:
    async def scenario(site: Site) -> None:
        await site.idle(2)
        keys = keys_of(site.view)
        await train(site.store, site.view, keys[:2])
        assert site.namespace.stats.missed_steps_made == 4
        assert [site.namespace.residency.working[key].identity for key in keys[:2]] == [Identity(site.namespace.epoch, 4)] * 2
        assert [site.namespace.residency.working[key].optimizer_step for key in keys[:2]] == [4, 4]
        assert site.namespace.stats.records_advanced == 0
        await first_values(site.store, site.view, keys[:2])
        assert site.namespace.stats.records_advanced == 0

    on_site(scenario)


def test_demand_goes_before_prefetch_where_buffers_are_short() -> None:
    async def scenario(site: Site) -> None:
        await site.idle()
        keys, order = keys_of(site.view), list[ExpertKey]()
        free = site.store.transfers._buffers.of("moe").advance
        while len(free) > 1:
            free.pop()
        settle = site.store.transfers._planner.copies.settle

        def noting(namespace: NamespaceState, copy: Any, error: Any) -> None:
            order.append(copy.key)
            settle(namespace, copy, error)

        site.store.transfers._planner.copies.settle = noting  # type: ignore[method-assign]
        prefetch = site.store.access.prefetch(site.view, keys[:4], "param", None)
        await lease(site.store, site.view, [keys[5]])
        await site.store.access.wait_prefetch(prefetch)
        assert order.index(keys[5]) <= 1, "behind the one that has the buffer, at most"
        assert len(free) == 1

    on_site(scenario)


def test_an_advance_that_somebody_comes_to_wait_for_is_demand() -> None:
    async def scenario(site: Site) -> None:
        await site.idle()
        keys, transfers = keys_of(site.view), site.store.transfers
        advances, buffers = transfers.advancer.of("moe"), transfers._buffers.of("moe").advance
        free = [buffers.pop() for _ in range(len(buffers))]
        prefetch = site.store.access.prefetch(site.view, keys[:3], "param", None)
        request = site.store.access.acquire(site.view, 7, [keys[2]], "param")
        await turns()
        assert [(waiting.copy.key, waiting.urgency) for waiting in advances.waiting] == [(keys[0], 1), (keys[1], 1), (keys[2], 0)]
        buffers.extend(free)
        transfers.advancer._give_buffers(site.namespace)
        transfers.carry_out()
        await site.store.access.wait_lease(request, 5.0)
        await site.store.access.wait_prefetch(prefetch)

    on_site(scenario)


def test_a_damaged_record_fails_who_asked_for_it_and_nobody_else() -> None:
    async def scenario(site: Site) -> None:
        await site.idle()
        keys = keys_of(site.view)
        located = site.namespace.on_volume(keys[1])
        assert located is not None
        site.machine.disks[0].corrupt(located.extent.offset_bytes + EXACT.stored.field("exp_avg/w").offset_bytes)
        with pytest.raises(CorruptRecord, match="exp_avg/w"):
            await lease(site.store, site.view, [keys[1]])
        assert await first_values(site.store, site.view, [keys[0], keys[2]]) == [dense(range(6), 1)[at] for at in (0, 2)]
        assert site.namespace.writing.broken is None
        assert not site.store.transfers.advancer.of("moe").running

    on_site(scenario)


def test_a_lease_given_up_and_a_view_closed_leave_no_buffer_behind() -> None:
    async def scenario(site: Site) -> None:
        await site.idle()
        assert site.machine.workers is not None
        site.machine.workers.pause()
        site.store.access.acquire(site.view, 5, keys_of(site.view)[:3], "param")
        prefetch = site.store.access.prefetch(site.view, keys_of(site.view)[3:], "param", None)
        site.store.transfers.cancel_prefetch(prefetch)
        site.store.close_view(site.view)
        site.machine.workers.resume()
        while not site.store.transfers.runner.is_idle:
            await asyncio.sleep(0)
        advances = site.store.transfers.advancer.of("moe")
        assert not advances.waiting
        assert not advances.running
        assert all(isinstance(buffer, memoryview) for buffer in site.store.transfers._buffers.of("moe").advance)
        assert all(copy.leases == 0 for copies in site.namespace.residency.copies.values() for copy in copies)

    on_site(scenario)


def test_an_apply_without_gradients_is_a_step_that_a_commit_keeps() -> None:
    async def scenario(site: Site) -> None:
        await site.idle()
        answer = await site.store.committer.commit(site.view, 5, b"")
        assert answer["records"] == 0
        reader = await site.store.admission.open("moe", mode="read", at=5, host_bytes=None)
        before = await site.store.admission.open("moe", mode="read", at=1, host_bytes=None)
        assert await first_values(site.store, reader) == dense(range(6), 1)
        assert await first_values(site.store, before) == dense(range(6), 0)
        again = await site.store.committer.commit(site.view, 5, b"")
        assert again["records"] == 0
        assert again["seconds"] == 0.0, "nothing happened since"

    on_site(scenario)


def test_the_same_step_again_after_an_apply_without_gradients_is_no_repetition() -> None:
    async def scenario(site: Site) -> None:
        await site.idle()
        with pytest.raises(Exception, match="steps go up, 1 is committed"):
            await site.store.committer.commit(site.view, 1, b"")

    on_site(scenario)
