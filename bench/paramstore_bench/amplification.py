"""Measures how many bytes reach the volumes for each byte of a record that a commit publishes, over a short training run.

Every record changes at every step and every step is committed, which is how a training run wears a drive. The daemon counts
records as they are written back, with their headers, and commit notes in all copies; zero-fill is counted apart, since it
happens once. A note takes whole pages, twice on every volume: 8 KiB for a commit without `extra`, which shows in a commit of a
single small record and not in one of a thousand. Beside it stands what the kernel counted for the process, catalog included.
"""

from __future__ import annotations

from typing import Any

import torch

from paramstore.bench.context import Bench
from paramstore.bench.plan import MIB, RecordSize
from paramstore.bench.process import written_bytes
from paramstore.bench.report.rows import SUBJECT, Row, Target, judged
from paramstore.bench.service.daemon import Service, serving
from paramstore.bench.service.experts import WAIT_S, Gradients, adamw_schema, create_adamw_namespace
from paramstore.core.schema import Schema

RECORD = RecordSize(MIB)
RECORDS = 64
AMPLIFICATION_TARGET = 1.02
BUDGETS = {"all in memory": 512 * MIB, "part of it in memory": 56 * MIB}
"""Host budget of each case. In the second, working slots hold only some of the records; the others are evicted within a step."""
COUNTED = ("bytes_written", "note_bytes", "bytes_committed", "commits")


def measure_amplification(bench: Bench) -> list[Row]:
    """One row for each host budget."""
    rows = []
    for case, budget_bytes in BUDGETS.items():
        bench.tell(f"write amplification, {case}")
        with bench.folder("store") as folder, serving(folder, host_budget_bytes=budget_bytes) as service:
            rows.append(_measure(bench, service, case))
    return rows


def _measure(bench: Bench, service: Service, case: str) -> Row:
    schema = adamw_schema(RECORD, torch.bfloat16)
    namespace = create_adamw_namespace(service.store, "training", schema, RECORDS)
    gradients = Gradients(namespace, schema, RECORDS)
    service.wait_until_quiet(bench.clock)
    before, kernel_before = _counted(service), written_bytes(service.pid)
    for step in range(2, 2 + bench.plan.training_steps):
        gradients.push(step)
        gradients.apply()
        namespace.commit(step).wait(WAIT_S)
    after, kernel_after = _counted(service), written_bytes(service.pid)
    return _row(schema, case, {name: after[name] - before[name] for name in COUNTED}, kernel_after - kernel_before, after)


def _counted(service: Service) -> dict[str, Any]:
    figures: dict[str, Any] = service.stats()["namespaces"]["training"]
    return figures


def _row(schema: Schema, case: str, moved: dict[str, int], kernel_bytes: int, figures: dict[str, Any]) -> Row:
    committed = moved["bytes_committed"]
    row = Row(
        name="write amplification", case=case, subject=SUBJECT, record_bytes=schema.record_bytes, unit="bytes per byte",
        value=(moved["bytes_written"] + moved["note_bytes"]) / committed, target=Target("value", "<=", AMPLIFICATION_TARGET),
        parts={
            "records": RECORDS, "optim_slots": figures["optim"]["slots"], "commits": moved["commits"],
            "committed_bytes": committed, "written_bytes": moved["bytes_written"], "note_bytes": moved["note_bytes"],
            "kernel_bytes": kernel_bytes,
        },
    )  # fmt: skip
    return judged(row)
