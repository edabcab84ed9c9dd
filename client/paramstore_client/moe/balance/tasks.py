"""Which rows of which task's batch a rank computes, and how much they weigh: elastic training of several tasks of different size.

MoESys (arXiv 2205.10034, section 4.1): a task with a large batch has several ranks, small ones share one, as otherwise all wait at
each exchange for the rank with the largest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from paramstore.core.arguments import indices, whole_number
from paramstore.core.balancing import plan_tasks


@dataclass(frozen=True, slots=True)
class TaskRows:
    """The rows of one task's batch that one rank computes.

    task: its place among the batches. rows: of the batch. weight: what the mean loss over these rows is multiplied by. The mean
    over ranks of the gradients, as DDP takes it and `attach(reduce="mean")`, is then that of the sum over tasks of the mean loss
    over a task's whole batch.
    """

    task: int
    rows: slice
    weight: float


def split_tasks(batches: Sequence[int], *, rank: int, world_size: int) -> list[TaskRows]:
    """Says which rows of which tasks `rank` computes: of all ranks together each row of each task once, as even as can be; by task.

    batches: the rows of each task's batch, 1 or more, the same on every rank. With few rows some ranks have none, and take part in
    exchanges without tokens. Raises ConfigError.

        mine = ps.moe.split_tasks((512, 256, 128, 128), rank=rank, world_size=world_size)
        y = model(torch.cat([batch_of(own.task)[own.rows] for own in mine]))
        parts = y.split([own.rows.stop - own.rows.start for own in mine])
        sum(own.weight * loss_of(own, part) for own, part in zip(mine, parts)).backward()

    One forward and one backward a step, on every rank: DDP and expert-parallel layers exchange something in each.
    """
    sizes = indices("batches", batches)
    world_size = whole_number("world_size", world_size, least=1)
    rank = whole_number("rank", rank, most=world_size - 1)
    found = []
    for task, plan in enumerate(plan_tasks(sizes, world_size)):
        if rank in plan:
            begin = sum(rows for other, rows in plan.items() if other < rank)
            found.append(TaskRows(task, slice(begin, begin + plan[rank]), world_size * plan[rank] / sizes[task]))
    return found
