"""The argument by which a user asks for expert parallelism: the ranks of a job compute each only the experts placed on them."""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch.distributed as dist

from paramstore.core.arguments import choice, seconds, whole_number, wrong
from paramstore.core.balancing import Choice
from paramstore.core.placement import Placement
from paramstore.errors import ConfigError, ParamStoreError, RankLost, StepMismatch
from paramstore_client.moe.exchange import Exchange, FlatExchange
from paramstore_client.moe.granularity.search import Search
from paramstore_client.moe.granularity.trial import PipelineChoice
from paramstore_client.moe.hops.choice import WAYS, ExchangeChoice
from paramstore_client.moe.hops.opening import meet_nodes, opened
from paramstore_client.moe.hops.two_hops import TwoHopExchange
from paramstore_client.moe.host_arena import HostArena
from paramstore_client.moe.parallel_layer import ParallelLayer
from paramstore_client.moe.pipeline_plan import Pipeline, PipelineSearch
from paramstore_client.moe.placing import check_fits, place, rebalance
from paramstore_client.source import ExpertSource

WAIT_S = 60.0
"""Longest that ranks wait for each other where no daemon says how long it waits, in seconds."""


class ExpertParallel:
    """Lets the ranks of a job share the experts of each layer: tokens travel to the rank that computes their expert, and what it
    gives back, by all-to-alls whose sizes are what the tokens ask for; no token is dropped, and none is padded. Each rank leases,
    and pushes gradients of, its own experts alone.

    group: a group of torch.distributed whose ranks take part, used by nothing else; None: one of all ranks is made, by the first
    layer. In a process without torch.distributed, or alone in its group, it changes nothing.
    placement: which ranks compute each expert: a `Placement` of all layers, or one for each layer by its index; of layers that it
    does not name, and for None, the experts lie in order: each rank has a run of consecutive ones.
    timeout_s: longest that a rank waits in an exchange for the others, in seconds; None: as the daemon; without one 60.
    pipeline: how a layer is split, so that exchanges stand beside computing, and what it keeps for backward: a `Pipeline`; a
    `PipelineSearch`, or "auto" for one with its defaults: what is quickest by the clock; None: neither.
    exchange: how rows travel where ranks are on several nodes: "flat", straight; "two_hops", within the node first; "row_per_node",
    a token once to each node; "auto": what is measured to be quicker, when the first rows are sent.

    Every rank calls the same layers in one order, with tokens or without, as many times forward and backward. One object serves
    one model: its layers share the exchange.

        experts = ps.nn.StoredExperts(namespace, layer, parallel=parallel)
        model = ps.hf.from_pretrained(..., expert_parallel=ps.moe.ExpertParallel())

    What a layer gives, and the gradients, are bit for bit those of one rank with the tokens of all, one rank's after the other's,
    wherever each expert lies; those of an expert with several ranks but for rounding. A mean over ranks
    (`attach(reduce="mean")`) is not one over tokens where ranks have different numbers of them, as with DDP.
    """

    def __init__(
        self, group: Any = None, *, placement: Placement | Mapping[int, Placement] | None = None, timeout_s: float | None = None,
        pipeline: Pipeline | PipelineSearch | str | None = None, exchange: str = "auto",
    ) -> None:  # fmt: skip
        if group is not None and not (dist.is_available() and isinstance(group, dist.ProcessGroup)):
            raise wrong("group", group, "a group of torch.distributed, as dist.new_group() gives it")
        self._group = group
        self._timeout_s = None if timeout_s is None else seconds("timeout_s", timeout_s)
        self._placement = placement if placement is None else _checked(placement)
        self._layers: dict[int, ParallelLayer] = {}
        given = _pipeline_of(pipeline)
        self._pipeline = Search(given) if isinstance(given, PipelineSearch) else given
        self._arena = HostArena(self._pipeline.host_bytes)
        self._way = choice("exchange", exchange, WAYS)
        self._exchange: Exchange | None = None
        self._choice: ExchangeChoice | None = None
        self._has_met = False
        self._handle: Any = None
        """Of the namespace whose daemon knows which rank is gone; None where there are only tables."""
        self.table_count = 0

    @property
    def chosen(self) -> ExchangeChoice | None:
        """How rows travel, and why; None before that is known: before the first layer is there, and with "auto" on several nodes
        before the first rows are sent."""
        measured = self._exchange.chosen if isinstance(self._exchange, TwoHopExchange) else None
        return measured or self._choice

    @property
    def pipelines(self) -> tuple[PipelineChoice, ...]:
        """The pipelines that were chosen by search, each for a number of rows, and why; the same on all ranks."""
        return self._pipeline.choices if isinstance(self._pipeline, Search) else ()

    def layer(self, source: ExpertSource, layer: int) -> ParallelLayer | None:
        """What `layer` of `source` exchanges rows by; None where this rank is alone. Every rank calls it, for each layer, in one
        order. Raises ConfigError where the namespace was opened for other ranks than the group has."""
        handle: Any = getattr(source, "namespace", source)
        self._handle = handle
        exchange = self.meet()
        if exchange is None:
            return None
        ranks, size = handle.world_size if _writes(handle) else exchange.world_size, exchange.world_size
        if ranks != size:
            raise ConfigError(
                f"expert_parallel: its group has {size} ranks, the namespace was opened for {ranks}: open it with rank= and "
                "world_size=, as ps.training.launched() gives them"
            )
        placed = self._placement_of(layer) or Placement.in_order(source.experts, size)
        check_fits(placed, layer, experts=source.experts, world_size=size)
        made = self._layers[layer] = ParallelLayer(
            exchange, placed, source, layer, step=partial(_step_of, handle), pipeline=self._pipeline, arena=self._arena
        )
        return made

    def _placement_of(self, layer: int) -> Placement | None:
        """Where the experts of a layer lie, if anybody has said so."""
        if layer in self._layers:
            return self._layers[layer].placement
        return self._placement.get(layer) if isinstance(self._placement, dict) else self._placement

    def place(self, placement: Placement | Mapping[int, Placement]) -> None:
        """Places experts anew: each layer's lie as `placement` says from the next forward on, those of layers that it does not name
        as they did. All ranks call it, between the same two steps; nothing is copied.

        Raises on all ranks alike, and nothing has changed: StepMismatch where a forward awaits its backward, and where ranks name
        different placements; ConfigError for one that does not fit. In a process that is alone it changes nothing.
        """
        checked = _checked(placement)
        self._check_placeable()
        if self._exchange is not None:
            each = dict.fromkeys(self._layers, checked) if isinstance(checked, Placement) else checked
            place(self._exchange, self._layers, each)

    def rebalance(self) -> dict[int, Choice]:
        """Places experts so that tokens like those of late are spread evenly over ranks. For each layer a placement is chosen by
        the tokens of all ranks in its last 64 forwards: it is fitted to the first half, and judged on the second beside the present
        one, which stays where none is better.

        Gives each layer's choice, the same on all ranks; none in a process that is alone. All ranks call it, as `place`, and it
        raises what that raises.
        """
        self._check_placeable()
        return {} if self._exchange is None else rebalance(self._exchange, self._layers)

    def _check_placeable(self) -> None:
        """Raises ConfigError among several ranks before there is a layer."""
        if not self._layers and self.ranks[1] > 1:
            raise ConfigError("no layer has this ExpertParallel yet, so there is nothing to place: give it placement=, or wait")

    @property
    def ranks(self) -> tuple[int, int]:
        """This rank's number, and how many take part."""
        return (dist.get_rank(self._group), dist.get_world_size(self._group)) if _is_job() else (0, 1)

    def meet(self) -> Exchange | None:
        """The exchange of all ranks, which the first call makes; None where this one is alone. Raises StepMismatch where not all
        of them come in time."""
        if not self._has_met:
            self._exchange = self._met()
            self._has_met = True
        return self._exchange

    def mesh(self, device_type: str) -> Any:
        """The ranks as a mesh of torch's; None where this one is alone."""
        if self.ranks[1] == 1:
            return None
        from torch.distributed.device_mesh import DeviceMesh

        group: Any = self._group or dist.group.WORLD
        return DeviceMesh.from_group(group, device_type)

    def __deepcopy__(self, memo: dict[int, Any]) -> ExpertParallel:
        """Returns itself: a copy of a module shares the exchange."""
        return self

    def _met(self) -> Exchange | None:
        if not _is_job():
            return None
        timeout_s = self._timeout_s
        if timeout_s is None:
            timeout_s = WAIT_S if self._handle is None else float(self._handle.wait_timeout_s)
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
        flat = FlatExchange(group, rows, store, timeout_s=timeout_s, lost=lambda: _loss_of(self._handle))
        exchange, self._choice = opened(self._way, flat, nodes)
        return exchange


def _is_job() -> bool:
    return dist.is_available() and dist.is_initialized()


def _pipeline_of(given: object) -> Pipeline | PipelineSearch:
    """The argument `pipeline`."""
    if given is None:
        return Pipeline()
    if isinstance(given, Pipeline | PipelineSearch):
        return given
    if isinstance(given, str) and given == "auto":
        return PipelineSearch()
    raise wrong("pipeline", given, "a ps.moe.Pipeline(), a ps.moe.PipelineSearch(), or 'auto'")


def _checked(placement: object) -> Placement | dict[int, Placement]:
    """The argument, its layers as plain numbers."""
    if isinstance(placement, Placement):
        return placement
    if isinstance(placement, Mapping) and all(isinstance(each, Placement) for each in placement.values()):
        return {whole_number("layer of placement", layer): each for layer, each in placement.items()}
    raise wrong("placement", placement, "a ps.moe.Placement, or one for each layer by its index")


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
