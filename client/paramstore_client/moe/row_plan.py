"""Which rows of a layer go to which rank, and in which order they are computed with there: index arithmetic, without a collective.

Rows are sent by rank, within a rank by expert, slot and token. They arrive by rank of origin, and are brought into the order by
expert, slot, rank of origin and token: that of one process which has the tokens of all ranks, one rank's after the other's. So an
expert multiplies the matrix that it would multiply there. No row is dropped or added: the dynamic gating of "Towards MoE
Deployment" (arXiv 2303.06182, section V), whose capacity is what the tokens ask for.
"""

# N rows of this rank's tokens, M rows of this rank's experts, G groups (expert, slot), W ranks, L experts of a rank
# ruff: noqa: N803, N815 - shape suffixes, as the legend says

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from paramstore.core.placement import Placement
from paramstore.errors import ConfigError
from paramstore_client.nn.routing import Block


@dataclass(frozen=True, slots=True)
class Groups:
    """The groups of a layer's rows, each of one expert and slot, as a placement spreads them over the ranks.

    by_rank: for each rank, those of its experts, ascending. place_G: the place of each group among all ranks' groups; None where
    that is its number.
    """

    by_rank: tuple[Tensor, ...]
    place_G: Tensor | None

    @classmethod
    def of(cls, placement: Placement, *, slots: int) -> Groups:
        """slots: groups of each expert. Raises ConfigError where an expert has replicas, as a group is whole here."""
        if any(len(ranks) > 1 for ranks in placement.ranks):
            raise ConfigError("an expert with several ranks: rows are not routed to replicas yet")
        slot = torch.arange(slots)
        by_rank = tuple(
            (torch.tensor(placement.of_rank(rank), dtype=torch.int64)[:, None] * slots + slot).flatten()
            for rank in range(placement.world_size)
        )
        places = inverse(torch.cat(by_rank))
        return cls(by_rank, None if torch.equal(places, torch.arange(len(places))) else places)


@dataclass(frozen=True, slots=True)
class Outgoing:
    """The rows of this rank's tokens. counts: by rank, those of its groups. by_rank: their sums. order_N: the row that is sent at
    each place; None where that is the order they have."""

    counts: tuple[Tensor, ...]
    by_rank: list[int]
    order_N: Tensor | None

    @classmethod
    def of(cls, counts_G: Tensor, groups: Groups, *, device: torch.device) -> Outgoing:
        """Plans the sending of rows that are sorted by group. counts_G: rows of each group, on the host."""
        counts = tuple(counts_G[of_rank] for of_rank in groups.by_rank)
        order = None if groups.place_G is None else groups.place_G.repeat_interleave(counts_G).argsort(stable=True).to(device)
        return cls(counts, [int(of_rank.sum()) for of_rank in counts], order)


@dataclass(frozen=True, slots=True)
class Incoming:
    """The rows of this rank's experts. by_rank: how many come from each rank. order_M: the arrived row at each place of the
    computation; place_M: the place of each arrived row. blocks: the rows of each expert there."""

    by_rank: list[int]
    order_M: Tensor
    place_M: Tensor
    blocks: tuple[Block, ...]

    @classmethod
    def of(cls, counts_WG: Tensor, experts: tuple[int, ...], *, device: torch.device) -> Incoming:
        """counts_WG: by rank of origin, rows of each group of `experts`, this rank's, on the host."""
        groups = torch.arange(counts_WG.shape[1]).repeat(len(counts_WG)).repeat_interleave(counts_WG.flatten())
        order = groups.argsort(stable=True)
        slots = counts_WG.shape[1] // max(1, len(experts))
        sources = counts_WG.view(len(counts_WG), len(experts), slots).sum(2).T.tolist()
        blocks = tuple(
            Block(expert, sum(of_rank), tuple(of_rank)) for expert, of_rank in zip(experts, sources, strict=True) if any(of_rank)
        )
        return cls(counts_WG.sum(1).tolist(), order.to(device), inverse(order).to(device), blocks)


def inverse(order: Tensor) -> Tensor:
    """The place of each row in `order`."""
    places = torch.empty_like(order)
    places[order] = torch.arange(len(order), device=order.device)
    return places
