"""Where each expert of a layer is computed: the one placement of the project, a value without I/O."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from xxhash import xxh3_64_intdigest

from paramstore.core.arguments import indices, listed, whole_number, wrong
from paramstore.core.key import EXPERTS_MAX
from paramstore.errors import ConfigError

RANKS = "the ranks of each expert, as ((0,), (1,), (0, 1))"


@dataclass(frozen=True, slots=True)
class Placement:
    """Which ranks compute each expert of one layer, the same on every rank.

    ranks: for each expert, in order, the ranks that compute it, ascending, at least one. An expert with several has replicas
    there, the vExperts of FlexMoE (arXiv 2304.03946, section 3.1): each takes whole tokens. world_size: how many ranks there are;
    a rank may compute no expert. Raises ConfigError.
    """

    ranks: tuple[tuple[int, ...], ...]
    world_size: int

    def __post_init__(self) -> None:
        if not isinstance(self.ranks, Sequence):
            raise wrong("ranks", self.ranks, RANKS)
        given = listed("ranks", self.ranks, RANKS)
        ranks_of = tuple(indices(f"expert {expert} on ranks", ranks) for expert, ranks in enumerate(given))
        object.__setattr__(self, "ranks", ranks_of)  # plain numbers, as the digest is of their text
        object.__setattr__(self, "world_size", whole_number("world_size", self.world_size, least=1))
        for expert, ranks in enumerate(self.ranks):
            if not ranks or list(ranks) != sorted(set(ranks)) or not 0 <= ranks[0] <= ranks[-1] < self.world_size:
                raise ConfigError(f"placement: expert {expert} on ranks {ranks}: some of 0 to {self.world_size - 1}, ascending")

    @classmethod
    def in_order(cls, experts: int, world_size: int) -> Placement:
        """Gives each rank a run of consecutive experts, as many as the others or one more, in the order of the ranks.
        Raises ConfigError."""
        experts = whole_number("experts", experts, least=1, most=EXPERTS_MAX)
        world_size = whole_number("world_size", world_size, least=1)
        return cls(tuple(((expert * world_size + world_size - 1) // experts,) for expert in range(experts)), world_size)

    @property
    def experts(self) -> int:
        return len(self.ranks)

    def of_rank(self, rank: int) -> tuple[int, ...]:
        """The experts that `rank` computes, ascending. Raises ConfigError."""
        rank = whole_number("rank", rank, most=self.world_size - 1)
        return tuple(expert for expert, ranks in enumerate(self.ranks) if rank in ranks)

    @property
    def digest(self) -> int:
        """A number below 2**63 that tells placements apart."""
        return xxh3_64_intdigest(repr((self.ranks, self.world_size)).encode()) >> 1


def ranks_named(ranks: Sequence[int]) -> str:
    """The ranks as text for people: "ranks 0, 2"."""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
