from __future__ import annotations

import pytest
import torch

from paramstore.core.key import ExpertKey
from paramstore.testing.memory_namespace import MemoryNamespace
from paramstore_client.device.host_slots import HostSlots
from paramstore_client.hf.model import weight_sources
from paramstore_client.hf.model.compact_buffers import CompactBuffers
from paramstore_client.hf.model.weight_sources import AheadHint, CompactSupply, FieldSupply, HeldSupply, StreamedSupply
from paramstore_client.source import ExpertSource

CPU = torch.device("cpu")
KEYS: list[ExpertKey] = [(0, 1), (0, 2), (0, 5)]


def streamed(namespace: MemoryNamespace) -> StreamedSupply:
    return StreamedSupply(namespace, KEYS, CPU, forward_hint=lambda room: [], backward_hint=lambda room: [])


def compact(namespace: MemoryNamespace) -> CompactSupply:
    buffers = CompactBuffers(namespace.schema.part("param").fields, is_poisoned=True)
    return CompactSupply(namespace, KEYS, CPU, buffers=buffers, forward_hint=lambda room: [], backward_hint=lambda room: [])


def gradient(value: float) -> dict[str, torch.Tensor]:
    return {"gate_up": torch.full((24, 8), value), "down": torch.full((8, 12), value)}


def test_streamed_gradients_leave_together_at_the_end() -> None:
    namespace = MemoryNamespace.of_swiglu()
    supply = streamed(namespace)
    supply.begin_backward()
    for position in (2, 1, 0):
        supply.push(position, gradient(position))
    assert not namespace.pending
    supply.finish_backward()
    assert list(namespace.happened("push")) == [("push", ((0, 5), (0, 2), (0, 1)))]


def test_many_bytes_of_gradients_do_not_wait_for_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_sources, "PUSH_BYTES", 1)
    namespace = MemoryNamespace.of_swiglu()
    supply = streamed(namespace)
    supply.begin_backward()
    for position in (2, 1):
        supply.push(position, gradient(position))
    assert list(namespace.happened("push")) == [("push", ((0, 5),)), ("push", ((0, 2),))]


def test_compact_gradients_are_split_by_expert() -> None:
    namespace = MemoryNamespace.of_swiglu()
    supply = compact(namespace)
    supply.push(None, {name: torch.stack([gradient(value)[name] for value in (1.0, 2.0, 3.0)]) for name in ("gate_up", "down")})
    pushed = {key: fields["down"][0, 0].item() for key, fields in namespace.pending.items()}
    assert pushed == dict(zip(KEYS, (1.0, 2.0, 3.0), strict=True))


def test_gradients_of_a_backward_that_failed_are_dropped_by_the_next() -> None:
    namespace = MemoryNamespace.of_swiglu()
    supply = streamed(namespace)
    supply.push(0, gradient(1.0))
    supply.begin_backward()
    supply.finish_backward()
    assert not namespace.pending


@pytest.mark.parametrize("make", [streamed, compact])
def test_weights_that_were_let_go_come_back(make: object) -> None:
    namespace = MemoryNamespace.of_swiglu(lease_slots=2)
    supply = make(namespace)  # type: ignore[operator]
    holder = None if isinstance(supply, CompactSupply) else 1
    for _ in range(2):
        weights = supply.backward_weights(holder)["down"]
        found = weights[1] if holder is None else weights
        assert torch.equal(found, namespace.values((0, 2))["down"])
        supply.let_go()
        assert not namespace.leased


def held(source: ExpertSource, ahead: AheadHint, *, is_streamed: bool = False) -> HeldSupply:
    buffers = CompactBuffers(source.schema.part("param").fields)
    return HeldSupply(source, KEYS, is_streamed=is_streamed, buffers=buffers, ahead=ahead)


def test_held_weights_are_those_of_the_leases_which_end_with_the_pass() -> None:
    namespace = MemoryNamespace.of_swiglu(is_trainable=False)
    hints: list[tuple[tuple[int, int], int]] = []
    supply = held(namespace, lambda found, slots: hints.append((found, slots)) or [(1, 0)])  # type: ignore[func-returns-value]
    with supply.forward_pass() as weights_of:
        weights = weights_of(None)
        assert [len(lease.keys()) for lease in namespace.leased] == [3]
        stacked = weights["down"][torch.arange(3)]
        assert torch.equal(stacked, torch.stack([namespace.values(key)["down"] for key in KEYS]))
    assert not namespace.leased
    assert hints == [((0, 0), 64)]
    assert list(namespace.happened("prefetch")) == [("prefetch", ((1, 0),))]


