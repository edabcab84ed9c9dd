"""The dtype that weights compute in, and views of weights that autograd saved: kept without the bytes, and made again from those
of whoever holds them then, which are to be the same bytes."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from paramstore.core.key import ExpertKey
from paramstore.core.location import Identity
from paramstore.errors import StepMismatch
from paramstore_client.source import WeightLease

CAST = "ToCopyBackward0"
VIEWS = frozenset(f"{view}Backward0" for view in ("T", "Transpose", "Permute", "View", "UnsafeView", "ReshapeAlias"))
"""Nodes that autograd puts between a weight's cast and the kernel that saves it: they move no byte."""


class Identities:
    """The identities of the bytes that a layer's forward computed with. Owner of that fact."""

    def __init__(self) -> None:
        self._seen: dict[ExpertKey, Identity] = {}

    def check(self, keys: Sequence[ExpertKey], lease: WeightLease) -> None:
        """Notes keys that are seen for the first time; raises StepMismatch where another pass saw other bytes."""
        for key in keys:
            now = lease.identity(key)
            seen = self._seen.setdefault(key, now)
            if seen != now:
                raise StepMismatch(
                    f"expert {key}: forward computed with epoch {seen.epoch} version {seen.version}, backward finds epoch "
                    f"{now.epoch} version {now.version}; call apply, refresh and rollback after backward, not before it"
                )


class WeightView(NamedTuple):
    """A saved tensor that lay in a field of `holder`, or in a cast of one (autocast makes those). Owner of the geometry."""

    holder: Hashable
    field: str
    dtype: torch.dtype
    offset_elements: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    is_cast: bool

    def of(self, weight: Tensor) -> Tensor:
        """The saved tensor again, from a field with the same bytes."""
        flat = weight.view(-1)
        flat = flat.to(self.dtype) if self.is_cast else flat.view(self.dtype)
        return flat.as_strided(self.size, self.stride, flat.storage_offset() + self.offset_elements)


def find_view(tensor: Tensor, holder: Hashable, weights: Mapping[str, Tensor]) -> WeightView | None:
    """`tensor` as a view of one of the contiguous `weights` of `holder`, or of a cast of one; None where it is neither.

    A cast is recognised where the weights came into the graph by a node that lists them as `field_names`.
    """
    size, stride = tuple(tensor.shape), tuple(tensor.stride())
    address = tensor.data_ptr()
    for field, weight in weights.items():
        start = weight.data_ptr()
        if start <= address < start + weight.nbytes:
            offset_elements = (address - start) // tensor.element_size()
            return WeightView(holder, field, tensor.dtype, offset_elements, size, stride, is_cast=False)
    cast = _cast_field(tensor)
    if cast is None or tensor.untyped_storage().nbytes() != weights[cast].numel() * tensor.element_size():
        return None
    return WeightView(holder, cast, tensor.dtype, int(tensor.storage_offset()), size, stride, is_cast=True)


def hooks_around() -> tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]] | None:
    """The saved-tensor hooks that are in force here, pack and unpack: entering others hides them."""
    hooks: tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]] | None = (
        torch._C._autograd._top_saved_tensors_default_hooks(False)  # ignore_is_tracing
    )
    return hooks


def in_dtype_of(x: Tensor, weights: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """`weights` in the dtype in which our kernels multiply them with `x`: cast to that of `x` where theirs are longer, as FSDP2's
    mixed precision casts parameters.

    Nothing is cast under autocast, nor where some weight is as short as `x`: the kernel deals with those.
    """
    if any(weight.itemsize <= x.itemsize for weight in weights.values()) or torch.is_autocast_enabled(x.device.type):
        return weights
    return {name: weight.to(x.dtype) for name, weight in weights.items()}


def _cast_field(tensor: Tensor) -> str | None:
    """The field whose cast `tensor` is or views."""
    node: Any = tensor.grad_fn
    while node is not None and node.name() in VIEWS:
        node = node.next_functions[0][0]
    if node is None or node.name() != CAST:
        return None
    origin, output = node.next_functions[0]
    names: Sequence[str] | None = getattr(origin, "field_names", None)
    return None if names is None or output >= len(names) else names[output]
