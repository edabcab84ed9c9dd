"""The byte-level MoE transformer: its dense part is here, and its experts are the modules that `make_experts` gives per layer.

- Two models built from one seed have equal dense weights, bit for bit. `initial_expert` does the same for experts, by key,
  so that a store and a model in memory can start from the same values.
- The same module trains and generates: with a `KeyValueCache` it takes the bytes that follow those it has seen.

Attention has linear biases (ALiBi, arXiv 2108.12409): no positions to learn. The embedding sees the last four bytes,
which spares a short training from learning to look one byte back. The router is top-2 of a softmax, renormalised, with
the load-balancing loss of the Switch Transformer (arXiv 2101.03961, section 2.2).
"""

# B sequences, S bytes of a call, T tokens = B * S, P bytes seen before and now, A heads, D hidden, E experts, K top-k
# ruff: noqa: N803, N806 - shape suffixes, as the legend says

from __future__ import annotations

import math
from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from paramstore.core.key import ExpertKey
from paramstore.demo.settings import ModelShape

EMBEDDED_BYTES = 4
"""Number of last bytes that the embedding of a position sums."""
EXPERTS_NAME = "experts"
"""Name of a block's attribute that is not dense: all parameters below it are left to the store."""

MakeExperts = Callable[[int], nn.Module]
"""Function from a layer to a module that is called as (x_TD, expert_ids_TK, gate_TK) -> y_TD."""


class KeyValueCache:
    """State that generation keeps between calls: keys and values per layer, and the last bytes. Owner of both."""

    def __init__(self, layers: int) -> None:
        self.seen_bytes: Tensor | None = None
        self._keys: list[Tensor | None] = [None] * layers
        self._values: list[Tensor | None] = [None] * layers

    def extend(self, layer: int, key_BASd: Tensor, value_BASd: Tensor) -> tuple[Tensor, Tensor]:
        """Adds keys and values to those of `layer`; gives all so far."""
        keys, values = self._keys[layer], self._values[layer]
        key_BAPd = key_BASd if keys is None else torch.cat([keys, key_BASd], dim=2)
        value_BAPd = value_BASd if values is None else torch.cat([values, value_BASd], dim=2)
        self._keys[layer], self._values[layer] = key_BAPd, value_BAPd
        return key_BAPd, value_BAPd


