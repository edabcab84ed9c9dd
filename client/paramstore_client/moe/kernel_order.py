"""Brings the tokens of an experts module to the ranks of their experts, and sums what comes back in the order of its kernel.

Between the two each rank runs that kernel, on one expert for each row and a gate of 1. So what a model computes is, bit for bit,
what it computes unmodified with the tokens of all ranks: its output, and the gradients of tokens and gates. Gradients of weights
are sums over rows: `eager` adds them in the order in which they are brought here, the others in one of their own, as they sort
unstably.
"""

# T tokens, K experts per token, N = T * K rows, H hidden, M rows of this rank's experts
# ruff: noqa: N803, N806, N815 - shape suffixes, as the legend says

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce
from typing import Protocol

import torch
from torch import Tensor

from paramstore_client.nn.parallel import Anchor, Guard, ParallelRows
from paramstore_client.nn.routing import Block, Taken, check_routing


class KernelRun(Protocol):
    """Runs the kernel of the module that it is asked for on experts of this rank."""

    def __call__(self, hidden_TH: Tensor, ids_TK: Tensor, gate_TK: Tensor, *, anchor: Anchor, guard: Guard | None) -> Tensor: ...


class ParallelKernel:
    """The kernel of one layer's experts module, spread over ranks."""

    def __init__(self, rows: ParallelRows, *, experts: int, kernel: str) -> None:
        self._rows = rows
        self._experts = experts
        self._kernel = kernel

    def run(self, hidden_TH: Tensor, ids_TK: Tensor, gate_TK: Tensor, run: KernelRun, *, anchor: Anchor) -> Tensor:
        """y [T, H], as the module gives it. Raises what `ParallelRows.run` raises, ConfigError on what no router gives."""
        with self._rows.guard(hidden_TH.device):
            check_routing(hidden_TH, ids_TK, gate_TK, experts=self._experts)
            spread = Spread.of(ids_TK, experts=self._experts, kernel=self._kernel)

        def local(blocks: tuple[Block, ...], x_MH: Tensor, anchor: Anchor, guard: Guard) -> Tensor:
            counts = torch.tensor([block.row_count for block in blocks])
            ids_M = torch.tensor([block.expert for block in blocks]).repeat_interleave(counts).to(x_MH.device)
            gate_M = torch.ones(len(ids_M), dtype=gate_TK.dtype, device=x_MH.device)
            return run(x_MH, ids_M[:, None], gate_M[:, None], anchor=anchor, guard=guard)

        y_NH = self._rows.run(
            hidden_TH, spread.taken(kernel=self._kernel), spread.counts_G, top_k=ids_TK.shape[1], local=local, anchor=anchor
        )
        return spread.summed(y_NH, gate_TK, hidden_TH.dtype)


@dataclass(frozen=True, slots=True)
class Spread:
    """The rows of one call: where each token's are. Made by `Spread.of`.

    counts_G: rows of each group on the host, one group of each expert, or one of each expert and slot. token_N: the token of each
    row, which are sorted by expert. by_slot_TK, by_expert_TK: the rows of each token, in either order. order_TK: the slots of each
    token by expert.
    """

    is_eager: bool
    counts_G: Tensor
    token_N: Tensor
    by_slot_TK: Tensor
    by_expert_TK: Tensor
    order_TK: Tensor

    @classmethod
    def of(cls, ids_TK: Tensor, *, experts: int, kernel: str) -> Spread:
        """Waits for the device, to count. A slot's tokens are apart for `eager`, whose experts take slot after slot."""
        is_eager, (tokens, top_k) = kernel == "eager", ids_TK.shape
        ids_TK = ids_TK.long()
        slot_TK = torch.arange(top_k, device=ids_TK.device).expand(tokens, top_k)
        token_TK = torch.arange(tokens, device=ids_TK.device)[:, None].expand(tokens, top_k)
        group_TK = ids_TK * top_k + slot_TK if is_eager else ids_TK
        order_N = group_TK.flatten().argsort(stable=True)
        by_slot_TK = torch.empty_like(order_N)
        by_slot_TK[order_N] = torch.arange(len(order_N), device=order_N.device)
        by_slot_TK = by_slot_TK.view(tokens, top_k)
        order_TK = ids_TK.argsort(dim=1, stable=True)
        counts_G = torch.bincount(group_TK.flatten(), minlength=experts * (top_k if is_eager else 1)).cpu()
        return cls(
            is_eager, counts_G, token_TK.flatten()[order_N], by_slot_TK, by_slot_TK.gather(1, order_TK), order_TK
        )  # fmt: skip

    def taken(self, *, kernel: str) -> Taken:
        """Each token once for each of its experts. Gradients of a token are added as the kernel does: by expert, downwards
        (`eager`) or upwards (`grouped_mm`), or in one sum over its slots (`batched_mm`)."""
        if kernel == "batched_mm":
            return Taken(self.token_N, self.by_slot_TK, in_turn=False)
        return Taken(self.token_N, self.by_expert_TK.flip(1) if self.is_eager else self.by_expert_TK, in_turn=True)

    def summed(self, y_NH: Tensor, gate_TK: Tensor, dtype: torch.dtype) -> Tensor:
        """y [T, H] in `dtype`: each token's rows times their gates, added in the order of experts (`eager`), else in one sum."""
        rows_TK = self.by_expert_TK if self.is_eager else self.by_slot_TK
        readers_N1 = torch.empty(len(y_NH), dtype=torch.int64, device=y_NH.device)
        readers_N1[rows_TK.flatten()] = torch.arange(len(y_NH), device=y_NH.device)
        y_TKH = Taken(rows_TK.flatten(), readers_N1[:, None], in_turn=False).rows(y_NH).view(*rows_TK.shape, y_NH.shape[1])
        if not self.is_eager:
            return (y_TKH * gate_TK.unsqueeze(-1)).sum(dim=1).to(dtype)
        weighted = (y_TKH * gate_TK.gather(1, self.order_TK).unsqueeze(-1)).to(dtype)
        return reduce(torch.add, weighted.unbind(1))
