"""Whatever computes with the experts of a source fails with the reason that its `acquire` gives, where that was promised no slot,
and never with what its `prefetch` raises."""

# T tokens, K experts per token, D model
# ruff: noqa: N806 - shape suffixes, as the legend says

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from paramstore.errors import CapacityError, ParamStoreError, UnknownNamespace, VolumeError
from paramstore.testing.memory_namespace import MemoryNamespace
from paramstore_client.device.ring import RingMemory
from paramstore_client.device.tier import DeviceTier
from paramstore_client.hf.model.lease_window import Window
from paramstore_client.nn import StoredExperts
from paramstore_client.nn.weight_views import Identities
from paramstore_client.source import ExpertSource, load_ahead

HIDDEN = 8


def stored(source: ExpertSource) -> object:
    return StoredExperts(source, 0)(torch.ones(2, HIDDEN), torch.tensor([[0, 1], [2, 3]]), torch.full((2, 2), 0.5))


def ring_layer(namespace: MemoryNamespace) -> None:
    with RingMemory(namespace, 2) as ring, ring.layer(0, [1]):
        pass


def ring_parts(namespace: MemoryNamespace) -> None:
    with RingMemory(namespace, 2) as ring:
        list(ring.parts(0))


def ring_experts(namespace: MemoryNamespace) -> object:
    with RingMemory(namespace, 2) as ring, torch.no_grad():
        return stored(ring)


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


def differentiated(source: ExpertSource) -> object:
    x_TD = torch.ones(3, HIDDEN, requires_grad=True)
    y_TD = StoredExperts(source, 0)(x_TD, torch.tensor([[0, 1], [2, 3], [1, 2]]), torch.full((3, 2), 0.5))
    y_TD.sum().backward()
    return x_TD.grad


def without_graph(source: ExpertSource) -> object:
    with torch.no_grad():
        return stored(source)


def in_few_device_slots(source: MemoryNamespace) -> object:
    with DeviceTier(source, 2, device="cpu") as made, torch.no_grad():
        ids_TK = torch.arange(16).view(8, 2)  # so many that the host is asked for the rest while the first are computed with
        return StoredExperts(made, 0)(torch.ones(8, HIDDEN), ids_TK, torch.full((8, 2), 0.5))


def in_a_window(source: MemoryNamespace) -> object:
    keys = [(0, expert) for expert in range(4)]
    with Window(source, keys, Identities(), device=torch.device("cpu"), is_upward=True, hint=lambda _: []) as made:
        return [made.weights(position)["down"].sum() for position in range(4)]


@pytest.mark.parametrize("error", [CapacityError, UnknownNamespace, VolumeError])
@pytest.mark.parametrize("compute", [stored, differentiated, without_graph, in_few_device_slots, in_a_window, ring_experts])
def test_what_cannot_be_asked_for_ahead_fails_no_work_and_changes_no_bit(
    compute: Callable[[MemoryNamespace], object], error: type[ParamStoreError], monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    def refuse(*_: object, **__: object) -> None:
        raise error("no hints")

    def namespace() -> MemoryNamespace:
        return MemoryNamespace.of_swiglu(lease_slots=2, hidden=HIDDEN, experts=16)

    expected, refusing = compute(namespace()), namespace()
    monkeypatch.setattr(refusing, "prefetch", refuse)
    torch.testing.assert_close(compute(refusing), expected, rtol=0, atol=0)
    assert refusing.leased == []
    assert "could not be loaded ahead: no hints" in caplog.text


def test_nothing_is_asked_for_where_there_is_nothing_to_load() -> None:
    namespace = MemoryNamespace.of_swiglu()
    assert load_ahead(namespace, []) is None
    assert namespace.events == []
