"""Whatever computes with the experts of a source that was promised no slot fails with the reason that its `acquire` gives."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from paramstore.errors import CapacityError
from paramstore.testing.memory_namespace import MemoryNamespace
from paramstore_client.device.ring import RingMemory
from paramstore_client.device.tier import DeviceTier
from paramstore_client.hf.model.lease_window import Identities, Window
from paramstore_client.nn import StoredExperts
from paramstore_client.source import ExpertSource

HIDDEN = 8


def stored(source: ExpertSource) -> object:
    return StoredExperts(source, 0)(torch.ones(2, HIDDEN), torch.tensor([[0, 1], [2, 3]]), torch.full((2, 2), 0.5))


def ring_layer(namespace: MemoryNamespace) -> None:
    with RingMemory(namespace, 2) as ring, ring.layer(0, [1]):
        pass


def ring_parts(namespace: MemoryNamespace) -> None:
    with RingMemory(namespace, 2) as ring:
        list(ring.parts(0))


def ring_experts(namespace: MemoryNamespace) -> None:
    with RingMemory(namespace, 2) as ring, torch.no_grad():
        stored(ring)


def tier(namespace: MemoryNamespace) -> None:
    with DeviceTier(namespace, 4, device="cpu") as made:
        made.fetch([(0, 0), (0, 1)])


def tier_experts(namespace: MemoryNamespace) -> None:
    with DeviceTier(namespace, 4, device="cpu") as made:
        stored(made)


def window(namespace: MemoryNamespace) -> None:
    keys = [(0, 0), (0, 1)]
    with Window(namespace, keys, Identities(), device=torch.device("cpu"), is_upward=True, hint=lambda _: []) as made:
        made.weights(0)


@pytest.mark.parametrize("compute", [stored, ring_layer, ring_parts, ring_experts, tier, tier_experts, window])
def test_nothing_computes_without_a_slot_and_the_reason_is_that_of_the_source(compute: Callable[[MemoryNamespace], object]) -> None:
    namespace = MemoryNamespace.of_swiglu(lease_slots=0, hidden=HIDDEN)
    with pytest.raises(CapacityError, match="this session may lease lease_slots=0"):
        compute(namespace)
    assert not namespace.leased
