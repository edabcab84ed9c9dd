"""StoredExperts equals ResidentExperts bit for bit, within its leases, whatever is done to it."""

# T tokens, K experts per token, D model
# ruff: noqa: N803, N806 - shape suffixes, as the legend says

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint

from paramstore.core.optimizers import AdamW
from paramstore.errors import ConfigError, UnknownKey
from paramstore.policy.make import SLOT_POLICIES
from paramstore.testing.memory_namespace import MemoryNamespace
from paramstore_client.device.buffer import ExpertBuffer
from paramstore_client.device.copier import HostCopier, Mark
from paramstore_client.device.ring import RingMemory
from paramstore_client.device.tier import DeviceTier
from paramstore_client.nn import ExpertSchedule, ResidentExperts, StoredExperts, swiglu
from paramstore_client.recorder import TraceRecorder
from paramstore_testkit.training.small_experts import (
    EXPERTS,
    HIDDEN,
    TOP_K,
    Model,
    assert_pending_equal,
    assert_same_as_resident,
    make_namespace,
    make_resident,
    make_stored,
    make_tokens,
    run,
)

pytestmark = pytest.mark.usefixtures("one_thread")


# --- bitwise


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("lease_slots", [64, EXPERTS, 4, 1])
def test_loss_and_gradients_equal_resident_experts_however_few_fit(lease_slots: int, dtype: torch.dtype) -> None:
    ns = make_namespace(lease_slots=lease_slots, param_dtype=dtype)
    assert_same_as_resident(ns, make_stored(ns), make_resident(ns), make_tokens(dtype))
    assert ns.leased_keys_max <= lease_slots


def relu_of_views(x_tD: Tensor, weights: Mapping[str, Tensor]) -> Tensor:
    """An expert that saves views, transposes and a reinterpretation of its weights, and uses one field twice."""
    first, second = weights["gate_up"][:12], weights["gate_up"][12:].T
    hidden = (x_tD @ first.T).relu() * (x_tD @ second) + x_tD.mean() * weights["gate_up"][3:15, 0]
    return torch.einsum("ti,di->td", hidden.tanh(), weights["down"]) + x_tD * weights["down"].sum(1)


@pytest.mark.parametrize("lease_slots", [64, 4])
def test_an_expert_of_ones_own_equals_it_too(lease_slots: int) -> None:
    ns = make_namespace(lease_slots=lease_slots)
    assert_same_as_resident(ns, make_stored(ns, relu_of_views), make_resident(ns, relu_of_views), make_tokens())


def test_the_layer_computes_the_gated_sum_of_its_experts() -> None:
    ns = make_namespace()
    x_TD, gate_TK = make_tokens(), torch.rand(10, TOP_K)
    ids_TK = torch.rand(10, EXPERTS).topk(TOP_K).indices
    y_TD = StoredExperts(ns, 1)(x_TD, ids_TK, gate_TK)
    for token in range(10):
        expected = sum(gate_TK[token, k] * swiglu(x_TD[token], ns.values((1, int(ids_TK[token, k])))) for k in range(TOP_K))
        assert torch.allclose(y_TD[token], expected, atol=1e-6)


def test_the_order_of_a_tokens_experts_changes_no_bit() -> None:
    ns = make_namespace()
    layer, x_TD, gate_TK = StoredExperts(ns, 0), make_tokens(), torch.rand(10, 3)
    ids_TK = torch.rand(10, EXPERTS).topk(3).indices
    assert torch.equal(layer(x_TD, ids_TK, gate_TK), layer(x_TD, ids_TK.flip(1), gate_TK.flip(1)))


