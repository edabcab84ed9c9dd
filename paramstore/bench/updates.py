"""Measures `apply` through the service beside torch's fused AdamW in one process on the same cores, everything resident.

The clock runs from the call to the ticket done, the new `param` version included; pushing the gradients is a part of its own.
The peer updates as many experts of the same shapes, in fp32 whatever our parameters are.
"""

from __future__ import annotations

import os
from dataclasses import replace

import torch

from paramstore.bench.context import Bench
from paramstore.bench.limits.torch_adamw import TorchAdamW
from paramstore.bench.pairs import Sample, sample_pairs
from paramstore.bench.plan import MIB
from paramstore.bench.report.rows import SUBJECT, Row, Target, judged
from paramstore.bench.service.daemon import counted_seconds, serving
from paramstore.bench.service.experts import WAIT_S, Gradients, adamw_schema, check_all, create_adamw_namespace, keys_of
from paramstore.core.schema import dtype_name

MEGA = 1e6
TARGETS = {torch.float32: 0.70, torch.bfloat16: 0.65}
BUDGET_SETS = 3
WARM_UP_ROUNDS = 2


def measure_apply(bench: Bench, param_dtype: torch.dtype) -> Row:
    """Measures parameters a second for one dtype of parameters and gradients."""
    schema = adamw_schema(bench.plan.expert_size, param_dtype)
    count = bench.plan.apply_records
    budget_bytes = BUDGET_SETS * count * (schema.record_bytes + schema.part("param").image_bytes) + 256 * MIB
    with bench.folder("store") as folder, serving(folder, host_budget_bytes=budget_bytes) as service:
        bench.tell(f"apply, {dtype_name(param_dtype)}: {count} records are stored")
        namespace = create_adamw_namespace(service.store, "apply", schema, count)
        service.wait_until_quiet(bench.clock)
        loaded = namespace.prefetch(keys_of(count), part="optim").wait(WAIT_S)
        check_all(count, int(loaded["loaded"]) + int(loaded["resident"]), what="prefetch of optim")
        gradients = Gradients(namespace, schema, count)

        def apply(number: int) -> Sample:
            pushed_from_s = bench.clock.now_s()
            gradients.push(number)
            counters, started_cpu_s, started_s = service.stats(), service.cpu_s(), bench.clock.now_s()
            result = gradients.apply()
            sample = Sample(gradients.parameter_elements, bench.clock.now_s() - started_s, service.cpu_s() - started_cpu_s)
            service.watch_budget()
            parts = {"push_s": started_s - pushed_from_s, "read_bytes": float(result["bytes_read"])}
            return replace(sample, parts={**parts, **counted_seconds(counters, service.stats())})

        peer = TorchAdamW(
            record_count=count,
            field_elements=tuple(field.elements for field in schema.gradient_fields()),
            threads=len(os.sched_getaffinity(0)),
        )
        try:
            bench.tell(f"apply, {dtype_name(param_dtype)}: steps")
            pairs = sample_pairs(bench.plan.apply_rounds, apply, lambda _: peer.step(), warm_up_rounds=WARM_UP_ROUNDS)
        finally:
            peer.close()
    row = Row(
        name="apply", case=f"AdamW, {dtype_name(param_dtype)}, all resident", subject=SUBJECT, record_bytes=schema.record_bytes,
        unit="M parameters/s", value=pairs.rate / MEGA, limit=pairs.limit_rate / MEGA,
        against="torch.optim.AdamW(fused=True), fp32, in one process", target=Target("ratio", ">=", TARGETS[param_dtype]),
        ratio=pairs.ratio, ratio_min=pairs.ratio_min, ratio_max=pairs.ratio_max, parts=pairs.parts(),
    )  # fmt: skip
    return judged(row)
