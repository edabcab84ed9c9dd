"""Measures memory and copies for `bench_device.py`: whether leased memory can be pinned, and how fast bytes get to the device."""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor

from device_plan import MIB, Plan, absent
from paramstore.bench.context import row_of_pairs
from paramstore.bench.pairs import Sample, sample_pairs
from paramstore.bench.report.rows import SUBJECT, Row
from paramstore.clock import Clock
from paramstore.memory.arena import allocate_shared, probe_pages
from paramstore.memory.shared import Mapping
from paramstore_client.device.copier import REACHED, REGISTER_DEFAULT, REGISTER_READ_ONLY, CudaCopier

PIECE_BYTES = 8 * MIB
"""Size of an expert, which is what the tier copies at a time."""
MATMUL_SIZE, MATMUL_COUNT = 4096, 150
"""Size and number of matmuls, of 137 GFLOP each, that take longer than one timed copy."""
COPY_COUNT = 24
"""Number of copies that take longer than the matmuls."""


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


def measure_pinning(plan: Plan, device: torch.device, clock: Clock) -> list[Row]:
    """Measures whether a process can pin memory that it may only read."""
    cudart: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]  # the library's
    rows = []
    for case, flags in (("cudaHostRegisterReadOnly", REGISTER_READ_ONLY), ("cudaHostRegisterDefault", REGISTER_DEFAULT)):
        with leased_memory(plan.copy_bytes) as memory:
            started_s = clock.now_s()
            code = cudart.cudaHostRegister(memory.address, memory.length_bytes, flags)
            seconds = clock.now_s() - started_s
            if int(code) == 0:
                note = "yes"
                cudart.cudaHostUnregister(memory.address)
            else:
                note = f"no: error {int(code)}, {cudart.cudaGetErrorString(code)}"
                with suppress(RuntimeError):  # a refusal stays the last error, which the next launch reports as its own
                    torch.empty(1, device=device).fill_(0.0)
        rows.append(
            Row(
                name="pin a read-only mapping of a memfd", case=case, subject=SUBJECT, value=float(int(code) == 0),
                unit="(1 is yes)", parts={"register_s": seconds, "bytes": plan.copy_bytes}, note=note,
            )
        )  # fmt: skip
    return rows


