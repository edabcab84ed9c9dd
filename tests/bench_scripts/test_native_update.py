"""The kernel's rows: alone, and through two daemons that differ in it alone."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from paramstore.bench.context import Bench
from paramstore.bench.plan import Plan, RecordSize
from paramstore_bench.native_update import measure_native, measure_served
from paramstore_native.adamw import ADAMW
from paramstore_native.finder import SWITCH_VARIABLE


def small_bench(folder: Path) -> Bench:
    return Bench(replace(Plan(), expert_size=RecordSize(256 << 10)), folder)


@pytest.mark.slow
@pytest.mark.skipif(ADAMW.kernel() is None, reason=ADAMW.known_state())
def test_what_memory_bounds_has_no_target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SWITCH_VARIABLE, "1")
    unscaled, scaled = measure_native(small_bench(tmp_path), 2, ("bfloat16", "bfloat16, gradients scaled (clipping)"))
    assert unscaled.target is None
    assert scaled.target is not None
    row = measure_served(small_bench(tmp_path), torch.bfloat16, 2, records=2)
    assert row.ratio > 0
    assert row.target is None
    assert os.environ[SWITCH_VARIABLE] == "1", "as it was"
