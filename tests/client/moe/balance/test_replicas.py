"""Replicas: an expert's rows are shared over its ranks, whole ones, and all ranks decide alike."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from paramstore.core.placement import Placement
from paramstore_client.moe.balance.replicas import Replicas


@st.composite
def jobs(draw: st.DrawFn) -> tuple[Placement, int, list[torch.Tensor]]:
    """Draws a placement, the slots of an expert, and each rank's counts by group."""
    world_size, experts, slots = draw(st.integers(1, 4)), draw(st.integers(1, 6)), draw(st.integers(1, 3))
    ranks = st.sets(st.integers(0, world_size - 1), min_size=1).map(sorted).map(tuple)
    placement = Placement(tuple(draw(st.lists(ranks, min_size=experts, max_size=experts))), world_size)
    groups = experts * slots
    counts = [draw(st.lists(st.integers(0, 5), min_size=groups, max_size=groups)) for _ in range(world_size)]
    return placement, slots, [torch.tensor(of_rank) for of_rank in counts]


def pieces_of(placement: Placement, counts: list[torch.Tensor]) -> list[torch.Tensor]:
    """Each rank's rows of each piece, as the ranks decide."""
    replicas = Replicas.of(placement)
    if replicas is None:
        return counts
    counted = torch.stack([replicas.counted(of_rank) for of_rank in counts])
    return [replicas.split(of_rank, counted, rank=rank) for rank, of_rank in enumerate(counts)]


@given(job=jobs())
def test_no_row_is_lost_and_replicas_have_as_many_rows_or_one_more(job: tuple[Placement, int, list[torch.Tensor]]) -> None:
    placement, slots, counts = job
    keys = [(expert, slot, rank) for expert, ranks in enumerate(placement.ranks) for slot in range(slots) for rank in ranks]
    loads: dict[tuple[int, int], int] = {}
    for of_rank, pieces in zip(counts, pieces_of(placement, counts), strict=True):
        assert len(pieces) == len(keys)
        groups = torch.zeros_like(of_rank)
        for (expert, slot, rank), rows in zip(keys, pieces.tolist(), strict=True):
            assert rows >= 0
            groups[expert * slots + slot] += rows
            loads[expert, rank] = loads.get((expert, rank), 0) + rows
        assert torch.equal(groups, of_rank)
    for expert, ranks in enumerate(placement.ranks):
        shared = [loads[expert, rank] for rank in ranks]
        assert max(shared) - min(shared) <= 1


def test_a_ranks_own_replica_has_its_rows_first_in_runs_by_slot() -> None:
    placement = Placement(((0, 1), (1,)), 2)
    counts = [torch.tensor([3, 2, 1, 1]), torch.tensor([0, 1, 0, 4])]  # of two slots of each expert
    assert [pieces.tolist() for pieces in pieces_of(placement, counts)] == [[3, 0, 0, 2, 1, 1], [0, 0, 0, 1, 0, 4]]


def test_without_replicas_there_is_nothing_to_share() -> None:
    assert Replicas.of(Placement.in_order(4, 2)) is None
