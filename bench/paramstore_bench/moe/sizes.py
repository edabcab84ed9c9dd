"""How large the layers are that are measured, and the tokens that they get: drawn anew by everyone from equal numbers."""

# T tokens, K experts per token, D model, E experts
# ruff: noqa: N806 - shape suffixes, as the legend says

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

RANKS = 4


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes of layers. tokens: of one rank. skew: a token prefers the expert of n-th rank by 1 / n ** skew; which those are, no
    placement knows. rounds: pairs that are taken. passes: forwards with their backwards in one sample."""

    experts: int
    width: int
    inner: int
    tokens: int
    top_k: int
    skew: float
    layers: int = 1
    rounds: int = 15
    passes: int = 3

    @property
    def row_bytes(self) -> int:
        return 4 * self.width

    @property
    def rank_experts(self) -> int:
        """How many experts each rank computes."""
        return self.experts // RANKS

    def __str__(self) -> str:
        return (
            f"{self.layers} x {self.experts} experts of {self.width} x {self.inner}, {self.tokens} tokens a rank, {self.top_k} "
            f"experts each, skew {self.skew:g}"
        )


@dataclass(frozen=True, slots=True)
class Batch:
    """Tokens of one rank: x [T, D], expert ids and gates [layers, T, K], and the gradient of what is made of them [T, D]."""

    x: Tensor
    ids: Tensor
    gates: Tensor
    grad: Tensor

    @classmethod
    def draw(cls, sizes: Sizes, *, rank: int, number: int) -> Batch:
        """Draws the batch of that number."""
        drawn, shape = torch.Generator().manual_seed(number * RANKS + rank), (sizes.layers, sizes.tokens)
        likely_E = torch.arange(1, sizes.experts + 1).pow(-sizes.skew).log()[_order(sizes.experts)]
        noise = -torch.rand(*shape, sizes.experts, generator=drawn).log().neg().log()  # Gumbel's: so the best are a draw
        gates = torch.rand(*shape, sizes.top_k, generator=drawn) + 0.1
        x, grad = (torch.randn(sizes.tokens, sizes.width, generator=drawn) for _ in range(2))
        return cls(x, (likely_E + noise).topk(sizes.top_k, dim=-1)[1], gates / gates.sum(-1, keepdim=True), grad)

    def to(self, device: torch.device) -> Batch:
        """The same on a device."""
        return Batch(*(tensor.to(device) for tensor in (self.x, self.ids, self.gates, self.grad)))


def weights_of(sizes: Sizes, expert: int, *, layer: int = 0) -> dict[str, Tensor]:
    """The weights of one expert, the same for everyone."""
    drawn = torch.Generator().manual_seed(1000 * (1 + layer) + expert)
    return {
        "gate_up": torch.randn(2 * sizes.inner, sizes.width, generator=drawn) / sizes.width**0.5,
        "down": torch.randn(sizes.width, sizes.inner, generator=drawn) / sizes.inner**0.5,
    }


def _order(experts: int) -> Tensor:
    return torch.randperm(experts, generator=torch.Generator().manual_seed(1))
