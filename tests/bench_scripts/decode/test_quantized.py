"""Decoding from quantized experts: what is asked of it where, and that its logits are compared."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from paramstore.bench.context import Bench
from paramstore.bench.pairs import Sample
from paramstore.bench.plan import Plan
from paramstore.bench.report.rows import Row
from paramstore.errors import StepMismatch
from paramstore_bench.decode.checkpoint import Shape
from paramstore_bench.decode.quantized import FULL, SMALL, WORK, checkpoints_of, measure_pairs
from paramstore_client.hf.checkpoint.recipes import ExpertSource
from paramstore_client.hf.checkpoint.shards import open_checkpoint
from paramstore_client.hf.checkpoint.skeleton import skeleton
from paramstore_client.hf.model.layout import find_layout
from paramstore_client.quantized.packed import FP8, MXFP4

UNPACK_S = 0.004


@dataclass
class FakeServed:
    """A model that decodes in a given time; its logits are the prompt's number, and `shift`."""

    seconds: float
    shift: float = 0.0
    numbers: list[int] = field(default_factory=list)

    def decode(self, number: int) -> tuple[Sample, Tensor]:
        self.numbers.append(number)
        return Sample(WORK.new, self.seconds, parts={"read_bytes": 48.0}), torch.tensor([number + self.shift])


def measured(ours: FakeServed, theirs: FakeServed, *, read_s: float, kind: str = FP8) -> Row:
    costs = {"read_bf16_s": read_s, "unpack_s": UNPACK_S}
    return measure_pairs("case", ours, theirs, kind=kind, rounds=4, costs=costs, record_bytes=1)  # type: ignore[arg-type]


@pytest.mark.parametrize(("seconds", "holds"), [(1.0, True), (1.9, False)])
def test_more_speed_is_asked_where_reading_takes_twice_as_long_as_unpacking(seconds: float, holds: bool) -> None:
    ours, theirs = FakeServed(seconds), FakeServed(2.0)
    row = measured(ours, theirs, read_s=2 * UNPACK_S)
    assert row.ratio == pytest.approx(2.0 / seconds)
    assert row.holds is holds
    assert row.parts["read_bytes"] == 2.0
    assert ours.numbers == theirs.numbers


@pytest.mark.parametrize("kind", [FP8, MXFP4])
def test_a_row_names_its_format(kind: str) -> None:
    assert measured(FakeServed(1.0), FakeServed(1.0), read_s=1.0, kind=kind).name.endswith(f", {kind}")


@pytest.mark.parametrize("shape", [*FULL.values(), *SMALL.values()])
def test_the_memory_of_both_is_counted_in_the_bytes_of_the_models_own_experts(shape: Shape) -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(shape.config(), dtype=shape.dtype)  # type: ignore[no-untyped-call]
    layout = find_layout(model)
    assert layout.schema(None).part("param").image_bytes == shape.image_bytes
    assert len(layout.layers) * layout.experts == shape.keys


@pytest.mark.slow
@pytest.mark.parametrize("kind", SMALL)
def test_a_checkpoint_is_quantized_and_beside_it_lies_the_same_in_bf16(kind: str, tmp_path: Path) -> None:
    quantized, plain = checkpoints_of(Bench(Plan.quick(), tmp_path), tmp_path, kind, replace(SMALL[kind], layers=1))
    for checkpoint, method in ((quantized, kind), (plain, None)):
        model = skeleton(checkpoint, mode="infer")
        source = ExpertSource(model, find_layout(model), open_checkpoint(checkpoint))
        assert source.is_quantized is (method is not None)
        config = json.loads((checkpoint / "config.json").read_text()).get("quantization_config", {"quant_method": None})
        assert config["quant_method"] == method


def test_nothing_is_asked_elsewhere() -> None:
    row = measured(FakeServed(2.0), FakeServed(2.0), read_s=1.9 * UNPACK_S)
    assert row.holds is None
    assert "less than twice" in row.note


def test_other_logits_end_the_bench() -> None:
    with pytest.raises(StepMismatch, match="quantized and dequantized have other logits"):
        measured(FakeServed(1.0), FakeServed(1.0, shift=0.5), read_s=1.0)
