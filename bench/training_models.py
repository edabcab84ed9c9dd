"""Trains a Qwen3-MoE-shaped model: unmodified with everything in memory, or through `ps.hf` with its experts in a store.

Both load one checkpoint, and compute the same numbers: bf16 weights, fp32 masters of the experts, fused AdamW, and the kernel that
the model chooses by itself.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.utils import logging

import paramstore as ps
from paramstore_bench.training import Phases

LEARNING_RATE = 1e-4
WAIT_S = 600.0
BF16 = torch.bfloat16
EXPERTS = ".mlp.experts."
"""Part of the name of every parameter that holds experts."""


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of the model and of a step. Text is bytes, so that the vocabulary takes no parameters away from the experts."""

    layers: int = 6
    experts: int = 16
    hidden: int = 1024
    inner: int = 512
    top_k: int = 4
    rows: int = 8
    context: int = 512

    @property
    def tokens(self) -> int:
        return self.rows * self.context

    @property
    def expert_parameters(self) -> int:
        return self.layers * self.experts * 3 * self.hidden * self.inner

    @property
    def states_bytes(self) -> int:
        """Bytes of the experts' masters and both moments, fp32."""
        return self.expert_parameters * 12

    def config(self) -> Qwen3MoeConfig:
        return Qwen3MoeConfig(  # type: ignore[call-arg]  # its stub lacks one
            vocab_size=256, hidden_size=self.hidden, num_hidden_layers=self.layers, num_attention_heads=8, num_key_value_heads=4,
            head_dim=self.hidden // 8, intermediate_size=self.inner, moe_intermediate_size=self.inner, num_experts=self.experts,
            num_experts_per_tok=self.top_k, max_position_embeddings=self.context, norm_topk_prob=True, use_cache=False,
        )  # fmt: skip


QUICK = Shape(layers=2, experts=8, hidden=256, inner=256, top_k=2, rows=2, context=64)


@dataclass(frozen=True, slots=True)
class Step:
    """Figures of one training step. phases: until `optimizer.step()` has returned."""

    loss: float
    phases: Phases


class Trained(Protocol):
    """A model in training."""

    def step(self, input_BT: Tensor) -> Step:  # noqa: N803 - B rows, T bytes
        """Makes one step on these bytes."""
        ...

    def settle(self) -> None:
        """Waits until nothing of the last step is under way."""
        ...


class InMemory:
    """The unmodified model. Its experts' masters are fp32, in the same optimizer as the rest."""

    def __init__(self, checkpoint: Path) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=BF16, attn_implementation="sdpa").train()
        named = list(self.model.named_parameters())
        self._experts = [parameter for name, parameter in named if EXPERTS in name]
        self._masters = [parameter.detach().float().requires_grad_() for parameter in self._experts]
        dense = [parameter for name, parameter in named if EXPERTS not in name]
        self._optimizer = torch.optim.AdamW([*dense, *self._masters], lr=LEARNING_RATE, fused=True)

    def step(self, input_BT: Tensor) -> Step:  # noqa: N803
        return timed_step(self.model, input_BT, self._update)

    def settle(self) -> None:
        """Does nothing: a step is over when it returns."""

    @torch.no_grad()
    def _update(self) -> None:
        for parameter, master in zip(self._experts, self._masters, strict=True):
            assert parameter.grad is not None, "every layer has run"
            master.grad, parameter.grad = parameter.grad.float(), None
        self._optimizer.step()
        self._optimizer.zero_grad()
        for parameter, master in zip(self._experts, self._masters, strict=True):
            parameter.copy_(master)


class Stored:
    """The checkpoint's model as a user has it, in three lines of `ps.hf`.

    name: the namespace's; it is made from the checkpoint where it is not there yet. updates: the rule for idle experts.
    """

    def __init__(self, checkpoint: Path, store: ps.Store, *, name: str, updates: str) -> None:
        self.model = ps.hf.from_pretrained(
            AutoModelForCausalLM, checkpoint, store=store, name=name, updates=updates, dtype=BF16, attn_implementation="sdpa"
        ).train()
        trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        self._optimizer = torch.optim.AdamW(trained, lr=LEARNING_RATE, fused=True)
        self.experts = ps.hf.experts(self.model)
        self.experts.attach(self._optimizer)

    def step(self, input_BT: Tensor) -> Step:  # noqa: N803
        return timed_step(self.model, input_BT, self._update)

    def settle(self) -> None:
        self.experts.settle()

    def save(self, file: Path, step: int) -> float:
        """Commits the experts as step `step`, and writes the rest of a checkpoint to `file`. Returns the commit's seconds."""
        started_s = time.perf_counter()
        self.experts.commit(step).wait(WAIT_S)
        seconds = time.perf_counter() - started_s
        parts = {"model": self.model, "optimizer": self._optimizer, "experts": self.experts}
        torch.save({name: part.state_dict() for name, part in parts.items()}, file)
        return seconds

    def resume(self, file: Path) -> None:
        """Continues from what `save` left in the file and in the store."""
        saved: dict[str, Any] = torch.load(file)
        self.model.load_state_dict(saved["model"])
        self._optimizer.load_state_dict(saved["optimizer"])
        self.experts.load_state_dict(saved["experts"])

    def _update(self) -> None:
        self._optimizer.step()
        self._optimizer.zero_grad()


def save_model(shape: Shape, checkpoint: Path, *, seed: int) -> None:
    """Writes a checkpoint with new weights, equal for equal seeds, as it would lie on the hub."""
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]  # the bench has one of its own
    torch.manual_seed(seed)
    Qwen3MoeForCausalLM._from_config(shape.config(), dtype=BF16).save_pretrained(checkpoint)  # type: ignore[no-untyped-call]  # the library's


def run(trained: Trained, batches: Sequence[Tensor]) -> list[Step]:
    """Makes one step on each of the batches, one right after the other; at the end nothing is under way."""
    steps = [trained.step(batch) for batch in batches]
    trained.settle()
    return steps


def timed_step(model: nn.Module, input_BT: Tensor, update: Callable[[], None]) -> Step:  # noqa: N803
    started_s = time.perf_counter()
    loss = model(input_ids=input_BT, labels=input_BT).loss
    forward_s = time.perf_counter()
    loss.backward()
    backward_s = time.perf_counter()
    update()
    return Step(loss.item(), Phases(forward_s - started_s, backward_s - forward_s, time.perf_counter() - backward_s))
