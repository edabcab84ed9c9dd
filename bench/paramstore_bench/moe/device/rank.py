"""A process that is one rank of a job on a device: under torchrun `-m paramstore_bench.moe.device.rank FOLDER` does the task that
lies there, with the others. The first rank leaves what was found beside it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist

from paramstore.bench.pairs import Sample, sample_pairs
from paramstore_bench.moe.comparing import NAMES, difference, joined, passed, run
from paramstore_bench.moe.device.rows import FOUND, TASKS, DeviceFound, DeviceTask
from paramstore_bench.moe.found import check_equal
from paramstore_bench.moe.layers import Ours, experts_of
from paramstore_bench.moe.meeting import greatest, seconds_of
from paramstore_bench.moe.memory_rank import changes_of
from paramstore_bench.moe.sizes import Batch
from paramstore_client.moe import Pipeline


def found_of(task: DeviceTask, device: torch.device) -> list[DeviceFound]:
    """Does a task. Raises StepMismatch where a pipeline gives more than rounding else than one part."""
    exchange, sizes = joined(), task.sizes
    rank, ranks = exchange.rank, exchange.world_size
    held = sizes.experts // ranks
    module = experts_of(sizes, range(rank * held, (rank + 1) * held)).to(device)
    batch = Batch.draw(sizes, rank=rank, number=0).to(device)
    plain = Ours(sizes, module, exchange)
    found = []
    for parts, split, reuse in task.pipelines:
        layer = Ours(sizes, module, exchange, Pipeline(parts, split, reuse))
        both = zip(NAMES, passed(layer, batch), passed(plain, batch), strict=True)
        check_equal({name: greatest(difference(one, another)) for name, one, another in both})
        pairs = sample_pairs(sizes.rounds, *(partial(_sample, each, batch, ranks) for each in (layer, plain)))
        used = [round(greatest(value)) for each in (layer, plain) for value in _bytes(each, batch)]
        found.append(DeviceFound(pairs, *used))
    return found


def _sample(layer: Ours, batch: Batch, ranks: int, _: int) -> Sample:
    def pass_both() -> None:
        run(layer, batch)
        if batch.x.is_cuda:
            torch.cuda.synchronize()

    (seconds,) = seconds_of(pass_both)
    return Sample(ranks * len(batch.x), seconds)


def _bytes(layer: Ours, batch: Batch) -> tuple[int, int]:
    """Bytes held between the passes, and at most, beside what there was before."""
    x, gates = batch.x.detach().requires_grad_(), batch.gates[0].detach().requires_grad_()
    for parameter in layer.parameters:
        parameter.grad = None

    def forward() -> torch.Tensor:
        return layer(x, batch.ids[0], gates)

    def step() -> None:
        torch.autograd.backward(forward(), batch.grad)

    return _changes(forward, batch.x.device)[0], _changes(step, batch.x.device)[1]


def _changes(work: Callable[[], object], device: torch.device) -> tuple[int, int]:
    """What `work` leaves allocated while its result lives, and the most that it takes."""
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before_bytes = torch.cuda.memory_allocated()
        kept = work()
        torch.cuda.synchronize()
        left, most = torch.cuda.memory_allocated() - before_bytes, torch.cuda.max_memory_allocated() - before_bytes
        del kept
        return left, most
    changes = changes_of(work)
    return changes[-1], max(changes)


def main(folder: Path) -> None:
    """Does the task in `folder`."""
    torch.set_num_threads(1)
    task = msgspec.json.decode((folder / TASKS).read_bytes(), type=DeviceTask)
    device = torch.device(task.device)
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
    found = found_of(task, device)
    if dist.get_rank() == 0:
        (folder / FOUND).write_bytes(msgspec.json.encode(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
