"""One layer whose rows travel to the ranks that compute their experts: two nodes of the caller's graph around the local experts.

    rows, anchor -> There -> local experts -> Back -> rows

Every rank takes part in every exchange, forward and backward, with tokens or without: both nodes hang on an anchor that needs a
gradient, and Back on There, whatever lies between them. Where the layer is pipelined, or keeps less for backward than it needs, it
is one node (`pipeline`).

The layer's exchanges are those of MPMoE's S and R (section III-A; C is the local experts'), without its capacity. What S sends is
not padded, so that its sizes travel first.
"""

# T tokens of this rank, N rows of them, M rows of this rank's experts, D model, W ranks
# ruff: noqa: N803, N806 - shape suffixes, as the legend says

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from paramstore.core.placement import Placement
from paramstore.errors import ConfigError
from paramstore_client.moe.balance.history import TokenHistory
from paramstore_client.moe.balance.replicas import Replicas
from paramstore_client.moe.call import Call, check_first_derivative, check_met, ending, telling
from paramstore_client.moe.exchange import Exchange
from paramstore_client.moe.granularity.call_plan import CallPlan, FixedPlan, SearchedPlan
from paramstore_client.moe.granularity.search import Kind, Search
from paramstore_client.moe.header import DTYPES, NUMBERS, TIMED_AT, TOLD_AT, Header, Phase, messages
from paramstore_client.moe.host_arena import HostArena
from paramstore_client.moe.pipeline import PipelinedCall
from paramstore_client.moe.pipeline_plan import Pipeline
from paramstore_client.moe.row_plan import Groups, Incoming, Outgoing, chunk_counts
from paramstore_client.nn.parallel import Anchor, Local, ParallelRows
from paramstore_client.nn.routing import Taken
from paramstore_client.nn.weight_views import hooks_around
from paramstore_client.source import ExpertSource, load_ahead

_log = logging.getLogger(__name__)


