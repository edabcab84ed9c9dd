"""Whoever waits for bytes gets them, or a reason within a bounded time; whoever stops waiting leaves nothing behind."""

from __future__ import annotations

import asyncio

import pytest

from paramstore.core.residency import Working
from paramstore.errors import CorruptRecord, LeaseError, SchemaMismatch, TicketCancelled, UnknownKey, WaitTimeout
from paramstore_testkit.stores.small_store import SCHEMA, first_values, lease, train, turns
from paramstore_testkit.stores.update_site import Site, on_site

A, B, C, D = ((0, expert) for expert in range(4))


# --- leases


def test_a_part_that_clients_cannot_see_is_not_leased() -> None:
    async def scenario(site: Site) -> None:
        with pytest.raises(SchemaMismatch, match="'optim' cannot be leased: the daemon alone sees it"):
            site.store.access.acquire(site.view, 1, [A], "optim")
        with pytest.raises(SchemaMismatch, match="no part 'gradients'"):
            site.store.access.acquire(site.view, 1, [A], "gradients")

    on_site(scenario)


def test_a_lease_that_times_out_says_what_it_waited_for() -> None:
    async def scenario(site: Site) -> None:
        site.pause()
        with pytest.raises(WaitTimeout, match="lease of 2 keys of 'moe': 2 still loading"):
            await lease(site.store, site.view, [A, B], timeout_s=0.0)
        site.resume()
        arena = site.namespace.memory.param
        held = await lease(site.store, site.view, [A, B])
        other = await site.store.admission.open("moe", mode="read", at=None, host_bytes=None)
        while arena.slots.free_count:
            arena.slots.take()
        with pytest.raises(WaitTimeout, match="lease of 1 keys of 'moe': waiting for slots to come free"):
            await lease(site.store, other, [C], timeout_s=0.0)
        assert not arena.waiting
        site.store.access.release(site.view, held.lease_id)

    on_site(scenario)


def test_a_waiting_lease_can_be_cancelled_from_outside() -> None:
    async def scenario(site: Site) -> None:
        site.pause()
        request = site.store.access.acquire(site.view, 1, [A], "param")
        waiting = asyncio.ensure_future(site.store.access.wait_lease(request, 5.0))
        await turns(3)
        site.store.access.cancel_lease(request, TicketCancelled("not wanted"))
        with pytest.raises(TicketCancelled):
            await waiting
        site.resume()
        await site.idle()
        assert not site.view.leased
        assert await first_values(site.store, site.view) == [0, 1, 2, 3]

    on_site(scenario, experts=4)


def test_closing_the_view_ends_its_waits() -> None:
    async def scenario(site: Site) -> None:
        site.pause()
        request = site.store.access.acquire(site.view, 1, [A], "param")
        waiting = asyncio.ensure_future(site.store.access.wait_lease(request, 5.0))
        await turns(3)
        site.store.close_view(site.view)
        with pytest.raises(LeaseError, match="the session ended"):
            await waiting

    on_site(scenario)


# --- prefetch


def test_a_prefetch_says_what_it_came_to() -> None:
    async def scenario(site: Site) -> None:
        held = await lease(site.store, site.view, [A])
        figures = await site.store.access.wait_prefetch(site.store.access.prefetch(site.view, [A, B, C], "param", None))
        assert figures == {"loaded": 2, "resident": 1, "skipped": 0, "bytes": 2 * SCHEMA.part("param").image_bytes}
        figures = await site.store.access.wait_prefetch(site.store.access.prefetch(site.view, [A, B], "optim", 1.0))
        assert figures == {"loaded": 2, "resident": 0, "skipped": 0, "bytes": 2 * SCHEMA.record_bytes}
        site.store.access.release(site.view, held.lease_id)

    on_site(scenario)


def test_a_prefetch_reports_its_first_error_when_all_its_loads_are_over() -> None:
    async def scenario(site: Site) -> None:
        located = site.namespace.steps.ledger.at(B, 0)
        assert located is not None
        site.machine.disks[0].corrupt(located.extent.offset_bytes + SCHEMA.stored.field("master/w").offset_bytes)
        request = site.store.access.prefetch(site.view, [A, B, C], "param", None)
        with pytest.raises(CorruptRecord, match=r"\(0, 1\)"):
            await site.store.access.wait_prefetch(request)
        assert request.loaded == 2
        assert not request.pending

    on_site(scenario)


def test_a_prefetch_of_what_is_not_there_is_refused() -> None:
    async def scenario(site: Site) -> None:
        with pytest.raises(SchemaMismatch):
            site.store.access.prefetch(site.view, [A], "gradients", None)
        with pytest.raises(UnknownKey):
            site.store.access.prefetch(site.view, [(5, 5)], "param", None)

    on_site(scenario)


