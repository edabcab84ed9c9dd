"""The native AdamW kernel beside torch's step and casts, everything else equal: what it must win to be kept (>= 1.3)."""

from __future__ import annotations

import os
from collections.abc import Iterable

from paramstore.bench.context import Bench
from paramstore.bench.pairs import sample_pairs
from paramstore.bench.report import SUBJECT, Row, Target, judged
from paramstore.bench.update_alone import MEGA, Work
from paramstore.bench.update_process import UpdateProcess
from paramstore_native.adamw import kernel

TARGET = 1.3
RECORDS = 8
WARM_UP_ROUNDS = 3
CASES: dict[str, tuple[str, Work]] = {
    "bfloat16": ("bfloat16", Work()),
    "bfloat16, gradients scaled (clipping)": ("bfloat16", Work(grad_scale=0.37)),
    "bfloat16, two ranks, scaled": ("bfloat16", Work(ranks=2, grad_scale=0.5)),
    "bfloat16, three missed steps each": ("bfloat16", Work(missed=3)),
    "float16, scaled": ("float16", Work(grad_scale=0.37)),
    "float32": ("float32", Work()),
}


QUICK_CASES = tuple(CASES)[:2]


def measure_native(bench: Bench, rounds: int, cases: Iterable[str] = CASES) -> list[Row]:
    """One row per case, in pairs of single updates of all records; none where the kernel cannot be had."""
    return [_measure_case(bench, case, rounds) for case in cases] if kernel() is not None else []


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
        against="casts and torch's fused step, in chunks", target=Target("ratio", ">=", TARGET),
        ratio=pairs.ratio, ratio_min=pairs.ratio_min, ratio_max=pairs.ratio_max, parts=pairs.parts(),
    )  # fmt: skip
    return judged(row)
