"""Counts how often the host waits for the device in a layer of experts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from paramstore.bench.report.rows import SUBJECT, Row, Target, judged
from paramstore_bench.device.place import Place, Waits
from paramstore_bench.device.plan import Plan, yes_or_no
from paramstore_client.device.tier import DeviceTier
from paramstore_client.hf.model.binding import LayerExperts
from paramstore_client.hf.model.dispatch import look_up
from paramstore_testkit.streams.models import StoredModel

KERNELS = ("grouped_mm", "batched_mm")
"""Those that need not be told their experts on the host; the module's own loop waits for each of its experts."""
EXPERTS = 64


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
        model = StoredModel("qwen3_moe", kernel)
        with place.streams() as waits, waits_of_layers(waits) as found:
            model.compute(0)
        yield judged(
            Row(
                name="host's waits in a layer", case=kernel, subject=SUBJECT, value=max(found), unit="waits",
                target=Target("value", "<=", 1.0), parts={"layers": len(found), "waits": sum(found)},
            )
        )  # fmt: skip
    yield _guesses(place)


@contextmanager
def waits_of_layers(waits: Waits) -> Iterator[list[int]]:
    """Within it each call of a layer's experts adds its number of waits to the list that it yields."""
    found: list[int] = []
    run = LayerExperts.run

    def counted(layer: LayerExperts, *inputs: Any) -> Any:
        before = waits()
        y = run(layer, *inputs)
        found.append(waits() - before)
        return y

    def forget(tier: DeviceTier, address: int, length_bytes: int) -> None:
        tier._copier.forget_memory(address, length_bytes)

    # A namespace in memory unmaps what is released; the service's keeps it mapped, and nobody waits for copies from there.
    with patch.object(LayerExperts, "run", counted), patch.object(DeviceTier, "_forget_memory", forget):
        yield found


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
