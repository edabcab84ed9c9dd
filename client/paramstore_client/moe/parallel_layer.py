"""One layer whose rows travel to the ranks that compute their experts: two nodes of the caller's graph around the local experts.

    rows, anchor -> There -> local experts -> Back -> rows

- Every rank takes part in every exchange, forward and backward, with tokens or without: both nodes hang on an anchor that needs a
  gradient, and Back on There, whatever lies between them.
- Before each exchange of rows all ranks are known to stand before the same one (`header`): so ranks that do different things
  learn it, and nothing is sent whose size is not agreed on. What one rank fails at, it tells in place of its next header: all raise
  it, and are in step after it.

The layer's exchanges are those of MPMoE's S and R (section III-A; C is the local experts'), without its capacity. What S sends is
not padded, so that its sizes travel first.
"""

# N rows of this rank's tokens, M rows of this rank's experts, D model
# ruff: noqa: N803, N806 - shape suffixes, as the legend says

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from paramstore.core.placement import Placement
from paramstore.errors import ConfigError, ParamStoreError
from paramstore_client.moe.exchange import Exchange
from paramstore_client.moe.header import (
    DTYPE_AT,
    DTYPES,
    NUMBERS,
    TOLD_AT,
    UNKNOWN,
    Header,
    Phase,
    check_told,
    messages,
    refusal,
)  # fmt: skip
from paramstore_client.moe.history import TokenHistory
from paramstore_client.moe.row_plan import Groups, Incoming, Outgoing, inverse
from paramstore_client.nn.parallel import Anchor, Local, ParallelRows
from paramstore_client.source import ExpertSource, load_ahead

_log = logging.getLogger(__name__)


