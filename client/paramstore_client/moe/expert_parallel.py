"""The argument by which a user asks for expert parallelism: the ranks of a job compute each only the experts placed on them."""

from __future__ import annotations

import datetime
from functools import partial
from typing import Any

import torch.distributed as dist

from paramstore.core.arguments import choice, instance, seconds, wrong
from paramstore.core.placement import Placement
from paramstore.errors import ConfigError, ParamStoreError, RankLost, StepMismatch
from paramstore_client.moe.exchange import Exchange, FlatExchange
from paramstore_client.moe.hops.choice import WAYS, Choice
from paramstore_client.moe.hops.opening import meet_nodes, opened
from paramstore_client.moe.hops.two_hops import TwoHopExchange
from paramstore_client.moe.host_arena import HostArena
from paramstore_client.moe.parallel_layer import ParallelLayer
from paramstore_client.moe.pipeline_plan import Pipeline
from paramstore_client.source import ExpertSource


class ExpertParallel:
    """Lets the ranks of a job share the experts of each layer: tokens travel to the rank that computes their expert, and what it
    gives back, by all-to-alls whose sizes are what the tokens ask for; no token is dropped, and none is padded. Each rank leases,
    and pushes gradients of, its own experts alone.

    group: a group of torch.distributed whose ranks take part, used by nothing else; None: one of all ranks is made, by the first
    layer. In a process without torch.distributed, or alone in its group, it changes nothing.
    timeout_s: longest that a rank waits in an exchange for the others, in seconds; None: as long as the daemon waits.
    pipeline: how a layer is split, so that exchanges stand beside computing, and what it keeps for backward; None: neither.
    exchange: how rows travel where ranks are on several nodes: "flat", straight; "two_hops", within the node first; "row_per_node",
    a token once to each node; "auto": what is measured to be quicker, when the first rows are sent.

    Every rank calls the same layers in one order, with tokens or without, as many times forward and backward. One object serves
    one model: its layers share the exchange.

        experts = ps.nn.StoredExperts(namespace, layer, parallel=parallel)
        model = ps.hf.from_pretrained(..., expert_parallel=ps.moe.ExpertParallel())

    What a layer gives, and the gradients, are bit for bit those of one rank with the tokens of all, one rank's after the other's.
    A mean over ranks (`attach(reduce="mean")`) is not one over tokens where ranks have different numbers of them, as with DDP.
    """

    def __init__(
        self, group: Any = None, *, timeout_s: float | None = None, pipeline: Pipeline | None = None, exchange: str = "auto"
    ) -> None:
        if group is not None and not (dist.is_available() and isinstance(group, dist.ProcessGroup)):
            raise wrong("group", group, "a group of torch.distributed, as dist.new_group() gives it")
        self._group = group
        self._timeout_s = None if timeout_s is None else seconds("timeout_s", timeout_s)
        self._pipeline = Pipeline() if pipeline is None else instance("pipeline", pipeline, Pipeline, "a ps.moe.Pipeline()")
        self._arena = HostArena(self._pipeline.host_bytes)
        self._way = choice("exchange", exchange, WAYS)
        self._exchange: Exchange | None = None
        self._choice: Choice | None = None
        self._has_met = False

    @property
    def chosen(self) -> Choice | None:
        """How rows travel, and why; None before that is known: before the first layer is there, and with "auto" on several nodes
        before the first rows are sent."""
        measured = self._exchange.chosen if isinstance(self._exchange, TwoHopExchange) else None
        return measured or self._choice

    def layer(self, source: ExpertSource, layer: int) -> ParallelLayer | None:
        """What `layer` of `source` exchanges rows by; None where this rank is alone. Every rank calls it, for each layer, in one
        order. Raises ConfigError where the namespace was opened for other ranks than the group has."""
        handle: Any = getattr(source, "namespace", source)
        if not self._has_met:
            self._exchange = self._met(handle)
            self._has_met = True
        if self._exchange is None:
            return None
        ranks, size = handle.world_size if _writes(handle) else self._exchange.world_size, self._exchange.world_size
        if ranks != size:
            raise ConfigError(
                f"expert_parallel: its group has {size} ranks, the namespace was opened for {ranks}: open it with rank= and "
                "world_size=, as ps.training.launched() gives them"
            )
        placement = Placement.in_order(source.experts, size)
        return ParallelLayer(
            self._exchange, placement, source, layer, step=partial(_step_of, handle), pipeline=self._pipeline, arena=self._arena
        )

    def _met(self, handle: Any) -> Exchange | None:
        """The exchange of all ranks; None where this one is alone. Raises StepMismatch where not all of them come in time."""
        if not dist.is_available() or not dist.is_initialized():
            return None
        timeout_s = float(handle.wait_timeout_s) if self._timeout_s is None else self._timeout_s
        limit, c10d = datetime.timedelta(seconds=timeout_s), dist.distributed_c10d
        try:
            group = self._group or dist.new_group(timeout=limit)
            if group.size() == 1:
                return None
            rows = dist.new_group(dist.get_process_group_ranks(group), timeout=limit, use_local_synchronization=True)
            store = c10d.PrefixStore(f"paramstore/moe/{group.group_name}", c10d._get_default_store())
            nodes = meet_nodes(store, self._way, rank=group.rank(), world_size=group.size(), limit=limit)
        except dist.DistError as error:
            raise StepMismatch(
                f"expert_parallel: not all ranks came to make their group within {timeout_s:g} s, as each does that makes the "
                f"model: {error}"
            ) from error
        flat = FlatExchange(group, rows, store, timeout_s=timeout_s, lost=partial(_loss_of, handle))
        exchange, self._choice = opened(self._way, flat, nodes)
        return exchange


def _writes(handle: Any) -> bool:
    return getattr(handle, "mode", "read") == "write"


def _step_of(handle: Any) -> int:
    """A number that is the same where ranks see the experts of one step: the step of a reader, the epoch of a writer."""
    step = getattr(handle, "view_step", None)
    return int(handle.epoch if step is None else step)


def _loss_of(handle: Any) -> ParamStoreError | None:
    """The daemon's word on which rank of a group of writers is gone."""
    if not _writes(handle) or handle.world_size == 1:
        return None
    try:
        handle.end_layers([])  # of all calls the one that says it at once and changes nothing
    except RankLost as error:
        return error
    except ParamStoreError:
        return None
    return None
