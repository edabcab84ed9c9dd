"""Families of models served by a real daemon, their experts in several segments: the logits of the unmodified model bit for bit."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import paramstore as ps
from paramstore_client.hf.compat import modeling
from paramstore_testkit.processes.forked_daemon import ForkedDaemon
from paramstore_testkit.training.moe_families import (
    NOT_GROUPED,
    NOT_SERVED,
    SERVED_ALWAYS,
    families,
    modeling_class,
    tiny_config,
)  # fmt: skip
from paramstore_testkit.training.moe_models import tokens, watch_routers

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("in_time", "one_thread")]

FAMILIES = families()
SEGMENT_BYTES = 16 << 10
"""Room for one or two experts of the tiny models: the eight of a layer need several segments."""
CASES = (
    {"expert_memory": 16}, {"expert_memory": 4}, {"expert_memory": 9, "residency": "ring"},
    {"expert_memory": 2, "residency": "ring", "speculation": False}, {"expert_memory": 1, "residency": "buffer"},
    {"expert_memory": 9, "residency": "buffer", "speculation": False},
)  # fmt: skip
"""Arguments of `from_config`, all experts first; tests/client/hf/test_inference.py has all pairs of them."""


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[ForkedDaemon]:
    with ForkedDaemon(tmp_path / "store", "--host-budget", "4MiB", segment_bytes=SEGMENT_BYTES) as daemon:
        yield daemon


def logits(model: Any, ids: torch.Tensor) -> torch.Tensor:
    found = model(input_ids=ids)
    value: torch.Tensor = found.logits if hasattr(found, "logits") else found.last_hidden_state
    return value


def segments_of(namespace: ps.Namespace) -> set[int]:
    """The addresses of the mappings in which a layer's experts lie."""
    with namespace.acquire([(namespace.layers[0], expert) for expert in range(namespace.experts)]) as lease:
        addresses = {field.data_ptr() for key in lease for field in lease[key].values()}
    mapped = [line.split()[0].split("-") for line in Path("/proc/self/maps").read_text().splitlines() if "paramstore" in line]
    spans = [(int(first, 16), int(end, 16)) for first, end in mapped]
    return {first for address in addresses for first, end in spans if first <= address < end}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(
    "family",
    [pytest.param(one, marks=() if one in SERVED_ALWAYS else pytest.mark.soak) for one in sorted({*FAMILIES} - NOT_SERVED)],
)
def test_family_has_the_logits_of_the_unmodified_model_from_several_segments(
    daemon: ForkedDaemon, family: str, dtype: torch.dtype
) -> None:
    kernel = "eager" if family in NOT_GROUPED else "grouped_mm"
    model_class, given = modeling_class(FAMILIES[family]), {"experts_implementation": kernel, "dtype": dtype}
    config = tiny_config(family)
    torch.manual_seed(0)
    stock = modeling.build(model_class, tiny_config(family), **given).eval()
    inputs = [tokens(), tokens(seed=1), *(tokens(seed=seed)[:1, :1] for seed in (2, 3))]
    with ps.connect(daemon.address) as store, torch.no_grad():
        routed = watch_routers(stock)
        expected = [logits(stock, ids) for ids in inputs]
        for options in CASES:
            torch.manual_seed(0)
            served = ps.hf.from_config(model_class, config, store=store, mode="infer", **given, **options).eval()
            with ps.hf.recording(served) as recording:
                for ids, value in zip(inputs, expected, strict=True):
                    assert torch.equal(logits(served, ids), value), (options, ids.shape)
            assert [event for event in recording.recorded().events if event.experts] == routed, options
            namespace = ps.hf.namespace(served)
            if options is CASES[0]:
                assert len(segments_of(namespace)) >= 2
            namespace.close()
