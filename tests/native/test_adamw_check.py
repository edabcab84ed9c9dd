"""A kernel that differs from torch anywhere is found out."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from paramstore_native.adamw import ADAMW, SOURCE
from paramstore_native.adamw_check import count_different, difference
from paramstore_native.adamw_kernel import Kernel, Options, Span
from paramstore_native.compiled import Unavailable, build

MUTANTS = {
    "square not fused": ("fmaf(step.square_weight * value, value, exp_avg_sq[i] * step.beta2)",
                         "step.square_weight * value * value + exp_avg_sq[i] * step.beta2"),
    "lerp not fused": ("fmaf(step.weight, value - moment, starts_at_moment ? moment : value)",
                       "step.weight * (value - moment) + (starts_at_moment ? moment : value)"),
    "lerp from the other end": ("starts_at_moment ? moment : value)", "starts_at_moment ? value : moment)"),
    "decay fused": ("decayed + step.rate * moment / denominator", "fmaf(step.rate, moment / denominator, decayed)"),
    "divided first": ("step.rate * moment / denominator", "step.rate * (moment / denominator)"),
    "eps under the root": ("sqrtf(square) / step.correction + step.eps", "sqrtf(square + step.eps) / step.correction"),
    "bfloat16 cut off": ("(bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16", "bits >> 16"),
    "sum not rounded": ("            sum[i] += other[i];\n        round_to(sum, dtype, count);", "            sum[i] += other[i];"),
    "scale not rounded": ("            sum[i] *= scale;\n        round_to(sum, dtype, count);", "            sum[i] *= scale;"),
    "first missed step left out": ("size_t step = 0; step < step_count", "size_t step = step_count > 1; step < step_count"),
    "ranks in the other order": ("gradients[rank] + start", "gradients[ranks - rank] + start"),
}  # fmt: skip
needs_kernel = pytest.mark.skipif(ADAMW.kernel() is None, reason=ADAMW.known_state())


def test_the_kernel_in_use_has_passed() -> None:
    found = ADAMW.kernel()
    if found is None:
        pytest.skip(ADAMW.known_state())
    assert difference(found) == ""


@pytest.mark.slow
@needs_kernel
@pytest.mark.parametrize("name", MUTANTS)
def test_a_kernel_with_a_fault_is_found_out(name: str, tmp_path: Path) -> None:
    text = SOURCE.read_text()
    old, new = MUTANTS[name]
    assert text.count(old) == 1
    mutant = tmp_path / "adamw.c"
    mutant.write_text(text.replace(old, new))
    library = build(mutant, cache=tmp_path / "cache")
    assert not isinstance(library, Unavailable)
    assert "differ from those of torch" in difference(Kernel(library))


@needs_kernel
def test_a_kernel_that_does_nothing_is_found_out() -> None:
    class Idle:
        def serves(self, *_: str) -> bool:
            return True

        def __call__(self, spans: Sequence[Span], steps: Sequence[Options], *, last_step: int, grad_scale: float) -> None:
            """Leaves everything as it is."""

    assert "master differ" in difference(Idle())  # type: ignore[arg-type]


def test_nan_is_nan_and_zeros_have_signs() -> None:
    nans = torch.tensor([0x7FC00000, -1, 0], dtype=torch.int32).view(torch.float32)
    assert count_different(nans, torch.tensor([float("nan"), float("nan"), 0.0])) == 0
    assert count_different(torch.tensor([0.0, 1.0]), torch.tensor([-0.0, 1.0])) == 1
    assert count_different(torch.tensor([float("nan")]), torch.tensor([1.0])) == 1
