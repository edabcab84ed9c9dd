"""Several tasks whose batches differ, on ranks that each have a share of a processor: rows spread evenly over them, as
`ps.moe.split_tasks` says, beside one task on each rank (MoESys, arXiv 2205.10034, section 4.1).

A step is a forward and a backward of a dense body and one expert-parallel layer, and the sum of the body's gradients over ranks, in
which all wait for the rank with the most rows. The experts' load is the same in both: their tokens travel.
"""

# T tokens, D model
# ruff: noqa: N806 - shape suffixes, as the legend says

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from paramstore.bench.pairs import Sample, sample_pairs
from paramstore_bench.moe.comparing import difference, gradients_of, joined, own_experts
from paramstore_bench.moe.found import Compared, check_equal
from paramstore_bench.moe.layers import Layer, Ours, experts_of
from paramstore_bench.moe.meeting import seconds_of
from paramstore_bench.moe.sizes import RANKS, Batch, Sizes
from paramstore_client.moe.balance.tasks import TaskRows, split_tasks
from paramstore_testkit.nodes.quota import Quota

BATCHES = (4, 2, 1, 1)
"""Sizes of the tasks' batches, as parts of the rows of all ranks: 512, 256, 128 and 128 of 256 rows a rank."""


def beside_one_task_each(sizes: Sizes, *, quotas: Sequence[str]) -> Compared:
    """Compares spread tasks with one on each rank. quotas: the group of each rank, which this process enters."""
    rank = dist.get_rank()
    Quota(Path(quotas[rank])).enter()
    job = Elastic(sizes, Ours(sizes, experts_of(sizes, own_experts(sizes, rank)), joined()))
    spread = split_tasks(job.batches, rank=rank, world_size=RANKS)
    alone = [TaskRows(rank, slice(0, job.batches[rank]), RANKS)]
    one, another = job.gradients(spread), job.gradients(alone)
    differences = {name: difference(one[name], another[name]) for name in one}
    check_equal(differences)
    pairs = sample_pairs(sizes.rounds, lambda _: job.sample(spread), lambda _: job.sample(alone))
    rows = {"rows_of_the_first_rank": float(sum(own.rows.stop - own.rows.start for own in spread))}
    return Compared(pairs, differences, rows)


class Elastic:
    """One rank of a job of several tasks, with the rows of all. Owner of the dense body, equal on all ranks."""

    def __init__(self, sizes: Sizes, layer: Layer) -> None:
        self.batches = tuple(part * RANKS * sizes.tokens // sum(BATCHES) for part in BATCHES)
        self._sizes, self._layer = sizes, layer
        torch.manual_seed(0)
        self._body = nn.Sequential(
            nn.Linear(sizes.width, 8 * sizes.width), nn.GELU(), nn.Linear(8 * sizes.width, sizes.width), nn.LayerNorm(sizes.width)
        )
        drawn = [Batch.draw(sizes, rank=rank, number=0) for rank in range(RANKS)]
        self._x_TD, self._grad_TD = (torch.cat([getattr(each, name) for each in drawn]) for name in ("x", "grad"))
        self._ids_TK, self._gates_TK = (torch.cat([getattr(each, name)[0] for each in drawn]) for name in ("ids", "gates"))
        self._begins = [0, *accumulate(self.batches)]

    def step(self, rows: Sequence[TaskRows]) -> Tensor:
        """Computes the gradients of these rows, and the mean over ranks of the body's, which are returned in a row."""
        places = [torch.arange(own.rows.start, own.rows.stop) + self._begins[own.task] for own in rows]
        rows_T = torch.cat([*places, torch.empty(0, dtype=torch.int64)])
        for parameter in (*self._body.parameters(), *self._layer.parameters):
            parameter.grad = None
        x_TD = self._body(self._x_TD[rows_T])
        y_TD = x_TD + self._layer(x_TD, self._ids_TK[rows_T], self._gates_TK[rows_T])
        loss_T = (y_TD * self._grad_TD[rows_T]).sum(1)
        losses = loss_T.split([len(place) for place in places]) if places else ()
        sum((own.weight * loss.mean() for own, loss in zip(rows, losses, strict=True)), 0.0 * y_TD.sum()).backward()
        dense = torch.cat([parameter.grad.flatten() for parameter in self._body.parameters() if parameter.grad is not None])
        dist.all_reduce(dense)
        return dense / RANKS

    def gradients(self, rows: Sequence[TaskRows]) -> dict[str, Tensor]:
        """The gradients of a step, by what has them."""
        return {"gradients of the body": self.step(rows), "gradients of experts": gradients_of(self._layer)}

    def sample(self, rows: Sequence[TaskRows]) -> Sample:
        """The rows that a rank computes, as the mean, and the seconds in which it does."""

        def steps() -> None:
            for _ in range(self._sizes.passes):
                self.step(rows)

        (seconds,) = seconds_of(steps)
        return Sample(self._sizes.tokens * self._sizes.passes, seconds)
