"""Measures records from host memory into slots of a device, each sample beside copies of as many pinned bytes to it.

Half of the records stand in slots; each sample asks for the other half. Never run on a GPU: its twin on the CPU shows the shape.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from paramstore.bench.context import Bench, row_of_pairs
from paramstore.bench.pairs import Sample, sample_pairs
from paramstore.bench.plan import RecordSize
from paramstore.bench.report.rows import SUBJECT, Row
from paramstore.bench.service.daemon import serving
from paramstore.bench.service.experts import WAIT_S, create_param_namespace, keys_of, param_schema
from paramstore.bench.transfers import budget_bytes

HBM = "host to HBM"
"""Name of the row. No target: what a copy reaches is the link's."""


def measure_hbm(bench: Bench, size: RecordSize, device: torch.device | None = None) -> list[Row]:
    """Makes a row for `device`; for the current CUDA device, if there is one, where none is given."""
    if device is None:
        if not torch.cuda.is_available():
            return []
        device = torch.device("cuda", torch.cuda.current_device())
    from paramstore_client.device.tier import DeviceTier

    schema = param_schema(size)
    count = bench.plan.record_count(schema.record_bytes)
    keys, slots = keys_of(count), count // 2
    bench.tell(f"{device}, records of {schema.record_bytes / (1 << 20):.3g} MiB: {slots} slots")
    with (
        bench.folder("store") as folder,
        serving(folder / "store", host_budget_bytes=budget_bytes(schema, count)) as service,
        create_param_namespace(service.store, "param", schema, count) as namespace,
        DeviceTier(namespace, slots, device=device) as tier,
    ):
        namespace.prefetch(keys).wait(WAIT_S)
        record_bytes = tier.slots.bytes // tier.slots.count
        source = torch.ones(record_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
        targets = torch.empty(slots, record_bytes, dtype=torch.uint8, device=device)

        def fetch(number: int) -> None:
            start = number % 2 * slots
            tier.fetch(keys[start : start + slots]).release()

        def copy(_: int) -> None:
            for target in targets:
                target.copy_(source, non_blocking=True)

        def timed(call: Callable[[int], None], number: int) -> Sample:
            started_s = bench.clock.now_s()
            call(number)
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            return Sample(slots * record_bytes, bench.clock.now_s() - started_s)

        pairs = sample_pairs(bench.plan.rounds, lambda n: timed(fetch, n), lambda n: timed(copy, n), warm_up_rounds=1)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "twin on the CPU"
    case = f"param, {name}"
    return [row_of_pairs(pairs, name=HBM, case=case, subject=SUBJECT, record_bytes=record_bytes, against="pinned copies")]