class Attention(nn.Module):
    """Causal self-attention with linear biases."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.qkv = nn.Linear(shape.hidden, 3 * shape.hidden, bias=False)
        self.out = nn.Linear(shape.hidden, shape.hidden, bias=False)

    def forward(self, x_BSD: Tensor, layer: int, cache: KeyValueCache | None) -> Tensor:
        B, S, D = x_BSD.shape
        query, key, value = self.qkv(x_BSD).view(B, S, 3, self.heads, D // self.heads).permute(2, 0, 3, 1, 4)
        if cache is not None:
            key, value = cache.extend(layer, key, value)
        bias_ASP = distance_bias(self.heads, S, key.shape[2])
        y_BASd = functional.scaled_dot_product_attention(query, key, value, attn_mask=bias_ASP)
        y_BSD: Tensor = self.out(y_BASd.transpose(1, 2).reshape(B, S, D))
        return y_BSD


def distance_bias(heads: int, new: int, total: int) -> Tensor:
    """Bias of attention, [heads, new, total]: minus slope times distance to the past, minus infinity to the future."""
    slope_A = 2.0 ** (-8.0 * torch.arange(1, heads + 1) / heads)
    distance_SP = torch.arange(total - new, total)[:, None] - torch.arange(total)[None, :]
    bias_ASP = -slope_A[:, None, None] * distance_SP
    return bias_ASP.masked_fill(distance_SP < 0, -math.inf)


class Block(nn.Module):
    """Attention, then the experts that the router chose, both residual. A call also returns the balance loss.

    routed_E: tokens that went to each expert in the last call.
    """

    def __init__(self, shape: ModelShape, layer: int, experts: nn.Module) -> None:
        super().__init__()
        self.layer = layer
        self.top_k = shape.top_k
        self.attention_norm = nn.RMSNorm(shape.hidden)
        self.attention = Attention(shape)
        self.router_norm = nn.RMSNorm(shape.hidden)
        self.router = nn.Linear(shape.hidden, shape.experts, bias=False)
        self.experts = experts
        self.routed_E = torch.zeros(shape.experts, dtype=torch.int64)

    def forward(self, x_BSD: Tensor, cache: KeyValueCache | None) -> tuple[Tensor, Tensor]:
        x_BSD = x_BSD + self.attention(self.attention_norm(x_BSD), self.layer, cache)
        x_TD = self.router_norm(x_BSD).flatten(0, 1)
        chance_TE = self.router(x_TD).softmax(dim=-1)
        gate_TK, ids_TK = chance_TE.topk(self.top_k, dim=-1)
        y_TD = self.experts(x_TD, ids_TK, gate_TK / gate_TK.sum(dim=-1, keepdim=True))
        self.routed_E = torch.bincount(ids_TK.flatten(), minlength=chance_TE.shape[1])
        return x_BSD + y_TD.view_as(x_BSD), balance_loss(chance_TE, self.routed_E)


def balance_loss(chance_TE: Tensor, routed_E: Tensor) -> Tensor:
    """Balance loss of the router: 1 when tokens are spread evenly over the experts, E when all go to one."""
    share_E = routed_E / routed_E.sum()
    return len(routed_E) * (share_E * chance_TE.mean(dim=0)).sum()


class ByteTransformer(nn.Module):
    """Maps bytes [B, S] to (logits [B, S, 256], mean balance loss of the layers)."""

    def __init__(self, shape: ModelShape, make_experts: MakeExperts, *, seed: int) -> None:
        super().__init__()
        self.embeddings = nn.ModuleList(nn.Embedding(shape.vocabulary, shape.hidden) for _ in range(EMBEDDED_BYTES))
        self.blocks = nn.ModuleList(Block(shape, layer, make_experts(layer)) for layer in range(shape.layers))
        self.norm = nn.RMSNorm(shape.hidden)
        self.head = nn.Linear(shape.hidden, shape.vocabulary)
        _initialize(self, shape, seed=seed)

    def forward(self, bytes_BS: Tensor, cache: KeyValueCache | None = None) -> tuple[Tensor, Tensor]:
        x_BSD = self._embed(bytes_BS, cache)
        balance = x_BSD.new_zeros(())
        for block in self.blocks:
            x_BSD, layer_balance = block(x_BSD, cache)
            balance = balance + layer_balance
        return self.head(self.norm(x_BSD)), balance / len(self.blocks)

    def _embed(self, bytes_BS: Tensor, cache: KeyValueCache | None) -> Tensor:
        """Sums one embedding per distance; before the first byte there are zero bytes."""
        B, S = bytes_BS.shape
        before = bytes_BS.new_zeros(B, EMBEDDED_BYTES - 1)
        if cache is not None and cache.seen_bytes is not None:
            before = cache.seen_bytes
        window = torch.cat([before, bytes_BS], dim=1)
        if cache is not None:
            cache.seen_bytes = window[:, -(EMBEDDED_BYTES - 1) :]
        x_BSD: Tensor = self.embeddings[0](bytes_BS)
        for distance in range(1, EMBEDDED_BYTES):
            start = EMBEDDED_BYTES - 1 - distance
            x_BSD = x_BSD + self.embeddings[distance](window[:, start : start + S])
        return x_BSD

    def routed_tokens(self) -> Tensor:
        """Counts the tokens that went to each expert in the last call, [layers, experts]."""
        return torch.stack([cast(Block, block).routed_E for block in self.blocks])

    def set_byte_frequencies(self, frequency_V: Tensor) -> None:
        """Starts the head at the corpus' own byte frequencies, so that the first steps need not learn them."""
        with torch.no_grad():
            self.head.bias.copy_((frequency_V + 1e-6).log())


def dense_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Finds every parameter that is not an expert's, by name."""
    return {name: value for name, value in model.named_parameters() if EXPERTS_NAME not in name.split(".")}


def expert_fields(shape: ModelShape) -> dict[str, tuple[int, int]]:
    """The fields of one expert and their shapes, as `StoredExperts`' SwiGLU takes them."""
    return {"gate_up": (2 * shape.inner, shape.hidden), "down": (shape.hidden, shape.inner)}


def initial_expert(shape: ModelShape, key: ExpertKey, *, seed: int) -> dict[str, Tensor]:
    """Makes the first values of one expert, fp32: a pure function of (shape, key, seed)."""
    layer, expert = key
    generator = torch.Generator().manual_seed((seed * 4099 + layer) * 65537 + expert)
    deviation = {"gate_up": shape.hidden**-0.5, "down": shape.inner**-0.5 * shape.layers**-0.5}
    return {
        name: torch.randn(size, generator=generator) * deviation[name] for name, size in expert_fields(shape).items()
    }


def _initialize(model: ByteTransformer, shape: ModelShape, *, seed: int) -> None:
    """Draws normal weights scaled by their inputs; those that write into the residual stream are smaller, the head is zero."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in dense_parameters(model).items():
            if name == "head.weight" or name.endswith("bias"):
                weight.zero_()
            elif name.endswith("norm.weight"):
                weight.fill_(1.0)
            elif name.startswith("embeddings"):
                weight.normal_(std=EMBEDDED_BYTES**-0.5, generator=generator)
            elif name.endswith("attention.out.weight"):
                weight.normal_(std=(2 * shape.layers * shape.hidden) ** -0.5, generator=generator)
            else:
                weight.normal_(std=shape.hidden**-0.5, generator=generator)
