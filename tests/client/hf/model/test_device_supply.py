"""Layers that compute in the slots of a tier, on its twin on the CPU; `tests/properties/test_device_streams.py` has whole models on
simulated streams."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from paramstore_client.device.tier import DeviceTier
from paramstore_client.hf.compat import modeling
from paramstore_client.hf.model.binding import ModelExperts, bind
from paramstore_testkit.training.moe_families import tiny_config
from paramstore_testkit.training.moe_models import Twin, tokens

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]

FAMILIES = ("mixtral", "qwen3_moe", "deepseek_v3", "gpt_oss")
SLOTS = (16, 8, 3)
"""All experts of two layers; one layer's; fewer than a layer asks for, which come in parts."""


@contextmanager
def tier_of(twin: Twin, slots: int, kernel: str) -> Iterator[DeviceTier]:
    with DeviceTier(twin.namespace, slots, device="cpu", policy="schedule") as tier:
        bind(twin.stored, ModelExperts(tier, anchor=None), kernel=kernel)
        yield tier


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("kernel", modeling.KERNELS)
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_the_unmodified_model(family: str, kernel: str, dtype: torch.dtype) -> None:
    twin = Twin.of(tiny_config(family), kernel=kernel, dtype=dtype, is_trained=False)
    for slots in SLOTS:
        with tier_of(twin, slots, kernel), torch.no_grad():
            for ids in (tokens(), tokens(seed=1), tokens(seed=2)[:1, :1]):
                assert torch.equal(twin.stored(ids).logits, twin.stock(ids).logits), (slots, ids.shape)
        assert twin.namespace.leased == []


@pytest.mark.parametrize("kernel", modeling.KERNELS)
def test_nothing_is_copied_nor_asked_for_where_all_stand(kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    twin = Twin.of(tiny_config("qwen3_moe"), kernel=kernel, is_trained=False)
    with tier_of(twin, 16, kernel) as tier, torch.no_grad():
        expected = twin.stored(tokens()).logits
        monkeypatch.setattr("paramstore_client.hf.model.compact_buffers.CompactBuffers.filled", None)
        monkeypatch.setattr("paramstore_client.device.tier.DeviceTier._lease_from_host", None)
        twin.namespace.events.clear()
        copied = tier.stats.bytes_copied
        assert torch.equal(twin.stored(tokens()).logits, expected)
        assert (tier.stats.bytes_copied, twin.namespace.events) == (copied, [])


def test_a_failing_kernel_ends_its_visit(monkeypatch: pytest.MonkeyPatch) -> None:
    twin = Twin.of(tiny_config("qwen3_moe"), kernel="grouped_mm", is_trained=False)

    def fail(*_: Any) -> None:
        raise RuntimeError("planted")

    with tier_of(twin, 8, "grouped_mm") as tier, torch.no_grad():
        with monkeypatch.context() as patch:
            patch.setattr("paramstore_client.hf.model.kernels.ExpertStack.grouped_mm", fail)
            with pytest.raises(RuntimeError, match="planted"):
                twin.stored(tokens())
        assert [held for held in tier.plan.held if held.users] == []
        assert torch.equal(twin.stored(tokens()).logits, twin.stock(tokens()).logits)


@pytest.mark.parametrize(
    "given",
    [
        {"do_sample": False}, {"do_sample": False, "num_beams": 3}, {"do_sample": True, "top_k": 5},
        {"do_sample": False, "cache_implementation": "static"},
    ],
    ids=["greedy", "beams", "sampling", "static cache"],
)  # fmt: skip
def test_generate_gives_the_tokens_of_the_unmodified_model(given: dict[str, Any]) -> None:
    """A batch of two prompts, of which one is padded on its left."""
    twin = Twin.of(tiny_config("qwen3_moe"), kernel="grouped_mm", is_trained=False)
    ids, mask = tokens().clone(), torch.ones_like(tokens())
    ids[1, :3], mask[1, :3] = 0, 0
    made = []
    with tier_of(twin, 9, "grouped_mm"):
        for model in (twin.stock.eval(), twin.stored.eval()):
            torch.manual_seed(3)
            made.append(model.generate(ids, attention_mask=mask, max_new_tokens=10, pad_token_id=0, **given))
    assert torch.equal(*made)
