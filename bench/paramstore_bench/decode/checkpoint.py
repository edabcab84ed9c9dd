"""The model whose decoding is measured: a Qwen3-MoE or a gpt-oss of random weights, made on the spot."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, GptOssConfig, PretrainedConfig, Qwen3MoeConfig

import paramstore as ps
from paramstore.bench.context import Bench
from paramstore.config import SEGMENT_ALIGNMENT_BYTES
from paramstore.engine.planner.promises import slots_promising
from paramstore.engine.tables.arena import segment_lengths
from paramstore_bench.decode.long_prompt import LONGEST
from paramstore_bench.decode.runs import VOCABULARY

EMBEDDING_STD = 1.0
"""With 0.02, as where training begins, attention is larger than embeddings: the states of all tokens become alike from layer to
layer, and choose the same experts. Prompts of 512 tokens used 31 to 43 of 64, 24 decoded ones 16 to 31; now 64, and 45 to 51."""
SLACK_BYTES = 64 << 20
"""Beside the slots: what the daemon keeps for who else might come."""


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of the model. Weights are random, with embeddings of `EMBEDDING_STD`: routing spreads over all experts, which is the
    hardest case for a cache."""

    layers: int = 4
    experts: int = 64
    hidden: int = 1024
    inner: int = 1408
    top_k: int = 4
    dtype: torch.dtype = torch.bfloat16

    @property
    def keys(self) -> int:
        return self.layers * self.experts

    @property
    def image_bytes(self) -> int:
        """Bytes of an expert in a slot."""
        return ps.param_schema({name: (shape, self.dtype) for name, shape in self.tensors().items()}).part("param").image_bytes

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Shapes of an expert's tensors."""
        return {"gate_up": (2 * self.inner, self.hidden), "down": (self.hidden, self.inner)}

    def budget_bytes(self, slots: int) -> int:
        """The host budget in which one reader is promised so many experts."""
        budget_bytes = sum(segment_lengths(slots_promising(slots), self.image_bytes)) + SLACK_BYTES
        return budget_bytes - budget_bytes % -SEGMENT_ALIGNMENT_BYTES

    def config(self) -> PretrainedConfig:
        return Qwen3MoeConfig(  # type: ignore[call-arg]  # its stub lacks one
            vocab_size=VOCABULARY, hidden_size=self.hidden, num_hidden_layers=self.layers, num_attention_heads=16,
            num_key_value_heads=4, head_dim=self.hidden // 16, intermediate_size=self.inner, moe_intermediate_size=self.inner,
            num_experts=self.experts, num_experts_per_tok=self.top_k, max_position_embeddings=LONGEST, norm_topk_prob=True,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class GptOssShape(Shape):
    """Sizes of a gpt-oss: its experts have biases beside the matrices."""

    def tensors(self) -> dict[str, tuple[int, ...]]:
        matrices = {"gate_up": (self.hidden, 2 * self.inner), "down": (self.inner, self.hidden)}
        return {**matrices, "gate_up_bias": (2 * self.inner,), "down_bias": (self.hidden,)}

    def config(self) -> PretrainedConfig:
        return GptOssConfig(
            vocab_size=VOCABULARY, hidden_size=self.hidden, num_hidden_layers=self.layers, num_attention_heads=16,
            num_key_value_heads=4, head_dim=self.hidden // 16, intermediate_size=self.inner, num_local_experts=self.experts,
            num_experts_per_tok=self.top_k, max_position_embeddings=LONGEST, layer_types=["full_attention"] * self.layers,
        )  # fmt: skip


SHAPES = {"bfloat16": Shape(), "float32": Shape(inner=704, dtype=torch.float32)}
"""By dtype, with experts of equal bytes. A processor without instructions for bf16 computes prompts ten times as fast in fp32."""
QUICK = Shape(layers=4, experts=8, hidden=256, inner=256, top_k=2)


def checkpoint_of(bench: Bench, shape: Shape, directory: Path | None = None) -> Path:
    """The model's checkpoint, made at the first call. directory: where it lies; default the bench's."""
    path = (directory or bench.directory) / "checkpoint"
    if not path.exists():
        bench.tell("making the model")
        torch.manual_seed(0)
        model: Any = AutoModelForCausalLM.from_config(shape.config(), dtype=shape.dtype)  # type: ignore[no-untyped-call]
        model.model.embed_tokens.weight.data.normal_(std=EMBEDDING_STD)
        model.save_pretrained(path)
    return path
