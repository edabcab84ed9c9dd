"""Measures memory and copies: whether leased memory can be registered, and how fast bytes get to the device."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor

from paramstore.bench.context import row_of_pairs
from paramstore.bench.pairs import Sample, sample_pairs
from paramstore.bench.report.rows import SUBJECT, Row
from paramstore.memory.arena import allocate_shared, probe_pages
from paramstore.memory.shared import Mapping
from paramstore_bench.device.place import Place
from paramstore_bench.device.plan import Plan, yes_or_no
from paramstore_client.device.copier import (
    REACHED,
    REGISTER_DEFAULT,
    REGISTER_READ_ONLY,
    Copier,
    CudaCopier,
    HostCopier,
)


@contextmanager
def leased_memory(length_bytes: int) -> Iterator[Mapping]:
    """Maps memory as a client leases it: a sealed memfd of the daemon's kind, without the right to write."""
    segment = allocate_shared(length_bytes, probe_pages())
    segment.touch()
    assert segment.fd is not None
    mapping = Mapping(os.dup(segment.fd), length_bytes, is_writable=False)
    try:
        yield mapping
    finally:
        mapping.close()
        segment.close()


def measure_registration(place: Place, plan: Plan, directory: Path) -> Iterator[Row]:
    """Measures whether a process can register memory that it may only read, and how long one record's takes."""
    with place.streams():
        cudart: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]  # the library's
        for case, flags in (("cudaHostRegisterReadOnly", REGISTER_READ_ONLY), ("cudaHostRegisterDefault", REGISTER_DEFAULT)):
            with leased_memory(plan.copy_bytes) as memory:
                started_s = time.perf_counter()
                codes = [
                    int(cudart.cudaHostRegister(memory.address + start, plan.piece_bytes, flags))
                    for start in range(0, memory.length_bytes, plan.piece_bytes)
                ]
                seconds = time.perf_counter() - started_s
                note = "yes"
                for start in (number * plan.piece_bytes for number, code in enumerate(codes) if code == 0):
                    cudart.cudaHostUnregister(memory.address + start)
                if any(codes):
                    note = f"no: error {max(codes)}, {cudart.cudaGetErrorString(cudart.cudaError(max(codes)))}"
                    with suppress(RuntimeError):  # a refusal stays the last error, which the next launch reports as its own
                        torch.empty(1, device="cuda").fill_(0.0)
            yield yes_or_no(
                "register a read-only mapping of a memfd", case, is_so=not any(codes), note=note, bytes=plan.copy_bytes,
                register_s=seconds, ms_per_record=seconds * 1e3 / len(codes), record_bytes=plan.piece_bytes,
            )  # fmt: skip


def measure_overlap(place: Place, plan: Plan, directory: Path) -> Iterator[Row]:
    """Measures copies of pinned memory each way, beside compute and alone; and what they cost the compute."""
    host = place.pinned(plan.copy_bytes)
    slots = torch.empty(plan.copy_bytes, dtype=torch.uint8, device=place.device)
    factor = torch.randn(plan.matmul_size, plan.matmul_size, dtype=torch.bfloat16, device=place.device)
    product = torch.empty_like(factor)
    in_other_stream = place.other_stream()
    note = "nothing goes on beside anything here" if place.is_twin else ""

    def compute() -> None:
        for _ in range(plan.matmuls):
            torch.mm(factor, factor, out=product)

    def compute_beside() -> None:
        with in_other_stream():
            compute()

    def copy_beside() -> None:
        with in_other_stream():
            for _ in range(plan.copies):
                slots.copy_(host, non_blocking=True)

    def pairs_of(work: float, launch: Callable[[], object], beside: Callable[[], object]) -> Any:
        return sample_pairs(
            plan.rounds, lambda _: place.timed(work, launch, beside=beside), lambda _: place.timed(work, launch)
        )  # fmt: skip

    for name, copy in (
        ("copy to the device", lambda: slots.copy_(host, non_blocking=True)),
        ("copy to the host", lambda: host.copy_(slots, non_blocking=True)),
    ):
        pairs = pairs_of(plan.copy_bytes, copy, compute_beside)
        row = row_of_pairs(
            pairs, name=name, case="pinned, while it computes", subject=SUBJECT, record_bytes=plan.copy_bytes, against="alone"
        )
        yield msgspec.structs.replace(row, note=note)
    pairs = pairs_of(2.0 * plan.matmul_size**3 * plan.matmuls, compute, copy_beside)
    yield Row(
        name="matmul, bf16", case="while experts come in", subject=SUBJECT, value=pairs.rate / 1e12, unit="TFLOP/s",
        against="alone", limit=pairs.limit_rate / 1e12, ratio=pairs.ratio, ratio_min=pairs.ratio_min,
        ratio_max=pairs.ratio_max, parts=pairs.parts(), note=note,
    )  # fmt: skip


def measure_tier_copies(place: Place, plan: Plan, directory: Path) -> Iterator[Row]:
    """Measures copies of experts out of leased memory, as the tier makes them, beside one copy of memory that torch pinned."""
    pinned = place.pinned(plan.copy_bytes)
    slots = torch.empty(plan.copy_bytes, dtype=torch.uint8, device=place.device)
    with leased_memory(plan.copy_bytes) as memory:
        experts = torch.frombuffer(memory.buffer, dtype=torch.uint8).split(plan.piece_bytes)  # type: ignore[no-untyped-call]  # the library's
        for copier in copiers(place, plan):
            pairs = sample_pairs(
                plan.rounds,
                lambda _, copier=copier, experts=experts: copy_experts(copier, slots.split(plan.piece_bytes), experts),  # type: ignore[misc,no-untyped-call]  # a default in a lambda
                lambda _: place.timed(plan.copy_bytes, lambda: slots.copy_(pinned, non_blocking=True)),
            )
            how = copier.describe()
            copier.close()
            row = row_of_pairs(
                pairs, name="copy to the device", case=f"as the tier does, {how.partition(':')[0]}", subject=SUBJECT,
                record_bytes=plan.piece_bytes, against="pinned by torch, at once",
            )  # fmt: skip
            yield msgspec.structs.replace(row, note=how)
        del experts, pairs  # the memory is unmapped once nothing refers to it


def copiers(place: Place, plan: Plan) -> Iterator[Copier]:
    """Yields each kind of copier: registered memory, and bounce buffers."""
    if place.is_twin:
        yield HostCopier()
        return
    for may_register in (True, False):
        yield CudaCopier(place.device, bounce_bytes=plan.piece_bytes, may_register=may_register)


def copy_experts(copier: Copier, targets: Sequence[Tensor], sources: Sequence[Tensor]) -> Sample:
    """Copies one expert after the other, as a miss of several experts does, until the last is there."""
    started_s = time.perf_counter()
    mark = [copier.copy([pair], after=REACHED) for pair in zip(targets, sources, strict=True)][-1]
    mark.wait_on_host()
    return Sample(sum(source.nbytes for source in sources), time.perf_counter() - started_s)
