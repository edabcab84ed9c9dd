"""The bench of dequantizing compares bits before it times."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from paramstore.bench.context import Bench
from paramstore.bench.plan import Plan
from paramstore.errors import StepMismatch
from paramstore_bench import dequantize
from paramstore_bench.dequantize import fp8_expert, measure_dequantize, measure_one


@pytest.fixture(autouse=True)
def threads_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dequantize.torch, "set_num_threads", lambda _: None)


def test_every_kind_has_a_row_for_each_number_of_threads(tmp_path: Path) -> None:
    rows = list(measure_dequantize(Bench(Plan.quick(), tmp_path), is_quick=True))
    assert [row.name for row in rows] == ["dequantize fp8"] * 2 + ["dequantize mxfp4"] * 2
    assert [round(row.parts["packed_of_bf16"], 2) for row in rows] == [0.50, 0.50, 0.27, 0.27]
    assert all(row.value > 0 and row.limit is not None for row in rows)


def test_other_bits_than_those_of_transformers_end_the_bench(tmp_path: Path) -> None:
    packed = fp8_expert(128, 128)
    packed.fields["down:fp8:0:scale"] = torch.full((1, 1), 2.0)
    wrong = dequantize.Packed(packed.schema, packed.fields, lambda _: fp8_expert(128, 128).convert(fp8_expert(128, 128).fields))
    with pytest.raises(StepMismatch, match="fp8"):
        measure_one(Bench(Plan.quick(), tmp_path), "fp8", wrong, 1)
