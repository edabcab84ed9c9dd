"""Counts how often the host waits for a device in each layer of a model, beside what that layer lacked there."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import ceil
from typing import Any
from unittest.mock import patch

from paramstore_client.device.tier import DeviceTier
from paramstore_client.hf.model.layer_experts import LayerExperts


@dataclass(frozen=True, slots=True)
class LayerWaits:
    """One call of a layer. waits: of the host; lacked: experts that were loaded on demand."""

    waits: int
    lacked: int


def most_load_waits(keys: int, lease_slots: int) -> int:
    """How often loads of so many keys may wait, as `DeviceCopies` says; a layer waits once more, to learn its experts."""
    return max(0, ceil(keys / max(1, lease_slots // 2)) - 1)


@contextmanager
def unmapped_late() -> Iterator[None]:
    """Within it nobody waits for copies where host leases end: a namespace in memory unmaps what is released, and the service's
    keeps it mapped."""

    def forget(tier: DeviceTier, address: int, length_bytes: int) -> None:
        tier._copier.forget_memory(address, length_bytes)

    with patch.object(DeviceTier, "_forget_memory", forget):
        yield


@contextmanager
def layer_waits(waits: Callable[[], int]) -> Iterator[list[LayerWaits]]:
    """Within it each call of a layer's experts adds to the list that it yields. waits: () -> how often the host has waited."""
    found, run = list[LayerWaits](), LayerExperts.run

    def counted(layer: LayerExperts, *inputs: Any) -> Any:
        assert isinstance(layer.source, DeviceTier)
        counts = layer.source.plan.counts
        before, lacked = waits(), counts.misses + counts.passed
        y = run(layer, *inputs)
        found.append(LayerWaits(waits() - before, counts.misses + counts.passed - lacked))
        return y

    with unmapped_late(), patch.object(LayerExperts, "run", counted):
        yield found
