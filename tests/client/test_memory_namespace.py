"""The fake namespace refuses, spoils and updates as its docstring says: what stands on it is tested by that."""

import pytest
import torch

from paramstore.core.location import Identity
from paramstore.core.optimizers import SGD, Adagrad, AdamW, Options
from paramstore.core.schema import Schema
from paramstore.errors import CapacityError, LeaseError, SchemaMismatch, UnknownKey
from paramstore.testing.memory_namespace import MemoryNamespace
from paramstore_testkit.oracles.optim_records import TorchOptimizer

KEYS = [(0, expert) for expert in range(6)]


def make_namespace(*, lease_slots: int = 4, **arguments: object) -> MemoryNamespace:
    return MemoryNamespace.of_swiglu(lease_slots=lease_slots, **arguments)


def test_acquire_refuses_more_than_the_cap_and_what_own_leases_block() -> None:
    ns = make_namespace()
    with pytest.raises(CapacityError, match="lease_slots=4"):
        ns.acquire(KEYS[:5])
    with ns.acquire(KEYS[:3]), pytest.raises(LeaseError, match="own leases hold 3 of 4"):
        ns.acquire(KEYS[3:5])
    with pytest.raises(UnknownKey):
        ns.acquire([(9, 0)])
    assert ns.leased == []


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "uint8"])
def test_a_released_tensor_is_spoiled(dtype: str) -> None:
    ns = make_namespace(param_dtype=dtype, is_trainable=dtype != "uint8")
    with ns.acquire(KEYS[:1]) as lease:
        tensor = lease[0, 0]["down"]
        assert torch.equal(tensor, ns.values((0, 0))["down"])
    assert bool((tensor == 255).all()) if dtype == "uint8" else bool(tensor.isnan().all())
    with pytest.raises(LeaseError):
        lease[0, 0]


def test_writing_into_a_leased_tensor_is_seen_at_release() -> None:
    lease = make_namespace().acquire(KEYS[:1])
    lease[0, 0]["down"].add_(1)
    with pytest.raises(AssertionError, match="somebody wrote"):
        lease.release()


def test_apply_updates_what_was_pushed_and_counts_its_version() -> None:
    ns = make_namespace()
    before = {key: ns.values(key)["down"].clone() for key in KEYS}
    gradient = {name: torch.ones_like(value) for name, value in ns.values((0, 1)).items()}
    ns.push({(0, 1): gradient})
    ns.push({(0, 1): gradient})
    assert torch.equal(ns.pending[0, 1]["down"], gradient["down"] * 2)
    ns.apply(AdamW(lr=0.1, weight_decay=0.0))
    assert torch.allclose(ns.values((0, 1))["down"], before[0, 1] - 0.1)
    assert torch.equal(ns.values((0, 2))["down"], before[0, 2])
    assert (ns.identity((0, 1)), ns.identity((0, 2))) == (Identity(0, 1), Identity(0, 0))
    assert ns.pending == {}


@pytest.mark.parametrize("options", [AdamW(lr=0.1), SGD(lr=0.1, momentum=0.9), Adagrad(lr=0.1)])
def test_apply_is_torchs_optimizer_of_the_schemas_kind(options: Options) -> None:
    schema = Schema.trained(options.kind, {"w": (64,)}, param_dtype="float32")
    ns = MemoryNamespace(schema, layers=1, experts=1, lease_slots=1)
    values = {"w": torch.randn(64)}
    ns.initialize(lambda _: values)
    reference = TorchOptimizer(values, options)
    for _ in range(3):
        gradients = {"w": torch.randn(64)}
        ns.push({(0, 0): gradients})
        ns.apply(options)
        reference.step(gradients)
        assert torch.equal(ns.values((0, 0))["w"], reference.state("w")["master"])
    with pytest.raises(SchemaMismatch, match="schema kind"):
        ns.apply(SGD() if options.kind != "sgd" else AdamW())


def test_a_push_with_a_wrong_field_is_refused_and_changes_nothing() -> None:
    ns = make_namespace()
    good = {name: torch.ones_like(value) for name, value in ns.values((0, 1)).items()}
    for bad in ({"down": good["down"]}, {**good, "down": good["down"].double()}, {**good, "down": good["down"][:1]}):
        with pytest.raises(SchemaMismatch, match=r"\(0, 1\)"):
            ns.push({(0, 1): bad})
    assert ns.pending == {}


def test_whoever_asked_is_told_of_each_slot_at_its_release() -> None:
    ns = make_namespace()
    told: list[tuple[int, int]] = []
    stop = ns.before_unmap(lambda address, length_bytes: told.append((address, length_bytes)))
    lease = ns.acquire(KEYS[:2])
    slots = [(buffer.ctypes.data, buffer.nbytes) for buffer in lease.buffers.values()]
    lease.release()
    assert told == slots
    assert all(address % 4096 == 0 for address, _ in slots), "as the service's slots, so that each can be registered"
    stop()
    ns.acquire(KEYS[:1]).release()
    assert told == slots
