"""Which rows of a layer go to which rank in which part, and in which order they are computed with there: index arithmetic, without
a collective.

Rows are sent part by part, in a part by rank, within a rank by expert, slot and token. They arrive by rank of origin, and are
brought into the order by expert, slot, rank of origin and token: that of one process which has the tokens of all ranks, one rank's
after the other's. So an expert multiplies the matrix that it would multiply there, or a part of its rows where tokens are split.
No row is dropped or added: the dynamic gating of "Towards MoE Deployment" (arXiv 2303.06182, section V), whose capacity is what the
tokens ask for.
"""

# T tokens of this rank, N rows of them, M rows of this rank's experts, G groups (expert, slot), W ranks, C chunks of tokens
# ruff: noqa: N803, N806, N815 - shape suffixes, as the legend says

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from paramstore.core.placement import Placement
from paramstore.errors import ConfigError
from paramstore_client.nn.routing import Block


@dataclass(frozen=True, slots=True)
class Groups:
    """The groups of a layer's rows, each of one expert and slot, as a placement spreads them over the ranks.

    by_part: for each part the groups of each rank, ascending. experts: for each part the experts of each rank. place_G: the place
    of each group among those of all parts and ranks; None where that is its number.
    """

    by_part: tuple[tuple[Tensor, ...], ...]
    experts: tuple[tuple[tuple[int, ...], ...], ...]
    place_G: Tensor | None

    @classmethod
    def of(cls, placement: Placement, *, slots: int, parts: int = 1) -> Groups:
        """slots: groups of each expert. parts: those into which each rank's experts are split, as many or one more in each. Raises
        ConfigError where an expert has replicas, as a group is whole here."""
        if any(len(ranks) > 1 for ranks in placement.ranks):
            raise ConfigError("an expert with several ranks: rows are not routed to replicas yet")
        of_ranks = [placement.of_rank(rank) for rank in range(placement.world_size)]
        experts = tuple(
            tuple(held[len(held) * part // parts : len(held) * (part + 1) // parts] for held in of_ranks) for part in range(parts)
        )
        slot = torch.arange(slots)
        by_part = tuple(
            tuple((torch.tensor(held, dtype=torch.int64)[:, None] * slots + slot).flatten() for held in part) for part in experts
        )
        places = inverse(torch.cat([of_rank for part in by_part for of_rank in part]))
        return cls(by_part, experts, None if torch.equal(places, torch.arange(len(places))) else places)


def chunk_counts(counts_G: Tensor, token_N: Tensor, *, tokens: int, chunks: int) -> tuple[Tensor, Tensor]:
    """Splits tokens into consecutive chunks, as many or one more in each: the chunk of each row, and counts [C, G]. All on the
    host; token_N: the token of each row."""
    ends = torch.tensor([tokens * (chunk + 1) // chunks for chunk in range(chunks)])
    chunk_N = torch.bucketize(token_N, ends, right=True)
    group_N = torch.arange(len(counts_G)).repeat_interleave(counts_G)
    counts_CG = torch.bincount(chunk_N * len(counts_G) + group_N, minlength=chunks * len(counts_G)).view(chunks, len(counts_G))
    return chunk_N, counts_CG


@dataclass(frozen=True, slots=True)
class Outgoing:
    """The rows of this rank's tokens. counts: for each rank those of its groups, part after part. by_rank: for each part the rows
    to each rank. orders: for each part the rows that are sent, in order; None where that is all, in the order they have."""

    counts: tuple[Tensor, ...]
    by_rank: tuple[list[int], ...]
    orders: tuple[Tensor | None, ...]

    @classmethod
    def of(cls, counts_CG: Tensor, groups: Groups, *, chunk_N: Tensor | None = None, device: torch.device) -> Outgoing:
        """Plans the sending of rows that are sorted by group. counts_CG: rows of each group, of each chunk of tokens. chunk_N: the
        chunk of each row. Counts and chunks are on the host."""
        parts = [[counts_G[of_rank] for of_rank in part] for counts_G in counts_CG for part in groups.by_part]
        by_rank = tuple([int(of_rank.sum()) for of_rank in part] for part in parts)
        counts = tuple(torch.cat(of_rank) for of_rank in zip(*parts, strict=True))
        if groups.place_G is None and len(parts) == 1:
            return cls(counts, by_rank, (None,))
        places = torch.arange(counts_CG.shape[1]) if groups.place_G is None else groups.place_G
        key_N = places.repeat_interleave(counts_CG.sum(0))
        if chunk_N is not None:
            key_N += chunk_N * len(places)
        order = key_N.argsort(stable=True).to(device)
        return cls(counts, by_rank, torch.split(order, [sum(part) for part in by_rank]))


@dataclass(frozen=True, slots=True)
class Incoming:
    """The rows of this rank's experts in one part. by_rank: how many come from each rank. order_M: the arrived row at each place of
    the computation; place_M: the place of each arrived row. blocks: the rows of each expert there."""

    by_rank: list[int]
    order_M: Tensor
    place_M: Tensor
    blocks: tuple[Block, ...]

    @classmethod
    def of(cls, counts_WG: Tensor, experts: Sequence[int], *, device: torch.device) -> Incoming:
        """counts_WG: by rank of origin, rows of each group of `experts`, on the host."""
        groups = torch.arange(counts_WG.shape[1]).repeat(len(counts_WG)).repeat_interleave(counts_WG.flatten())
        order = groups.argsort(stable=True)
        slots = counts_WG.shape[1] // max(1, len(experts))
        rows = counts_WG.sum(0).view(len(experts), slots).sum(1).tolist()
        blocks = tuple(Block(expert, count) for expert, count in zip(experts, rows, strict=True) if count)
        return cls(counts_WG.sum(1).tolist(), order.to(device), inverse(order).to(device), blocks)

    @classmethod
    def of_parts(
        cls, counts_WG: Tensor, groups: Groups, *, rank: int, chunks: int, device: torch.device
    ) -> tuple[Incoming, ...]:  # fmt: skip
        """Those of each part. counts_WG: as the ranks tell `rank` their `Outgoing.counts`."""
        told = torch.split(counts_WG, [len(part[rank]) for part in groups.by_part] * chunks, dim=1)
        return tuple(
            cls.of(counts, part[rank], device=device) for counts, part in zip(told, groups.experts * chunks, strict=True)
        )


def inverse(order: Tensor) -> Tensor:
    """The place of each row in `order`."""
    places = torch.empty_like(order)
    places[order] = torch.arange(len(order), device=order.device)
    return places