@pytest.mark.slow
def test_steps_of_training_keep_stored_and_resident_experts_equal() -> None:
    ns = make_namespace(lease_slots=4)
    stored, resident = make_stored(ns, used_experts=4), make_resident(ns, used_experts=4)
    weights = [p for name, p in resident.named_parameters() if ".weights." in name]
    optimizer = torch.optim.AdamW(weights, lr=1e-2, weight_decay=0.1, fused=True)
    for step in range(4):
        assert_same_as_resident(ns, stored, resident, make_tokens(seed=step))
        ns.apply(AdamW(lr=1e-2, weight_decay=0.1))
        optimizer.step()
        optimizer.zero_grad()
        stored.gate.grad = resident.gate.grad = None
    for layer, module in zip(ns.layers, resident.layers, strict=True):
        for expert, fields in enumerate(module.weights):
            for name, parameter in fields.items():
                assert torch.equal(ns.values((layer, expert))[name], parameter), f"{(layer, expert)} {name}"


def test_gradients_of_micro_batches_add_up_before_the_step() -> None:
    ns = make_namespace(lease_slots=4)
    stored, resident = make_stored(ns), make_resident(ns)
    for seed in range(3):
        run(stored, make_tokens(seed=seed))
        run(resident, make_tokens(seed=seed))
    assert_pending_equal(ns, resident)


@pytest.mark.parametrize("lease_slots", [64, 4])
@pytest.mark.parametrize("is_reentrant", [True, False])
def test_activation_checkpointing_changes_no_bit(lease_slots: int, is_reentrant: bool) -> None:
    ns = make_namespace(lease_slots=lease_slots)
    stored, resident = make_stored(ns), make_resident(ns)
    for model in (stored, resident):
        model.wrap = lambda layer, *inputs: checkpoint(layer, *inputs, use_reentrant=is_reentrant)
    assert_same_as_resident(ns, stored, resident, make_tokens())


@pytest.mark.parametrize("is_checkpointed", [True, False])
def test_autocast_changes_no_bit(is_checkpointed: bool) -> None:
    ns = make_namespace(lease_slots=4)
    stored, resident = make_stored(ns), make_resident(ns)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for model in (stored, resident):
            if is_checkpointed:
                model.wrap = lambda layer, *inputs: checkpoint(layer, *inputs, use_reentrant=False)
        assert_same_as_resident(ns, stored, resident, make_tokens())


def saved_floats(model: torch.nn.Module, x_TD: Tensor) -> int:
    """How many elements autograd keeps for backward, in distinct storages."""
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes() // tensor.itemsize
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y_TD = model(x_TD)
    del y_TD
    return sum(kept.values())


@pytest.mark.parametrize("lease_slots", [64, 4])
@pytest.mark.parametrize("is_autocast", [False, True])
def test_longer_weights_compute_in_the_dtype_of_the_tokens_and_are_not_kept_in_it(lease_slots: int, is_autocast: bool) -> None:
    ns = make_namespace(lease_slots=lease_slots)
    stored, tokens = make_stored(ns), make_tokens(torch.bfloat16)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=is_autocast):
        with torch.no_grad():
            assert torch.equal(stored(tokens), make_resident(ns).to(torch.bfloat16)(tokens))
        assert saved_floats(stored, tokens) == saved_floats(make_stored(make_namespace(param_dtype="bfloat16")), tokens)
    resident = make_resident(ns).to(torch.bfloat16)
    stored.to(torch.bfloat16)  # its gate
    run(stored, tokens)
    run(resident, tokens)
    assert_pending_equal(ns, resident)


def test_an_expert_of_ones_own_gets_its_weights_as_they_are_stored() -> None:
    def single(x_tD: Tensor, weights: Mapping[str, Tensor]) -> Tensor:
        return swiglu(x_tD.float(), weights).to(x_tD.dtype)

    ns, tokens = make_namespace(), make_tokens(torch.bfloat16)
    assert_same_as_resident(ns, make_stored(ns, single), make_resident(ns, single), tokens)
    with torch.no_grad():
        assert torch.equal(make_stored(ns, single)(tokens), make_resident(ns, single)(tokens))


