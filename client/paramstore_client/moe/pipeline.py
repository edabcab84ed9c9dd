"""A layer's exchanges and computing in parts, one beside the other: MPMoE, section III-B.

Rows of part i + 1 are on their way there, and those of part i - 1 on their way back, while part i is computed. The layer is one
node of the caller's graph, as its backward does the same with gradients; each part's experts have a graph of their own in it
(`part_graph`), and so does what is kept of them.

The paper splits a layer's tokens. Parts of each rank's experts are ours: they change no bit, as an expert's rows stay together.
"""

# T tokens of this rank, N rows of them, M rows of this rank's experts, D model
# ruff: noqa: N803, N806 - shape suffixes, as the legend says

from __future__ import annotations

import traceback
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from paramstore_client.moe.call import Call, check_first_derivative
from paramstore_client.moe.exchange import Arriving
from paramstore_client.moe.header import Phase
from paramstore_client.moe.host_arena import HostArena
from paramstore_client.moe.part_graph import PartGraph
from paramstore_client.moe.pipeline_plan import Pipeline
from paramstore_client.nn.parallel import Anchor, Local
from paramstore_client.nn.routing import Taken


class PipelinedCall:
    """One call of a layer in parts, forward and backward. Owner of its parts' graphs.

    load_ahead: asks for the experts of a part that is computed next. arena: where activations wait that are offloaded.
    """

    def __init__(
        self, call: Call, taken: Taken, local: Local, pipeline: Pipeline, *, arena: HostArena, load_ahead: Callable[[int], None]
    ) -> None:  # fmt: skip
        self._call = call
        self._taken = taken
        self._local = local
        self._pipeline = pipeline
        self._arena = arena
        self._load_ahead = load_ahead
        self._anchor: Anchor = None
        self._graphs: dict[int, PartGraph] = {}

    def run(self, x_TD: Tensor, *, is_bound: bool, given: Tensor | None) -> Tensor:
        """The rows [N, D] that came back, recorded for backward where grad mode is on. is_bound: whether there is an anchor, which
        has given `given`."""
        if not torch.is_grad_enabled():
            return self._passed(Phase.RETURN, lambda part: [self._start_rows(part, x_TD)], self._compute)
        leaf = torch.zeros((), requires_grad=True) if given is None else given
        if is_bound:
            inner = None if given is None else torch.zeros_like(given, requires_grad=True)
            self._anchor = lambda: inner
        return _Pipelined.apply(self, leaf, x_TD)  # type: ignore[no-untyped-call, no-any-return]

    def forward(self, x_TD: Tensor) -> tuple[Tensor, list[Tensor]]:
        """The rows that came back, and what the caller keeps for backward: the tokens first where they are sent again."""
        y_ND = self._passed(Phase.RETURN, lambda part: [self._start_rows(part, x_TD)], self._record)
        tokens = [x_TD] if self._pipeline.sends_again else []
        return y_ND, tokens + [tensor for graph in self._graphs.values() for tensor in graph.take_kept()]

    def backward(self, grad_ND: Tensor, kept: list[Tensor]) -> Tensor:
        """The gradients of tokens. kept: what `forward` gave."""
        self._call.meet(Phase.BACKWARD)
        tokens, kept = (kept[:1], kept[1:]) if self._pipeline.sends_again else ([], kept)
        does_stay = torch._C._autograd._get_current_graph_task_keep_graph()
        by_part = {}
        for part, graph in self._graphs.items():
            by_part[part], kept = kept[: graph.kept_count], kept[graph.kept_count :]

        def start(part: int) -> list[Arriving]:
            gradients = self._call.start_there(part, self._ordered(part, grad_ND))
            return [gradients, *(self._start_rows(part, x_TD) for x_TD in tokens)]

        def compute(part: int, grad_MD: Tensor, x_MD: Tensor | None = None) -> Tensor:
            if not self._call.incoming[part].blocks:
                return grad_MD
            self._load_ahead(part + 1)
            return self._graphs[part].differentiate(
                lambda x_MD: self._experts(part, x_MD), grad_MD, kept=by_part.pop(part), x_MD=x_MD, does_stay=does_stay
            )

        with self._call.agreed():
            grad_TD = self._taken.summed(self._passed(Phase.RETURN_BACKWARD, start, compute))
        if not does_stay:
            self._graphs.clear()
        self._call.done()
        return grad_TD

    def _passed(
        self, phase: Phase, start: Callable[[int], list[Arriving]], compute: Callable[..., Tensor]
    ) -> Tensor:  # fmt: skip
        """The rows that come back of all parts: what `start` sends of each on its way there is computed with when it has come. What
        `compute` raises, all ranks raise after the last part."""
        call = self._call
        rows_ND: Tensor | None = None
        back: Arriving | None = None
        failure: BaseException | None = None
        try:
            following = start(0)
            for part in range(call.parts):
                under_way, following = following, start(part + 1) if part + 1 < call.parts else []
                arrived = [call.computable(part, each) for each in under_way]
                under_way.clear()  # the rows as they came
                computed = None
                if failure is None:
                    try:
                        computed = compute(part, *arrived)
                    except BaseException as error:  # noqa: BLE001 - raised where all do
                        failure = error
                        traceback.clear_frames(error.__traceback__)  # what they hold is needed for the parts to come
                del arrived
                before, back = back, call.start_back(part, computed)
                del computed
                if before is not None:
                    rows_ND = self._placed(rows_ND, part - 1, before.wait())
                del before
            assert back is not None
            (last,) = call.settle(phase, [back], failure)
        except BaseException as error:
            if failure is None or error is failure:
                raise
            raise failure from error  # its own comes first
        finally:
            failure = None  # it would know itself, by this frame
        return self._placed(rows_ND, call.parts - 1, last)

    def _placed(self, rows_ND: Tensor | None, part: int, arrived: Tensor) -> Tensor:
        order = self._call.order(part)
        if order is None:
            return arrived
        rows_ND = arrived.new_empty(self._call.row_count, arrived.shape[1]) if rows_ND is None else rows_ND
        return rows_ND.index_copy_(0, order, arrived)

    def _ordered(self, part: int, rows_ND: Tensor) -> Tensor:
        order = self._call.order(part)
        return rows_ND.contiguous() if order is None else rows_ND.index_select(0, order)

    def _start_rows(self, part: int, x_TD: Tensor) -> Arriving:
        return self._call.start_tokens(part, x_TD, self._taken.token_N)

    def _compute(self, part: int, x_MD: Tensor) -> Tensor:
        if not self._call.incoming[part].blocks:
            return x_MD
        self._load_ahead(part + 1)
        return self._experts(part, x_MD)

    def _record(self, part: int, x_MD: Tensor) -> Tensor:
        if not self._call.incoming[part].blocks:
            return x_MD
        self._load_ahead(part + 1)
        graph = self._graphs[part] = PartGraph(self._pipeline, self._arena)
        return graph.record(lambda x_MD: self._experts(part, x_MD), x_MD)

    def _experts(self, part: int, x_MD: Tensor) -> Tensor:
        return self._call.checked(self._local(self._call.incoming[part].blocks, x_MD, self._anchor, nullcontext), x_MD)


class _Pipelined(torch.autograd.Function):
    """The layer's node in the caller's graph."""

    @staticmethod
    def forward(ctx: Any, call: PipelinedCall, leaf: Tensor, x_TD: Tensor) -> Tensor:
        y_ND, kept = call.forward(x_TD)
        ctx.call = call
        ctx.save_for_backward(*kept)
        return y_ND

    @staticmethod
    def backward(ctx: Any, grad_ND: Tensor) -> tuple[None, Tensor, Tensor | None]:
        check_first_derivative()
        kept = list(ctx.saved_tensors)  # before any exchange: unpacking may recompute a checkpointed region, which has its own
        grad_TD = ctx.call.backward(grad_ND, kept)
        return None, torch.zeros(()), grad_TD if ctx.needs_input_grad[2] else None
