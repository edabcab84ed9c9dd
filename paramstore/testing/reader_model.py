"""What a reader may see: every record by the updates that it has been through, and its bytes as torch's own optimizer makes them.

`tests/properties/test_reader_model.py` holds the whole store against it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache

import torch

from paramstore.core.key import ExpertKey
from paramstore.engine.namespace import View
from paramstore.engine.requests import LeaseRequest
from paramstore.testing.small_store import OPTIONS, SCHEMA

Updates = tuple[tuple[int, int], ...]
"""What a record has been through: the gradient of each update, and its number, so that no two are taken for one."""
State = dict[ExpertKey, Updates]


@lru_cache(maxsize=4096)
def fields_of(expert: int, gradients: tuple[int, ...]) -> dict[str, torch.Tensor]:
    """Every stored field of a record after these gradients, as torch's own optimizer makes them."""
    if not gradients:
        made = {
            each.name.removeprefix("master/"): torch.full((each.length_bytes // 4,), float(expert))
            for each in SCHEMA.initial_fields()
        }  # fmt: skip
        zeros = {f"{part}/{name}": torch.zeros_like(made[name]) for part in ("exp_avg", "exp_avg_sq") for name in made}
        return zeros | {f"master/{name}": value for name, value in made.items()}
    after = {name: value.clone() for name, value in fields_of(expert, gradients[:-1]).items()}
    for name in [name.removeprefix("master/") for name in after if name.startswith("master/")]:
        master = after[f"master/{name}"]
        torch._fused_adamw_(
            [master], [torch.full_like(master, float(gradients[-1]))], [after[f"exp_avg/{name}"]], [after[f"exp_avg_sq/{name}"]],
            [], [torch.tensor(float(len(gradients)))], lr=OPTIONS.lr, beta1=OPTIONS.betas[0], beta2=OPTIONS.betas[1],
            weight_decay=OPTIONS.weight_decay, eps=OPTIONS.eps, amsgrad=False, maximize=False,
        )  # fmt: skip
    return after


def expected(key: ExpertKey, updates: Updates, name: str) -> torch.Tensor:
    return fields_of(key[1], tuple(gradient for gradient, _ in updates))[name]


@dataclass(eq=False)
class Lease:
    """What was leased, and what must be seen there for as long as it is."""

    request: LeaseRequest
    state: State


@dataclass(eq=False)
class Reader:
    view: View
    step: int
    is_dropped: bool = False
    leases: list[Lease] = field(default_factory=list)
