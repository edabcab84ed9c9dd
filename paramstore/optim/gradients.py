"""Prepares the gradients of ranks: sums them in rank order in their own dtype, scales in it, casts to fp32; and computes norms.

Gradients lie in memory that another process can write. Each element is read once, so whatever happens to it meanwhile, a
record's new state is one that some gradient gives.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch
from torch import Tensor

from paramstore.core.schema import MASTER_DTYPE, Schema
from paramstore.optim import chunks
from paramstore.optim.tensors import configure_threads, torch_dtype

_thread = threading.local()


class GradientBuffers:
    """One thread's buffers for a chunk's gradient."""

    def __init__(self) -> None:
        self._elements = chunks.CHUNK_ELEMENTS
        self._summed: dict[torch.dtype, Tensor] = {}
        self._cast = torch.empty(self._elements, dtype=torch_dtype(MASTER_DTYPE))
        self._zeros: Tensor | None = None
        self._wide: Tensor | None = None

    def join(self, gradients: Sequence[Tensor]) -> Tensor:
        """Sums the ranks' gradients of one chunk, in this order and in their dtype."""
        gradient = gradients[0]
        if len(gradients) > 1:
            summed = self._room(gradient)
            for other in gradients[1:]:
                gradient = torch.add(gradient, other, out=summed)
        return gradient

    def prepare(self, gradients: Sequence[Tensor], grad_scale: float) -> Tensor:
        """Returns the sum, scaled in its dtype, as fp32. Copies only where that changes something."""
        gradient = self.join(gradients)
        if grad_scale != 1.0:
            gradient = torch.mul(gradient, grad_scale, out=self._room(gradient))
        if gradient.dtype is not torch.float32:
            gradient = self._cast[: gradient.numel()].copy_(gradient)
        return gradient

    def zeros(self, elements: int) -> Tensor:
        """Returns a gradient of zeros, to which nobody may write."""
        if self._zeros is None:
            self._zeros = torch.zeros(self._elements, dtype=torch_dtype(MASTER_DTYPE))
        return self._zeros[:elements]

    def square_sum(self, gradients: Sequence[Tensor]) -> float:
        """Returns the sum of squares of the sum, in float64."""
        if self._wide is None:
            self._wide = torch.empty(self._elements, dtype=torch.float64)
        gradient = self.join(gradients)
        return self._wide[: gradient.numel()].copy_(gradient).square_().sum().item()

    def _room(self, like: Tensor) -> Tensor:
        room = self._summed.get(like.dtype)
        if room is None:
            room = self._summed[like.dtype] = torch.empty(self._elements, dtype=like.dtype)
        return room[: like.numel()]


def buffers_of_thread() -> GradientBuffers:
    """The calling thread's own, which last as long as it: pages of new ones would cost as much as what is computed in them."""
    buffers: GradientBuffers | None = getattr(_thread, "buffers", None)
    if buffers is None:
        buffers = _thread.buffers = GradientBuffers()
    return buffers


def square_sum(schema: Schema, gradients: Sequence[memoryview]) -> float:
    """Returns the sum of squares of a record's gradient, accumulated in float64: equal bytes give equal bits.

    gradients: one per rank, each laid out by `schema.gradient_fields()`; they are first summed in this order in their dtype, as
    in an update.
    """
    configure_threads()
    buffers = buffers_of_thread()
    total = 0.0
    for field in schema.gradient_fields():
        sizes = chunks.chunk_sizes(0, field.elements, chunks.CHUNK_ELEMENTS)
        for parts in zip(*(chunks.cut(gradient, field, 0, sizes) for gradient in gradients), strict=True):
            total += buffers.square_sum(parts)
    return total
