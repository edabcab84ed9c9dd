"""What a layer in parts takes of torch's memory, by what of it is kept for backward (`Pipeline.reuse`).

Bytes are those that torch's allocator gives between the begin of a forward and the end of its backward, of the rank with the most:
whatever the layer makes. Tokens, weights, gradients that are handed in and the process as it was are not among them; neither is
memory of the host in which activations wait, which is told apart. All of it stands beside what a formula says of the sizes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import torch

from paramstore.bench.report.rows import SUBJECT, Row, Target, judged
from paramstore.core.placement import Placement
from paramstore_bench.moe.sizes import RANKS, Batch, Sizes
from paramstore_bench.moe.task import run_by_torchrun
from paramstore_client.moe import Pipeline
from paramstore_client.moe.granularity.memory import LayerSizes, held_bytes, host_bytes, peak_bytes

TASKS, FOUND = "memory_tasks.json", "memory_found.json"
PARTS = 4
REUSES = ("S1", "S2", "S3", "S4")
HELD_TARGET = Target("ratio", "<=", 0.35)
PEAK_TARGETS = {"tokens": Target("ratio", "<=", 0.80), "experts": Target("ratio", "<=", 0.90)}
FORMULA_TARGET = Target("value", "<=", 0.10)


class MemoryTask(msgspec.Struct, frozen=True):
    """One way to run the layer."""

    sizes: Sizes
    parts: int
    split: str
    reuse: str

    @property
    def pipeline(self) -> Pipeline:
        return Pipeline(parts=self.parts, split=self.split, reuse=self.reuse)

    def __str__(self) -> str:
        return f"{self.sizes}, {self.parts} parts of {self.split}, {self.reuse}"


class MemoryFound(msgspec.Struct, frozen=True):
    """Bytes of the rank with the most. held: between forward and backward. peak: at most. arena: on the host."""

    held: int
    peak: int
    arena: int


def memory_rows(sizes: Sequence[Sizes], folder: Path) -> Iterator[Row]:
    """Makes the rows of both splits, in an empty folder: of the first sizes beside a layer that keeps all, and of each beside the
    formula. Raises StoreUnavailable where a rank ends early."""
    tasks = [
        MemoryTask(each, PARTS, split, reuse) for each in sizes for split in PEAK_TARGETS for reuse in ("keep", *REUSES)
    ]  # fmt: skip
    found = dict(zip(tasks, _found(tasks, folder), strict=True))
    for task in tasks:
        if task.sizes == sizes[0] and task.reuse != "keep":
            yield from _reuse_rows(task, found[task], found[msgspec.structs.replace(task, reuse="keep")])
    for task in tasks:
        yield from _formula_rows(task, found[task])


def formula_of(task: MemoryTask) -> MemoryFound:
    """What the formula says, of the rank with the most."""
    pipeline, ranks = task.pipeline, _layer_sizes(task.sizes)
    return MemoryFound(*(max(of(each, pipeline) for each in ranks) for of in (held_bytes, peak_bytes, host_bytes)))


def _layer_sizes(sizes: Sizes) -> list[LayerSizes]:
    """The sizes by rank, counted from all ranks' batches."""
    ids = torch.stack([Batch.draw(sizes, rank=rank, number=0).ids[0] for rank in range(RANKS)])
    counts, placement = ids.flatten().bincount(minlength=sizes.experts).tolist(), Placement.in_order(sizes.experts, RANKS)
    return [
        LayerSizes(
            tokens=sizes.tokens, rows_out=sizes.tokens * sizes.top_k,
            expert_rows=tuple(counts[expert] for expert in placement.of_rank(rank)),
            width=sizes.width, inner=sizes.inner, reads_host=True,
        )
        for rank in range(RANKS)
    ]  # fmt: skip


def _reuse_rows(task: MemoryTask, found: MemoryFound, keep: MemoryFound) -> Iterator[Row]:
    yield _row("memory between the passes", str(task), found.held, keep.held, target=HELD_TARGET, host=found.arena)
    yield _row("peak memory", str(task), found.peak, keep.peak, target=PEAK_TARGETS[task.split], host=found.arena)


def _formula_rows(task: MemoryTask, found: MemoryFound) -> Iterator[Row]:
    """Rows whose value is how far the formula is off, either way."""
    said = formula_of(task)
    for name, measured, formula in (
        ("memory between the passes", found.held, said.held),
        ("peak memory", found.peak, said.peak),
        ("memory of the host", found.arena, said.arena),
    ):
        if not measured and not formula:
            continue  # nothing waits on the host
        error = abs(formula - measured) / measured if measured else 1.0
        yield judged(
            Row(
                name=f"formula of {name}", case=str(task), subject=SUBJECT, value=error, unit="of what was measured",
                target=FORMULA_TARGET, parts={"measured_bytes": float(measured), "formula_bytes": float(formula)},
            )
        )  # fmt: skip


def _row(name: str, case: str, value: int, limit: int, *, target: Target, host: int) -> Row:
    return judged(
        Row(
            name=name, case=case, subject=SUBJECT, value=value, unit="B", against="all kept", limit=limit, ratio=value / limit,
            target=target, parts={"host_bytes": float(host)},
        )
    )  # fmt: skip


def _found(tasks: Sequence[MemoryTask], folder: Path) -> list[MemoryFound]:
    (folder / TASKS).write_bytes(msgspec.json.encode(tasks))
    run_by_torchrun("paramstore_bench.moe.memory_rank", folder)
    return msgspec.json.decode((folder / FOUND).read_bytes(), type=list[MemoryFound])