class ParallelLayer(ParallelRows):
    """One layer of experts of which this rank computes some. Owner of its placement, and of what was agreed on for its calls.

    source: of its experts. step: tells which step's experts are seen. pipeline: of every call, or the search that chooses it,
    shared by a model's layers as arena is: where activations wait that are copied to the host.
    """

    def __init__(
        self,
        exchange: Exchange,
        placement: Placement,
        source: ExpertSource,
        layer: int,
        *,
        step: Callable[[], int],
        pipeline: Pipeline | Search | None = None,
        arena: HostArena | None = None,
    ) -> None:
        self._exchange = exchange
        self._source = source
        self._layer = layer
        self._step = step
        self._pipeline = pipeline or Pipeline()
        self._arena = arena or HostArena(self._pipeline.host_bytes)
        self._groups: dict[tuple[int, int], Groups] = {}
        self._recorded: WeakSet[Call] = WeakSet()
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
        self._replicas = Replicas.of(placement)
        self._groups.clear()

    @property
    def awaits_backward(self) -> bool:
        """Whether a graph of one of its calls lives whose backward was not run."""
        return any(not call.is_done for call in self._recorded)

    def run(self, x_TD: Tensor, taken: Taken, counts_G: Tensor, *, top_k: int, local: Local, anchor: Anchor) -> Tensor:
        """Gives what `ParallelRows.run` says. Raises StepMismatch before a row is sent where ranks differ, the error of a rank
        that fails, and RankLost."""
        records = torch.is_grad_enabled()
        with self.guard(x_TD.device):  # once a forward: a checkpoint that recomputes gives another leaf each time
            given = anchor() if records and anchor is not None else None
        call, pipeline = self._agreed(x_TD, taken, counts_G, top_k=top_k, records=records)
        with call.agreed():
            if records:
                self._recorded.add(call)
            self._load_ahead(call, 0)
            if not pipeline.is_plain:
                ahead = partial(self._load_ahead, call)
                pipelined = PipelinedCall(call, taken, local, pipeline, arena=self._arena, load_ahead=ahead)
                rows_ND = pipelined.run(x_TD, is_bound=anchor is not None, given=given)
            elif not records:
                x_MD = call.computable(0, call.start_tokens(0, x_TD, taken.token_N))
                rows_ND = call.back(Phase.RETURN, _computed(call, local, x_MD, None))
            else:
                leaf = torch.zeros((), requires_grad=True) if given is None else given
                x_MD, link = _There.apply(call, taken, leaf, x_TD)  # type: ignore[no-untyped-call]
                y_MD = _computed(call, local, x_MD, None if anchor is None else lambda: given)
                rows_ND = _Back.apply(call, leaf, link, y_MD)  # type: ignore[no-untyped-call]
            y_ND = call.returned(rows_ND)
            if not records:
                call.done()
            return y_ND

    def _load_ahead(self, call: Call, part: int) -> None:
        """Asks for this rank's experts that have rows in `part`, while these are on their way; it fails nobody's work."""
        if part == call.parts:
            return
        try:
            blocks = call.incoming[part].blocks[: max(1, self._source.lease_slots // 2)]
            load_ahead(self._source, [(self._layer, block.expert) for block in blocks])
        except Exception:  # noqa: BLE001 - whatever it is: the others have begun to send
            _log.exception("layer %d: experts could not be loaded ahead", self._layer)

    def _agreed(
        self, x_TD: Tensor, taken: Taken, counts_G: Tensor, *, top_k: int, records: bool
    ) -> tuple[Call, Pipeline]:  # fmt: skip
        exchange, device = self._exchange, x_TD.device
        self.device = device
        with self.guard(device):
            if x_TD.dtype not in DTYPES:
                raise ConfigError(f"expert-parallel rows of {x_TD.dtype}: use one of {', '.join(map(str, DTYPES))}")
            are_hooks_around = hooks_around() is not None
            plan = self._plan(x_TD, top_k=top_k, records=records, is_fixed=are_hooks_around)
            pipeline, slots = plan.pipeline, len(counts_G) // self._placement.experts
            if are_hooks_around:  # whoever put them says what is kept, and where
                pipeline = replace(pipeline, reuse="keep")
            groups = self._grouped(slots, pipeline.expert_parts)
            header = Header(
                Phase.FORWARD, exchange.call_count, self._layer, self._step(), DTYPES.index(x_TD.dtype), x_TD.shape[1],
                self._placement.experts, top_k, slots, self._digest, int(records), *pipeline.numbers, plan.word,
            )  # fmt: skip
        exchange.call_count += 1
        counts_G = self._split(header, counts_G, device)
        with telling(exchange, Phase.FORWARD, device):
            chunk_N, counts_CG = None, counts_G[None]
            if pipeline.chunks > 1:
                chunk_N, counts_CG = chunk_counts(counts_G, taken.token_N.cpu(), tokens=len(x_TD), chunks=pipeline.chunks)
            outgoing = Outgoing.of(counts_CG, groups, chunk_N=chunk_N, device=device)
            timed = plan.telling(len(taken.token_N))
        counts_WG, timed_W = self._told(header, outgoing.counts, timed)
        with ending(exchange):
            clock = plan.agreed(exchange, header.call, timed_W)
            incoming = Incoming.of_parts(counts_WG, groups, rank=exchange.rank, chunks=pipeline.chunks, device=device)
            self.history.add([block for part in incoming for block in part.blocks])
            return Call(exchange, header, outgoing, incoming, device, clock=clock), pipeline

    def _plan(self, x_TD: Tensor, *, top_k: int, records: bool, is_fixed: bool) -> CallPlan:
        if not isinstance(self._pipeline, Search):
            return FixedPlan(self._pipeline)
        kind = Kind(records, self._placement.experts, top_k, x_TD.shape[1] * x_TD.element_size())
        return SearchedPlan(self._pipeline, kind, x_TD.device, is_fixed=is_fixed)

    def _grouped(self, slots: int, parts: int) -> Groups:
        if (slots, parts) not in self._groups:
            self._groups[slots, parts] = Groups.of(self._placement, slots=slots, parts=parts)
        return self._groups[slots, parts]

    def _split(self, header: Header, counts_G: Tensor, device: torch.device) -> Tensor:
        """The rows of each group, of an expert with replicas for each of these."""
        if self._replicas is None:
            return counts_G
        counted_R = self._replicas.counted(counts_G)
        counted_WR, _ = self._told(replace(header, phase=Phase.REPLICAS), [counted_R] * self._exchange.world_size)
        with telling(self._exchange, Phase.FORWARD, device):
            return self._replicas.split(counts_G, counted_WR, rank=self._exchange.rank)

    def _told(
        self, header: Header, counts: Sequence[Tensor], timed: Sequence[int] = ()
    ) -> tuple[Tensor, list[list[int]]]:  # fmt: skip
        """[ranks, numbers], those that each rank tells this one behind its header, as many as this one tells itself; and what each
        tells in place of `timed`. counts: for each rank. Raises what `check_told` raises."""
        told = self._exchange.alike(messages(header, len(counts), counts=counts, timed=timed, device=self.device)).cpu()
        check_met(self._exchange, told)
        behind = torch.cat([told[:, TOLD_AT:], *self._rest(counts)], dim=1)[:, : len(counts[self._exchange.rank])]
        return behind, told[:, TIMED_AT : TIMED_AT + len(timed)].tolist()

    def _rest(self, counts: Sequence[Tensor]) -> list[Tensor]:
        """The counts that a message has no room for, by rank: of many experts, slots or parts."""
        fit = NUMBERS - TOLD_AT
        if (most := max(map(len, counts))) <= fit:
            return []
        more = torch.zeros(len(counts), most - fit, dtype=torch.int64)
        for message, numbers in zip(more, counts, strict=True):
            message[: max(0, len(numbers) - fit)] = numbers[fit:]
        return [self._exchange.alike(more.to(self.device)).cpu()]

    @contextmanager
    def guard(self, device: torch.device) -> Iterator[None]:
        """What is raised within it, before `run`, the other ranks learn in place of this one's header."""
        with telling(self._exchange, Phase.FORWARD, device):
            try:
                yield
            except BaseException:
                self._exchange.call_count += 1
                raise

    def __deepcopy__(self, memo: dict[int, Any]) -> ParallelLayer:
        """Returns itself: a copy of a module shares the exchange."""
        return self


def _computed(call: Call, local: Local, x_MD: Tensor, anchor: Anchor) -> Tensor:
    if not call.incoming[0].blocks:
        return x_MD
    with call.guard(Phase.RETURN):
        return call.checked(local(call.incoming[0].blocks, x_MD, anchor, partial(call.guard, Phase.RETURN_BACKWARD)), x_MD)


class _There(torch.autograd.Function):
    """The node by which rows leave; its second output ties `_Back` to it."""

    @staticmethod
    def forward(ctx: Any, call: Call, taken: Taken, leaf: Tensor, x_TD: Tensor) -> tuple[Tensor, Tensor]:
        ctx.call, ctx.taken = call, taken
        ctx.wants_x = ctx.needs_input_grad[3]
        return call.computable(0, call.start_tokens(0, x_TD, taken.token_N)), torch.zeros(())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_MD: Tensor, _: Tensor) -> tuple[None, None, Tensor, Tensor | None]:
        with ctx.call.agreed():
            grad_ND = ctx.call.back(Phase.RETURN_BACKWARD, grad_MD)
        grad_TD = ctx.taken.summed(grad_ND) if ctx.wants_x else None
        ctx.call.done()
        return None, None, torch.zeros(()), grad_TD


class _Back(torch.autograd.Function):
    """The node by which rows come back."""

    @staticmethod
    def forward(ctx: Any, call: Call, leaf: Tensor, link: Tensor, y_MD: Tensor) -> Tensor:
        ctx.call = call
        return call.back(Phase.RETURN, y_MD)

    @staticmethod
    def backward(ctx: Any, grad_ND: Tensor) -> tuple[None, Tensor, Tensor, Tensor]:
        check_first_derivative()
        ctx.call.meet(Phase.BACKWARD)
        with ctx.call.agreed():
            return None, torch.zeros(()), torch.zeros(()), ctx.call.there(grad_ND)
