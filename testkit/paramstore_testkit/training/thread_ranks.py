"""Ranks of a job as threads of one process, which exchange through real groups of gloo: a fake of processes alone."""

from __future__ import annotations

import datetime
import threading
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch.distributed import distributed_c10d

from paramstore.core.placement import Placement
from paramstore.errors import ParamStoreError
from paramstore_client.moe.exchange import Exchange, FlatExchange
from paramstore_client.moe.granularity.search import Search
from paramstore_client.moe.host_arena import HostArena
from paramstore_client.moe.parallel_layer import ParallelLayer
from paramstore_client.moe.pipeline_plan import Pipeline, PipelineSearch

T = TypeVar("T")

GIVE_UP_S = 60.0
GROUP_S = 12.0
"""Longest that a group waits in a call by itself. A call that one rank left is under way as long, and whoever collects its group
stands still until then: a rank of a later test, which waits longer."""


class ThreadParallel:
    """What `ExpertParallel` is to a model, of one rank among threads. placement: of every layer; None: in order. Owner of the
    layers that were made last."""

    def __init__(
        self, exchange: Exchange, placement: Placement | None = None, pipeline: Pipeline | PipelineSearch | None = None
    ) -> None:
        self.exchange = exchange
        self.placement = placement
        self.pipeline = Search(pipeline) if isinstance(pipeline, PipelineSearch) else pipeline or Pipeline()
        self.arena = HostArena(self.pipeline.host_bytes)
        self.layers: dict[int, ParallelLayer] = {}
        self.table_count = 0

    @property
    def ranks(self) -> tuple[int, int]:
        return self.exchange.rank, self.exchange.world_size

    def meet(self) -> Exchange:
        return self.exchange

    def mesh(self, device_type: str) -> None:
        """None: threads are no ranks of torch's, so their tables stay what each has."""

    def layer(self, source: Any, layer: int) -> ParallelLayer | None:
        placement = self.placement or Placement.in_order(source.experts, self.exchange.world_size)
        made = self.layers[layer] = ParallelLayer(
            self.exchange, placement, source, layer, step=lambda: 0, pipeline=self.pipeline, arena=self.arena
        )
        return made


def run_ranks(
    count: int, rank: Callable[[FlatExchange], T], *, timeout_s: float = 30.0,
    lost: Callable[[], ParamStoreError | None] = lambda: None,
) -> list[T | BaseException]:  # fmt: skip
    """Calls `rank` in a thread for each of `count` ranks, with its exchange; gives what each returned or raised, by rank."""
    store = torch.distributed.HashStore()  # type: ignore[attr-defined]  # torch's stubs lack it
    results: list[Any] = [TimeoutError(f"not done within {GIVE_UP_S} s")] * count

    def run(number: int) -> None:
        try:
            limit = datetime.timedelta(seconds=GROUP_S)
            messages, rows = (
                distributed_c10d.ProcessGroupGloo(distributed_c10d.PrefixStore(name, store), number, count, limit)
                for name in ("messages", "rows")
            )
            roll = distributed_c10d.PrefixStore("roll", store)
            results[number] = rank(FlatExchange(messages, rows, roll, timeout_s=timeout_s, lost=lost))
        except BaseException as error:  # noqa: BLE001 - handed to the test
            results[number] = error

    threads = [threading.Thread(target=run, args=(number,), daemon=True) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(GIVE_UP_S)
    return results


def of_all(results: list[T | BaseException]) -> list[T]:
    """The results of ranks none of which raised; raises the first error else."""
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results  # type: ignore[return-value]  # none is an error
