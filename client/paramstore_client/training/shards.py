"""Gradients of weights of which each rank has a part, while an optimizer is attached: the sentinel speaks for them.

Whoever clips sees only the parameters of its own rank, and a norm of these alone would differ between ranks. So, from the end of a
backward to the optimizer's step, these gradients are held here, as the experts' are in the daemon; the sentinel's is the norm of
both, and at the step they are given back, scaled as it was. DTensors are left where they are: torch has the norm of their mesh.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from paramstore.errors import ConfigError, StepMismatch
from paramstore_client.nn.sharded import ShardedModule
from paramstore_client.training.options import holds_any
from paramstore_client.training.updates import Reduce


class HeldShards:
    """Owner of the held gradients."""

    def __init__(self, modules: Sequence[ShardedModule]) -> None:
        self._modules = [module for module in modules if not _is_distributed(module.weight)]
        self._held: list[Tensor | None] = [None] * len(self._modules)

    def take(self) -> float:
        """Takes what a backward has added. Returns the norm of all that is held, by all ranks; they call it together."""
        for index, module in enumerate(self._modules):
            gradient, held = module.weight.grad, self._held[index]
            if held is not None and gradient is not None:
                gradient = held.add_(gradient)
            self._held[index], module.weight.grad = held if gradient is None else gradient, None
        norms = [module.norm_of(held) for module, held in zip(self._modules, self._held, strict=True)]
        return math.sqrt(sum(norm * norm for norm in norms))

    def give(self, coefficient: float) -> None:
        """Gives the gradients back for the optimizer's step, times `coefficient`. Raises StepMismatch where a backward has added
        one since they were taken, which no norm counts."""
        for module in self._modules:
            if module.weight.grad is not None:
                raise StepMismatch(
                    f"{type(module).__name__}({module.extra_repr()}): a backward through none of the experts has added to its "
                    "gradient, after the one whose norm was made: add their losses up, and go backward once"
                )
        for module, held in zip(self._modules, self._held, strict=True):
            if held is not None:
                module.weight.grad = held if coefficient == 1.0 else held.mul_(coefficient)
        self.drop()

    def give_back(self) -> None:
        """Adds the gradients to those that the weights have."""
        for module, held in zip(self._modules, self._held, strict=True):
            if held is not None:
                module.weight.grad = held if module.weight.grad is None else module.weight.grad.add_(held)
        self.drop()

    def drop(self) -> None:
        self._held = [None] * len(self._modules)


def check_shards(modules: Sequence[ShardedModule], optimizer: torch.optim.Optimizer, *, reduce: Reduce, sentinel: Tensor) -> None:
    """Raises ConfigError for weights that do not fit what the optimizer has beside them, or how its gradients are reduced."""
    own = {id(sentinel), *(id(module.weight) for module in modules)}
    has_mesh = any(_is_distributed(p) for group in optimizer.param_groups for p in group["params"] if id(p) not in own)
    for module in modules:
        what = f"attach: {type(module).__name__}({module.extra_repr()})"
        if module.reduce != reduce:
            raise ConfigError(f"{what} has reduce={module.reduce!r}, attach reduce={reduce!r}: the dense gradients have one")
        if has_mesh and not _is_distributed(module.weight):
            raise ConfigError(f"{what} is a plain tensor among DTensors: make it with mesh=, the one that fully_shard gets")
        if module.weight.requires_grad and not holds_any(optimizer, [module.weight]):
            raise ConfigError(f"{what} is in another optimizer: the attached one clips and steps it, or requires_grad_(False) does")


def before_step(give: Callable[[], None], arguments: Any, named: dict[str, Any]) -> tuple[Any, dict[str, Any]] | None:
    """Calls `give` before an optimizer's step, after its closure where it has one: what a hook before steps does and returns."""
    own, *rest = arguments
    closure = rest[0] if rest else named.get("closure")
    if closure is None:
        give()
        return None

    def run() -> Any:
        loss = closure()
        give()
        return loss

    return (own, run, *rest[1:]), {name: value for name, value in named.items() if name != "closure"}


def _is_distributed(weight: Tensor) -> bool:
    return hasattr(weight, "device_mesh")
