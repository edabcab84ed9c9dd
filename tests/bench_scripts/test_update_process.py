"""The update in a process of its own."""

from __future__ import annotations

import pytest

from paramstore.bench.plan import RecordSize
from paramstore.bench.update_alone import Work
from paramstore_bench.update_process import UpdateProcess
from paramstore_native.adamw import ADAMW


@pytest.mark.slow
@pytest.mark.parametrize("is_native", [True, False])
def test_each_step_tells_parameters_and_seconds_and_who_computes(is_native: bool) -> None:
    work = Work(ranks=2, grad_scale=0.5, missed=1)
    process = UpdateProcess("bfloat16", RecordSize(256 << 10), 2, threads=1, work=work, is_native=is_native)
    try:
        assert process.uses == ("native" if is_native and ADAMW.kernel() is not None else "torch")
        samples = [process.step(), process.step()]
    finally:
        process.close()
    assert len({sample.work for sample in samples}) == 1
    assert samples[0].work > 0
    assert all(sample.seconds > 0 for sample in samples)
