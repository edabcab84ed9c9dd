"""Brings tokens to experts and sums the experts' outputs; one piece of code for stored and resident experts.

- Rows are sorted by expert, within an expert by token; each expert sees one contiguous block.
- A token's contributions are summed in ascending expert order, whatever the order of its top-k.
- Forward and backward only gather (no atomic adds), so both are deterministic on every device.
- The expert counts are read on the host once per layer: the only synchronisation.
"""

# T tokens, K experts per token, N = T * K rows, D model, E experts
# ruff: noqa: N803, N806, N815 - shape suffixes, as the legend says

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from paramstore.errors import ConfigError
from paramstore_client.nn.weight_views import in_dtype_of

ExpertFn = Callable[[Tensor, Mapping[str, Tensor]], Tensor]
"""(x_tD, weights by field) -> y_tD of one expert's tokens."""


def swiglu(x_tD: Tensor, weights: Mapping[str, Tensor]) -> Tensor:
    """The default expert: down(silu(gate(x)) * up(x)), fields `gate_up` [2I, D] (gate first) and `down` [D, I].

    Weights that are longer than the dtype of `x_tD` are cast to it.
    """
    weights = in_dtype_of(x_tD, weights)
    gate_tI, up_tI = functional.linear(x_tD, weights["gate_up"]).chunk(2, dim=-1)
    return functional.linear(functional.silu(gate_tI) * up_tI, weights["down"])


@dataclass(frozen=True, slots=True)
class Block:
    """The rows of one expert: `row_count` of them, next to those of the block before."""

    expert: int
    row_count: int


@dataclass(frozen=True, slots=True)
class Taken:
    """The rows that are taken of a call's tokens, sorted by expert.

    token_N: the token of each row. readers_TK: the rows of each token. in_turn: whether a token's gradients are added one after
    the other, in that order, or in one sum.
    """

    token_N: Tensor
    readers_TK: Tensor
    in_turn: bool

    def rows(self, x_TD: Tensor) -> Tensor:
        """[N, D], recorded for backward where grad mode is on."""
        return Gather.apply(x_TD, self.token_N, self.readers_TK, self.in_turn)  # type: ignore[no-untyped-call, no-any-return]

    def summed(self, grad_ND: Tensor) -> Tensor:
        """The gradients of tokens, [T, D], of those of the rows."""
        if self.in_turn:
            total, *others = (grad_ND.index_select(0, readers_T) for readers_T in self.readers_TK.unbind(1))
            for other in others:
                total += other
            return total
        taken = grad_ND.index_select(0, self.readers_TK.flatten())
        if self.readers_TK.shape[1] == 1:
            return taken
        return taken.view(*self.readers_TK.shape, taken.shape[1]).sum(dim=1)


RunBlocks = Callable[[tuple[Block, ...], Tensor, Taken], Tensor]
"""(blocks in expert order, x_TD, the rows taken of it) -> y_ND."""


def apply_experts(
    run_blocks: RunBlocks,
    x_TD: Tensor,
    expert_ids_TK: Tensor,
    gate_TK: Tensor,
    *,
    takes_none: bool = False,
) -> Tensor:
    """y_TD = for each token, the sum over its experts of gate * expert(x), in ascending expert order; dtype of x_TD.

    expert_ids_TK: integers, each an expert's index. gate_TK: any floating dtype. takes_none: whether `run_blocks` is called without
    tokens too.
    """
    ids_TK, place_TK = expert_ids_TK.sort(dim=1, stable=True)
    ids_N = ids_TK.flatten()
    order_N = ids_N.argsort(stable=True)
    blocks = count_blocks(ids_N)
    if not blocks and not takes_none:  # no token: nothing to compute, and no expert that would tell the shape of the output
        return x_TD * gate_TK.sum(dim=1, keepdim=True).to(x_TD.dtype)
    top_k = ids_TK.shape[1]
    y_ND = run_blocks(blocks, x_TD, Taken(order_N // top_k, _inverse(order_N).view(-1, top_k), in_turn=False))
    y_TKD = _to_tokens(y_ND, order_N).view(*ids_TK.shape, y_ND.shape[1])
    return (y_TKD * gate_TK.gather(1, place_TK).unsqueeze(-1)).sum(dim=1).to(x_TD.dtype)


def check_routing(x_TD: Tensor, expert_ids_TK: Tensor, gate_TK: Tensor, *, experts: int) -> None:
    """Raises ConfigError where these are no tokens with their experts, below `experts`, and gates. Waits for the device."""
    shapes = f"x {list(x_TD.shape)}, expert_ids {list(expert_ids_TK.shape)}, gate {list(gate_TK.shape)}"
    if x_TD.dim() != 2 or expert_ids_TK.dim() != 2 or gate_TK.shape != expert_ids_TK.shape or len(x_TD) != len(expert_ids_TK):
        raise ConfigError(f"{shapes}: give [tokens, width], and twice [tokens, experts of each]")
    if expert_ids_TK.is_floating_point() or expert_ids_TK.dtype == torch.bool:
        raise ConfigError(f"expert_ids of {expert_ids_TK.dtype}: give integers")
    if expert_ids_TK.numel():
        least, most = (int(bound) for bound in torch.aminmax(expert_ids_TK))
        if least < 0 or most >= experts:
            raise ConfigError(f"expert_ids from {least} to {most}: the layer has experts 0 to {experts - 1}")


def count_blocks(ids_N: Tensor) -> tuple[Block, ...]:
    """One block per expert that has rows, in expert order. Waits for the device."""
    counts = ids_N.bincount().tolist()
    return tuple(Block(expert, count) for expert, count in enumerate(counts) if count)


def split_rows(rows_ND: Tensor, blocks: Sequence[Block]) -> tuple[Tensor, ...]:
    """The rows of each block, as views."""
    return torch.split(rows_ND, [block.row_count for block in blocks])


def _inverse(order_N: Tensor) -> Tensor:
    inverse_N = torch.empty_like(order_N)
    inverse_N[order_N] = torch.arange(len(order_N), device=order_N.device)
    return inverse_N


def _to_tokens(y_ND: Tensor, order_N: Tensor) -> Tensor:
    """The rows of `y_ND` back in token order."""
    return Taken(_inverse(order_N), order_N.view(-1, 1), in_turn=False).rows(y_ND)


class Gather(torch.autograd.Function):
    """`source[rows_N]`, whose backward gathers too: readers_SR[s] lists the R rows that were taken from source row s, as in
    `Taken`.

    The backward of `index_select` adds into a zeroed tensor row by row: atomic on a GPU, 14 times slower on a CPU
    where it is done per expert (2048 tokens, 8 of 64 experts).
    """

    @staticmethod
    def forward(ctx: Any, source: Tensor, rows_N: Tensor, readers_SR: Tensor, in_turn: bool) -> Tensor:
        ctx.save_for_backward(readers_SR)
        ctx.in_turn = in_turn
        return source.index_select(0, rows_N)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        (readers_SR,) = ctx.saved_tensors
        return Taken(readers_SR, readers_SR, ctx.in_turn).summed(grads[0]), None, None, None
