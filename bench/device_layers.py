"""Measures layers for `bench_device.py`: what a host sync costs one, and how fast a model decodes with experts from the store."""

# T tokens, K experts per token, N = T * K rows, D model, E experts
# ruff: noqa: N803, N806 - shape suffixes, as the legend says

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import paramstore as ps
from device_plan import MIB, Plan
from paramstore.bench.pairs import Sample, sample_pairs
from paramstore.bench.report import machine
from paramstore.bench.report.rows import SUBJECT, Row
from paramstore.bench.service.daemon import serving
from paramstore.clock import Clock
from paramstore_client.nn.routing import count_blocks

TOP_K = 2


def measure_host_sync(plan: Plan, device: torch.device, clock: Clock) -> list[Row]:
    """Measures what reading the expert counts on the host adds to a layer's time."""
    ids_N = torch.randint(plan.experts, (plan.tokens * TOP_K,), device=device)
    ones_N = torch.ones_like(ids_N)
    weight_DD = torch.randn(plan.hidden, plan.hidden, dtype=torch.bfloat16, device=device) / plan.hidden**0.5
    x_TD = torch.randn(plan.tokens, plan.hidden, dtype=torch.bfloat16, device=device)

    def read_counts() -> object:
        return torch.zeros(plan.experts, dtype=torch.int64, device=device).scatter_add_(0, ids_N, ones_N).tolist()

    def layers_s(look: Callable[[], object]) -> float:
        wait_for(device)
        started_s = clock.now_s()
        y_TD = x_TD
        for _ in range(plan.sync_layers):
            y_TD = y_TD @ weight_DD
            look()
        wait_for(device)
        return clock.now_s() - started_s

    looks = {"": lambda: None, "one .tolist() of counts": read_counts, "as StoredExperts counts": lambda: count_blocks(ids_N)}
    for look in looks.values():
        layers_s(look)
    seconds = {case: statistics.median(layers_s(look) for _ in range(plan.rounds)) for case, look in looks.items()}
    without_us = seconds.pop("") / plan.sync_layers * 1e6
    return [
        Row(
            name="host sync of a layer", case=case, subject=SUBJECT, value=taken_s / plan.sync_layers * 1e6 - without_us, unit="us",
            parts={"layer_with_us": taken_s / plan.sync_layers * 1e6, "layer_without_us": without_us},
        )
        for case, taken_s in seconds.items()
    ]  # fmt: skip


def measure_decoding(plan: Plan, device: torch.device, clock: Clock, directory: Path) -> list[Row]:
    """Measures tokens a second of a small MoE whose experts come from the store, beside all of them resident on the device."""
    machine.check_free_space(directory.parent, 6 * plan.model_bytes)
    with serving(directory, host_budget_bytes=2 * plan.model_bytes + 256 * MIB) as service:
        make_experts(plan, service.store)
        service.wait_until_quiet(clock)
        with service.store.open_namespace("moe") as reader:
            return decode_rows(plan, device, clock, reader)


def make_experts(plan: Plan, store: ps.Store) -> None:
    """Stores random experts, small enough that activations stay finite, committed as step 0."""
    generator = torch.Generator().manual_seed(0)
    with store.create_namespace("moe", plan.schema, layers=plan.layers, experts=plan.experts) as ns:
        ns.initialize(
            lambda key: {name: (torch.randn(shape, generator=generator) * 0.02).bfloat16() for name, shape, _ in plan.schema.specs}
        )
        ns.commit(0).wait()


def decode_rows(plan: Plan, device: torch.device, clock: Clock, reader: ps.Namespace) -> list[Row]:
    resident = [ps.nn.ResidentExperts(layer_weights(reader, layer)).to(device) for layer in range(plan.layers)]
    generator = torch.Generator().manual_seed(1)
    routers_DE = [torch.randn(plan.hidden, plan.experts, generator=generator).to(device) for _ in range(plan.layers)]
    x_TD = torch.randn(plan.tokens, plan.hidden, generator=generator).to(device, torch.bfloat16)
    outputs = {}

    def decode(name: str, layers: Sequence[nn.Module]) -> Sample:
        wait_for(device)
        started_s = clock.now_s()
        y_TD = x_TD
        with torch.no_grad():
            for _ in range(plan.steps):
                y_TD = step(layers, routers_DE, y_TD)
        wait_for(device)
        outputs[name] = y_TD
        return Sample(plan.tokens * plan.steps, clock.now_s() - started_s)

    rows = []
    for case, make in sources(plan, device, reader):
        with make() as source:
            layers = [ps.nn.StoredExperts(source, layer) for layer in range(plan.layers)]
            pairs = sample_pairs(
                plan.rounds,
                lambda _, case=case, layers=layers: decode(case, layers),  # type: ignore[misc]  # a default in a lambda
                lambda _: decode("resident", resident),
            )
            counts = {name: float(value) for name, value in asdict(source.stats).items()}
        rows.append(
            Row(
                name="decoding", case=case, subject=SUBJECT, value=pairs.rate, unit="tokens/s", against="all resident",
                record_bytes=plan.schema.record_bytes, limit=pairs.limit_rate, ratio=pairs.ratio, ratio_min=pairs.ratio_min,
                ratio_max=pairs.ratio_max, parts={**pairs.parts(), **counts},
                note=f"output bitwise equal: {torch.equal(outputs[case], outputs['resident'])}",
            )
        )  # fmt: skip
    return rows


def sources(plan: Plan, device: torch.device, reader: ps.Namespace) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Yields the sources of experts, each as its name and a function that makes it."""
    count = plan.layers * plan.experts
    for slots in (count, count // 2):
        yield f"DeviceTier, {slots} of {count} experts", lambda slots=slots: ps.DeviceTier(reader, slots, device=device)  # type: ignore[misc]  # a default in a lambda
    yield (
        f"RingMemory, {plan.ring_layers} of {plan.layers} layers",
        lambda: ps.RingMemory(reader, slots=plan.ring_layers, device=device, experts_ahead=plan.experts),
    )


def layer_weights(reader: ps.Namespace, layer: int) -> list[dict[str, Tensor]]:
    weights = []
    for expert in range(reader.experts):
        with reader.acquire([(layer, expert)]) as lease:
            weights.append(lease.clone()[layer, expert])
    return weights


def step(layers: Sequence[nn.Module], routers_DE: Sequence[Tensor], x_TD: Tensor) -> Tensor:
    """Computes one token of every sequence through all layers."""
    for layer, router_DE in zip(layers, routers_DE, strict=True):
        gate_TK, ids_TK = (x_TD.float() @ router_DE).softmax(dim=-1).topk(TOP_K)
        x_TD = functional.rms_norm(x_TD + layer(x_TD, ids_TK, gate_TK), x_TD.shape[-1:])
    return x_TD


def wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
