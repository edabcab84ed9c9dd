"""Which ranks stand on which node: what hops between ranks are planned by. A value without I/O; `this_node` alone looks around."""

from __future__ import annotations

import os
import socket
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

from xxhash import xxh3_64_intdigest

LAUNCHED_AS = "GROUP_RANK"
"""Where torchrun tells a process which of its nodes this is."""


@dataclass(frozen=True, slots=True)
class Nodes:
    """The ranks of a job by node. ranks: of each node, ascending; nodes are in the order of their first ranks. They need not
    follow each other. A rank's place in its node is its *local* rank."""

    ranks: tuple[tuple[int, ...], ...]

    @classmethod
    def named(cls, names: Sequence[Hashable]) -> Nodes:
        """names: of the node of each rank, equal where they share one."""
        by_name: dict[Hashable, list[int]] = {}
        for rank, name in enumerate(names):
            by_name.setdefault(name, []).append(rank)
        return cls(tuple(tuple(ranks) for ranks in by_name.values()))

    @property
    def world_size(self) -> int:
        return sum(map(len, self.ranks))

    @property
    def width(self) -> int:
        """How many ranks each node has."""
        return len(self.ranks[0])

    @property
    def are_alike(self) -> bool:
        """Whether all have as many ranks, so that each rank has one of its local rank on every node."""
        return len({len(ranks) for ranks in self.ranks}) == 1

    def place(self, rank: int) -> tuple[int, int]:
        """The node of a rank, and its local rank there."""
        return next((node, ranks.index(rank)) for node, ranks in enumerate(self.ranks) if rank in ranks)

    def peers(self, local: int) -> list[int]:
        """The ranks that have one local rank, one on each node, ascending."""
        return sorted(ranks[local] for ranks in self.ranks)

    def by_rank(self, counts: Mapping[int, int]) -> list[int]:
        """The counts of all ranks, 0 of those that have none."""
        return [counts.get(rank, 0) for rank in range(self.world_size)]

    def __str__(self) -> str:
        return " | ".join(",".join(map(str, ranks)) for ranks in self.ranks)


def this_node() -> int:
    """A number of the node that this process runs on, below 2**63: by what torchrun says, else by the name of the host."""
    name = os.environ.get(LAUNCHED_AS) or socket.gethostname()
    return xxh3_64_intdigest(name.encode()) >> 1
