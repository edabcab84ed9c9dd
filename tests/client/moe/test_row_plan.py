"""Rows of any counts, over any ranks: each goes to the rank of its expert, and comes home, once."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paramstore.core.placement import Placement
from paramstore.errors import ConfigError
from paramstore_client.moe.row_plan import Groups, Incoming, Outgoing, inverse

CPU = torch.device("cpu")


@st.composite
def _jobs(draw: st.DrawFn) -> tuple[Placement, int, list[torch.Tensor]]:
    """Draws a placement, the slots of an expert, and each rank's counts by group."""
    world_size, experts, slots = draw(st.integers(1, 4)), draw(st.integers(1, 6)), draw(st.integers(1, 3))
    ranks = draw(st.lists(st.integers(0, world_size - 1), min_size=experts, max_size=experts))
    groups = experts * slots
    counts = [draw(st.lists(st.integers(0, 3), min_size=groups, max_size=groups)) for _ in range(world_size)]
    return Placement(tuple((rank,) for rank in ranks), world_size), slots, [torch.tensor(of_rank) for of_rank in counts]


@given(job=_jobs())
def test_every_row_is_computed_by_the_rank_of_its_expert_and_comes_home_once(
    job: tuple[Placement, int, list[torch.Tensor]],
) -> None:
    placement, slots, counts = job
    groups = Groups.of(placement, slots=slots)
    rows = [  # (group, rank of origin, number) of each row, sorted by group
        [(group, rank, number) for number, group in enumerate(torch.arange(len(of_rank)).repeat_interleave(of_rank).tolist())]
        for rank, of_rank in enumerate(counts)
    ]
    outgoing = [Outgoing.of(of_rank, groups, device=CPU) for of_rank in counts]
    sent = [
        [mine[place] for place in (range(len(mine)) if out.order_N is None else out.order_N.tolist())]
        for mine, out in zip(rows, outgoing, strict=True)
    ]
    for rank in range(placement.world_size):
        incoming = Incoming.of(torch.stack([out.counts[rank] for out in outgoing]), placement.of_rank(rank), device=CPU)
        starts = [sum(out.by_rank[:rank]) for out in outgoing]
        arrived = [
            row for mine, start, out in zip(sent, starts, outgoing, strict=True) for row in mine[start:][: out.by_rank[rank]]
        ]  # fmt: skip
        computed = [arrived[place] for place in incoming.order_M.tolist()]
        assert incoming.by_rank == [out.by_rank[rank] for out in outgoing]
        assert computed == sorted(row for mine in rows for row in mine if placement.ranks[row[0] // slots] == (rank,))
        assert [block.expert for block in incoming.blocks] == sorted({row[0] // slots for row in computed})
        assert [block.row_count for block in incoming.blocks] == [
            sum(row[0] // slots == block.expert for row in computed) for block in incoming.blocks
        ]
        assert [computed[place] for place in incoming.place_M.tolist()] == arrived, "each goes back to where it came from"


@given(job=_jobs())
def test_rows_that_are_sent_in_their_own_order_have_none(job: tuple[Placement, int, list[torch.Tensor]]) -> None:
    placement, slots, counts = job
    in_order = [rank for (rank,) in placement.ranks] == sorted(rank for (rank,) in placement.ranks)
    out = Outgoing.of(counts[0], Groups.of(placement, slots=slots), device=CPU)
    assert (out.order_N is None) == in_order


def test_the_inverse_of_an_order_leads_back() -> None:
    order = torch.tensor([2, 0, 1])
    assert torch.arange(3)[order][inverse(order)].tolist() == [0, 1, 2]


def test_replicas_are_refused() -> None:
    with pytest.raises(ConfigError, match="replicas yet"):
        Groups.of(Placement(((0, 1), (1,)), 2), slots=1)
