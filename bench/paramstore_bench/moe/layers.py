"""One expert-parallel layer over experts in memory, in three ways: ours, transformers' all-to-all, and one of fixed capacity.

Experts in memory, since the others know no store: what stands beside each other is how rows travel, are put in order, and are
summed. Ours and transformers' run the same kernel, transformers' `grouped_mm`, on the same parameters of one experts module; each
brings rows to it, and back, by its own code. Transformers' is measured twice: *bare*, on plain parameters that are a rank's own,
and *as loaded*, on sharded ones, as `from_pretrained` leaves it, whose kernel masks rows besides. Bare is what ours is judged by.

Fixed capacity is GShard's (arXiv 2006.16668, section 3.2): as many rows from each rank to each expert, the others zero. It is
generous: rows find their places by indices, not by products with one-hot masks; the capacity is the largest load, so that nothing
is dropped, and known to all without asking; experts multiply in one product a matrix.
"""

# T tokens, K experts per token, D model, E experts, L experts of a rank, W ranks, C capacity
# ruff: noqa: N803, N806 - shape suffixes, as the legend says

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single_autograd, wait_tensor
from torch.nn import functional
from transformers import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from paramstore.core.placement import Placement
from paramstore_bench.moe.sizes import RANKS, Sizes, weights_of
from paramstore_client.moe.exchange import Exchange
from paramstore_client.moe.granularity.search import Search
from paramstore_client.moe.kernel_order import ParallelKernel
from paramstore_client.moe.parallel_layer import ParallelLayer
from paramstore_client.moe.pipeline_plan import Pipeline
from paramstore_client.nn.parallel import Anchor, Guard
from paramstore_client.nn.routing import Block
from paramstore_client.source import ExpertSource

KERNEL = "grouped_mm"


class Layer(Protocol):
    """One layer of which each rank computes some experts."""

    @property
    def parameters(self) -> list[nn.Parameter]:
        """Those of this rank's experts."""
        ...

    def __call__(self, x_TD: Tensor, ids_TK: Tensor, gates_TK: Tensor) -> Tensor: ...


def experts_of(sizes: Sizes, experts: range) -> Any:
    """transformers' module of those experts."""
    config = Qwen3MoeConfig(
        hidden_size=sizes.width, moe_intermediate_size=sizes.inner, num_experts=len(experts), num_experts_per_tok=sizes.top_k,
        hidden_act="silu",
    )  # fmt: skip
    config._experts_implementation = KERNEL
    module = Qwen3MoeExperts(config)  # type: ignore[no-untyped-call]  # transformers left it so
    with torch.no_grad():
        for place, expert in enumerate(experts):
            weights = weights_of(sizes, expert)
            module.gate_up_proj[place] = weights["gate_up"]
            module.down_proj[place] = weights["down"]
    return module


class Ours(Layer):
    """The exchange and the order of sums that a model of `ps.hf` has, over a module of this rank's experts."""

    def __init__(self, sizes: Sizes, module: Any, exchange: Exchange, pipeline: Pipeline | Search | None = None) -> None:
        resident = cast(ExpertSource, SimpleNamespace(lease_slots=0, prefetch=lambda keys: None))
        placement = Placement.in_order(sizes.experts, exchange.world_size)
        rows = ParallelLayer(exchange, placement, resident, 0, step=lambda: 0, pipeline=pipeline)
        self._kernel = ParallelKernel(rows, experts=sizes.experts, kernel=KERNEL)
        self._module = module
        self._first = placement.of_rank(exchange.rank)[0]

    @property
    def parameters(self) -> list[nn.Parameter]:
        return list(self._module.parameters())

    def __call__(self, x_TD: Tensor, ids_TK: Tensor, gates_TK: Tensor) -> Tensor:
        return self._kernel.run(x_TD, ids_TK, gates_TK, self._run, anchor=None)

    def _run(
        self, hidden_TH: Tensor, ids_TK: Tensor, gate_TK: Tensor, *, anchor: Anchor, guard: Guard, blocks: tuple[Block, ...]
    ) -> Tensor:  # fmt: skip
        return cast(Tensor, self._module(hidden_TH, ids_TK - self._first, gate_TK))


