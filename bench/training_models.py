"""A Qwen3-MoE-shaped model in training, its experts in this process or in the store, behind one small interface.

Dense weights, data and arithmetic are the same in both: bf16 weights, fp32 masters, fused AdamW.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

import paramstore as ps
from paramstore.bench.training import Phases

LEARNING_RATE = 1e-4
WAIT_S = 600.0
BF16 = torch.bfloat16


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of the model and of a step. Text is bytes, so that the vocabulary takes nothing away from the experts."""

    layers: int = 6
    experts: int = 16
    hidden: int = 1024
    inner: int = 512
    top_k: int = 4
    rows: int = 8
    context: int = 256

    @property
    def tokens(self) -> int:
        return self.rows * self.context

    @property
    def expert_parameters(self) -> int:
        return self.layers * self.experts * 3 * self.hidden * self.inner

    def config(self) -> Qwen3MoeConfig:
        return Qwen3MoeConfig(
            vocab_size=256, hidden_size=self.hidden, num_hidden_layers=self.layers, num_attention_heads=8, num_key_value_heads=4,
            head_dim=self.hidden // 8, intermediate_size=self.inner, moe_intermediate_size=self.inner, num_experts=self.experts,
            num_experts_per_tok=self.top_k, max_position_embeddings=self.context, norm_topk_prob=True, use_cache=False,
        )  # fmt: skip

    def fields(self) -> dict[str, tuple[int, int]]:
        """An expert's tensors as the store has them."""
        return {"gate_up": (2 * self.inner, self.hidden), "down": (self.hidden, self.inner)}


QUICK = Shape(layers=2, experts=8, hidden=256, inner=256, top_k=2, rows=2, context=64)


class MasterAdamW:
    """Fused AdamW on fp32 masters of bf16 parameters, which get the result."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self._parameters = parameters
        self._masters = [parameter.detach().float().requires_grad_() for parameter in parameters]
        self._optimizer = torch.optim.AdamW(self._masters, lr=LEARNING_RATE, fused=True)

    @torch.no_grad()
    def step(self) -> None:
        for parameter, master in zip(self._parameters, self._masters, strict=True):
            master.grad = None if parameter.grad is None else parameter.grad.float()
            parameter.grad = None
        self._optimizer.step()
        for parameter, master in zip(self._parameters, self._masters, strict=True):
            parameter.copy_(master)
            master.grad = None


class Trained(Protocol):
    """A model in training."""

    def step(self, input_BT: Tensor) -> Phases:  # noqa: N803 - B rows, T bytes
        """One step on these bytes; the new weights are there on return."""
        ...


class InMemory:
    """Everything in this process."""

    def __init__(self, shape: Shape, *, seed: int) -> None:
        self.model = make_model(shape, seed=seed)
        self._optimizer = MasterAdamW(list(self.model.parameters()))

    def step(self, input_BT: Tensor) -> Phases:  # noqa: N803
        return timed_step(self.model, input_BT, self._optimizer.step)

    def expert(self, layer: int, expert: int) -> dict[str, Tensor]:
        """An expert's weights in fp32, by the store's names."""
        module = self.model.model.layers[layer].mlp.experts
        return {"gate_up": module.gate_up_proj[expert].detach().float(), "down": module.down_proj[expert].detach().float()}


class Stored:
    """Experts in `namespace`, the rest in this process: `StoredExperts` in place of each layer's experts, no integration."""

    def __init__(self, shape: Shape, namespace: ps.Namespace, *, seed: int) -> None:
        self.model = make_model(shape, seed=seed)
        schedule = ps.nn.ExpertSchedule()
        for index, layer in enumerate(self.model.model.layers):
            layer.mlp.experts = ps.nn.StoredExperts(namespace, index, group=schedule)
        self._dense = MasterAdamW(list(self.model.parameters()))
        self._namespace = namespace

    def step(self, input_BT: Tensor) -> Phases:  # noqa: N803
        return timed_step(self.model, input_BT, self._update)

    def _update(self) -> None:
        ticket = self._namespace.apply(ps.AdamW(lr=LEARNING_RATE))
        self._dense.step()
        ticket.wait(WAIT_S)


def make_model(shape: Shape, *, seed: int) -> Qwen3MoeForCausalLM:
    """In bf16, equal for equal seeds."""
    torch.manual_seed(seed)
    return Qwen3MoeForCausalLM._from_config(shape.config(), dtype=BF16, attn_implementation="sdpa").train()


def timed_step(model: nn.Module, input_BT: Tensor, update: Callable[[], None]) -> Phases:  # noqa: N803
    started_s = time.perf_counter()
    loss = model(input_ids=input_BT, labels=input_BT).loss
    forward_s = time.perf_counter()
    loss.backward()
    backward_s = time.perf_counter()
    update()
    return Phases(forward_s - started_s, backward_s - forward_s, time.perf_counter() - backward_s)
