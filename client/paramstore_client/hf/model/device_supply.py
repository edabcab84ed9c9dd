"""Gives a layer's call its weights where they lie in device slots, for a forward without a graph.

- All keys of the layer are one visit of the tier, which ends when the kernel has been given to the stream.
- A kernel that takes rows of a weight by expert computes on the slots themselves, [S, ...] per field: ids are slot numbers, and
  slots of other experts have no rows. So does `batched_mm` where it casts nothing, and `grouped_mm` where that multiplies groups in
  one launch: bfloat16, compute capability 9.0 or more, fewer than GROUPS_MAX slots, rows of whole 16 bytes. Elsewhere `grouped_mm`
  multiplies views of the slots, one mm a group, with the counts that the host knows; the module's own loop indexes views.
- A layer of more experts than slots runs through them: both kernels take the experts one after the other, as they come, and the
  module's own loop in its order.
- The host waits for nothing: slot numbers go to the device from pinned memory.

Proven on the simulated device and its twin on the CPU; it has never run on a GPU. There `grouped_mm` chooses its tiles by rows and
groups, so with S slots bits may differ from those with the model's own number of experts.
"""

# S slots, T tokens, K experts per token
# ruff: noqa: N806 - shape suffixes, as the legend says


from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from paramstore.core.key import ExpertKey
from paramstore_client.device.tier import DeviceTier
from paramstore_client.hf.model.compact_buffers import CompactBuffers
from paramstore_client.hf.model.dispatch import Dispatch
from paramstore_client.hf.model.kernels import Kernel
from paramstore_client.hf.model.layer_call import ForwardSupply, WeightsOf
from paramstore_client.hf.model.layer_weights import LayerWeights
from paramstore_client.hf.model.lease_window import Hint
from paramstore_client.source import load_ahead

GROUPS_MAX = 1024
"""torch's grouped_mm on CUDA takes fewer groups than this."""
GROUPED_CAPABILITY = (9, 0)
"""The least compute capability on which it multiplies all groups in one launch; below, it asks the device for the offsets."""
ROW_BYTES = 16
"""Rows of a weight must be whole multiples of it."""


class DeviceSupply(ForwardSupply):
    """The weights of one visit of a tier, for tokens `x`. A holder is the position of an expert, or None for all."""

    def __init__(
        self, tier: DeviceTier, layer: int, dispatch: Dispatch, x: Tensor, *, kernel: Kernel, buffers: CompactBuffers,
        forward_hint: Hint,
    ) -> None:  # fmt: skip
        self._keys: list[ExpertKey] = [(layer, expert) for expert in dispatch.experts]
        self._hint = forward_hint
        self._tier = tier
        self._dispatch = dispatch
        self._kernel = kernel
        self._casts = any(field.itemsize > x.itemsize for field in tier.slots.fields.values())
        self._buffers = buffers
        self._slots: Tensor | None = None

    @contextmanager
    def forward_pass(self) -> Iterator[WeightsOf]:
        keys, tier, kernel = self._keys, self._tier, self._kernel
        with ExitStack() as lent, tier.acquire_arriving(keys, may_pass=True) as lease:
            is_on_slots = not lease.passing_count and _computes_on_slots(kernel, tier, casts=self._casts)
            if (kernel.is_streamed and not lease.passing_count) or is_on_slots:
                lease.load()
            load_ahead(tier, tier.lacking(self._hint(max(0, tier.lease_slots - len(keys)))))
            if kernel.is_streamed:
                yield lambda position: lease.turn_to(keys[position])
            elif is_on_slots:
                self._slots = _on_device([lease.slot(key) for key in keys], tier.device)
                yield lambda holder: tier.slots.fields
            else:
                weights = LayerWeights(lease, keys, self._buffers, lent, device=tier.device)
                ends = list(accumulate(self._dispatch.counts))
                stacks: Any = weights.stacks(tier.schema.part("param").fields, ends=ends)
                yield lambda holder: stacks

    def shrink(self) -> None:
        """Gives memory of the slots back, after a pass that had none. Raises CapacityError where the tier has one slot."""
        self._slots = None
        self._tier.shrink()

    def placed(self) -> tuple[Tensor, int]:
        """(ids [T, K], how many experts the kernel sees), within the forward pass."""
        positions_TK = self._dispatch.positions_TK
        if self._slots is None:
            return positions_TK, len(self._keys)
        return self._slots[positions_TK], self._tier.slots.count


def may_supply(tier: DeviceTier, kernel: Kernel, x: Tensor) -> bool:
    """Whether `kernel` can compute with experts of the tier where they lie, on tokens `x`."""
    return x.device == tier.device and not torch.is_grad_enabled() and (kernel.is_streamed or kernel.name != "eager")


def _computes_on_slots(kernel: Kernel, tier: DeviceTier, *, casts: bool) -> bool:
    if kernel.name == "batched_mm":
        return not casts  # of all slots, whoever is in them
    if tier.device.type != "cuda":
        return False
    matrices = [field for field in tier.slots.fields.values() if field.dim() == 3]
    is_legal = all(field.dtype == torch.bfloat16 and field.stride(1) * field.itemsize % ROW_BYTES == 0 for field in matrices)
    capability = torch.cuda.get_device_capability(tier.device)
    return is_legal and tier.slots.count < GROUPS_MAX and capability >= GROUPED_CAPABILITY


def _on_device(numbers: Sequence[int], device: torch.device) -> Tensor:
    """The numbers as int64 on the device; the host waits for nothing."""
    there = torch.tensor(numbers)
    if device.type != "cuda":
        return there
    pinned = torch.empty(len(numbers), dtype=torch.int64, pin_memory=True)
    pinned.copy_(there)
    return pinned.to(device, non_blocking=True)