class Transformers(Layer):
    """The all-to-all of `transformers.distributed`, over this rank's experts or, as loaded, over its shard of all of them."""

    def __init__(self, sizes: Sizes, module: Any, *, is_bare: bool) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from transformers.distributed.expert_parallel import AllToAllEP, apply_expert_parallelism

        mesh = init_device_mesh("cpu", (1, RANKS), mesh_dim_names=("tp", "ep"))
        self._module = module
        if is_bare:
            self._call = AllToAllEP(module, mesh["ep"], mesh["tp"])
            return
        self._module = experts_of(sizes, range(sizes.experts))
        plan = {"experts.gate_up_proj": "grouped_gemm", "experts.down_proj": "grouped_gemm", "experts": "ep_dispatch_experts"}
        model = nn.ModuleDict({"experts": self._module})
        apply_expert_parallelism(model, mesh["ep"], mesh["tp"], plan, ep_implementation="all_to_all")
        self._call = self._module

    @property
    def parameters(self) -> list[nn.Parameter]:
        return list(self._module.parameters())

    def __call__(self, x_TD: Tensor, ids_TK: Tensor, gates_TK: Tensor) -> Tensor:
        return cast(Tensor, self._call(x_TD, ids_TK, gates_TK))


class FixedCapacity(Layer):
    """An all-to-all that brings `capacity` rows from each rank to each expert, which no expert may exceed."""

    def __init__(self, sizes: Sizes, module: Any, *, capacity: int) -> None:
        self._sizes = sizes
        self._module = module
        self.capacity = capacity
        self._splits = [sizes.rank_experts * capacity] * RANKS

    @property
    def parameters(self) -> list[nn.Parameter]:
        return list(self._module.parameters())

    @property
    def sent_bytes(self) -> int:
        """Bytes that a rank sends to others in a forward and a backward."""
        return 4 * (RANKS - 1) * self._splits[0] * self._sizes.row_bytes

    def __call__(self, x_TD: Tensor, ids_TK: Tensor, gates_TK: Tensor) -> Tensor:
        (tokens, top_k), width, experts = ids_TK.shape, x_TD.shape[1], self._sizes.experts
        ids_N = ids_TK.flatten()
        order_N = ids_N.argsort(stable=True)
        counts_E = torch.bincount(ids_N, minlength=experts)
        place_N = torch.empty_like(order_N)
        place_N[order_N] = torch.arange(len(ids_N)) - (counts_E.cumsum(0) - counts_E)[ids_N[order_N]]
        slot_N = ids_N * self.capacity + place_N
        rows_ND = x_TD[:, None].expand(tokens, top_k, width).reshape(-1, width)
        y_SD = self._there_and_back(x_TD.new_zeros(experts * self.capacity, width).index_copy(0, slot_N, rows_ND))
        return (y_SD.index_select(0, slot_N).view(tokens, top_k, width) * gates_TK.unsqueeze(-1)).sum(dim=1)

    def _there_and_back(self, sent_SD: Tensor) -> Tensor:
        own, width = self._sizes.rank_experts, sent_SD.shape[1]
        x_LMD = self._exchanged(sent_SD).view(RANKS, own, -1, width).transpose(0, 1).reshape(own, -1, width)
        gate, up = torch.bmm(x_LMD, self._module.gate_up_proj.transpose(1, 2)).chunk(2, dim=-1)
        y_LMD = torch.bmm(functional.silu(gate) * up, self._module.down_proj.transpose(1, 2))
        return self._exchanged(y_LMD.view(own, RANKS, -1, width).transpose(0, 1).reshape(-1, width))

    def _exchanged(self, rows: Tensor) -> Tensor:
        assert dist.group.WORLD is not None, "the process has joined its job"
        arrived = all_to_all_single_autograd(rows, self._splits, self._splits, dist.group.WORLD)
        return cast(Tensor, wait_tensor(arrived))  # type: ignore[no-untyped-call]
