"""Compares logits of models whose experts stand in a tier's slots with those of the unmodified model on the same device, by bits.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paramstore.bench.report.rows import SUBJECT, Row
from paramstore_bench.device.place import Place
from paramstore_bench.device.plan import Plan
from paramstore_client.device.tier import DeviceTier
from paramstore_client.hf.compat import modeling
from paramstore_client.hf.model.binding import ModelExperts, bind
from paramstore_testkit.training.moe_families import EXPERTS, tiny_config
from paramstore_testkit.training.moe_models import Twin, tokens

FAMILIES = ("qwen3_moe", "mixtral", "deepseek_v3", "gpt_oss")
FEW = 3
"""Slots below what a layer asks for: its experts come in parts."""


def measure_logits(place: Place, plan: Plan, directory: Path) -> Iterator[Row]:
    """Compares bf16 logits of whole prompts and of one token, with all experts in slots, half of them, and few."""
    prompts = [tokens(), tokens(seed=1, batch=8, length=48), tokens(seed=2)[:1, :1]]
    for family in FAMILIES:
        for kernel in modeling.KERNELS:
            config = tiny_config(family, sizes=plan.sizes)
            twin = Twin.of(config, kernel=kernel, dtype=torch.bfloat16, is_trained=False)
            twin.stock.to(place.device)
            twin.stored.to(place.device)
            layers = len(twin.layout.layers)
            with torch.no_grad():
                expected = [twin.stock(ids.to(place.device)).logits for ids in prompts]
                for slots in (layers * EXPERTS, layers * EXPERTS // 2, FEW):
                    yield _compared(place, twin, prompts, expected, slots, case=f"{family}, {kernel}")


def _compared(place: Place, twin: Twin, prompts: list[Tensor], expected: list[Tensor], slots: int, *, case: str) -> Row:
    with DeviceTier(twin.namespace, slots, device=place.device, policy="schedule") as tier:
        bind(twin.stored, ModelExperts(tier, anchor=None), kernel=case.rpartition(" ")[2])
        found = [twin.stored(ids.to(place.device)).logits for ids in prompts]
        counts: Any = tier.stats
    equal = [torch.equal(ours, theirs) for ours, theirs in zip(found, expected, strict=True)]
    apart = max(float((ours - theirs).abs().max()) for ours, theirs in zip(found, expected, strict=True))
    return Row(
        name="logits, bf16", case=f"{case}, {slots} of {len(twin.layout.layers) * EXPERTS} experts in slots", subject=SUBJECT,
        value=float(sum(equal)), unit=f"of {len(equal)} bitwise equal", against="the unmodified model",
        parts={"largest_difference": apart, "misses": counts.misses, "hits": counts.hits},
    )  # fmt: skip