def timed(work: float, launch: Callable[[], object], *, beside: Callable[[], object] | None = None) -> Sample:
    """Times `launch` on the current stream, by the device's clock. beside: gives work to another stream, just before."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # the library's
    torch.cuda.synchronize()
    if beside is not None:
        beside()
    start.record()
    launch()
    end.record()
    end.synchronize()
    return Sample(work, start.elapsed_time(end) / 1000)


def measure_overlap(plan: Plan, device: torch.device) -> list[Row]:
    """Measures copies of pinned memory each way, beside compute and alone; and what they cost the compute."""
    host = torch.empty(plan.copy_bytes, dtype=torch.uint8, pin_memory=True)
    slots = torch.empty(plan.copy_bytes, dtype=torch.uint8, device=device)
    factor = torch.randn(MATMUL_SIZE, MATMUL_SIZE, dtype=torch.bfloat16, device=device)
    product = torch.empty_like(factor)
    other_stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # the library's

    def compute() -> None:
        for _ in range(MATMUL_COUNT):
            torch.mm(factor, factor, out=product)

    def compute_beside() -> None:
        with torch.cuda.stream(other_stream):
            compute()

    def copy_beside() -> None:
        with torch.cuda.stream(other_stream):
            for _ in range(COPY_COUNT):
                slots.copy_(host, non_blocking=True)

    rows = []
    for name, copy in (
        ("copy to the device", lambda: slots.copy_(host, non_blocking=True)),
        ("copy to the host", lambda: host.copy_(slots, non_blocking=True)),
    ):
        pairs = sample_pairs(
            plan.rounds,
            lambda _, copy=copy: timed(plan.copy_bytes, copy, beside=compute_beside),  # type: ignore[misc]  # a default in a lambda
            lambda _, copy=copy: timed(plan.copy_bytes, copy),  # type: ignore[misc]  # a default in a lambda
        )
        rows.append(
            row_of_pairs(
                pairs, name=name, case="pinned, while it computes", subject=SUBJECT, record_bytes=plan.copy_bytes, against="alone"
            )
        )
    flops = 2.0 * MATMUL_SIZE**3 * MATMUL_COUNT
    pairs = sample_pairs(plan.rounds, lambda _: timed(flops, compute, beside=copy_beside), lambda _: timed(flops, compute))
    rows.append(
        Row(
            name="matmul, bf16", case="while experts come in", subject=SUBJECT, value=pairs.rate / 1e12, unit="TFLOP/s",
            against="alone", limit=pairs.limit_rate / 1e12, ratio=pairs.ratio, ratio_min=pairs.ratio_min,
            ratio_max=pairs.ratio_max, parts=pairs.parts(),
        )
    )  # fmt: skip
    return rows


def measure_tier_copies(plan: Plan, device: torch.device, clock: Clock) -> list[Row]:
    """Measures copies of experts out of leased memory, as the tier makes them, beside one copy of memory that torch pinned."""
    pinned = torch.empty(plan.copy_bytes, dtype=torch.uint8, pin_memory=True)
    slots = torch.empty(plan.copy_bytes, dtype=torch.uint8, device=device)
    rows = []
    with leased_memory(plan.copy_bytes) as memory:
        experts = torch.frombuffer(memory.buffer, dtype=torch.uint8).split(PIECE_BYTES)  # type: ignore[no-untyped-call]  # the library's
        for may_register in (True, False):
            copier = CudaCopier(device, bounce_bytes=PIECE_BYTES, may_register=may_register)
            pairs = sample_pairs(
                plan.rounds,
                lambda _, copier=copier: copy_experts(copier, slots.split(PIECE_BYTES), experts, clock),  # type: ignore[misc,no-untyped-call]  # a default in a lambda
                lambda _: timed(plan.copy_bytes, lambda: slots.copy_(pinned, non_blocking=True)),
            )
            how = copier.describe()
            copier.close()
            row = row_of_pairs(
                pairs, name="copy to the device", case=f"as the tier does, {how.partition(':')[0]}", subject=SUBJECT,
                record_bytes=PIECE_BYTES, against="pinned by torch, at once",
            )  # fmt: skip
            rows.append(msgspec.structs.replace(row, note=how))
    return rows


def copy_experts(copier: CudaCopier, targets: Sequence[Tensor], sources: Sequence[Tensor], clock: Clock) -> Sample:
    """Copies one expert after the other, as a miss of several experts does, until the last is there."""
    started_s = clock.now_s()
    mark = [copier.copy([pair], after=REACHED) for pair in zip(targets, sources, strict=True)][-1]
    mark.wait_on_host()
    return Sample(sum(source.nbytes for source in sources), clock.now_s() - started_s)


def measure_kvikio(plan: Plan, device: torch.device, clock: Clock, directory: Path) -> list[Row]:
    """Measures GPUDirect Storage by kvikio, or its compatibility mode, if it is installed."""
    try:
        import kvikio
    except ImportError as error:
        return [absent("read into the device by kvikio", f"kvikio cannot be imported: {error}")]
    path = directory / "kvikio"
    path.write_bytes(os.urandom(plan.copy_bytes))
    target = torch.empty(plan.copy_bytes, dtype=torch.uint8, device=device)
    rates = []
    for _ in range(plan.rounds):
        started_s = clock.now_s()
        with kvikio.CuFile(str(path), "r") as file:
            read_bytes = file.read(target)
        torch.cuda.synchronize()
        assert read_bytes == plan.copy_bytes
        rates.append(plan.copy_bytes / (clock.now_s() - started_s))
    is_equal = target.cpu().numpy().tobytes() == path.read_bytes()
    path.unlink()
    note = f"kvikio {kvikio.__version__}, compat_mode {kvikio.defaults.get('compat_mode')}, bytes equal: {is_equal}"
    return [
        Row(
            name="read into the device by kvikio", case="through the page cache where it is in compat mode", subject="kvikio",
            value=statistics.median(rates) / 1e9, unit="GB/s", record_bytes=plan.copy_bytes, note=note,
        )
    ]  # fmt: skip
