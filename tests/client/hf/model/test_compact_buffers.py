from __future__ import annotations

import torch

from paramstore.testing.memory_namespace import MemoryNamespace
from paramstore_client.hf.model.compact_buffers import CompactBuffers
from paramstore_client.hf.model.lease_window import Window
from paramstore_client.nn.weight_views import Identities

CPU = torch.device("cpu")


def buffers_of(namespace: MemoryNamespace, *, is_poisoned: bool = True) -> CompactBuffers:
    return CompactBuffers(namespace.schema.part("param").fields, is_poisoned=is_poisoned)


def window_of(namespace: MemoryNamespace, experts: list[int], layer: int = 0) -> Window:
    keys = [(layer, expert) for expert in experts]
    return Window(namespace, keys, Identities(), device=CPU, is_upward=True, hint=lambda room: [])


def test_buffers_hold_the_experts_in_order_and_no_lease() -> None:
    namespace = MemoryNamespace.of_swiglu(lease_slots=2)
    with buffers_of(namespace).filled(window_of(namespace, [1, 3, 4]), 3, CPU) as weights:
        assert not namespace.leased
        assert weights["down"].is_contiguous()
        for position, expert in enumerate([1, 3, 4]):
            for name, value in namespace.values((0, expert)).items():
                assert torch.equal(weights[name][position], value)


def test_memory_is_reused_by_the_next_layer_and_poisoned_in_between() -> None:
    namespace = MemoryNamespace.of_swiglu()
    buffers = buffers_of(namespace)
    with buffers.filled(window_of(namespace, [0, 1, 2]), 3, CPU) as first:
        address = first["down"].data_ptr()
    assert first["down"].isnan().all()
    with buffers.filled(window_of(namespace, [0, 5], layer=1), 2, CPU) as second:
        assert second["down"].data_ptr() == address
        assert second["down"].shape[0] == 2
        assert torch.equal(second["down"][1], namespace.values((1, 5))["down"])


def test_layers_at_the_same_time_get_memory_of_their_own() -> None:
    namespace = MemoryNamespace.of_swiglu()
    buffers = buffers_of(namespace)
    with buffers.filled(window_of(namespace, [0]), 1, CPU) as one, buffers.filled(window_of(namespace, [1]), 1, CPU) as other:
        assert one["down"].data_ptr() != other["down"].data_ptr()
        assert torch.equal(one["down"][0], namespace.values((0, 0))["down"])


def test_buffers_grow_with_the_largest_layer() -> None:
    namespace = MemoryNamespace.of_swiglu()
    buffers = buffers_of(namespace, is_poisoned=False)
    for count in (1, 6, 2):
        with buffers.filled(window_of(namespace, list(range(count))), count, CPU) as weights:
            assert torch.equal(weights["down"][count - 1], namespace.values((0, count - 1))["down"])


def test_buffers_made_in_inference_mode_serve_training_later() -> None:
    namespace = MemoryNamespace.of_swiglu()
    buffers = buffers_of(namespace)
    with torch.inference_mode(), buffers.filled(window_of(namespace, [0]), 1, CPU):
        pass
    with buffers.filled(window_of(namespace, [0]), 1, CPU) as weights:
        value = torch.ones(8, 12, requires_grad=True)
        (value * weights["down"][0]).sum().backward()
    assert value.grad is not None
