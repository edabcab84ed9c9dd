"""A layer of experts whose weights live in the store: the module that a training or inference loop calls.

- It has no parameters: optimizers, DDP, FSDP and state dicts see nothing of the experts.
- Loss and gradients equal `ResidentExperts` bit for bit, however many experts fit at once.
- After a forward, a backward or an error in either, it holds no lease.
"""

# T tokens, K experts per token, N = T * K rows, D model
# ruff: noqa: N803, N806 - shape suffixes, as the legend says

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial

import torch
from torch import Tensor, nn

from paramstore.core.arguments import function, instance, whole_number, wrong
from paramstore.core.key import ExpertKey
from paramstore.errors import UnknownKey
from paramstore_client.nn.parallel import Anchor, Guard, Parallel, ParallelRows
from paramstore_client.nn.routing import Block, ExpertFn, Taken, apply_experts, check_routing, swiglu
from paramstore_client.nn.schedule import ExpertSchedule
from paramstore_client.nn.streaming import LayerCall, split_parts
from paramstore_client.source import ExpertSource


class StoredExperts(nn.Module):
    """One MoE layer's experts, fetched when needed and given back at once; gradients go to the store.

    namespace: a namespace handle; or, in front of one, a `DeviceTier` (GPU), a `RingMemory` or an `ExpertBuffer` (generation). Over
    a bare handle nothing stands between two forwards: each asks the daemon again.
    layer: its index in the namespace. expert_fn: (x_tD, weights by field) -> y_tD; default `swiglu`.
    group: shared by the model's layers, prefetches for the layer to come; None prefetches only within the layer.
    parallel: a `ps.moe.ExpertParallel`, shared by the model's layers: this rank computes the experts placed on it, with the tokens
    of all ranks. None: each rank computes whatever its tokens choose.

    A layer with more active experts than half of `namespace.lease_slots` runs in parts, in expert order, so that the
    other half can hold the next part. `backward` pushes the gradients of the active experts before it returns; an expert
    without tokens gets none. Two things to know:
    - `expert_fn` computes from its arguments alone: a parameter that it closes over gets no gradient. It gets the weights in the
      dtype that the schema says, whatever the tokens have; `swiglu` casts longer ones.
    - `torch.autograd.grad(loss, x)` runs this layer's backward too, so it pushes as well.

        group = ps.nn.ExpertSchedule()
        experts = nn.ModuleList(ps.nn.StoredExperts(ns, layer, group=group) for layer in range(L))
        ...
        y_TD = experts[layer](x_TD, expert_ids_TK, gate_TK)
        loss.backward()
        ns.apply(ps.AdamW(lr=1e-4))
    """

    def __init__(
        self,
        namespace: ExpertSource,
        layer: int,
        expert_fn: ExpertFn | None = None,
        *,
        group: ExpertSchedule | None = None,
        parallel: Parallel | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(namespace, ExpertSource):
            raise wrong("namespace", namespace, "an open namespace, or a DeviceTier or RingMemory over one")
        if (layer := whole_number("layer", layer)) not in namespace.layers:
            raise UnknownKey(f"layer {layer} is not in the namespace; it has {', '.join(map(str, namespace.layers))}")
        self.namespace = namespace
        self.layer = layer
        self.expert_fn: ExpertFn = swiglu if expert_fn is None else function("expert_fn", expert_fn)
        self.group = None if group is None else instance("group", group, ExpertSchedule, "a ps.nn.ExpertSchedule()")
        self.anchor: Callable[[], Tensor | None] | None = None
        """Returns the leaf that ties a forward into the graph, None where experts get no gradients; `training.bind` sets it."""
        if parallel is not None and not isinstance(parallel, Parallel):
            raise wrong("parallel", parallel, "a ps.moe.ExpertParallel()")
        self._parallel = None if parallel is None else parallel.layer(namespace, layer)
        if group is not None:
            group.join(layer)

    def forward(self, x_TD: Tensor, expert_ids_TK: Tensor, gate_TK: Tensor) -> Tensor:
        """y_TD: per token the sum over its experts of gate * expert(x), in ascending expert order, dtype of x_TD.

        expert_ids_TK: integer indices. gate_TK: the routing weights, any floating dtype.
        Raises what `acquire`, `prefetch` and `expert_fn` raise; backward also what `push` raises, and StepMismatch
        where an update came between forward and backward. With `parallel` also what another rank raises, StepMismatch where ranks
        differ in what must be alike or one does not come in time, and RankLost.
        """
        if self._parallel is not None:
            return self._run_parallel(self._parallel, x_TD, expert_ids_TK, gate_TK)
        y_TD = apply_experts(lambda blocks, x, taken: self._run_blocks(blocks, taken.rows(x)), x_TD, expert_ids_TK, gate_TK)
        if len(x_TD) == 0 and self.anchor is not None and torch.is_grad_enabled() and (anchor := self.anchor()) is not None:
            y_TD = y_TD + anchor  # a rank without tokens takes part in what ranks do together after backward
        return y_TD

    def extra_repr(self) -> str:
        return f"layer={self.layer}, experts={self.namespace.experts}"

    def _run_parallel(self, parallel: ParallelRows, x_TD: Tensor, expert_ids_TK: Tensor, gate_TK: Tensor) -> Tensor:
        experts = self.namespace.experts
        with parallel.guard(x_TD.device):
            check_routing(x_TD, expert_ids_TK, gate_TK, experts=experts)

        def run_blocks(blocks: tuple[Block, ...], x_TD: Tensor, taken: Taken) -> Tensor:
            counts_E = torch.zeros(experts, dtype=torch.int64)
            counts_E[[block.expert for block in blocks]] = torch.tensor([block.row_count for block in blocks], dtype=torch.int64)
            return parallel.run(
                x_TD, taken, counts_E, top_k=expert_ids_TK.shape[1], local=self._run_blocks, anchor=self.anchor
            )

        return apply_experts(run_blocks, x_TD, expert_ids_TK, gate_TK, takes_none=True)

    def _run_blocks(
        self, blocks: tuple[Block, ...], x_ND: Tensor, anchor: Anchor = None, guard: Guard = nullcontext
    ) -> Tensor:  # fmt: skip
        parts = split_parts(self.layer, blocks, limit=max(1, self.namespace.lease_slots // 2))
        call = LayerCall(
            self.namespace,
            parts,
            self.expert_fn,
            forward_hint=partial(self._after_forward, [block.expert for block in blocks]),
            backward_hint=self._after_backward,
            anchor=anchor or self.anchor,
            guard=guard,
        )
        return call.run(x_ND)

    def _after_forward(self, experts: list[int], room: int) -> list[ExpertKey]:
        return [] if self.group is None else self.group.begin_forward(self.layer, experts, room=room)

    def _after_backward(self, room: int) -> list[ExpertKey]:
        return [] if self.group is None else self.group.begin_backward(self.layer, room=room)
