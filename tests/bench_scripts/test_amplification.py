"""The row on write amplification: what it counts, and that the daemon's count is what the kernel saw."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from paramstore.bench.context import Bench
from paramstore.bench.plan import Plan
from paramstore.bench.service.experts import adamw_schema
from paramstore_bench import amplification
from paramstore_bench.amplification import AMPLIFICATION_TARGET, BUDGETS, RECORDS, measure_amplification


@pytest.mark.slow
def test_a_training_run_writes_each_committed_byte_about_once(tmp_path: Path) -> None:
    steps = 2
    rows = measure_amplification(Bench(replace(Plan.quick(), training_steps=steps), tmp_path))
    record_bytes = adamw_schema(amplification.RECORD, torch.bfloat16).record_bytes
    assert [row.case for row in rows] == list(BUDGETS)
    for row in rows:
        assert row.record_bytes == record_bytes
        assert row.parts["commits"] == steps
        assert row.parts["committed_bytes"] == steps * RECORDS * record_bytes
        written = row.parts["written_bytes"] + row.parts["note_bytes"]
        assert row.value == written / row.parts["committed_bytes"]
        assert row.holds
        assert row.target is not None
        assert row.target.bound == AMPLIFICATION_TARGET
        assert row.parts["kernel_bytes"] == 0 or row.parts["kernel_bytes"] >= written, "0 on a file system in memory"
    everything, some = rows
    assert everything.parts["optim_slots"] >= RECORDS > some.parts["optim_slots"]
    assert list(tmp_path.iterdir()) == []
