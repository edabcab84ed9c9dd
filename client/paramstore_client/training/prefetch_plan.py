"""The 2D prefetch of MoESys (arXiv 2205.10034, section 3.2.2): one order of a model's blocks drives both dimensions.

- Horizontal: the dense slices of the next blocks are gathered from the other ranks while a block computes. FSDP2 does it; what it
  is told here is which blocks come next, forward and backward.
- Vertical: the experts of the next blocks are fetched from the store. The stored layers ask for them by themselves, in the order
  of their schedule; the order here is checked to be the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from paramstore.core.arguments import instance, whole_number
from paramstore.errors import ConfigError
from paramstore_client.nn.stored_experts import StoredExperts

BOUND = "_paramstore_layer"
"""Attribute of a module of transformers: the layer that it was joined with (`paramstore_client.hf.model.binding`)."""


@dataclass(frozen=True, slots=True)
class PrefetchPlan:
    """The order of both prefetches. blocks: the names of the blocks in forward order. layers: per block the stored layers in it.
    dense_ahead: how many blocks' dense slices are gathered ahead of use, each way; 0 where FSDP2 shards no block."""

    blocks: tuple[str, ...]
    layers: tuple[tuple[int, ...], ...]
    dense_ahead: int


def plan_prefetch(model: nn.Module, *, dense_ahead: int = 1) -> PrefetchPlan:
    """Tells FSDP2 to gather the dense slices of the next `dense_ahead` blocks ahead of use, in the order in which the experts are
    fetched. To be called after `fully_shard`, of the blocks and of the model, and again after any change of either.

    A block is a module of a list (`model.layers`) in which stored experts lie; blocks without experts among them count too. On
    the CPU the gathering goes on beside the computing only by FSDP2's asynchronous unsharding, which is switched on here.
    Raises ConfigError where `dense_ahead` is negative, the model has no stored experts, or its blocks visit their layers in another
    order than the schedule's.
    """
    dense_ahead = whole_number("dense_ahead", dense_ahead)
    instance("model", model, nn.Module, "a torch module")
    layer_of = dict(_stored_layers(model))
    if not layer_of:
        raise ConfigError(f"{type(model).__name__} has no stored experts: there is no order to plan by")
    blocks = list(_blocks(model, layer_of))
    layers = tuple(tuple(layer for path, layer in layer_of.items() if path.startswith(f"{name}.")) for name, _ in blocks)
    flat = [layer for block in layers for layer in block]
    if flat != sorted(flat):
        raise ConfigError(f"the model's blocks visit the stored layers in the order {flat}: the schedule expects ascending ones")
    sharded = [block for _, block in blocks if _is_sharded(block)]
    ahead = dense_ahead if len(sharded) > 1 else 0
    if ahead:
        _gather_ahead(sharded, ahead)
    return PrefetchPlan(tuple(name for name, _ in blocks), layers, ahead)


def _stored_layers(model: nn.Module) -> Iterator[tuple[str, int]]:
    """(path, layer) of every module that computes with stored experts."""
    for path, module in model.named_modules():
        if isinstance(module, StoredExperts):
            yield path, module.layer
        elif (bound := module.__dict__.get(BOUND)) is not None:
            yield path, bound.layer


def _blocks(model: nn.Module, layer_of: dict[str, int]) -> Iterator[tuple[str, nn.Module]]:
    """The modules of every outermost list in which stored experts lie, in order."""
    outermost: list[str] = []
    for path, module in model.named_modules():
        is_list = isinstance(module, nn.ModuleList) and any(stored.startswith(f"{path}.") for stored in layer_of)
        if is_list and not any(path.startswith(f"{outer}.") for outer in outermost):
            outermost.append(path)
            yield from ((f"{path}.{name}", block) for name, block in module.named_children())


def _is_sharded(block: nn.Module) -> bool:
    return hasattr(block, "set_modules_to_forward_prefetch")


def _gather_ahead(blocks: Sequence[Any], ahead: int) -> None:
    for index, block in enumerate(blocks):
        block.set_modules_to_forward_prefetch(list(blocks[index + 1 : index + 1 + ahead]))
        block.set_modules_to_backward_prefetch(list(reversed(blocks[max(0, index - ahead) : index])))
        on_cpu = all(parameter.device.type == "cpu" for parameter in block.parameters())
        if on_cpu and hasattr(block, "_set_unshard_async_op"):
            block._set_unshard_async_op(True)  # the CPU has no streams that would run it beside the computing
