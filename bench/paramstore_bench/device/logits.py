"""Compares models whose experts stand in a tier's slots with the unmodified model on the same device: logits by bits, and tokens of
`generate`, which by itself decodes the unmodified one with another kernel there.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paramstore.bench.report.rows import SUBJECT, Row
from paramstore_bench.device.place import Place
from paramstore_bench.device.plan import Plan, yes_or_no
from paramstore_client.device.tier import DeviceTier
from paramstore_client.hf.compat import modeling
from paramstore_client.hf.model.binding import IMPLEMENTATION, bind
from paramstore_client.hf.model.layer_experts import ModelExperts
from paramstore_testkit.training.moe_families import EXPERTS, tiny_config
from paramstore_testkit.training.moe_models import Twin, tokens

FAMILIES = ("qwen3_moe", "mixtral", "deepseek_v3", "gpt_oss")
GREEDY: dict[str, Any] = {"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
FEW = 3
"""Slots below what a layer asks for: its experts come in parts."""


def measure_logits(place: Place, plan: Plan, directory: Path) -> Iterator[Row]:
    """Compares bf16 logits of whole prompts and of one token, with all experts in slots, half of them, and few; then the tokens of
    `generate`."""
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
            yield _generated(place, twin, layers * EXPERTS // 2, case=f"{family}, {kernel}")


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


def _generated(place: Place, twin: Twin, slots: int, *, case: str) -> Row:
    """Compares tokens, with the kernel of the unmodified model held in decoding. The stored one keeps its own: nothing holds it."""
    ids, kernels = tokens(seed=3).to(place.device), set[str]()
    stock, stored = twin.stock.eval(), twin.stored.eval()

    def note(model: Any, *_: Any) -> None:
        kernels.add(model.get_experts_implementation()[""])

    with DeviceTier(twin.namespace, slots, device=place.device, policy="schedule") as tier:
        bind(stored, ModelExperts(tier, anchor=None), kernel=case.rpartition(" ")[2])
        with stored.register_forward_pre_hook(note):
            found = stored.generate(ids, **GREEDY)
    own, kernels = kernels, set[str]()
    with modeling.fixed_kernel(stock), stock.register_forward_pre_hook(note):
        expected = stock.generate(ids, **GREEDY)
    is_kept = own == {IMPLEMENTATION} and kernels == {case.rpartition(" ")[2]}
    return yes_or_no(
        "tokens of generate", f"{case}, {slots} of {len(twin.layout.layers) * EXPERTS} experts in slots",
        is_so=torch.equal(found, expected) and is_kept, note=f"kernels: {sorted(own)}, unmodified {sorted(kernels)}",
        tokens=found.shape[1] - ids.shape[1],
    )  # fmt: skip