def test_the_sooner_of_two_deadlines_moves_first() -> None:
    async def scenario(site: Site) -> None:
        site.pause()
        loads = {}
        for key, deadline_s in ((A, None), (B, None), (C, 9.0), (D, 1.0)):
            loads[key] = site.store.access.prefetch(site.view, [key], "param", deadline_s)
        ended: list[tuple[int, int]] = []

        async def wait(key: tuple[int, int]) -> None:
            await site.store.access.wait_prefetch(loads[key])
            ended.append(key)

        waits = [asyncio.ensure_future(wait(key)) for key in loads]
        site.resume()
        await asyncio.gather(*waits)
        assert ended == [A, B, D, C], "the two workers had taken the first two before the others came"

    on_site(scenario)


# --- held working copies


def test_a_held_copy_is_in_its_slot_and_stays_until_it_is_let_go() -> None:
    async def scenario(site: Site) -> None:
        working = await site.access.hold(site.namespace, A)
        assert (working.state, working.holders) == (Working.CLEAN, 1)
        assert await site.store.evict(site.view, [A], "optim") == {"evicted": 0, "skipped": [[0, 0]]}
        site.unhold(A)
        assert await site.store.evict(site.view, [A], "optim") == {"evicted": 1, "skipped": []}

    on_site(scenario)


def test_who_waits_for_a_slot_too_long_is_told_and_leaves_the_queue() -> None:
    async def scenario(site: Site) -> None:
        site.leave_slots(1)
        await site.access.hold(site.namespace, A)
        with pytest.raises(WaitTimeout, match=r"a slot for \(0, 1\) of 'moe': nothing in the store has moved for 0.01 s"):
            await site.access.hold(site.namespace, B)
        assert not site.namespace.memory.working.waiting
        site.unhold(A)
        assert (await site.access.hold(site.namespace, B)).holders == 1

    on_site(scenario, wait_timeout_s=0.01)


def test_who_stops_waiting_for_a_load_holds_nothing_when_it_lands() -> None:
    async def scenario(site: Site) -> None:
        site.pause()
        waiting = asyncio.ensure_future(site.access.hold(site.namespace, A))
        await turns(3)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        site.resume()
        await site.idle()
        working = site.namespace.residency.working[A]
        assert (working.state, working.holders) == (Working.CLEAN, 0)

    on_site(scenario)


@pytest.mark.parametrize("is_fill", [False, True])
def test_who_is_stopped_in_the_moment_in_which_the_slot_comes_lets_it_go(is_fill: bool) -> None:
    async def scenario(site: Site) -> None:
        site.leave_slots(1)
        await site.access.hold(site.namespace, A)
        site.namespace.residency.working[B].target = site.namespace.residency.working[B].identity
        waiting = asyncio.ensure_future(site.access.hold(site.namespace, B, is_fill=is_fill))
        await turns(3)
        site.unhold(A)
        while not (site.namespace.residency.working[B].holders or site.namespace.residency.working[B].state is Working.UPDATING):
            await asyncio.sleep(0)
        waiting.cancel()  # it was told, and has not run yet
        outcome = (await asyncio.gather(waiting, return_exceptions=True))[0]
        assert isinstance(outcome, asyncio.CancelledError)
        await site.idle()
        assert site.namespace.residency.working[B].holders == 0
        assert site.namespace.residency.working[B].state in (Working.ABSENT, Working.CLEAN)
        await site.store.evict(site.view, None, None)
        assert (await site.access.hold(site.namespace, C)).holders == 1

    on_site(scenario)


def test_a_change_wakes_who_waits_for_it_and_a_wait_for_none_is_bounded() -> None:
    async def scenario(site: Site) -> None:
        working = await site.access.hold(site.namespace, A)
        await site.access.hold(site.namespace, A)
        waiting = asyncio.ensure_future(site.access.changed(site.namespace, working))
        await turns(3)
        assert not waiting.done()
        site.unhold(A)
        await waiting
        with pytest.raises(WaitTimeout, match=r"\(0, 0\) of 'moe', clean: nothing in the store has moved for 0.02 s"):
            await site.access.changed(site.namespace, working)

    on_site(scenario, wait_timeout_s=0.02)


def test_leases_wait_for_the_bytes_that_an_apply_called_before_them_makes() -> None:
    async def scenario(site: Site) -> None:
        before = await first_values(site.store, site.view)
        training = asyncio.ensure_future(train(site.store, site.view))
        await turns(1)
        after = await first_values(site.store, site.view)
        assert [old - new for old, new in zip(before, after, strict=True)] == pytest.approx([0.5, 0.5, 0.5, 0.5])
        await training

    on_site(scenario, experts=4)
