"""Measures decoding and prefill of a model whose experts stand in slots of the device, all of them or a share, beside the
unmodified model on the device; what is not in a slot comes from the daemon's host memory."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache

import paramstore as ps
from paramstore.bench.report import machine
from paramstore.bench.report.rows import SUBJECT, Row
from paramstore.bench.service.daemon import serving
from paramstore.config import SEGMENT_ALIGNMENT_BYTES
from paramstore.engine.planner.promises import slots_promising
from paramstore.engine.tables.arena import segment_lengths
from paramstore_bench.decode.rows import SHARES, Work
from paramstore_bench.device.place import Place
from paramstore_bench.device.plan import MIB, Plan
from paramstore_client.device.tier import DeviceTier
from paramstore_client.hf.compat import caches
from paramstore_client.hf.loading.expert_memory import POLICIES
from paramstore_client.hf.model.binding import ATTRIBUTE, bind, layer_of
from paramstore_client.hf.model.layer_experts import ModelExperts

KERNEL = "grouped_mm"


def measure_speed(place: Place, plan: Plan, directory: Path) -> Iterator[Row]:
    """Measures each work with each share of the experts in slots, in pairs with the unmodified model."""
    keys = plan.layers * plan.experts
    fields = {"gate_up": ((2 * plan.inner, plan.hidden), "bfloat16"), "down": ((plan.hidden, plan.inner), "bfloat16")}
    image_bytes = ps.param_schema(fields).part("param").image_bytes
    machine.check_free_space(directory, 4 * keys * image_bytes)
    checkpoint = _checkpoint(place, plan, directory / "checkpoint")
    budget_bytes = sum(segment_lengths(slots_promising(keys), image_bytes)) + 64 * MIB
    budget_bytes -= budget_bytes % -SEGMENT_ALIGNMENT_BYTES
    memory: Any = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.bfloat16, experts_implementation=KERNEL)
    memory.to(place.device)
    works = [Work(plan.prompts[0], new=plan.new), *map(Work, plan.prompts)]
    with serving(directory / "store", host_budget_bytes=budget_bytes) as service:
        for share in SHARES:
            slots = max(plan.top_k, round(share * keys))
            with served(place, service.store, checkpoint, slots) as (ours, tier):
                for key in ((layer, expert) for layer in tier.layers for expert in range(tier.experts)):
                    tier.fetch([key]).release()  # nothing comes from the volume from here on
                for work in works:
                    yield _row(place, plan, work, ours, memory, tier, share)


def _checkpoint(place: Place, plan: Plan, path: Path) -> Path:
    torch.manual_seed(0)
    with torch.device(place.device):
        model = AutoModelForCausalLM.from_config(plan.config(), dtype=torch.bfloat16)  # type: ignore[no-untyped-call]
    model.save_pretrained(path)
    return path


@contextmanager
def served(place: Place, store: ps.Store, checkpoint: Path, slots: int) -> Iterator[tuple[Any, DeviceTier]]:
    """The model with `slots` experts in slots of the device, and its tier. On the twin these are made in its model's place."""
    where = {"expert_memory": 1} if place.is_twin else {"expert_memory": slots, "device_map": {"": place.device.index}}
    model = ps.hf.from_pretrained(
        AutoModelForCausalLM, checkpoint, store=store, mode="infer", name="experts", experts_kernel=KERNEL,
        dtype=torch.bfloat16, **where,
    )  # fmt: skip
    with ExitStack() as stack:
        namespace = stack.enter_context(ps.hf.namespace(model))
        if place.is_twin:
            tier = DeviceTier(namespace, slots, device=place.device, policy=POLICIES["auto"])
            bind(model, ModelExperts(tier, anchor=None), kernel=KERNEL)
        else:
            source = next(layer_of(module).source for module in model.modules() if ATTRIBUTE in module.__dict__)
            assert isinstance(source, DeviceTier), "a model on a device has its experts there"
            tier = source
        yield model, stack.enter_context(tier)


def _row(place: Place, plan: Plan, work: Work, ours: Any, memory: Any, tier: DeviceTier, share: float) -> Row:
    """Measures one cell: pairs in alternating order, after one that is not counted."""
    seconds: list[tuple[float, float]] = []
    equal, apart, before = 0, 0.0, tier.stats
    for number in range(-1, plan.rounds):
        prompt = torch.randint(1024, (1, work.prompt), generator=torch.Generator().manual_seed(number + 1)).to(place.device)
        order = (memory, ours) if number % 2 else (ours, memory)
        answers = {id(model): run(place, model, work, prompt) for model in order}
        (ours_s, found), (memory_s, expected) = answers[id(ours)], answers[id(memory)]
        if number < 0:
            before = tier.stats
            continue
        seconds.append((ours_s, memory_s))
        equal += torch.equal(found, expected)
        apart = max(apart, float((found - expected).abs().max()))
    after, ratios = tier.stats, [memory_s / ours_s for ours_s, memory_s in seconds]
    tokens = work.tokens * plan.rounds
    return Row(
        name=work.name, case=f"{share:.0%} of the experts in slots", subject=SUBJECT, unit="tokens/s",
        value=median(work.tokens / ours_s for ours_s, _ in seconds), limit=median(work.tokens / one for _, one in seconds),
        against="the unmodified model", ratio=median(ratios), ratio_min=min(ratios), ratio_max=max(ratios),
        record_bytes=tier.slots.bytes // tier.slots.count,
        note=f"logits bitwise equal: {equal} of {plan.rounds} samples; host memory {tier.describe()['host_memory']}",
        parts={
            "slots": float(tier.lease_slots), "largest_difference": apart, "hits": after.hits - before.hits,
            "misses": after.misses - before.misses, "late": after.late - before.late,
            "bytes_copied_per_token": (after.bytes_copied - before.bytes_copied) / tokens,
        },
    )  # fmt: skip


@torch.no_grad()
def run(place: Place, model: Any, work: Work, prompt: Tensor) -> tuple[float, Tensor]:
    """(seconds, logits of the last position of each forward). In decoding the prompt goes first, untimed; tokens are the likeliest.
    """
    given = {caches.name_in(model.forward): DynamicCache(config=model.config), "use_cache": True}
    logits: list[Tensor] = []
    tokens = prompt
    if work.new:
        tokens = model(input_ids=prompt, **given).logits[:, -1:].argmax(-1)
    place.finish()
    started_s = time.perf_counter()
    for _ in range(max(1, work.new)):
        logits.append(model(input_ids=tokens, **given).logits[:, -1])
        tokens = logits[-1].argmax(-1, keepdim=True)
    place.finish()
    return time.perf_counter() - started_s, torch.cat(logits)