def test_hooks_around_the_layer_see_what_it_saves() -> None:
    ns = make_namespace(lease_slots=4)
    moved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: moved.append(tensor) or tensor.clone(), lambda t: t):
        layer = StoredExperts(ns, 0)
        y = layer(make_tokens(), torch.zeros(10, 1, dtype=torch.long), torch.ones(10, 1))
    y.sum().backward()
    assert any(tensor.shape == (10, HIDDEN) for tensor in moved), "the expert's tokens"
    assert all(tensor.shape not in ((24, HIDDEN), (HIDDEN, 12)) for tensor in moved), "never its weights"


def test_saving_activations_elsewhere_changes_no_bit() -> None:
    ns = make_namespace(lease_slots=4)
    with save_on_cpu():
        assert_same_as_resident(ns, make_stored(ns), make_resident(ns), make_tokens())


# --- without a graph: more experts than slots


class CountingCopier(HostCopier):
    """Counts the bytes that it copies."""

    def __init__(self) -> None:
        self.bytes = 0

    def copy(self, fields: Sequence[tuple[Tensor, Tensor]], *, after: Mark) -> Mark:
        self.bytes += sum(target.nbytes for target, _ in fields)
        return super().copy(fields, after=after)


@pytest.mark.parametrize("policy", SLOT_POLICIES)
@pytest.mark.parametrize("kind", ["host", "device"])
def test_dispatches_of_twice_the_slots_find_nine_tenths_of_what_can_stand(
    kind: str, policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """64 experts on 32 slots, of which 4 let others pass, again and again: by the bytes that were leased, or copied."""
    copier = CountingCopier()
    monkeypatch.setattr("paramstore_client.device.tier.make_copier", lambda *arguments, **options: copier)
    rounds, experts, slots = 20, 64, 32
    ns = MemoryNamespace.of_swiglu(layers=1, experts=experts, hidden=4, inner=4, lease_slots=experts, is_trainable=False)
    x_TD, ids_TK, gate_TK = torch.randn(experts, 4), torch.arange(experts)[:, None], torch.ones(experts, 1)
    expected = ResidentExperts([ns.values((0, expert)) for expert in range(experts)])(x_TD, ids_TK, gate_TK)
    expert_bytes = sum(value.nbytes for value in ns.values((0, 0)).values())
    source = ExpertBuffer(ns, slots, policy=policy) if kind == "host" else DeviceTier(ns, slots, device="cpu", policy=policy)
    with source, torch.no_grad():
        for _ in range(rounds):
            assert torch.equal(StoredExperts(source, 0)(x_TD, ids_TK, gate_TK), expected)
        leased = sum(len(keys) for _, keys in ns.happened("acquire"))
        moved = leased if kind == "host" else copier.bytes / expert_bytes
        uses, bound = rounds * experts, (slots - 4) / experts
        assert 0.9 * bound <= 1 - moved / uses <= bound
        assert moved == source.counts.loads == uses - source.counts.hits
    assert ns.leased == []
    assert ns.leased_keys_max <= slots


@pytest.mark.parametrize("lease_slots", [64, 4, 1])
@pytest.mark.parametrize("kind", ["namespace", "recorder", "buffer", "ring", "tier"])
def test_every_source_gives_the_bits_of_resident_experts_without_a_graph(kind: str, lease_slots: int) -> None:
    ns = make_namespace(lease_slots=lease_slots)
    sources: dict[str, Callable[[], Any]] = {
        "namespace": lambda: nullcontext(ns), "recorder": lambda: nullcontext(TraceRecorder(ns)),
        "buffer": lambda: ExpertBuffer(ns, max(1, lease_slots - 1)), "ring": lambda: RingMemory(ns, 1),
        "tier": lambda: DeviceTier(ns, 2, device="cpu"),
    }  # fmt: skip
    with sources[kind]() as source, torch.no_grad():
        for seed in range(2):
            x_TD = make_tokens(seed=seed)
            group = ExpertSchedule()
            stored = Model([StoredExperts(source, layer, group=group) for layer in ns.layers])
            assert torch.equal(stored(x_TD), make_resident(ns)(x_TD))
    assert ns.leased == []
    assert ns.leased_keys_max <= lease_slots


# --- what is pushed


def test_an_expert_without_tokens_gets_no_gradient() -> None:
    ns = make_namespace()
    run(make_stored(ns, used_experts=3), make_tokens())
    assert {expert for _, expert in ns.pending} == {0, 1, 2}


def test_tokens_that_need_no_gradient_leave_the_experts_theirs() -> None:
    ns, expected = make_namespace(lease_slots=4), make_namespace()
    run(make_stored(ns), make_tokens())
    layer_input = make_tokens().detach()
    stored = make_stored(expected)
    stored(layer_input).square().sum().backward()
    assert ns.pending.keys() == expected.pending.keys()
    assert torch.equal(ns.pending[0, 1]["down"], expected.pending[0, 1]["down"])


def test_a_field_that_the_expert_ignores_gets_a_gradient_of_zeros() -> None:
    ns = make_namespace()
    run(make_stored(ns, lambda x_tD, weights: x_tD @ weights["down"] @ weights["down"].T), make_tokens())
    assert not ns.pending[0, 0]["gate_up"].any()
    assert ns.pending[0, 0]["down"].any()


def test_experts_that_use_no_weight_push_nothing() -> None:
    ns = make_namespace()
    loss, grad_x = run(make_stored(ns, lambda x_tD, weights: x_tD * 2), make_tokens())
    assert ns.pending == {}
    assert grad_x.any()
    assert loss.isfinite()


def test_gradients_have_the_dtype_of_the_schema() -> None:
    ns = make_namespace(param_dtype="bfloat16")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        run(make_stored(ns), make_tokens(torch.bfloat16))
    assert {tensor.dtype for fields in ns.pending.values() for tensor in fields.values()} == {torch.bfloat16}


def test_an_inference_schema_passes_gradients_through_to_the_tokens() -> None:
    ns = make_namespace(is_trainable=False, lease_slots=4)
    _, grad_x = run(make_stored(ns), make_tokens())
    _, expected = run(make_resident(ns), make_tokens())
    assert torch.equal(grad_x, expected)
    assert not list(ns.happened("push"))


def test_each_part_is_pushed_once_after_its_lease_in_reverse_order() -> None:
    ns = make_namespace(lease_slots=4)
    layer = StoredExperts(ns, 0)
    y = layer(make_tokens(), torch.arange(10)[:, None] % 5, torch.ones(10, 1))
    ns.events.clear()
    y.sum().backward()
    parts = [((0, 4),), ((0, 2), (0, 3)), ((0, 0), (0, 1))]
    assert list(ns.happened("acquire", "release", "push")) == [
        event for part in parts for event in (("acquire", part), ("release", part), ("push", part))
    ]


# --- borders


def test_no_tokens_ask_for_no_expert() -> None:
    ns = make_namespace()
    y = StoredExperts(ns, 0)(torch.empty(0, HIDDEN), torch.empty(0, TOP_K, dtype=torch.long), torch.empty(0, TOP_K))
    assert y.shape == (0, HIDDEN)
    assert ns.events == []


def test_an_unknown_layer_or_expert_is_named() -> None:
    ns = make_namespace()
    with pytest.raises(UnknownKey, match="layer 7"):
        StoredExperts(ns, 7)
    with pytest.raises(UnknownKey, match=r"\(0, 9\)"):
        StoredExperts(ns, 0)(make_tokens(), torch.full((10, 1), 9), torch.ones(10, 1))


def test_weights_on_another_device_are_refused_with_the_fix() -> None:
    ns = make_namespace()
    elsewhere = DeviceTier(ns, EXPERTS, device="meta")
    with pytest.raises(ConfigError, match="DeviceTier"):
        StoredExperts(elsewhere, 0)(make_tokens(), torch.zeros(10, 1, dtype=torch.long), torch.ones(10, 1))


def test_the_module_has_no_parameters_and_no_state() -> None:
    layer = StoredExperts(make_namespace(), 0)
    assert list(layer.parameters()) == []
    assert layer.state_dict() == {}
