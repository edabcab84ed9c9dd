"""All ranks measure the same, in a bounded number of messages."""

from __future__ import annotations

import pytest
import torch

from paramstore_client.moe.exchange import FlatExchange
from paramstore_client.moe.granularity import probe
from paramstore_client.moe.granularity.model import Curve
from paramstore_testkit.training.thread_ranks import of_all, run_ranks

SIZES = 1 << 16, 1 << 12


def _measured(flat: FlatExchange) -> tuple[Curve, int]:
    return probe.measured(flat, SIZES, torch.device("cpu")), flat.sent_bytes


@pytest.mark.parametrize(("probe_s", "rounds"), [(60.0, probe.ROUNDS), (0.0, 1)])
def test_all_ranks_have_one_curve_of_what_was_sent(monkeypatch: pytest.MonkeyPatch, probe_s: float, rounds: int) -> None:
    monkeypatch.setattr(probe, "PROBE_S", probe_s)
    found = of_all(run_ranks(4, _measured))
    assert len({curve for curve, _ in found}) == 1
    for curve, sent_bytes in found:
        assert [size for size, _ in curve.points] == sorted(SIZES)
        assert all(seconds > 0 for _, seconds in curve.points)
        assert sent_bytes == rounds * sum(SIZES) * 3 // 4
