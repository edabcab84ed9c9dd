"""A process that is one rank of a job: under torchrun `-m paramstore_bench.moe.memory_rank FOLDER` does the tasks that lie there,
with the others. The first rank leaves what was found beside them.
"""

from __future__ import annotations

import datetime
import sys
import time
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path
from statistics import median

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from paramstore.testing.memory_namespace import MemoryNamespace
from paramstore_bench.moe.comparing import EXCHANGE_S
from paramstore_bench.moe.meeting import greatest
from paramstore_bench.moe.memory import FOUND, TASKS, MemoryFound, MemoryTask
from paramstore_bench.moe.sizes import Batch, Sizes, weights_of
from paramstore_client.moe.exchange import Exchange, FlatExchange
from paramstore_client.nn import StoredExperts
from paramstore_client.schemas import adamw_schema
from paramstore_testkit.training.thread_ranks import ThreadParallel

ROUNDS = 3
"""Passes whose median is taken."""
SETTLE_S = 1e-3


class SettledExchange(FlatExchange):
    """An exchange that waits a moment longer, until gloo's threads have let go of the rows: torch's profiler sees what the thread
    that it measures frees, and no other."""

    def carry_out(self, step: Callable[[datetime.timedelta], None]) -> None:
        super().carry_out(step)
        time.sleep(SETTLE_S)


def namespace_of(sizes: Sizes) -> MemoryNamespace:
    """The layer's experts, in this process."""
    shapes = {"gate_up": (2 * sizes.inner, sizes.width), "down": (sizes.width, sizes.inner)}
    made = MemoryNamespace(
        adamw_schema(shapes, param_dtype=torch.float32), layers=1, experts=sizes.experts, lease_slots=2 * sizes.experts
    )
    made.initialize(lambda key: weights_of(sizes, key[1]))
    return made


def found_of(task: MemoryTask, exchange: Exchange) -> MemoryFound:
    """Does a task."""
    batch = Batch.draw(task.sizes, rank=dist.get_rank(), number=0)
    parallel = ThreadParallel(exchange, pipeline=task.pipeline)
    namespace = namespace_of(task.sizes)
    layer = StoredExperts(namespace, 0, parallel=parallel)
    x, gates = batch.x.requires_grad_(), batch.gates[0].requires_grad_()

    def forward() -> Tensor:
        return layer(x, batch.ids[0], gates)  # type: ignore[no-any-return]

    def step() -> None:
        torch.autograd.backward(forward(), batch.grad)

    step()  # the first one makes what later ones find: groups, the arena, and the sums to which gradients are added
    held, peaks = [], []
    for _ in range(ROUNDS):
        x.grad = gates.grad = None
        held.append(changes_of(forward)[-1])
        peaks.append(max(changes_of(step)))
    return MemoryFound(*(round(greatest(found)) for found in (median(held), median(peaks), parallel.arena.size_bytes)))


def changes_of(work: Callable[[], object]) -> list[int]:
    """What torch's allocator had given, beside what it had before, after each time that it gave or took. What `work` returns lives
    until the end."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        kept = work()
    events = [event for event in profiled.profiler.kineto_results.events() if event.name() == "[memory]"]
    del kept
    return list(accumulate(event.nbytes() for event in sorted(events, key=lambda event: event.start_ns()))) or [0]


def main(folder: Path) -> None:
    """Does the tasks in `folder`."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    store = dist.distributed_c10d._get_default_store()
    exchange = SettledExchange(dist.new_group(), dist.new_group(), store, timeout_s=EXCHANGE_S, lost=lambda: None)
    found = [found_of(task, exchange) for task in msgspec.json.decode((folder / TASKS).read_bytes(), type=list[MemoryTask])]
    if dist.get_rank() == 0:
        (folder / FOUND).write_bytes(msgspec.json.encode(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
