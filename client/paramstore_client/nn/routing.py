"""Brings tokens to experts and sums the experts' outputs; one piece of code for stored and resident experts.

- Rows are sorted by expert, within an expert by token; each expert sees one contiguous block.
- A token's contributions are summed in ascending expert order, whatever the order of its top-k.
- Forward and backward only gather (no atomic adds), so both are deterministic on every device.
- The expert counts are read on the host once per layer: the only synchronisation.
"""

# T tokens, K experts per token, N = T * K rows, D model, E experts
# ruff: noqa: N803, N806 - shape suffixes, as the legend says

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
    """The rows of one expert: `row_count` of them, next to those of the block before. sources: how many came from each rank, where
    they came from several."""

    expert: int
    row_count: int
    sources: tuple[int, ...] = ()


RunBlocks = Callable[[tuple[Block, ...], Tensor], Tensor]
"""(blocks in expert order, x_ND) -> y_ND."""


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
    y_ND = run_blocks(blocks, _to_rows(x_TD, order_N, ids_TK.shape[1]))
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


def _to_rows(x_TD: Tensor, order_N: Tensor, top_k: int) -> Tensor:
    """Row n is the token of position order_N[n] in the flattened top-k."""
    return Gather.apply(x_TD, order_N // top_k, _inverse(order_N).view(-1, top_k), False)  # type: ignore[no-untyped-call, no-any-return]


def _to_tokens(y_ND: Tensor, order_N: Tensor) -> Tensor:
    """The rows of `y_ND` back in token order."""
    return Gather.apply(y_ND, _inverse(order_N), order_N.view(-1, 1), False)  # type: ignore[no-untyped-call, no-any-return]


class Gather(torch.autograd.Function):
    """`source[rows_N]`, whose backward gathers too: readers_SR[s] lists the R rows that were taken from source row s. Their
    gradients are added in one sum, or one after the other in that order (in_turn).

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
        if ctx.in_turn:
            total, *others = (grads[0].index_select(0, readers_S) for readers_S in readers_SR.unbind(1))
            for other in others:
                total += other
            return total, None, None, None
        taken = grads[0].index_select(0, readers_SR.flatten())
        if readers_SR.shape[1] == 1:
            return taken, None, None, None
        return taken.view(*readers_SR.shape, taken.shape[1]).sum(dim=1), None, None, None
