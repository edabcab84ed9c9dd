"""One layer whose rows travel to the ranks that compute their experts: two nodes of the caller's graph around the local experts.

    rows, anchor -> There -> local experts -> Back -> rows

- Every rank takes part in every exchange, forward and backward, with tokens or without: both nodes hang on an anchor that needs a
  gradient, and Back on There, whatever lies between them.
- The row behind those that come back to a rank says how the others fared: where one of them failed, all have its error, after
  the same exchanges, and are in step.
- No row is computed with before all ranks are known to agree (`header`).

The layer's exchanges are those of MPMoE's S and R (section III-A; C is the local experts'), without its capacity. What S sends is
not padded, so that its sizes travel first.
"""

# N rows of this rank's tokens, M rows of this rank's experts, D model
# ruff: noqa: N803, N806 - shape suffixes, as the legend says

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from paramstore.core.placement import Placement
from paramstore.errors import ConfigError, ParamStoreError
from paramstore_client.moe.exchange import Exchange
from paramstore_client.moe.header import (
    DTYPES,
    NUMBERS,
    TOLD_AT,
    Header,
    check_alike,
    check_refusals,
    messages,
    refusal,
    refused,
)  # fmt: skip
from paramstore_client.moe.row_plan import Groups, Incoming, Outgoing, inverse
from paramstore_client.nn.parallel import Anchor, Local, ParallelRows

STATUS_BYTES = 8
FAILED = -1
"""The status of a rank that failed; else the dtype of its rows, by its place in DTYPES, or UNKNOWN where it computed none."""
UNKNOWN = len(DTYPES)


class ParallelLayer(ParallelRows):
    """One layer of experts of which this rank computes some. Owner of what was agreed on for its calls.

    step: tells which step's experts are seen. calls: counts the calls of all layers of the exchange; shared.
    """

    def __init__(
        self, exchange: Exchange, placement: Placement, layer: int, *, step: Callable[[], int], calls: list[int]
    ) -> None:  # fmt: skip
        self._exchange = exchange
        self._placement = placement
        self._layer = layer
        self._step = step
        self._calls = calls
        self._digest = placement.digest
        self._groups: dict[int, Groups] = {}
        self.experts = placement.of_rank(exchange.rank)

    def run(
        self, x_ND: Tensor, counts_G: Tensor, *, top_k: int, local: Local, ahead: Callable[[list[int]], object], anchor: Anchor
    ) -> Tensor:
        """As `ParallelRows.run`. Raises StepMismatch before a row is sent where ranks differ, the error of a rank that fails, and
        RankLost."""
        records = torch.is_grad_enabled()
        call = self._agreed(x_ND, counts_G, top_k=top_k, records=records)
        ahead([block.expert for block in call.incoming.blocks])
        if not records:
            y_MD = self._computed(call, local, call.there(x_ND), None)
            return call.returned(call.back(y_MD))
        given = None if anchor is None else anchor()  # once a forward: a checkpoint that recomputes gives another leaf each time
        leaf = torch.zeros((), requires_grad=True) if given is None else given
        x_MD, link = _There.apply(call, leaf, x_ND)  # type: ignore[no-untyped-call]
        y_MD = self._computed(call, local, x_MD, None if anchor is None else lambda: given)
        return call.returned(_Back.apply(call, leaf, link, y_MD))  # type: ignore[no-untyped-call]

    def _agreed(self, x_ND: Tensor, counts_G: Tensor, *, top_k: int, records: bool) -> _Call:
        exchange, device = self._exchange, x_ND.device
        slots = len(counts_G) // self._placement.experts
        if slots not in self._groups:
            self._groups[slots] = Groups.of(self._placement, slots=slots)
        outgoing = Outgoing.of(counts_G, self._groups[slots], device=device)
        header = Header(
            self._calls[0], self._layer, self._step(), DTYPES.index(x_ND.dtype), x_ND.shape[1], self._placement.experts, top_k,
            slots, self._digest, int(records),
        )  # fmt: skip
        self._calls[0] += 1
        told = exchange.alike(messages(header, outgoing.counts, device=device)).cpu()
        check_refusals(told, this=exchange.rank)
        check_alike([Header.of(numbers) for numbers in told[:, 2:TOLD_AT].tolist()])
        counts_WG = torch.cat([told[:, TOLD_AT:], *self._rest(outgoing, device)], dim=1)[:, : len(self.experts) * slots]
        return _Call(exchange, outgoing, Incoming.of(counts_WG, self.experts, device=device), like=x_ND)

    def _rest(self, outgoing: Outgoing, device: torch.device) -> list[Tensor]:
        """The counts that a message has no room for, by rank: of many experts, or slots."""
        fit = NUMBERS - TOLD_AT
        if (most := max(map(len, outgoing.counts))) <= fit:
            return []
        more = torch.zeros(len(outgoing.counts), most - fit, dtype=torch.int64)
        for message, counts in zip(more, outgoing.counts, strict=True):
            message[: max(0, len(counts) - fit)] = counts[fit:]
        return [self._exchange.alike(more.to(device)).cpu()]

    @contextmanager
    def guard(self, device: torch.device) -> Iterator[None]:
        """What is raised within it, before `run`, the other ranks learn in place of this one's header."""
        try:
            yield
        except BaseException as error:
            with suppress(ParamStoreError):
                self._exchange.alike(refusal(error, device=device).repeat(self._exchange.world_size, 1))
            raise

    @staticmethod
    def _computed(call: _Call, local: Local, x_MD: Tensor, anchor: Anchor) -> Tensor:
        if not call.incoming.blocks:
            return x_MD
        with call.guard():
            y_MD = local(call.incoming.blocks, x_MD, anchor, call.guard)
            if y_MD.shape != x_MD.shape or y_MD.dtype not in DTYPES:
                raise ConfigError(
                    f"expert-parallel experts gave rows {list(y_MD.shape)} of {y_MD.dtype} for rows {list(x_MD.shape)}: give as "
                    "many, of the same width and a floating dtype"
                )
            call.computed = y_MD.dtype
            return y_MD.to(x_MD.dtype)


