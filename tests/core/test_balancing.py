"""Balancing: experts over ranks by their history, an expert's tokens over its replicas, tasks over ranks."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paramstore.core.balancing import (
    ANTI_CORRELATION,
    AS_IT_IS,
    GREEDY,
    busiest_share,
    choose_placement,
    place_anti_correlated,
    place_greedily,
    plan_tasks,
    read_history,
    route_tokens,
)
from paramstore.core.placement import Placement
from paramstore.core.trace import TraceEvent, TraceEventKind
from paramstore.errors import ConfigError

IN_TURN = [[9, 0, 9, 0, 3, 3], [0, 9, 0, 9, 3, 3]] * 4
"""Experts 0 and 2 are active together, and 1 and 3 together, in the batches between; means alone do not tell them apart."""

histories = st.integers(1, 12).flatmap(
    lambda experts: st.lists(st.lists(st.integers(0, 2**32 - 1), min_size=experts, max_size=experts), min_size=1, max_size=6)
)


@st.composite
def placements(draw: st.DrawFn) -> Placement:
    """Any placement, replicas on any of the ranks."""
    world_size = draw(st.integers(1, 6))
    ranks = st.sets(st.integers(0, world_size - 1), min_size=1).map(lambda found: tuple(sorted(found)))
    return Placement(tuple(draw(st.lists(ranks, min_size=1, max_size=5))), world_size)


@given(history=histories, world_size=st.integers(1, 14))
def test_each_rank_has_as_many_experts_as_the_others_or_one_more(history: list[list[int]], world_size: int) -> None:
    history.append([1] * len(history[0]))
    for placement in (place_greedily(history, world_size), place_anti_correlated(history, world_size)):
        sizes = [len(placement.of_rank(rank)) for rank in range(world_size)]
        assert max(sizes) - min(sizes) <= 1
        assert sum(sizes) == placement.experts == len(history[0])


def test_greedy_gives_the_most_loaded_first_to_the_rank_with_the_least_load() -> None:
    placement = place_greedily([[7, 6, 1, 5, 4, 1]], 2)
    assert [placement.of_rank(rank) for rank in range(2)] == [(0, 2, 4), (1, 3, 5)]


def test_a_large_batch_counts_no_more_than_a_small_one() -> None:
    placement = place_greedily([[6, 2, 1, 1], [6, 2, 1, 1], [200, 300, 300, 200]], 2)
    assert placement.of_rank(0) == (0, 3)


def test_anti_correlation_parts_experts_that_are_active_together() -> None:
    placement = place_anti_correlated(IN_TURN, 2)
    assert placement.ranks[0] != placement.ranks[2]
    assert placement.ranks[1] != placement.ranks[3]
    assert busiest_share(IN_TURN, placement) == 0.5 < busiest_share(IN_TURN, place_greedily(IN_TURN, 2))


def test_correlation_as_printed_would_outweigh_the_loads() -> None:
    """Experts 0 and 1 have most of the load and are never as active at once; 2 and 3 go with them."""
    history = [[50, 40, 6, 4], [40, 50, 4, 6]] * 3
    assert place_anti_correlated(history, 2).ranks[0] != place_anti_correlated(history, 2).ranks[1]


def test_the_share_of_the_busiest_is_the_mean_over_batches_and_replicas_share_alike() -> None:
    placement = Placement(((0,), (1,), (0, 1)), 2)
    assert busiest_share([[3, 1, 0], [0, 0, 8], [0, 0, 0], [0, 1, 2]], placement) == pytest.approx((3 / 4 + 1 / 2 + 2 / 3) / 3)


def test_the_best_on_the_second_half_is_chosen() -> None:
    choice = choose_placement(IN_TURN, Placement(((0,), (1,), (0,), (1,), (0,), (1,)), 2))
    assert choice.name == ANTI_CORRELATION
    assert choice.placement == place_anti_correlated(IN_TURN[:4], 2)
    assert choice.shares[ANTI_CORRELATION] < min(choice.shares[GREEDY], choice.shares[AS_IT_IS])


def test_what_is_judged_was_fitted_to_the_first_half_alone() -> None:
    history = [[8, 1, 2, 4]] * 2 + [[1, 20, 9, 1]] * 3
    placements = choose_placement(history, Placement.in_order(4, 2)).placements
    for name, place in ((GREEDY, place_greedily), (ANTI_CORRELATION, place_anti_correlated)):
        assert placements[name] == place(history[:2], 2) != place(history, 2)


def test_a_placement_stays_where_the_load_moves_on_and_where_no_other_is_better() -> None:
    current = Placement.in_order(4, 2)
    moved = [[1, 1, 9, 9]] * 3 + [[9, 1, 1, 9]] * 3
    assert busiest_share(moved[:3], place_greedily(moved[:3], 2)) < busiest_share(moved[:3], current)
    for history in (moved, [[1, 1, 1, 1]] * 4, [[5, 1, 4, 2]] * 4):
        choice = choose_placement(history, current)
        assert (choice.name, choice.placement) == (AS_IT_IS, current), history


@pytest.mark.parametrize("history", [[], [[0, 0]], [[5, 0], [0, 0]]])
def test_a_placement_stays_without_two_batches_to_fit_to_and_to_judge_on(history: list[list[int]]) -> None:
    current = Placement(((0, 1), (1,)), 2)
    choice = choose_placement(history, current)
    assert (choice.name, choice.placement, choice.shares) == (AS_IT_IS, current, {})


@given(history=histories, world_size=st.integers(1, 5))
def test_the_choice_is_never_worse_than_the_present_on_held_out_batches(history: list[list[int]], world_size: int) -> None:
    choice = choose_placement(history, Placement.in_order(len(history[0]), world_size))
    held_out = [batch for batch in history if sum(batch)]
    if choice.shares:
        share = busiest_share(held_out[len(held_out) // 2 :], choice.placement)
        assert share == choice.shares[choice.name] == min(choice.shares.values())


@pytest.mark.parametrize("history", [[], [[0, 0]]])
def test_a_history_without_a_token_is_refused(history: list[list[int]]) -> None:
    for judge in (place_greedily, place_anti_correlated):
        with pytest.raises(ConfigError, match="none has a token"):
            judge(history, 2)
    with pytest.raises(ConfigError, match="none has a token"):
        busiest_share(history, Placement.in_order(2, 2))


def test_a_history_is_read_from_a_layers_acquires_with_their_tokens_or_one_each() -> None:
    kinds = TraceEventKind
    events = [
        TraceEvent(kinds.ACQUIRE, 3, (0, 2), (7, 1)), TraceEvent(kinds.ACQUIRE, 4, (1,), (9,)), TraceEvent(kinds.PUSH, 3, (1,)),
        TraceEvent(kinds.ACQUIRE, 3, (1, 2)), TraceEvent(kinds.STEP, 3, ()),
    ]  # fmt: skip
    assert read_history(events, layer=3, experts=3) == [[7, 0, 1], [0, 1, 1]]


@given(data=st.data(), placement=placements())
def test_every_token_goes_to_one_rank_that_has_its_expert_the_own_replica_first(data: st.DataObject, placement: Placement) -> None:
    tokens = st.lists(st.integers(0, 50) | st.integers(0, 2**40), min_size=placement.experts, max_size=placement.experts)
    counts = data.draw(st.lists(tokens, min_size=placement.world_size, max_size=placement.world_size))
    routes = route_tokens(counts, placement)
    for expert, ranks in enumerate(placement.ranks):
        received = Counter(dict.fromkeys(ranks, 0))
        for source, row in enumerate(counts):
            route = routes[source][expert]
            assert sum(route.values()) == row[expert]
            assert route.keys() <= set(ranks)
            assert all(count > 0 for count in route.values())
            received.update(route)
        assert max(received.values()) - min(received.values()) <= 1
        for rank in ranks:
            assert routes[rank][expert].get(rank, 0) == min(counts[rank][expert], received[rank])


def test_free_capacity_is_what_the_own_tokens_leave_and_the_rest_goes_there_in_proportion() -> None:
    counts = [[0], [2], [12], [10]]  # 24 tokens, a mean of 8: rank 0 has room for 8, rank 1 for 6
    routes = [row[0] for row in route_tokens(counts, Placement(((0, 1, 2),), 4))]
    assert routes == [{}, {1: 2}, {2: 8, 0: 2, 1: 2}, {0: 6, 1: 4}]


def test_a_token_that_is_over_stays_where_it_is() -> None:
    assert [row[0] for row in route_tokens([[1], [2]], Placement(((0, 1),), 2))] == [{0: 1}, {1: 2}]


@pytest.mark.parametrize("counts", [[[1, 1]], [[1, 1], [1]], [[1, -1], [0, 0]]])
def test_counts_of_another_job_are_refused(counts: list[list[int]]) -> None:
    with pytest.raises(ConfigError, match="0 or more of each of 2 experts from each of 2 ranks"):
        route_tokens(counts, Placement.in_order(2, 2))


@pytest.mark.parametrize(
    ("batches", "world_size", "plan"),
    [
        ([512, 256, 128, 128], 4, [{0: 256, 1: 256}, {2: 256}, {3: 128}, {3: 128}]),
        ([512, 256, 128, 128], 8, [dict.fromkeys(range(4), 128), {4: 128, 5: 128}, {6: 128}, {7: 128}]),
        ([128, 256, 128, 512], 4, [{3: 128}, {2: 256}, {3: 128}, {0: 256, 1: 256}]),
        ([2, 3, 1, 2], 2, [{1: 2}, {0: 3}, {0: 1}, {1: 2}]),
        ([100, 300], 3, [{2: 100}, {0: 134, 1: 134, 2: 32}]),
        ([5], 4, [{0: 2, 1: 2, 2: 1}]),
        ([], 2, []),
    ],
)
def test_heavy_tasks_have_several_ranks_and_light_ones_share_one(
    batches: list[int], world_size: int, plan: list[dict[int, int]]
) -> None:
    assert plan_tasks(batches, world_size) == plan


@given(batches=st.lists(st.integers(1, 2**40) | st.integers(1, 20), min_size=1, max_size=10), world_size=st.integers(1, 10))
def test_all_rows_are_planned_with_the_least_on_the_busiest_rank_and_few_cuts(batches: list[int], world_size: int) -> None:
    plan = plan_tasks(batches, world_size)
    loads = Counter[int]()
    for task in plan:
        assert list(task) == list(range(min(task), max(task) + 1))
        assert min(task.values()) > 0
        loads.update(task)
    assert [sum(task.values()) for task in plan] == batches
    assert max(loads.values()) == -(-sum(batches) // world_size)
    assert max(loads) < world_size
    assert sum(map(len, plan)) < len(batches) + world_size


@pytest.mark.parametrize(("batches", "world_size"), [([4, 0], 2), ([4], 0), ([-1], 1)])
def test_tasks_without_rows_or_ranks_are_refused(batches: list[int], world_size: int) -> None:
    with pytest.raises(ConfigError, match="all of them 1 or more"):
        plan_tasks(batches, world_size)
