"""A module whose weight is spread over ranks: what keeps others from taking a rank's part for a weight that all ranks have alike.

- DDP's buckets and `fully_shard` look at the parameters of each module by itself, and see none of an `UncollectedModule`. An
  optimizer, clipping and `state_dict` look at a whole model, and see them.
- DDP's constructor copies rank 0's parameters to all ranks, by the names that the module it wraps has not excepted
  (torch/nn/parallel/distributed.py): `leave_out_of_ddp` excepts them.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from typing import Literal

from torch import Tensor, nn

from paramstore.core.arguments import instance

DDP_IGNORES = "_ddp_params_and_buffers_to_ignore"
"""Attribute that DDP reads from the module that it wraps."""


class UncollectedModule(nn.Module):
    """A module whose own parameters a model lists, and no collector that looks at each module by itself. It has no buffers."""

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Yields no parameter without `recurse`: that is how DDP and `fully_shard` collect what they reduce or shard."""
        if recurse:
            yield from super().named_parameters(prefix, recurse, remove_duplicate)

    def named_buffers(self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True) -> Iterator[tuple[str, Tensor]]:
        """Yields the parameters without `recurse`: `fully_shard` moves buffers and leaves them as they are, and torch's distributed
        checkpoint, which looks at both, finds the parameters that the optimizer has."""
        if not recurse:
            yield from super().named_parameters(prefix, recurse, remove_duplicate)


class ShardedModule(UncollectedModule):
    """A module of which each rank has a part of one weight, with the whole gradient of that part after a backward.

    reduce: "mean" where that gradient is divided by the number of ranks, as DDP and FSDP2 do with theirs; else "sum".
    """

    weight: nn.Parameter
    reduce: Literal["mean", "sum"]

    @abstractmethod
    def norm_of(self, gradient: Tensor | None) -> float:
        """The norm of all ranks' parts together, the same on each, which gives its own; None counts as 0. All ranks call it."""


def sharded_modules(model: nn.Module) -> list[ShardedModule]:
    return [module for module in model.modules() if isinstance(module, ShardedModule)]


def leave_out_of_ddp(model: nn.Module) -> None:
    """Excepts the weights in `model` that are spread over ranks from what DDP copies and reduces, when it wraps `model` itself.

    To be called before `DistributedDataParallel(model)`; `ps.training.bind`, and so `ps.hf.from_pretrained`, has done it for what
    the model held then. `fully_shard` needs nothing of the kind.
    """
    instance("model", model, nn.Module, "a torch module")
    names = []
    for module_name, module in model.named_modules():
        if isinstance(module, ShardedModule):
            names.append(f"{module_name}.weight" if module_name else "weight")
            module.weight._ddp_ignored = True  # type: ignore[attr-defined]  # DDP's mixed precision reads it
    known = getattr(model, DDP_IGNORES, ())
    setattr(model, DDP_IGNORES, [*known, *(name for name in names if name not in known)])