class _Call:
    """One call of a layer: how its rows travel, either way."""

    def __init__(self, exchange: Exchange, outgoing: Outgoing, incoming: Incoming, *, like: Tensor) -> None:
        self._exchange = exchange
        self._outgoing = outgoing
        self._width, self._dtype, self._device = like.shape[1], like.dtype, like.device
        self._behind = -(-STATUS_BYTES // max(1, self._width * like.itemsize))
        """Rows behind those of a rank that hold its status."""
        self.incoming = incoming
        self.computed: torch.dtype | None = None
        """Of what this rank's experts gave; None where they had no rows."""
        self._returned: torch.dtype | None = None
        """Of what the experts of this rank's tokens gave."""

    def there(self, rows_ND: Tensor) -> Tensor:
        """Rows of this rank's tokens, or their gradients, to the ranks of their experts: there in the order of computation."""
        order = self._outgoing.order_N
        sent = rows_ND.contiguous() if order is None else rows_ND.index_select(0, order)
        arrived = self._exchange.rows(sent, to_each=self._outgoing.by_rank, from_each=self.incoming.by_rank)
        return arrived.index_select(0, self.incoming.order_M)

    def back(self, rows_MD: Tensor | None) -> Tensor:
        """Rows of this rank's experts, or their gradients, back to the ranks of their tokens, in the order that those have. None:
        this rank has failed. Raises the error of another that has."""
        to_each = [count + self._behind for count in self.incoming.by_rank]
        from_each = [count + self._behind for count in self._outgoing.by_rank]
        arrived = self._exchange.rows(self._sent_back(rows_MD, to_each), to_each=to_each, from_each=from_each)
        parts = torch.split(arrived, [size for count in from_each for size in (count - self._behind, self._behind)])
        fared = torch.stack([part.view(torch.uint8).view(-1)[:STATUS_BYTES] for part in parts[1::2]]).view(torch.int64)
        told = fared.flatten().tolist()
        if FAILED in told:
            if rows_MD is not None:
                self._raise_of(told.index(FAILED))
            return arrived[:0]
        known = {DTYPES[dtype] for dtype in told if dtype != UNKNOWN}
        self._returned = known.pop() if len(known) == 1 else self._returned
        rows_ND = torch.cat(parts[::2])
        return rows_ND if self._outgoing.order_N is None else rows_ND.index_select(0, inverse(self._outgoing.order_N))

    def _sent_back(self, rows_MD: Tensor | None, to_each: Sequence[int]) -> Tensor:
        status = FAILED if rows_MD is None else UNKNOWN if self.computed is None else DTYPES.index(self.computed)
        end = torch.tensor([status], dtype=torch.int64).view(torch.uint8).to(self._device)
        sent = torch.zeros(sum(to_each), self._width, dtype=self._dtype, device=self._device)
        places = torch.split(self.incoming.place_M, self.incoming.by_rank)
        for part, place in zip(torch.split(sent, list(to_each)), places, strict=True):
            if rows_MD is not None:
                torch.index_select(rows_MD.detach(), 0, place, out=part[: len(place)])
            part[len(place) :].view(torch.uint8).view(-1)[:STATUS_BYTES] = end
        return sent

    def returned(self, rows_ND: Tensor) -> Tensor:
        """The rows that came back in the dtype in which experts gave them."""
        return rows_ND if self._returned is None else rows_ND.to(self._returned)

    @contextmanager
    def guard(self) -> Iterator[None]:
        """What is raised within it, the other ranks learn in place of the rows that were to come back to them."""
        try:
            yield
        except BaseException as error:
            with suppress(ParamStoreError):  # the exchange's own: they learn it from that
                self.back(None)
                self._exchange.alike(refusal(error, device=self._device).repeat(self._exchange.world_size, 1))
            raise

    def _raise_of(self, rank: int) -> None:
        empty = torch.zeros(self._exchange.world_size, NUMBERS, dtype=torch.int64, device=self._device)
        raise refused(self._exchange.alike(empty).cpu()[rank], rank)


class _There(torch.autograd.Function):
    """The node by which rows leave; its second output ties `_Back` to it."""

    @staticmethod
    def forward(ctx: Any, call: _Call, leaf: Tensor, x_ND: Tensor) -> tuple[Tensor, Tensor]:
        ctx.call = call
        ctx.wants_x = ctx.needs_input_grad[2]
        return call.there(x_ND), torch.zeros(())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_MD: Tensor, _: Tensor) -> tuple[None, Tensor, Tensor | None]:
        grad_ND = ctx.call.back(grad_MD)
        return None, torch.zeros(()), grad_ND if ctx.wants_x else None


class _Back(torch.autograd.Function):
    """The node by which rows come back."""

    @staticmethod
    def forward(ctx: Any, call: _Call, leaf: Tensor, link: Tensor, y_MD: Tensor) -> Tensor:
        ctx.call = call
        return call.back(y_MD)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_ND: Tensor) -> tuple[None, Tensor, Tensor, Tensor]:
        return None, torch.zeros(()), torch.zeros(()), ctx.call.there(grad_ND)
