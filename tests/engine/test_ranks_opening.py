"""Ranks on one store, in simulated time: those that open it together."""

from __future__ import annotations

import asyncio

import pytest

from paramstore.engine import ranks as ranks_module
from paramstore.engine.ranks import Arrival
from paramstore.engine.store import Store
from paramstore.errors import CapacityError, ConfigError, StepDropped, StepMismatch, TicketCancelled
from paramstore_testkit.stores.small_ranks import NAME, arrive, open_ranks, outcomes, run_ranks
from paramstore_testkit.stores.small_store import turns

TIMEOUT_S = 5.0


def test_the_last_rank_opens_for_all_and_rolls_back_once() -> None:
    async def scenario(store: Store) -> None:
        epoch = store.namespaces[NAME].epoch
        first, second = arrive(store, 0, 3), arrive(store, 2, 3)
        await turns()
        assert not first.done()
        assert store.namespaces[NAME].epoch == epoch
        views = await arrive(store, 1, 3)
        assert await first == await second == views
        assert [views[rank].rank for rank in range(3)] == [0, 1, 2]
        assert len({id(view) for view in views.values()}) == 3
        assert store.namespaces[NAME].epoch == epoch + 1

    run_ranks(scenario)


def test_a_rank_that_does_not_come_ends_the_wait_of_all_with_its_name() -> None:
    async def scenario(store: Store) -> None:
        started_s = asyncio.get_running_loop().time()
        found = await outcomes([arrive(store, 2, 4), arrive(store, 0, 4)])
        waited_s = asyncio.get_running_loop().time() - started_s
        assert waited_s == pytest.approx(TIMEOUT_S, abs=0.1)
        assert {type(error) for error in found} == {StepMismatch}
        assert "open_namespace of ranks 0, 2: ranks 1, 3 did not call in time" in str(found[0])
        assert [view.rank for view in await open_ranks(store, 2)] == [0, 1], "the next arrivals form anew"

    run_ranks(scenario, wait_timeout_s=TIMEOUT_S)


def test_arrivals_of_two_groups_never_mix() -> None:
    async def scenario(store: Store) -> None:
        old = arrive(store, 0, 2, group="run/0")
        new = arrive(store, 1, 2, group="run/1")
        await turns()
        assert not old.done()
        assert not new.done()
        views = await arrive(store, 0, 2, group="run/1")
        assert views[1] is (await new)[1]
        assert not old.done()
        (error,) = await outcomes([old])
        assert "rank 1 did not call in time" in str(error)

    run_ranks(scenario)


@pytest.mark.parametrize("size", [2, 3])
def test_ranks_that_disagree_about_the_opening_are_refused_at_once(size: int) -> None:
    async def scenario(store: Store) -> None:
        started_s = asyncio.get_running_loop().time()
        found = await outcomes([arrive(store, 0, 2, at=0), arrive(store, 1, size)])
        assert asyncio.get_running_loop().time() - started_s < 0.1
        assert {type(error) for error in found} == {StepMismatch}
        assert "rank 0 called open_namespace(at=0" in str(found[1])

    run_ranks(scenario)


def test_a_second_arrival_of_a_rank_is_refused_and_the_first_waits_on() -> None:
    async def scenario(store: Store) -> None:
        first = arrive(store, 0, 2)
        with pytest.raises(StepMismatch, match="rank 0 waits for the others in open_namespace already"):
            arrive(store, 0, 2)
        views = await arrive(store, 1, 2)
        assert await first == views

    run_ranks(scenario)


def test_a_rank_that_goes_while_its_group_forms_may_come_again() -> None:
    async def scenario(store: Store) -> None:
        first, other = arrive(store, 0, 2), arrive(store, 1, 3, group="other")
        store.ranks.withdraw(Arrival(NAME, "g", 0, 2))
        with pytest.raises(TicketCancelled):
            await first
        assert [view.rank for view in await open_ranks(store, 2)] == [0, 1]
        store.ranks.withdraw(Arrival(NAME, "g", 0, 2))  # it waits no more: nothing happens
        store.ranks.withdraw(Arrival(NAME, "other", 1, 3))
        await outcomes([other])

    run_ranks(scenario)


def test_what_keeps_the_namespace_from_being_opened_is_told_to_all_ranks() -> None:
    async def scenario(store: Store) -> None:
        found = await outcomes([arrive(store, rank, 2, at=7) for rank in range(2)])
        assert [type(error) for error in found] == [StepDropped, StepDropped]

    run_ranks(scenario)


def test_groups_that_form_have_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks_module, "FORMING_MAX", 2)

    async def scenario(store: Store) -> None:
        waiting = [arrive(store, 0, 2, group=group) for group in ("a", "b")]
        with pytest.raises(CapacityError, match="2 groups are forming"):
            arrive(store, 0, 2, group="c")
        await outcomes(waiting)
        assert len(await open_ranks(store, 2, group="c")) == 2

    run_ranks(scenario)


def test_a_rank_out_of_range_is_refused() -> None:
    async def scenario(store: Store) -> None:
        with pytest.raises(ConfigError, match="rank=2, world_size=2"):
            arrive(store, 2, 2)

    run_ranks(scenario)
