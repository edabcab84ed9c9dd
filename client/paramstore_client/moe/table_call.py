"""One call of a table of embeddings by all ranks, each of which has columns of it: how ids, columns and gradients travel.

Each exchange of rows has a header before it, as those of an expert-parallel layer have: so ranks that do different things learn
it before a row is sent, and what one of them fails at, all raise.
"""

# n ids of this rank, N ids of all ranks, V ids of the table, H width of a row, C columns of a rank, W ranks
# ruff: noqa: N803, N806 - shape suffixes, as the legend says

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from paramstore_client.moe.call import telling
from paramstore_client.moe.exchange import Exchange
from paramstore_client.moe.header import Header, Phase, check_told, messages


@dataclass(frozen=True, slots=True)
class TableCall:
    """One call of a table by all ranks. counts: how many ids each rank has."""

    exchange: Exchange
    header: Header
    device: torch.device
    counts: list[int]

    @property
    def world_size(self) -> int:
        return self.exchange.world_size

    def tell(self, numbers: Tensor | None = None, *, phase: Phase | None = None) -> Tensor:
        """What all ranks tell, [W, NUMBERS]: this one its header, and some numbers behind it. Raises StepMismatch where headers
        differ, and the error of a rank that has failed since the one before."""
        header = self.header if phase is None else replace(self.header, phase=phase)
        counts = [] if numbers is None else [numbers] * self.world_size
        told = self.exchange.alike(messages(header, self.world_size, counts=counts, device=self.device)).cpu()
        check_told(told, this=self.exchange.rank)
        return told

    def guard(self, phase: Phase) -> AbstractContextManager[None]:
        """What is raised within it, the other ranks learn in place of this one's next header, of `phase`."""
        return telling(self.exchange, phase, self.device)

    def ids_of_all(self, ids_n: Tensor) -> Tensor:
        return self.exchange.rows(ids_n.repeat(self.world_size), to_each=[len(ids_n)] * self.world_size, from_each=self.counts)

    def to_asking(self, y_NC: Tensor) -> Tensor:
        """[n, H]: the columns of all ranks for this rank's ids, from [N, C], this rank's columns for the ids of all."""
        count, width = self.counts[self.exchange.rank], y_NC.shape[1]
        came = self.exchange.rows(y_NC, to_each=self.counts, from_each=[count] * self.world_size)
        return came.view(self.world_size, count, width).transpose(0, 1).reshape(count, self.world_size * width)

    def by_columns(self, grad_nH: Tensor) -> Tensor:
        """The parts of a gradient in the order in which `to_columns` sends them."""
        count = len(grad_nH)
        width = grad_nH.shape[1] // self.world_size
        return grad_nH.reshape(count, self.world_size, width).transpose(0, 1).reshape(self.world_size * count, width).contiguous()

    def to_columns(self, sent: Tensor) -> Tensor:
        """[N, C]: the gradients of this rank's columns for the ids of all."""
        count = self.counts[self.exchange.rank]
        return self.exchange.rows(sent, to_each=[count] * self.world_size, from_each=self.counts)


class Lookup(torch.autograd.Function):
    """The node of a call in the caller's graph; it hangs on the weight, so that a rank without ids takes part in backward too.

    padding: the row that gets no gradient; -1 for none. divisor: of the weight's gradient.
    """

    @staticmethod
    def forward(ctx: Any, call: TableCall, padding: int, divisor: int, ids_n: Tensor, weight_VC: Tensor) -> Tensor:
        ids_N = call.ids_of_all(ids_n)
        with call.guard(Phase.COLUMNS):
            y_NC = functional.embedding(ids_N, weight_VC)
        call.tell(phase=Phase.COLUMNS)
        ctx.call, ctx.padding, ctx.divisor, ctx.rows = call, padding, divisor, len(weight_VC)
        ctx.save_for_backward(ids_N)
        return call.to_asking(y_NC)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_nH: Tensor) -> tuple[None, None, None, None, Tensor]:
        call, (ids_N,) = ctx.call, ctx.saved_tensors
        with call.guard(Phase.COLUMNS_BACKWARD):
            sent = call.by_columns(grad_nH)
        call.tell(phase=Phase.COLUMNS_BACKWARD)
        grad_NC = call.to_columns(sent)
        grad_VC = torch.ops.aten.embedding_dense_backward(grad_NC, ids_N, ctx.rows, ctx.padding, False)
        return None, None, None, None, grad_VC if ctx.divisor == 1 else grad_VC.div_(ctx.divisor)
