"""Placements: every expert has ranks, all ranks agree on them, and what is none is refused."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paramstore.core.placement import Placement, ranks_named
from paramstore.errors import ConfigError


@given(experts=st.integers(1, 40), world_size=st.integers(1, 12))
def test_in_order_gives_each_rank_a_run_of_experts_as_many_as_the_others_or_one_more(experts: int, world_size: int) -> None:
    placement = Placement.in_order(experts, world_size)
    runs = [placement.of_rank(rank) for rank in range(world_size)]
    assert [expert for run in runs for expert in run] == list(range(experts))
    assert max(map(len, runs)) - min(map(len, runs)) <= 1
    assert placement.experts == experts


def test_an_expert_with_replicas_is_on_each_of_its_ranks() -> None:
    placement = Placement(((0, 2), (1,)), 3)
    assert [placement.of_rank(rank) for rank in range(3)] == [(0,), (1,), (0,)]


@pytest.mark.parametrize("ranks", [(), (3,), (-1,), (1, 0), (1, 1)])
def test_ranks_that_are_none_of_the_job_are_refused(ranks: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match="expert 1 on ranks"):
        Placement(((0,), ranks), 3)


@pytest.mark.parametrize(
    ("ranks", "world_size", "name"),
    [(7, 2, "ranks"), (((0,), 1), 2, "expert 1 on ranks"), (((0,), ("a",)), 2, "expert 1 on ranks"), (((0,),), 0, "world_size")],
)
def test_what_says_no_ranks_is_refused(ranks: Any, world_size: int, name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name}="):
        Placement(ranks, world_size)


def test_lists_are_taken_as_the_same_placement() -> None:
    given: Any = [[0], [1, 2]]
    assert Placement(given, 3) == Placement(((0,), (1, 2)), 3)
    assert Placement(given, 3).digest == Placement(((0,), (1, 2)), 3).digest


@pytest.mark.parametrize("rank", [-1, 2, None])
def test_a_rank_that_is_none_has_no_experts_but_an_error(rank: Any) -> None:
    with pytest.raises(ConfigError, match="rank="):
        Placement.in_order(4, 2).of_rank(rank)


@pytest.mark.parametrize(("experts", "world_size"), [(0, 2), (4, 0), (None, 2), (4, "2")])
def test_what_is_no_number_of_experts_or_ranks_is_refused(experts: Any, world_size: Any) -> None:
    with pytest.raises(ConfigError, match=r"experts=|world_size="):
        Placement.in_order(experts, world_size)


def test_digests_tell_placements_apart() -> None:
    placements = [Placement.in_order(8, 4), Placement.in_order(8, 2), Placement.in_order(7, 4), Placement(((0, 1),) * 8, 4)]
    assert len({placement.digest for placement in placements}) == 4
    assert Placement.in_order(8, 4).digest == placements[0].digest < 1 << 63


def test_ranks_are_named_for_people() -> None:
    assert (ranks_named([2]), ranks_named((0, 3))) == ("rank 2", "ranks 0, 3")
