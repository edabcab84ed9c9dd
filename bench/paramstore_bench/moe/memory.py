"""What a layer in parts takes of torch's memory, by what of it is kept for backward (`Pipeline.reuse`).

Bytes are those that torch's allocator gives between the begin of a forward and the end of its backward, of the rank with the most:
whatever the layer makes. Tokens, weights and the process as it was are not among them; neither is memory of the host in which
activations wait, which is told apart.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from paramstore.bench.report.rows import SUBJECT, Row, Target, judged
from paramstore_bench.moe.sizes import Sizes
from paramstore_bench.moe.task import run_by_torchrun

TASKS, FOUND = "memory_tasks.json", "memory_found.json"
PARTS = 4
REUSES = ("S1", "S2", "S3", "S4")
HELD_TARGET = Target("ratio", "<=", 0.35)
PEAK_TARGETS = {"tokens": Target("ratio", "<=", 0.80), "experts": Target("ratio", "<=", 0.90)}


class MemoryTask(msgspec.Struct, frozen=True):
    """One way to run the layer."""

    sizes: Sizes
    parts: int
    split: str
    reuse: str


class MemoryFound(msgspec.Struct, frozen=True):
    """Bytes of the rank with the most. held: between forward and backward. peak: at most. arena: on the host."""

    held: int
    peak: int
    arena: int


def memory_rows(sizes: Sizes, folder: Path) -> Iterator[Row]:
    """Makes the rows of both splits; in an empty folder. Raises StoreUnavailable where a rank ends early."""
    tasks = [MemoryTask(sizes, PARTS, split, reuse) for split in PEAK_TARGETS for reuse in ("keep", *REUSES)]
    by_way = {(task.split, task.reuse): found for task, found in zip(tasks, _found(tasks, folder), strict=True)}
    for (split, reuse), found in by_way.items():
        keep, case = by_way[split, "keep"], f"{sizes}, {PARTS} parts of {split}, {reuse}"
        if reuse != "keep":
            yield _row("memory between the passes", case, found.held, keep.held, target=HELD_TARGET, host=found.arena)
            yield _row("peak memory", case, found.peak, keep.peak, target=PEAK_TARGETS[split], host=found.arena)


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
