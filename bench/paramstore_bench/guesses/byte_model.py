"""A Qwen3-MoE byte model that was trained, and made as large as real ones are without a change of what it computes.

What an early router guesses depends on how much the layers between move the hidden states, of which random weights tell nothing. A
model of real size cannot be trained here. So a small one learns the demo's text to below `BITS_MAX` bits a byte, and is then
*widened* with zeros: hidden states, experts and heads get rows and columns that add nothing, so that each router chooses what the
small model's would, and bytes and arithmetic are those of large experts.
The training's state lies in a file, so that one that was ended goes on, and a trained model is there at once.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from paramstore.demo.batches import BatchSampler, held_out_batches
from paramstore.demo.corpus import Corpus
from paramstore.errors import ConfigError
from paramstore_bench.decode_model import BITS_MAX, save

HELD_OUT_BATCHES = 8
SAVE_STEPS = 50


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of a byte model. heads: of queries; half as many are of keys and values."""

    layers: int = 8
    experts: int = 64
    hidden: int = 64
    inner: int = 48
    heads: int = 4
    top_k: int = 4

    def config(self) -> Qwen3MoeConfig:
        return Qwen3MoeConfig(  # type: ignore[call-arg]  # its stub lacks one
            vocab_size=256, hidden_size=self.hidden, num_hidden_layers=self.layers, num_attention_heads=self.heads,
            num_key_value_heads=self.heads // 2, head_dim=HEAD, intermediate_size=self.inner, moe_intermediate_size=self.inner,
            num_experts=self.experts, num_experts_per_tok=self.top_k, max_position_embeddings=1024, norm_topk_prob=True,
            router_aux_loss_coef=0.01, tie_word_embeddings=False, initializer_range=0.08,
        )  # fmt: skip


HEAD = 32
"""Size of a head, of the small model and of the wide one."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """How a model is trained: sequences and bytes of a batch, steps, peak learning rate."""

    shape: Shape = Shape()
    batch: int = 16
    context: int = 128
    steps: int = 2000
    learning_rate: float = 4e-3
    warmup_steps: int = 40
    seed: int = 0
    bits_max: float = BITS_MAX

    def rate(self, step: int) -> float:
        """The learning rate of a step, counted from 0: up in a line, down along a cosine to a tenth."""
        if step < self.warmup_steps:
            return self.learning_rate * (step + 1) / self.warmup_steps
        done = (step - self.warmup_steps) / max(1, self.steps - self.warmup_steps)
        return self.learning_rate * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * done)))


@dataclass(frozen=True, slots=True)
class Trained:
    """A small model, and how well it knows held-out text."""

    model: Any
    held_out_bits: float


def open_byte_model(file: Path, corpus: Corpus, recipe: Recipe) -> Trained:
    """Trains a model to the end of the recipe, from the state in `file` on if it is of this recipe and corpus, with one thread.

    Raises ConfigError if it knows held-out text worse than the recipe asks; the state stays in `file`.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return _trained(file, corpus, recipe)
    finally:
        torch.set_num_threads(threads)


def _trained(file: Path, corpus: Corpus, recipe: Recipe) -> Trained:
    torch.manual_seed(recipe.seed)
    model: Any = AutoModelForCausalLM.from_config(recipe.shape.config(), experts_implementation="grouped_mm")  # type: ignore[no-untyped-call]
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.01, fused=True)
    sampler = BatchSampler(corpus, batch=recipe.batch, context=recipe.context, seed=recipe.seed + 1)
    said = f"{asdict(recipe)}, corpus {corpus.sha256}"
    if file.exists() and (state := torch.load(file, weights_only=True))["recipe"] == said:
        model.load_state_dict(state["weights"])
        optimizer.load_state_dict(state["moments"])
        sampler.restore(state["sampler"])
    while sampler.position < recipe.steps:
        bits = _train_step(model, optimizer, sampler, recipe)
        if sampler.position % 20 == 0:
            print(f"step {sampler.position}/{recipe.steps}: {bits:.3f} bits a byte", file=sys.stderr, flush=True)
        if sampler.position % SAVE_STEPS == 0 or sampler.position == recipe.steps:
            state = {"recipe": said, "weights": model.state_dict(), "sampler": sampler.state()}
            save(file, {**state, "moments": optimizer.state_dict()})
    bits = _held_out_bits(model.eval(), corpus, recipe)
    if bits >= recipe.bits_max:
        raise ConfigError(f"steps={recipe.steps}: {bits:.3f} bits a byte of held-out text, below {recipe.bits_max} are asked")
    return Trained(model, bits)


def _train_step(model: Any, optimizer: torch.optim.Optimizer, sampler: BatchSampler, recipe: Recipe) -> float:
    for group in optimizer.param_groups:
        group["lr"] = recipe.rate(sampler.position)
    batch = sampler.draw()
    out = model(input_ids=batch.input_BT, output_router_logits=True, use_cache=False)
    loss = functional.cross_entropy(out.logits.flatten(0, 1), batch.target_BT.flatten())
    (loss + model.router_aux_loss_coef * out.aux_loss).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return loss.item() / math.log(2)


@torch.no_grad()
def _held_out_bits(model: Any, corpus: Corpus, recipe: Recipe) -> float:
    batches = held_out_batches(corpus, count=HELD_OUT_BATCHES, batch=recipe.batch, context=recipe.context)
    losses = [
        functional.cross_entropy(model(input_ids=batch.input_BT, use_cache=False).logits.flatten(0, 1), batch.target_BT.flatten())
        for batch in batches
    ]
    return torch.stack(losses).mean().item() / math.log(2)


def widened(model: Any, shape: Shape, *, dtype: torch.dtype) -> Any:
    """Makes a model of `shape` that computes what `model` does, up to rounding: what it has more is zero. shape: at least as large
    in every size, with as many layers and experts. Normed hidden states are scaled by what a mean over more elements loses."""
    config = shape.config()
    share = model.config.hidden_size / shape.hidden
    config.rms_norm_eps = model.config.rms_norm_eps * share
    wide: Any = AutoModelForCausalLM.from_config(config, dtype=dtype)  # type: ignore[no-untyped-call]
    given: Mapping[str, Tensor] = model.state_dict()
    with torch.no_grad():
        for name, weight in wide.state_dict().items():
            value = given[name]
            if name.endswith("norm.weight") and not name.endswith(("q_norm.weight", "k_norm.weight")):
                value = value * math.sqrt(share)
            weight.zero_()
            if name.endswith("gate_up_proj"):  # gates lie above ups
                for mine, theirs in zip(weight.chunk(2, dim=1), value.chunk(2, dim=1), strict=True):
                    _corner(mine, theirs).copy_(theirs)
            else:
                _corner(weight, value).copy_(value)
    return wide.eval()


def _corner(weight: Tensor, value: Tensor) -> Tensor:
    return weight[tuple(slice(size) for size in value.shape)]
