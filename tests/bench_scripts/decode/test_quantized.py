"""Decoding from quantized experts: what is asked of it where, and that its logits are compared."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from paramstore.bench.pairs import Sample
from paramstore.bench.report.rows import Row
from paramstore.errors import StepMismatch
from paramstore_bench.decode.quantized import WORK, measure_pairs

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


def measured(ours: FakeServed, theirs: FakeServed, *, read_s: float) -> Row:
    costs = {"read_bf16_s": read_s, "unpack_s": UNPACK_S}
    return measure_pairs("case", ours, theirs, rounds=4, costs=costs, record_bytes=1)  # type: ignore[arg-type]


@pytest.mark.parametrize(("seconds", "holds"), [(1.0, True), (1.9, False)])
def test_more_speed_is_asked_where_reading_takes_twice_as_long_as_unpacking(seconds: float, holds: bool) -> None:
    ours, theirs = FakeServed(seconds), FakeServed(2.0)
    row = measured(ours, theirs, read_s=2 * UNPACK_S)
    assert row.ratio == pytest.approx(2.0 / seconds)
    assert row.holds is holds
    assert row.parts["read_bytes"] == 2.0
    assert ours.numbers == theirs.numbers


def test_nothing_is_asked_elsewhere() -> None:
    row = measured(FakeServed(2.0), FakeServed(2.0), read_s=1.9 * UNPACK_S)
    assert row.holds is None
    assert "less than twice" in row.note


def test_other_logits_end_the_bench() -> None:
    with pytest.raises(StepMismatch, match="quantized and dequantized have other logits"):
        measured(FakeServed(1.0), FakeServed(1.0, shift=0.5), read_s=1.0)
