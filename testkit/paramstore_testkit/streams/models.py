"""Whole models of transformers on a device, their experts acquired through a device tier of it."""

from __future__ import annotations

import torch
from torch import Tensor

from paramstore_client.device.tier import DeviceTier
from paramstore_client.hf.model.binding import bind
from paramstore_client.hf.model.layer_experts import ModelExperts
from paramstore_testkit.streams.scenario import DEVICE
from paramstore_testkit.training.moe_families import EXPERTS, tiny_config
from paramstore_testkit.training.moe_models import Twin, tokens


class StoredModel:
    """A tiny bf16 model of a family, and what the unmodified one computes on the host. slots: default those of one layer.
    lease_slots: the namespace's."""

    def __init__(self, family: str, kernel: str, *, slots: int = EXPERTS, lease_slots: int = 64) -> None:
        self._name = f"{family}, {kernel}"
        self._kernel = kernel
        self._slots = slots
        config = tiny_config(family, attn_implementation="eager")
        self._twin = Twin.of(config, kernel=kernel, dtype=torch.bfloat16, is_trained=False, lease_slots=lease_slots)
        self._prompt = tokens(length=7)
        with torch.no_grad():
            self._expected = self._logits(self._twin.stock, self._prompt)
        modules = list(self._twin.stored.modules())
        self._dense = [(tensors, dict(tensors)) for module in modules for tensors in (module._parameters, module._buffers)]

    def compute(self, seed: int) -> list[str]:
        """Computes on the device, through fewer slots than the experts would fill. Tells of what the logits differ by a bit."""
        for tensors, host in self._dense:
            tensors.update({name: tensor.to(DEVICE) for name, tensor in host.items() if tensor is not None})
        with torch.no_grad(), DeviceTier(self._twin.namespace, self._slots, device=DEVICE) as tier:
            bind(self._twin.stored, ModelExperts(tier, anchor=None), kernel=self._kernel)
            computed = self._logits(self._twin.stored, self._prompt.to(DEVICE))
        both = zip(("prompt", "one token"), computed, self._expected, strict=True)
        return [f"{self._name}: {what}" for what, ours, theirs in both if not torch.equal(ours.cpu(), theirs)]

    def _logits(self, model: torch.nn.Module, prompt: Tensor) -> tuple[Tensor, Tensor]:
        return model(prompt).logits, model(prompt[:, :1]).logits
