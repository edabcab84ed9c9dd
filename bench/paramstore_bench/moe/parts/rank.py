"""A process that is one rank of a job on a node: `-m paramstore_bench.moe.parts.rank FOLDER` does the task that lies there, with
the others. The first rank leaves what was found beside it.
"""

# T tokens, N rows, D model
# ruff: noqa: N803, N806 - shape suffixes, as the legend says

from __future__ import annotations

import sys
import time
from functools import partial
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

from paramstore.bench.pairs import Sample, sample_pairs
from paramstore.core.placement import Placement
from paramstore.errors import StepMismatch
from paramstore_bench.moe.comparing import MOST_CALLS, joined
from paramstore_bench.moe.meeting import greatest, seconds_of
from paramstore_bench.moe.parts.task import COUNTS, FOUND, TASKS, PartsFound, PartsRun, PartsTask
from paramstore_bench.moe.sizes import RANKS, Batch
from paramstore_client.moe import Pipeline, PipelineSearch
from paramstore_client.moe.exchange import FlatExchange
from paramstore_client.moe.granularity.probe import measured
from paramstore_client.moe.granularity.search import Search
from paramstore_client.moe.granularity.trial import PipelineChoice
from paramstore_client.moe.parallel_layer import ParallelLayer
from paramstore_client.moe.pipeline_plan import SPLITS
from paramstore_client.nn.routing import Block, Taken
from paramstore_client.source import ExpertSource


class Sleeping:
    """A layer whose experts give back what they get, after a while."""

    def __init__(self, task: PartsTask, exchange: FlatExchange, pipeline: Pipeline | Search) -> None:
        resident = cast(ExpertSource, SimpleNamespace(lease_slots=0, prefetch=lambda keys: None))
        placement = Placement.in_order(task.sizes.experts, RANKS)
        self._layer = ParallelLayer(exchange, placement, resident, 0, step=lambda: 0, pipeline=pipeline)
        self._row_s = task.row_us / 1e6
        batch = Batch.draw(task.sizes, rank=dist.get_rank(), number=0)
        ids_N = batch.ids[0].flatten()
        order_N = ids_N.argsort(stable=True)
        self._x_TD, self._taken = batch.x, Taken(order_N // task.sizes.top_k, order_N[:, None], in_turn=False)
        self._counts_E = ids_N.bincount(minlength=task.sizes.experts)

    def run(self, *, does_compute: bool = True) -> Tensor:
        """One forward."""

        def local(blocks: tuple[Block, ...], x_MD: Tensor, *_: Any) -> Tensor:
            if does_compute:
                time.sleep(self._row_s * len(x_MD))
            return x_MD

        with torch.no_grad():
            return self._layer.run(self._x_TD, self._taken, self._counts_E, top_k=1, local=local, anchor=None)

    @property
    def rows(self) -> Tensor:
        """What comes back."""
        return self._x_TD.index_select(0, self._taken.token_N)


def found_of(task: PartsTask) -> PartsRun:
    """Does a task. Raises StepMismatch where other rows come back than were sent."""
    exchange = joined()
    one = Sleeping(task, exchange, Pipeline())
    exchange_s = median(seconds_of(*[partial(one.run, does_compute=False)] * task.rounds))
    held = Placement.in_order(task.sizes.experts, RANKS).of_rank(dist.get_rank())
    all_ids = [Batch.draw(task.sizes, rank=rank, number=0).ids[0] for rank in range(RANKS)]
    compute_s = greatest(float(sum(torch.isin(ids, torch.tensor(held)).sum() for ids in all_ids)) * task.row_us / 1e6)
    found = []
    for split in SPLITS:
        choice = _choice(task, exchange, split)
        expected_s = {each.pipeline.parts: each.seconds for each in choice.estimates}
        for parts in COUNTS:
            layer = Sleeping(task, exchange, Pipeline(parts=parts, split=split))
            if not torch.equal(layer.run(), layer.rows):
                raise StepMismatch(f"{parts} parts of {split}: other rows came back")
            pairs = sample_pairs(task.rounds, partial(_sample, task, layer), partial(_sample, task, one))
            found.append(PartsFound(split, parts, pairs, expected_s[parts], choice.pipeline.parts == parts))
    sizes_bytes = [len(one.rows) * task.sizes.row_bytes // (1 << power) for power in range(5)]
    return PartsRun(found, exchange_s, compute_s, list(measured(exchange, sizes_bytes, torch.device("cpu")).points))


def _choice(task: PartsTask, exchange: FlatExchange, split: str) -> PipelineChoice:
    """What a search among parts of one kind finds. Raises StepMismatch where it finds nothing."""
    search = Search(PipelineSearch(splits=(split,), most_parts=max(COUNTS)))
    layer = Sleeping(task, exchange, search)
    for _ in range(MOST_CALLS):
        layer.run()
        if search.choices:
            return search.choices[0]
    raise StepMismatch(f"parts of {split}: nothing was chosen in {MOST_CALLS} calls")


def _sample(task: PartsTask, layer: Sleeping, _: int) -> Sample:
    (seconds,) = seconds_of(layer.run)
    return Sample(task.sizes.tokens * task.sizes.top_k * RANKS, seconds)


def main(folder: Path) -> None:
    """Does the task in `folder`."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    found = found_of(msgspec.json.decode((folder / TASKS).read_bytes(), type=PartsTask))
    if dist.get_rank() == 0:
        (folder / FOUND).write_bytes(msgspec.json.encode(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
