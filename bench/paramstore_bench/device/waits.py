"""Counts how often the host waits for the device in a layer of experts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch

from paramstore.bench.report.rows import Row
from paramstore.testing.memory_namespace import MemoryNamespace
from paramstore_bench.device.place import Place
from paramstore_bench.device.plan import Plan, yes_or_no
from paramstore_client.device.tier import DeviceTier
from paramstore_client.hf.model.dispatch import look_up
from paramstore_testkit.streams.layer_waits import layer_waits, most_load_waits, unmapped_late
from paramstore_testkit.streams.models import StoredModel

KERNELS = ("grouped_mm", "batched_mm")
"""Those that need not be told their experts on the host; the module's own loop waits for each of its experts."""
EXPERTS = 64
LEASE_SLOTS = (64, 4, 2)
"""More than a layer has experts, as many as half of what a prompt uses, and the least with which copies overlap."""


def measure_waits(place: Place, plan: Plan, directory: Path) -> Iterator[Row]:
    """Counts the waits of each layer for a prompt and one token, loads among them; first those of which the number is known."""
    with place.streams() as waits:
        event, ones = torch.cuda.Event(), torch.ones(1, device="cuda:0")  # type: ignore[no-untyped-call]  # the library's
        before = waits()
        ones.item()
        event.record(torch.cuda.current_stream())
        event.synchronize()
        counted = waits() - before
    yield yes_or_no("known waits are counted", "a value, an event", is_so=counted == 2, counted=counted)
    for kernel in KERNELS:
        for lease_slots in LEASE_SLOTS:
            yield _layers(place, kernel, lease_slots)
    for lease_slots in LEASE_SLOTS:
        yield _loads_ahead(place, lease_slots)
    yield _guesses(place)


def _layers(place: Place, kernel: str, lease_slots: int) -> Row:
    """Compares the waits of each layer with what is promised of them: one, and with few lease slots those of its loads."""
    model = StoredModel("qwen3_moe", kernel, lease_slots=lease_slots)
    with place.streams() as waits, layer_waits(waits) as layers:
        model.compute(0)
    is_kept = all(layer.waits <= 1 + most_load_waits(layer.lacked, lease_slots) for layer in layers)
    return yes_or_no(
        "a layer waits no more often than is said", f"{kernel}, {lease_slots} lease slots", is_so=is_kept,
        most=max(layer.waits for layer in layers), waits=sum(layer.waits for layer in layers), layers=len(layers),
    )  # fmt: skip


def _loads_ahead(place: Place, lease_slots: int) -> Row:
    """Loads a layer ahead, then another while copies of the first are under way, and counts the waits."""
    namespace = MemoryNamespace.of_swiglu(layers=2, experts=EXPERTS, hidden=8, inner=8, lease_slots=lease_slots, seed=1)
    device = torch.device("cuda", 0)
    with place.streams() as waits, unmapped_late(), torch.no_grad(), DeviceTier(namespace, 2 * EXPERTS, device=device) as tier:
        before = waits()
        for layer in namespace.layers:
            tier.prefetch([(layer, expert) for expert in range(EXPERTS)])
        count = waits() - before
    return yes_or_no("loads ahead wait for nothing", f"{lease_slots} lease slots", is_so=count == 0, waits=count)


def _guesses(place: Place) -> Row:
    """Looks up one layer's choice, with guesses of the next one's experts in the same transfer."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(EXPERTS, (16, 4), generator=generator)
    guesses = torch.randint(EXPERTS, (16, 4), generator=generator)
    with place.streams() as waits:
        there, guesses_there = ids.to("cuda:0"), guesses.to("cuda:0")
        before = waits()
        found = look_up(there, experts=EXPERTS, guesses_G=guesses_there)
        count = waits() - before
    is_right = list(found.experts) == sorted(set(ids.flatten().tolist())) and list(found.guesses) == guesses.flatten().tolist()
    return yes_or_no("guesses come with the ids", "right, in one wait", is_so=is_right and count == 1, waits=count)
