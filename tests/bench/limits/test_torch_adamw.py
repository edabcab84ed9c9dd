"""The peer of `apply`."""

from __future__ import annotations

import pytest

from paramstore.bench.limits.torch_adamw import TorchAdamW


@pytest.mark.slow
def test_each_step_tells_parameters_and_seconds() -> None:
    peer = TorchAdamW(record_count=2, field_elements=(1000, 500), threads=1)
    try:
        samples = [peer.step(), peer.step()]
    finally:
        peer.close()
    assert [sample.work for sample in samples] == [3000, 3000]
    assert all(sample.seconds > 0 for sample in samples)
