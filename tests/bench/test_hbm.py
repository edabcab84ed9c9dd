"""The row for a device, on its twin: each sample copies half of the records into slots."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from paramstore.bench.context import Bench
from paramstore.bench.hbm import HBM, measure_hbm
from paramstore.bench.plan import MIB, Plan, RecordSize
from paramstore_client.device.tier import DeviceTier

TINY = replace(Plan.quick(), set_bytes=8 * MIB)


@pytest.mark.slow
def test_each_sample_fills_all_slots_anew(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    counts = []
    monkeypatch.setattr(DeviceTier, "close", lambda tier, close=DeviceTier.close: (counts.append(tier.stats), close(tier)))
    bench = Bench(TINY, tmp_path_factory.mktemp("b"))
    (row,) = measure_hbm(bench, RecordSize(MIB), torch.device("cpu"))
    assert (row.name, row.case, row.unit) == (HBM, "param, twin on the CPU", "GB/s")
    rounds, slots = TINY.rounds + 1, TINY.record_count(row.record_bytes or 0) // 2
    assert [(stats.hits, stats.misses) for stats in counts] == [(0, rounds * slots)]
    assert not list(bench.directory.iterdir())


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_device_there_is_no_row(tmp_path: Path) -> None:
    assert measure_hbm(Bench(TINY, tmp_path), RecordSize(MIB)) == []
