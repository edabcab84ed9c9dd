"""A model of what a reader may see: every record by the updates it has had, its bytes as torch's own optimizer makes them.

`tests/properties/test_reader_model.py` holds the whole store against it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache

import torch

from paramstore.core.key import ExpertKey
from paramstore.engine.tables.namespace import LeaseRequest, View
from paramstore_testkit.oracles.experts import Expert
from paramstore_testkit.stores.small_store import OPTIONS, SCHEMA

Updates = tuple[tuple[int, int], ...]
"""Updates that a record has had: the gradient of each, and its number, so that no two are taken for one."""
State = dict[ExpertKey, Updates]


@lru_cache(maxsize=4096)
def expert_after(number: int, gradients: tuple[int, ...]) -> Expert:
    """Makes a record after these gradients, with torch's own optimizer."""
    if not gradients:
        return Expert.initial({name: torch.full(shape, float(number)) for name, shape, _ in SCHEMA.specs})
    before = expert_after(number, gradients[:-1])
    return before.after({name: torch.full_like(value, float(gradients[-1])) for name, value in before.masters.items()}, OPTIONS)


def expected(key: ExpertKey, updates: Updates, name: str) -> torch.Tensor:
    return expert_after(key[1], tuple(gradient for gradient, _ in updates)).fields[name]


@dataclass(eq=False)
class Lease:
    """A lease, and the state that must be seen there for as long as it lasts."""

    request: LeaseRequest
    state: State


@dataclass(eq=False)
class Reader:
    view: View
    step: int
    is_dropped: bool = False
    leases: list[Lease] = field(default_factory=list)
