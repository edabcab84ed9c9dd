"""How rows get from rank to rank in several exchanges, so that they end as one would have brought them: index arithmetic, without a
collective.

- *Two hops* (MoESys, arXiv 2205.10034, section 4.2): rows go to the rank of their node that has the local rank of their
  destination, then on between equal local ranks. As many bytes as in one hop, in fewer and longer messages between nodes, which
  never leave the rail of their local rank.
- *A row for each token and node*: a token that several rows of one node are copies of goes there once, to the rank of its own local
  rank, which gives it to those of its node that have such rows. Each of them makes its rows of it.
"""

# T tokens, N rows of this rank's tokens, M rows that come to it, U tokens sent to a node once, P local ranks
# ruff: noqa: N803, N806, N815 - shape suffixes, as the legend says

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from paramstore_client.moe.hops.nodes import Nodes


@dataclass(frozen=True, slots=True)
class Parts:
    """Rows that lie in parts, and the order in which these are wanted. sizes: rows of each part, as they lie."""

    sizes: list[int]
    order: list[int]

    def brought(self, rows: Tensor) -> Tensor:
        """The parts one after the other in that order."""
        if self.order == sorted(self.order):
            return rows
        parts = torch.split(rows, self.sizes)
        return torch.cat([parts[part] for part in self.order])


@dataclass(frozen=True, slots=True)
class TwoHops:
    """A call of one rank. inside, between: what is sent in either hop, of what lies there, to each and from each rank. last: of
    what has come then."""

    inside: Parts
    inside_to: list[int]
    inside_from: list[int]
    between: Parts
    between_to: list[int]
    between_from: list[int]
    last: Parts

    @classmethod
    def of(
        cls, nodes: Nodes, rank: int, *, to_each: Sequence[int], from_each: Sequence[int], told: Sequence[Sequence[int]]
    ) -> TwoHops:  # fmt: skip
        """told: by rank, how many rows it has for this one's local rank on each node; those of its own node are read."""
        node, local = nodes.place(rank)
        mates, peers, locals_ = nodes.ranks[node], nodes.peers(local), range(nodes.width)
        node_of = {ranks[local]: number for number, ranks in enumerate(nodes.ranks)}
        through = [ranks[q] for q in locals_ for ranks in nodes.ranks]
        held = [told[mate][number] for mate in mates for number in range(len(nodes.ranks))]
        onward = [p * len(nodes.ranks) + node_of[peer] for peer in peers for p in locals_]
        sources = [nodes.ranks[node_of[peer]][p] for peer in peers for p in locals_]

        return cls(
            Parts(list(to_each), through),
            nodes.by_rank({mate: sum(to_each[ranks[q]] for ranks in nodes.ranks) for q, mate in enumerate(mates)}),
            nodes.by_rank({mate: sum(told[mate]) for mate in mates}),
            Parts(held, onward),
            nodes.by_rank({peer: sum(told[mate][node_of[peer]] for mate in mates) for peer in peers}),
            nodes.by_rank({peer: sum(from_each[source] for source in nodes.ranks[node_of[peer]]) for peer in peers}),
            Parts([from_each[source] for source in sources], sorted(range(len(sources)), key=sources.__getitem__)),
        )

    @staticmethod
    def telling(nodes: Nodes, rank: int, to_each: Sequence[int]) -> list[list[int]]:
        """What a rank tells each: how many rows it has for the other's local rank on each node; to other nodes' ranks nothing."""
        mates = nodes.ranks[nodes.place(rank)[0]]
        return [
            [to_each[ranks[mates.index(other)]] if other in mates else 0 for ranks in nodes.ranks]
            for other in range(nodes.world_size)
        ]  # fmt: skip


@dataclass(frozen=True, slots=True)
class SharedTokens:
    """The tokens of one rank that are sent to each node once. token_U: which they are, in the order in which they are sent: by the
    rank that they go to, ascending within. to_each: how many go to each rank. place_N: the place of each row's token among those of
    its node. is_wanted_UP: which ranks of its node have rows of a token."""

    token_U: Tensor
    to_each: list[int]
    place_N: Tensor
    is_wanted_UP: Tensor

    @classmethod
    def of(cls, nodes: Nodes, rank: int, token_N: Tensor, *, tokens: int, to_each: Sequence[int]) -> SharedTokens:
        """token_N: the token, below `tokens`, of each row, in the order of the ranks that they go to."""
        peers = nodes.peers(nodes.place(rank)[1])
        places = [nodes.place(other) for other in range(nodes.world_size)]
        turn = {nodes.place(peer)[0]: number for number, peer in enumerate(peers)}  # in which a node's are sent
        rows = torch.tensor(to_each)
        turn_N = torch.tensor([turn[node] for node, _ in places]).repeat_interleave(rows).to(token_N.device)
        local_N = torch.tensor([local for _, local in places]).repeat_interleave(rows).to(token_N.device)
        key_U, unique_N = torch.unique(turn_N * tokens + token_N, return_inverse=True)
        counts = torch.bincount(key_U // max(1, tokens), minlength=len(peers))
        is_wanted_UP = torch.zeros(len(key_U), nodes.width, dtype=torch.uint8, device=token_N.device)
        is_wanted_UP[unique_N, local_N] = 1
        place_N = unique_N - (counts.cumsum(0) - counts)[turn_N]
        to_peers = nodes.by_rank(dict(zip(peers, counts.tolist(), strict=True)))
        return cls(key_U % max(1, tokens), to_peers, place_N, is_wanted_UP)


@dataclass(frozen=True, slots=True)
class SharedRows:
    """The rows of one rank's experts as they are made of tokens that came once. place_M: the place of each row's token among what
    comes from this node's ranks. from_each: how many come from each."""

    place_M: Tensor
    from_each: list[int]

    @classmethod
    def of(cls, nodes: Nodes, rank: int, place_M: Tensor, *, from_each: Sequence[int]) -> SharedRows:
        """place_M: as its own rank told of each row, which are in the order of those ranks: among its tokens for this node."""
        mates, node_count = nodes.ranks[nodes.place(rank)[0]], len(nodes.ranks)
        # a mate gives the tokens of its local rank, one node's after the other's, in the order of the ranks that they come from
        turns = [
            local * node_count + nodes.peers(local).index(other)
            for other, (_, local) in enumerate(map(nodes.place, range(nodes.world_size)))
        ]  # fmt: skip
        turn_M = torch.tensor(turns).repeat_interleave(torch.tensor(from_each)).to(place_M.device)
        bound = int(place_M.max()) + 1 if len(place_M) else 1
        key, unique_M = torch.unique(turn_M * bound + place_M, return_inverse=True)
        counts = torch.bincount(key // bound // node_count, minlength=len(mates)).tolist()
        return cls(unique_M, nodes.by_rank(dict(zip(mates, counts, strict=True))))


def spread(nodes: Nodes, rank: int, is_wanted_UP: Tensor) -> tuple[Tensor, list[int]]:
    """Which of the tokens that came to a rank go to those of its node, in the order of these, and how many to each rank."""
    local, token = is_wanted_UP.t().nonzero(as_tuple=True)
    counts = torch.bincount(local, minlength=nodes.width).tolist()
    return token, nodes.by_rank(dict(zip(nodes.ranks[nodes.place(rank)[0]], counts, strict=True)))
