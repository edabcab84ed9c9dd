"""The ranks of a job that write a namespace together: how one of them introduces itself when it opens the namespace.

`group` names one start of the job, the same on every rank and another after a restart: ranks of two starts never form a group.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from paramstore.core.arguments import text, whole_number
from paramstore.errors import ConfigError

RUN_VARIABLE = "TORCHELASTIC_RUN_ID"
RESTART_VARIABLE = "TORCHELASTIC_RESTART_COUNT"


@dataclass(frozen=True, slots=True)
class Rank:
    """One of `world_size` processes of this node that write together; alone, if that is 1."""

    rank: int = 0
    world_size: int = 1
    group: str = ""

    def __post_init__(self) -> None:
        size, rank = whole_number("world_size", self.world_size, least=1), whole_number("rank", self.rank)
        if rank >= size:
            raise ConfigError(f"rank={rank}, world_size={size}: ranks are 0 to world_size - 1")
        object.__setattr__(self, "world_size", size)
        object.__setattr__(self, "rank", rank)

    @property
    def is_alone(self) -> bool:
        return self.world_size == 1


ALONE = Rank()


def this_rank(rank: int, world_size: int, group: str, environment: Mapping[str, str] | None = None) -> Rank:
    """The rank that the arguments name; without `group`, in the one that torchrun's variables name. Raises ConfigError."""
    text("group", group)
    alone = Rank(rank, world_size)
    if alone.is_alone:
        return alone
    found = os.environ if environment is None else environment
    if not group and RUN_VARIABLE in found:
        group = f"{found[RUN_VARIABLE]}/{found.get(RESTART_VARIABLE, '0')}"
    return Rank(rank, world_size, group)
