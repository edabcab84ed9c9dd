"""Which rows go to which replica of an expert that several ranks compute: FlexMoE's vExperts (arXiv 2304.03946, section 3.1).

Every rank knows how many rows each rank has for these experts, and decides alike, by `route_tokens`. A rank's rows of an expert go
to its replicas in runs, by slot and token, in the order of the ranks: so a group of rows is cut into runs, one for each replica.
"""

# G groups (expert, slot), S slots of an expert, V groups of each replica (expert, slot, rank), R experts with replicas, W ranks
# ruff: noqa: N803, N806 - shape suffixes, as the legend says

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from paramstore.core.balancing import route_tokens
from paramstore.core.placement import Placement


@dataclass(frozen=True, slots=True)
class Replicas:
    """The experts of a layer that several ranks compute. experts: which those are, ascending."""

    placement: Placement
    experts: tuple[int, ...]

    @classmethod
    def of(cls, placement: Placement) -> Replicas | None:
        """None where each expert has one rank."""
        experts = tuple(expert for expert, ranks in enumerate(placement.ranks) if len(ranks) > 1)
        return cls(placement, experts) if experts else None

    def counted(self, counts_G: Tensor) -> Tensor:
        """[R], the rows that a rank has for each of the experts. counts_G: its rows of each group."""
        return counts_G.view(self.placement.experts, -1).sum(1)[list(self.experts)]

    def split(self, counts_G: Tensor, counted_WR: Tensor, *, rank: int) -> Tensor:
        """[V], how many rows of `rank` go to each replica, by group. counts_G: its rows of each group. counted_WR: what each rank
        has `counted`."""
        shared = Placement(tuple(self.placement.ranks[expert] for expert in self.experts), self.placement.world_size)
        routes = dict(zip(self.experts, route_tokens(counted_WR.tolist(), shared)[rank], strict=True))
        counts: list[int] = []
        for expert, rows_S in enumerate(counts_G.view(self.placement.experts, -1).tolist()):
            counts += _runs(rows_S, routes[expert], self.placement.ranks[expert]) if expert in routes else rows_S
        return torch.tensor(counts, dtype=torch.int64)


def _runs(rows_S: Sequence[int], route: Mapping[int, int], ranks: Sequence[int]) -> list[int]:
    """How many of each slot's rows are in the run of each rank, whose lengths `route` says."""
    slots = [0, *accumulate(rows_S)]
    runs = [0, *accumulate(route.get(rank, 0) for rank in ranks)]
    return [
        max(0, min(slots[slot + 1], runs[place + 1]) - max(slots[slot], runs[place]))
        for slot in range(len(rows_S)) for place in range(len(ranks))
    ]  # fmt: skip