class ParallelLayer(ParallelRows):
    """One layer of experts of which this rank computes some. Owner of its placement, and of what was agreed on for its calls.

    source: of its experts. step: tells which step's experts are seen.
    """

    def __init__(
        self, exchange: Exchange, placement: Placement, source: ExpertSource, layer: int, *, step: Callable[[], int]
    ) -> None:  # fmt: skip
        self._exchange = exchange
        self._source = source
        self._layer = layer
        self._step = step
        self._groups: dict[int, Groups] = {}
        self._recorded: WeakSet[_Call] = WeakSet()
        self.history = TokenHistory(placement.experts)
        self.device = torch.device("cpu")
        """Where its last tokens were."""
        self.placement = placement

    @property
    def placement(self) -> Placement:
        return self._placement

    @placement.setter
    def placement(self, placement: Placement) -> None:
        """Lays the experts elsewhere, from the next call on; all ranks do so between the same two calls."""
        self._placement = placement
        self._digest = placement.digest
        self._groups.clear()
        self.experts = placement.of_rank(self._exchange.rank)

    @property
    def awaits_backward(self) -> bool:
        """Whether a graph of one of its calls lives whose backward was not run."""
        return any(not call.is_done for call in self._recorded)

    def run(self, x_ND: Tensor, counts_G: Tensor, *, top_k: int, local: Local, anchor: Anchor) -> Tensor:
        """Gives what `ParallelRows.run` says. Raises StepMismatch before a row is sent where ranks differ, the error of a rank
        that fails, and RankLost."""
        records = torch.is_grad_enabled()
        call = self._agreed(x_ND, counts_G, top_k=top_k, records=records)
        self._load_ahead([block.expert for block in call.incoming.blocks])
        if not records:
            y_MD = self._computed(call, local, call.there(x_ND), None)
            call.meet(Phase.RETURN)
            return call.returned(call.back(y_MD))
        self._recorded.add(call)
        given = None if anchor is None else anchor()  # once a forward: a checkpoint that recomputes gives another leaf each time
        leaf = torch.zeros((), requires_grad=True) if given is None else given
        x_MD, link = _There.apply(call, leaf, x_ND)  # type: ignore[no-untyped-call]
        y_MD = self._computed(call, local, x_MD, None if anchor is None else lambda: given)
        return call.returned(_Back.apply(call, leaf, link, y_MD))  # type: ignore[no-untyped-call]

    def _load_ahead(self, experts: list[int]) -> None:
        """Asks for this rank's experts that have rows, while these are on their way; it fails nobody's work."""
        try:
            load_ahead(self._source, [(self._layer, expert) for expert in experts[: max(1, self._source.lease_slots // 2)]])
        except Exception:  # noqa: BLE001 - whatever it is: the others have begun to send
            _log.exception("layer %d: experts could not be loaded ahead", self._layer)

    def _agreed(self, x_ND: Tensor, counts_G: Tensor, *, top_k: int, records: bool) -> _Call:
        exchange, device = self._exchange, x_ND.device
        self.device = device
        with self.guard(device):
            if x_ND.dtype not in DTYPES:
                raise ConfigError(f"expert-parallel rows of {x_ND.dtype}: use one of {', '.join(map(str, DTYPES))}")
            slots = len(counts_G) // self._placement.experts
            if slots not in self._groups:
                self._groups[slots] = Groups.of(self._placement, slots=slots)
            outgoing = Outgoing.of(counts_G, self._groups[slots], device=device)
            header = Header(
                Phase.FORWARD, exchange.call_count, self._layer, self._step(), DTYPES.index(x_ND.dtype), x_ND.shape[1],
                self._placement.experts, top_k, slots, self._digest, int(records),
            )  # fmt: skip
        self._exchange.call_count += 1
        told = exchange.alike(messages(header, outgoing.counts, device=device)).cpu()
        check_told(told, this=exchange.rank)
        counts_WG = torch.cat([told[:, TOLD_AT:], *self._rest(outgoing, device)], dim=1)[:, : len(self.experts) * slots]
        incoming = Incoming.of(counts_WG, self.experts, device=device)
        self.history.add(incoming.blocks)
        return _Call(exchange, header, outgoing, incoming, device)

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
            self._exchange.call_count += 1
            tell(self._exchange, error, device)
            raise

    def __deepcopy__(self, memo: dict[int, Any]) -> ParallelLayer:
        """Returns itself: a copy of a module shares the exchange."""
        return self

    @staticmethod
    def _computed(call: _Call, local: Local, x_MD: Tensor, anchor: Anchor) -> Tensor:
        if not call.incoming.blocks:
            return x_MD
        with call.guard():
            y_MD = local(call.incoming.blocks, x_MD, anchor, call.guard)
            is_held = y_MD.dtype in DTYPES and torch.promote_types(y_MD.dtype, x_MD.dtype) == x_MD.dtype
            if y_MD.shape != x_MD.shape or not is_held:
                raise ConfigError(
                    f"expert-parallel experts gave rows {list(y_MD.shape)} of {y_MD.dtype} for rows {list(x_MD.shape)} of "
                    f"{x_MD.dtype}: give as many, of the same width, and of no longer dtype"
                )
            call.computed = y_MD.dtype
            return y_MD.to(x_MD.dtype)


class _Call:
    """One call of a layer: how its rows travel, either way."""

    def __init__(
        self, exchange: Exchange, header: Header, outgoing: Outgoing, incoming: Incoming, device: torch.device
    ) -> None:  # fmt: skip
        self._exchange = exchange
        self._header = header
        self._outgoing = outgoing
        self._device = device
        self.incoming = incoming
        self.computed: torch.dtype | None = None
        """Of what this rank's experts gave; None where they had no rows."""
        self.is_done = False
        """Whether its backward was run."""
        self._returned: torch.dtype | None = None
        """Of what the experts of this rank's tokens gave."""

    def there(self, rows_ND: Tensor) -> Tensor:
        """Rows of this rank's tokens, or their gradients, to the ranks of their experts: there in the order of computation."""
        order = self._outgoing.order_N
        sent = rows_ND.contiguous() if order is None else rows_ND.index_select(0, order)
        arrived = self._exchange.rows(sent, to_each=self._outgoing.by_rank, from_each=self.incoming.by_rank)
        return arrived.index_select(0, self.incoming.order_M)

    def back(self, rows_MD: Tensor) -> Tensor:
        """Rows of this rank's experts, or their gradients, back to the ranks of their tokens, in the order that those have."""
        sent = rows_MD.index_select(0, self.incoming.place_M)
        arrived = self._exchange.rows(sent, to_each=self.incoming.by_rank, from_each=self._outgoing.by_rank)
        return arrived if self._outgoing.order_N is None else arrived.index_select(0, inverse(self._outgoing.order_N))

    def meet(self, phase: Phase) -> None:
        """Sees to it that all ranks stand before the same exchange of rows. Raises StepMismatch, and the error of a rank that has
        failed since the one before."""
        none = [torch.empty(0, dtype=torch.int64)] * self._exchange.world_size
        header = replace(self._header, phase=phase)
        told = self._exchange.alike(messages(header, none, device=self._device, computed=self.computed)).cpu()
        check_told(told, this=self._exchange.rank)
        known = {DTYPES[dtype] for dtype in told[:, DTYPE_AT].tolist() if dtype != UNKNOWN}
        self._returned = known.pop() if len(known) == 1 else None

    def returned(self, rows_ND: Tensor) -> Tensor:
        """The rows that came back in the dtype in which experts gave them."""
        return rows_ND if self._returned is None else rows_ND.to(self._returned)

    @contextmanager
    def guard(self) -> Iterator[None]:
        """What is raised within it, the other ranks learn where they `meet` next."""
        try:
            yield
        except BaseException as error:
            tell(self._exchange, error, self._device)
            raise


def tell(exchange: Exchange, error: BaseException, device: torch.device) -> None:
    """Tells the other ranks, in place of a header, what this one raises."""
    with suppress(ParamStoreError):  # the exchange's own: they learn it from that
        exchange.alike(refusal(error, device=device).repeat(exchange.world_size, 1))


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
        ctx.call.meet(Phase.RETURN_BACKWARD)
        grad_ND = ctx.call.back(grad_MD)
        ctx.call.is_done = True
        return None, torch.zeros(()), grad_ND if ctx.wants_x else None


class _Back(torch.autograd.Function):
    """The node by which rows come back."""

    @staticmethod
    def forward(ctx: Any, call: _Call, leaf: Tensor, link: Tensor, y_MD: Tensor) -> Tensor:
        ctx.call = call
        call.meet(Phase.RETURN)
        return call.back(y_MD)

    @staticmethod
    def backward(ctx: Any, grad_ND: Tensor) -> tuple[None, Tensor, Tensor, Tensor]:
        if torch.is_grad_enabled():  # on all ranks alike, before the local graph says so where there is one
            raise ConfigError("create_graph=True: stored experts have no second derivatives; leave it out")
        ctx.call.meet(Phase.BACKWARD)
        return None, torch.zeros(()), torch.zeros(()), ctx.call.there(grad_ND)
