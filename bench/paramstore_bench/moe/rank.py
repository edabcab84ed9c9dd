"""A process that is one rank of a job: under torchrun `-m paramstore_bench.moe.rank FOLDER` does the tasks that lie there, with the
others. The first rank leaves what was found beside them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist

from paramstore_bench.moe.comparing import beside_fixed_capacity, beside_one_part, beside_transformers
from paramstore_bench.moe.elastic import beside_one_task_each
from paramstore_bench.moe.found import Compared
from paramstore_bench.moe.service import through_a_daemon
from paramstore_bench.moe.sizes import Sizes
from paramstore_bench.moe.task import FOUND, TASKS, Part, Task


def found_of(task: Task) -> Compared:
    """Does a task."""
    measure: dict[Part, Callable[[Sizes], Compared]] = {
        Part.SERVICE: partial(through_a_daemon, address=task.address),
        Part.BARE: partial(beside_transformers, is_bare=True),
        Part.LOADED: partial(beside_transformers, is_bare=False),
        Part.CAPACITY: beside_fixed_capacity,
        Part.AUTO: beside_one_part,
        Part.ELASTIC: partial(beside_one_task_each, quotas=task.quotas),
    }  # fmt: skip
    return measure[task.part](task.sizes)


def main(folder: Path) -> None:
    """Does the tasks in `folder`."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    found = [found_of(task) for task in msgspec.json.decode((folder / TASKS).read_bytes(), type=list[Task])]
    if dist.get_rank() == 0:
        (folder / FOUND).write_bytes(msgspec.json.encode(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