def test_held_weights_that_are_on_their_way_come_last() -> None:
    namespace = MemoryNamespace.of_swiglu(is_trainable=False)
    source = HostSlots(namespace)
    source.acquire([KEYS[0], KEYS[2]]).release()
    supply = held(source, lambda found, slots: [])
    namespace.events.clear()
    with supply.forward_pass() as weights_of:
        weights = weights_of(None)
        assert namespace.events == [], "it was asked for, and nobody has waited for it"
        y = weights["down"].transpose(-2, -1).grouped_mm(torch.ones(3, 12), torch.tensor([1, 2, 3]))
        assert list(namespace.happened("acquire")) == [("acquire", (KEYS[1],))]
        expected = [torch.ones(1, 12) @ namespace.values(key)["down"].t() for key in KEYS]
        assert torch.equal(y, torch.cat(expected))


def test_a_loop_gets_each_expert_when_it_asks_for_it_and_no_copy() -> None:
    namespace = MemoryNamespace.of_swiglu(is_trainable=False)
    source = HostSlots(namespace)
    source.acquire(KEYS[1:]).release()
    supply = held(source, lambda found, slots: [], is_streamed=True)
    namespace.events.clear()
    with supply.forward_pass() as weights_of:
        assert namespace.events == []
        for position, key in enumerate(KEYS):
            found = weights_of(position)
            (lease,) = [lease for lease in namespace.leased if key in lease.keys()]  # noqa: SIM118  # it has no __contains__
            assert all(found[name].data_ptr() == value.data_ptr() for name, value in lease[key].items())
            assert all(torch.equal(found[name], value) for name, value in namespace.values(key).items())
    assert list(namespace.happened("acquire")) == [("acquire", (KEYS[0],))]


# --- weights by field, under a graph


def by_field(namespace: MemoryNamespace) -> FieldSupply:
    return FieldSupply(namespace, KEYS, CPU, forward_hint=lambda room: [], backward_hint=lambda room: [])


def test_gradients_by_field_leave_once_all_fields_of_their_expert_have_come(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_sources, "PUSH_BYTES", 1)
    namespace = MemoryNamespace.of_swiglu()
    supply = by_field(namespace)
    supply.begin_backward()
    for name in ("down", "gate_up"):
        for position in (2, 0):
            supply.push((position, name), {name: gradient(position + 1.0)[name]})
        assert len(list(namespace.happened("push"))) == (0 if name == "down" else 2)
    supply.finish_backward()
    assert namespace.pending[KEYS[2]]["down"][0, 0].item() == namespace.pending[KEYS[2]]["gate_up"][0, 0].item() == 3.0
    assert list(namespace.pending) == [KEYS[2], KEYS[0]]


def test_what_has_come_in_part_is_dropped_by_the_next_backward() -> None:
    namespace = MemoryNamespace.of_swiglu()
    supply = by_field(namespace)
    supply.push((0, "down"), {"down": gradient(1.0)["down"]})
    supply.begin_backward()
    supply.push((0, "gate_up"), {"gate_up": gradient(2.0)["gate_up"]})
    supply.push((0, "down"), {"down": gradient(2.0)["down"]})
    supply.finish_backward()
    assert namespace.pending[KEYS[0]]["down"][0, 0].item() == 2.0


@pytest.mark.parametrize("lease_slots", [64, 6, 3, 1])
def test_weights_by_field_are_there_in_whatever_order_and_let_go_of(lease_slots: int) -> None:
    namespace = MemoryNamespace.of_swiglu(lease_slots=lease_slots)
    supply = by_field(namespace)
    holders = [(position, name) for name in ("gate_up", "down") for position in range(3)]
    with supply.forward_pass() as weights_of:
        for position, name in holders:
            found = weights_of((position, name))
            assert list(found) == [name]
            assert torch.equal(found[name], namespace.values(KEYS[position])[name])
    assert not namespace.leased
    supply.begin_backward()
    for position, name in reversed(holders):
        assert torch.equal(supply.backward_weights((position, name))[name], namespace.values(KEYS[position])[name])
    assert namespace.leased_keys_max <= lease_slots
    supply.let_go()
    assert not namespace.leased
