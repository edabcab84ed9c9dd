"""Rows in several hops end where one exchange brings them, in its order, whatever the counts and wherever the ranks stand."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from paramstore_client.moe.hops.nodes import Nodes
from paramstore_client.moe.hops.plan import Parts, SharedRows, SharedTokens, TwoHops, spread

STANDS = ["aabb", "aaabbb", "aabbcc", "ab", "aa", "abba", "abab", "abcbca"]
"""The node of each rank, in each job."""


@st.composite
def _counts(draw: st.DrawFn) -> tuple[Nodes, list[list[int]]]:
    """Draws nodes, and how many rows each rank has for each."""
    nodes = Nodes.named(draw(st.sampled_from(STANDS)))
    size = nodes.world_size
    row = st.lists(st.integers(0, 3), min_size=size, max_size=size)
    return nodes, draw(st.lists(row, min_size=size, max_size=size))


def _exchanged(sent: Sequence[Tensor], to_each: Sequence[list[int]], from_each: Sequence[list[int]]) -> list[Tensor]:
    """What an all-to-all gives each rank. Sizes that do not match would end the process."""
    size = len(sent)
    assert all(to_each[one][other] == from_each[other][one] for one in range(size) for other in range(size))
    parts = [rows.split(sizes) for rows, sizes in zip(sent, to_each, strict=True)]
    return [torch.cat([parts[other][one] for other in range(size)]) for one in range(size)]


def _transposed(counts: list[list[int]]) -> list[list[int]]:
    return [list(column) for column in zip(*counts, strict=True)]


@given(job=_counts())
def test_two_hops_end_as_one(job: tuple[Nodes, list[list[int]]]) -> None:
    nodes, to_each = job
    ranks, from_each = range(nodes.world_size), _transposed(to_each)
    sent = [torch.arange(sum(counts)) + 1000 * rank for rank, counts in enumerate(to_each)]
    telling = [TwoHops.telling(nodes, rank, to_each[rank]) for rank in ranks]
    hops = [
        TwoHops.of(nodes, rank, to_each=to_each[rank], from_each=from_each[rank], told=[telling[other][rank] for other in ranks])
        for rank in ranks
    ]
    inside = _exchanged(
        [hop.inside.brought(rows) for hop, rows in zip(hops, sent, strict=True)],
        [hop.inside_to for hop in hops], [hop.inside_from for hop in hops],
    )  # fmt: skip
    between = _exchanged(
        [hop.between.brought(rows) for hop, rows in zip(hops, inside, strict=True)],
        [hop.between_to for hop in hops], [hop.between_from for hop in hops],
    )  # fmt: skip
    got = [hop.last.brought(rows) for hop, rows in zip(hops, between, strict=True)]
    assert [rows.tolist() for rows in got] == [rows.tolist() for rows in _exchanged(sent, to_each, from_each)]
    for rank, hop in enumerate(hops):
        node, local = nodes.place(rank)
        assert {other for other in ranks if hop.inside_to[other]} <= set(nodes.ranks[node])
        assert {other for other in ranks if hop.between_to[other]} <= set(nodes.peers(local))


@given(job=_counts(), drawn=st.randoms(use_true_random=False))
def test_rows_of_tokens_that_went_once_to_each_node_are_those_of_one_exchange(
    job: tuple[Nodes, list[list[int]]], drawn: Random
) -> None:
    nodes, to_each = job
    ranks, from_each, tokens = range(nodes.world_size), _transposed(to_each), 5
    token = [torch.tensor([drawn.randrange(tokens) for _ in range(sum(counts))], dtype=torch.int64) for counts in to_each]
    x = [torch.arange(tokens) + 100 * rank for rank in ranks]
    shared = [SharedTokens.of(nodes, rank, token[rank], tokens=tokens, to_each=to_each[rank]) for rank in ranks]
    came_from = _transposed([plan.to_each for plan in shared])
    places = _exchanged([plan.place_N for plan in shared], to_each, from_each)
    came = _exchanged(
        [x[rank][plan.token_U] for rank, plan in enumerate(shared)], [plan.to_each for plan in shared], came_from
    )  # fmt: skip
    wanted = _exchanged([plan.is_wanted_UP for plan in shared], [plan.to_each for plan in shared], came_from)
    spreads = [spread(nodes, rank, is_wanted) for rank, is_wanted in enumerate(wanted)]
    rows = [SharedRows.of(nodes, rank, places[rank], from_each=from_each[rank]) for rank in ranks]
    given_on = _exchanged(
        [tokens_[which] for tokens_, (which, _) in zip(came, spreads, strict=True)],
        [counts for _, counts in spreads], [plan.from_each for plan in rows],
    )  # fmt: skip
    flat = _exchanged([x[rank][token[rank]] for rank in ranks], to_each, from_each)
    assert [given_on[rank][plan.place_M].tolist() for rank, plan in enumerate(rows)] == [want.tolist() for want in flat]
    for rank, plan in enumerate(shared):  # each token once to each node that has rows of it
        destinations = torch.arange(nodes.world_size).repeat_interleave(torch.tensor(to_each[rank])).tolist()
        crossing = {(nodes.place(to)[0], one) for to, one in zip(destinations, token[rank].tolist(), strict=True)}
        assert len(plan.token_U) == len(crossing)


@pytest.mark.parametrize("order", [[0, 1, 2], [2, 0, 1]])
def test_parts_without_rows_keep_the_width(order: list[int]) -> None:
    assert Parts([0, 0, 0], order).brought(torch.zeros(0, 3)).shape == (0, 3)
