"""Rows of any counts, over any ranks: each goes to the rank of its expert, and comes home, once."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paramstore.core.placement import Placement
from paramstore.errors import ConfigError
from paramstore_client.moe.row_plan import Groups, Incoming, Outgoing, chunk_counts, inverse

CPU = torch.device("cpu")


@st.composite
def _jobs(draw: st.DrawFn) -> tuple[Placement, int, list[torch.Tensor], int, int]:
    """Draws a placement, the slots of an expert, each rank's counts by group, and parts of experts and chunks of tokens."""
    world_size, experts, slots = draw(st.integers(1, 4)), draw(st.integers(1, 6)), draw(st.integers(1, 3))
    ranks = draw(st.lists(st.integers(0, world_size - 1), min_size=experts, max_size=experts))
    groups = experts * slots
    counts = [draw(st.lists(st.integers(0, 3), min_size=groups, max_size=groups)) for _ in range(world_size)]
    parts = draw(st.sampled_from([(1, 1), (3, 1), (1, 3), (2, 2)]))
    return Placement(tuple((rank,) for rank in ranks), world_size), slots, [torch.tensor(of_rank) for of_rank in counts], *parts


@given(job=_jobs())
def test_every_row_is_computed_by_the_rank_of_its_expert_and_comes_home_once(
    job: tuple[Placement, int, list[torch.Tensor], int, int],
) -> None:
    placement, slots, counts, parts, chunks = job
    groups = Groups.of(placement, slots=slots, parts=parts)
    rows = [  # (group, rank of origin, token) of each row, sorted by group
        [(group, rank, number) for number, group in enumerate(torch.arange(len(of_rank)).repeat_interleave(of_rank).tolist())]
        for rank, of_rank in enumerate(counts)
    ]
    outgoing, chunk_of = [], []
    for of_rank, mine in zip(counts, rows, strict=True):
        tokens = torch.arange(len(mine))
        chunk, by_chunk = chunk_counts(of_rank, tokens, tokens=len(mine), chunks=chunks)
        outgoing.append(Outgoing.of(by_chunk, groups, chunk_N=chunk, device=CPU))
        chunk_of.append(chunk.tolist())
    sent = [
        [[mine[place] for place in (range(len(mine)) if order is None else order.tolist())] for order in out.orders]
        for mine, out in zip(rows, outgoing, strict=True)
    ]
    assert [sorted(row for part in mine for row in part) for mine in sent] == rows, "each is sent once"
    for rank in range(placement.world_size):
        told = torch.stack([out.counts[rank] for out in outgoing])
        incoming = Incoming.of_parts(told, groups, rank=rank, chunks=chunks, device=CPU)
        assert len(incoming) == parts * chunks
        all_computed = []
        for part, of_part in enumerate(incoming):
            arrived = [
                row for mine, out in zip(sent, outgoing, strict=True)
                for row in mine[part][sum(out.by_rank[part][:rank]) :][: out.by_rank[part][rank]]
            ]  # fmt: skip
            computed = [arrived[place] for place in of_part.order_M.tolist()]
            assert of_part.by_rank == [out.by_rank[part][rank] for out in outgoing]
            assert computed == sorted(computed)
            assert {chunk_of[source][number] for _, source, number in computed} <= {part // parts}
            counted = Counter(row[0] // slots for row in computed)
            assert {block.expert: block.row_count for block in of_part.blocks} == counted
            assert list(counted) == sorted(counted)
            assert [computed[place] for place in of_part.place_M.tolist()] == arrived, "each goes back to where it came from"
            all_computed += computed
        assert sorted(all_computed) == sorted(row for mine in rows for row in mine if placement.ranks[row[0] // slots] == (rank,))


@given(job=_jobs())
def test_parts_of_experts_split_no_experts_rows(job: tuple[Placement, int, list[torch.Tensor], int, int]) -> None:
    placement, slots, *_ = job
    groups = Groups.of(placement, slots=slots, parts=3)
    for rank in range(placement.world_size):
        held = [experts[rank] for experts in groups.experts]
        assert tuple(expert for part in held for expert in part) == placement.of_rank(rank)
        assert max(map(len, held)) - min(map(len, held)) <= 1


@given(job=_jobs())
def test_rows_that_are_sent_in_their_own_order_have_none(job: tuple[Placement, int, list[torch.Tensor], int, int]) -> None:
    placement, slots, counts, *_ = job
    in_order = [rank for (rank,) in placement.ranks] == sorted(rank for (rank,) in placement.ranks)
    out = Outgoing.of(counts[0][None], Groups.of(placement, slots=slots), device=CPU)
    assert (out.orders[0] is None) == in_order


def test_the_inverse_of_an_order_leads_back() -> None:
    order = torch.tensor([2, 0, 1])
    assert torch.arange(3)[order][inverse(order)].tolist() == [0, 1, 2]


def test_replicas_are_refused() -> None:
    with pytest.raises(ConfigError, match="replicas yet"):
        Groups.of(Placement(((0, 1), (1,)), 2), slots=1)
