"""All ranks measure the same, in a few messages, and so choose alike."""

from __future__ import annotations

import pytest
import torch

from paramstore_client.moe.exchange import FlatExchange
from paramstore_client.moe.hops import probe
from paramstore_client.moe.hops.choice import ExchangeChoice
from paramstore_client.moe.hops.nodes import Nodes
from paramstore_testkit.training.thread_ranks import of_all, run_ranks

SENT_MIB_MAX = 16


def _measured(flat: FlatExchange) -> tuple[ExchangeChoice, float]:
    choice = probe.measured(flat, Nodes.named("aabb"), torch.device("cpu"))
    return choice, flat.sent_bytes / 2**20


def test_all_ranks_make_one_choice_by_a_few_messages() -> None:
    found = of_all(run_ranks(4, _measured))
    assert len({choice for choice, _ in found}) == 1
    assert found[0][0].speeds is not None
    assert all(sent_mib < SENT_MIB_MAX for _, sent_mib in found)


def test_larger_messages_are_left_out_where_small_ones_take_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "PROBE_S", 0.0)
    for choice, _ in of_all(run_ranks(4, _measured)):
        assert choice.speeds is not None
        assert choice.speeds.flat.measured_bytes == probe.SIZES_BYTES[0]
