"""Measures the native AdamW kernel beside torch's step and casts, everything else equal: to be kept it must be 1.3 times as fast.

It is measured alone, in processes that do nothing else, and as users have it, through two daemons with everything resident. The
target stands in the rows that the kernel was made for (clipping, ranks, missed steps). Rows that are bound by memory (bf16
unscaled, fp32) win less, and have no target.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager

import torch

from paramstore.bench.context import Bench
from paramstore.bench.pairs import Sample, sample_pairs
from paramstore.bench.report.rows import SUBJECT, Row, Target, judged
from paramstore.bench.service.experts import Gradients, adamw_schema
from paramstore.bench.update_alone import MEGA, Work
from paramstore_bench.update_phase import Cell, stepping
from paramstore_bench.update_process import UpdateProcess
from paramstore_native.adamw import ADAMW
from paramstore_native.finder import SWITCH_VARIABLE

TARGET = 1.3
RECORDS = 8
WARM_UP_ROUNDS = 3
MEMORY_BOUND = ("bfloat16", "float32")
CASES: dict[str, tuple[str, Work]] = {
    "bfloat16": ("bfloat16", Work()),
    "bfloat16, gradients scaled (clipping)": ("bfloat16", Work(grad_scale=0.37)),
    "bfloat16, two ranks, scaled": ("bfloat16", Work(ranks=2, grad_scale=0.5)),
    "bfloat16, three missed steps each": ("bfloat16", Work(missed=3)),
    "float16, scaled": ("float16", Work(grad_scale=0.37)),
    "float32": ("float32", Work()),
}


QUICK_CASES = tuple(CASES)[:2]
SERVED_DTYPES = (torch.bfloat16, torch.float32)
SERVED_RECORDS = 16


def measure_native(bench: Bench, rounds: int, cases: Iterable[str] = CASES) -> list[Row]:
    """Makes one row per case, in pairs of single updates of all records; none where the kernel cannot be had."""
    return [_measure_case(bench, case, rounds) for case in cases] if ADAMW.kernel() is not None else []


def _measure_case(bench: Bench, case: str, rounds: int) -> Row:
    bench.tell(f"native kernel beside torch: {case}")
    (dtype, work), size, threads = CASES[case], bench.plan.expert_size, len(os.sched_getaffinity(0))
    ours = UpdateProcess(dtype, size, RECORDS, threads=threads, work=work, is_native=True)
    torch = UpdateProcess(dtype, size, RECORDS, threads=threads, work=work, is_native=False)
    try:
        pairs = sample_pairs(rounds, lambda _: ours.step(), lambda _: torch.step(), warm_up_rounds=WARM_UP_ROUNDS)
    finally:
        ours.close()
        torch.close()
    row = Row(
        name="AdamW alone", case=case, subject=f"{SUBJECT}, native kernel", record_bytes=size.nominal_bytes,
        unit="M parameters/s", value=pairs.rate / MEGA, limit=pairs.limit_rate / MEGA,
        against="casts and torch's fused step, in chunks", target=None if case in MEMORY_BOUND else Target("ratio", ">=", TARGET),
        ratio=pairs.ratio, ratio_min=pairs.ratio_min, ratio_max=pairs.ratio_max, parts=pairs.parts(),
    )  # fmt: skip
    return judged(row)


def measure_served(bench: Bench, param_dtype: torch.dtype, rounds: int, *, records: int = SERVED_RECORDS) -> Row:
    """Measures `apply` with everything resident, through a daemon with the kernel and one without, turn by turn."""
    schema = adamw_schema(bench.plan.expert_size, param_dtype)
    bench.tell(f"native kernel beside torch, through the service: {schema.gradient_dtype}")
    with ExitStack() as stack:

        def start(*, is_native: bool) -> Callable[[int], Sample]:
            with _arithmetic(is_native=is_native):
                folder = stack.enter_context(bench.folder("native" if is_native else "torch"))
                service, namespace = stack.enter_context(stepping(bench, folder, schema, records, Cell(1.0)))
            gradients = Gradients(namespace, schema, records)

            def step(number: int) -> Sample:
                gradients.push(number)
                started_cpu_s, started_s = service.cpu_s(), bench.clock.now_s()
                gradients.apply()
                seconds = bench.clock.now_s() - started_s
                return Sample(gradients.parameter_elements, seconds, service.cpu_s() - started_cpu_s)

            return step

        pairs = sample_pairs(rounds, start(is_native=True), start(is_native=False), warm_up_rounds=WARM_UP_ROUNDS)
    row = Row(
        name="apply, native kernel", case=f"AdamW, {schema.gradient_dtype}, all resident", subject=SUBJECT,
        record_bytes=schema.record_bytes, unit="M parameters/s", value=pairs.rate / MEGA, limit=pairs.limit_rate / MEGA,
        against="the same service with torch alone",
        ratio=pairs.ratio, ratio_min=pairs.ratio_min, ratio_max=pairs.ratio_max, parts=pairs.parts(),
    )  # fmt: skip
    return judged(row)


@contextmanager
def _arithmetic(*, is_native: bool) -> Iterator[None]:
    """Decides whether daemons that start within may use the kernel."""
    before = os.environ.get(SWITCH_VARIABLE)
    os.environ[SWITCH_VARIABLE] = "1" if is_native else "0"
    try:
        yield
    finally:
        del os.environ[SWITCH_VARIABLE]
        if before is not None:
            os.environ[SWITCH_VARIABLE] = before
