"""Measures the update of `apply` without the service: the same function and kinds of memory, a thread a core, in this process.

The service costs the step from this row to that of `apply`; the update costs the step from torch's row to this one. With
fp32 params it must move 36 bytes a parameter where torch moves 28: the new `param` version is written too, and a
store to memory reads the line first.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from queue import SimpleQueue

import torch

from paramstore.bench.context import GIGA, Bench
from paramstore.bench.limits.torch_adamw import TorchAdamW
from paramstore.bench.pairs import Sample, sample_pairs
from paramstore.bench.report.rows import SUBJECT, Row
from paramstore.bench.service.experts import adamw_schema
from paramstore.clock import Clock
from paramstore.core.optimizers import AdamW
from paramstore.core.schema import Schema, dtype_name
from paramstore.memory.arena import Segment, allocate_private, allocate_shared, allocate_upload, probe_pages
from paramstore.optim.tensors import flat_tensor
from paramstore.optim.update import update

MEGA = 1e6
WARM_UP_ROUNDS = 2
SEGMENT_ALIGNMENT_BYTES = 2 << 20


@dataclass(frozen=True, slots=True)
class Work:
    """Kind of a record's update: with gradients of how many ranks, which factor on them, and how many missed steps before it."""

    ranks: int = 1
    grad_scale: float = 1.0
    missed: int = 0


class UpdateAlone:
    """Owner of the memory of `record_count` records: images, gradients and params, as the daemon keeps them."""

    def __init__(self, schema: Schema, record_count: int, *, threads: int, clock: Clock, work: Work | None = None) -> None:
        pages = probe_pages()
        self._schema = schema
        self._count = record_count
        self._threads = threads
        self._clock = clock
        self._work_of_one = work if work is not None else Work()
        sizes = (schema.record_bytes, schema.part("param").image_bytes, schema.gradient_bytes)
        allocators = (allocate_private, allocate_shared, allocate_upload)
        self._segments: list[Segment] = []
        self._cells: list[list[memoryview]] = []
        for cell_bytes, allocate in zip(sizes, allocators, strict=True):
            length_bytes = -(-record_count * cell_bytes // SEGMENT_ALIGNMENT_BYTES) * SEGMENT_ALIGNMENT_BYTES
            segment = allocate(length_bytes, pages)
            segment.touch()
            self._segments.append(segment)
            self._cells.append([segment.view(index * cell_bytes, cell_bytes) for index in range(record_count)])
        for gradient in self._cells[2]:
            flat_tensor(gradient, schema.gradient_fields()[0].dtype).normal_()

    def step(self) -> Sample:
        """Updates every record once, its new param included."""
        waiting: SimpleQueue[int | None] = SimpleQueue()
        for index in (*range(self._count), *([None] * self._threads)):
            waiting.put(index)
        threads = [threading.Thread(target=self._work, args=(waiting.get,)) for _ in range(self._threads)]
        started_s = self._clock.now_s()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        elements = sum(field.elements for field in self._schema.gradient_fields())
        return Sample(self._count * elements, self._clock.now_s() - started_s)

    def _work(self, next_index: Callable[[], int | None]) -> None:
        images, params, gradients = self._cells
        work, options = self._work_of_one, AdamW(lr=1e-4)
        while (index := next_index()) is not None:
            ranks = [gradients[(index + rank) % self._count] for rank in range(work.ranks)]
            update(
                self._schema, images[index], ranks, options=options, optimizer_step=1 + work.missed, grad_scale=work.grad_scale,
                missed=(options,) * work.missed, param=params[index],
            )  # fmt: skip

    def close(self) -> None:
        self._cells.clear()
        for segment in self._segments:
            segment.close()


def measure_update_alone(bench: Bench, param_dtype: torch.dtype) -> Row:
    """Measures the row beside torch's, in pairs as `apply`'s is. It has no target of its own."""
    schema = adamw_schema(bench.plan.expert_size, param_dtype)
    count, threads = bench.plan.apply_records, len(os.sched_getaffinity(0))
    bench.tell(f"the update alone, {dtype_name(param_dtype)}")
    alone = UpdateAlone(schema, count, threads=threads, clock=bench.clock)
    field_elements = tuple(field.elements for field in schema.gradient_fields())
    peer = TorchAdamW(record_count=count, field_elements=field_elements, threads=threads)
    try:
        pairs = sample_pairs(
            bench.plan.apply_rounds, lambda _: alone.step(), lambda _: peer.step(), warm_up_rounds=WARM_UP_ROUNDS
        )
    finally:
        peer.close()
        alone.close()
    moved_bytes = sum(field.length_bytes for field in schema.stored.fields) * 2 + schema.gradient_bytes
    moved_bytes += 2 * schema.part("param").image_bytes
    return Row(
        name="apply", case=f"the update alone, {dtype_name(param_dtype)}", subject=f"{SUBJECT}, no service",
        record_bytes=schema.record_bytes, unit="M parameters/s", value=pairs.rate / MEGA, limit=pairs.limit_rate / MEGA,
        against="torch.optim.AdamW(fused=True), fp32, in one process",
        ratio=pairs.ratio, ratio_min=pairs.ratio_min, ratio_max=pairs.ratio_max,
        parts={**pairs.parts(), "memory_gb_per_s": moved_bytes / sum(field_elements) * pairs.rate / GIGA},
    )  # fmt: skip
