"""What a training loop does around a stored model changes no bit: checkpointing, autocast, accumulation, partial gradients."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from paramstore.core.optimizers import AdamW
from paramstore.errors import StepMismatch
from paramstore_client.hf.model.weight_sources import _LeasedSupply
from paramstore_testkit.training.moe_families import tiny_config
from paramstore_testkit.training.moe_models import Twin, tokens

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("small_experts_lie_apart")]

KERNELS = ("eager", "grouped_mm")
CASES = (("eager", 3), ("grouped_mm", 3), ("grouped_mm", 64))
"""Expert by expert; side by side, since not all can be leased at once; field by field, where they lie."""


def in_use(twin: Twin) -> list[Any]:
    """Leases that are left when all that stands idle has been given back."""
    for keeper in list(twin.namespace.keepers):
        keeper.give_back()
    return twin.namespace.leased


def train(twin: Twin, forward: Callable[[Any, Tensor], Tensor], *, passes: int = 1) -> None:
    """Backward of both models, and that they agree."""
    for index in range(passes):
        ids = tokens(seed=index)
        expected, computed = forward(twin.stock, ids), forward(twin.stored, ids)
        assert torch.equal(computed, expected)
        expected.backward()
        computed.backward()
    twin.check_gradients()
    assert not in_use(twin)


def loss(model: Any, ids: Tensor) -> Tensor:
    value: Tensor = model(ids, labels=ids, use_cache=False).loss
    return value


@pytest.mark.parametrize("lease_slots", [1, 2, 64])
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("is_reentrant", [True, False])
def test_activation_checkpointing_changes_no_bit(kernel: str, is_reentrant: bool, lease_slots: int) -> None:
    twin = Twin.of(tiny_config("qwen3_moe"), kernel=kernel, lease_slots=lease_slots)
    for model in (twin.stock, twin.stored):
        model.train()
        enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
        enable({"use_reentrant": is_reentrant})
        model.enable_input_require_grads()
    train(twin, loss, passes=2)


@pytest.mark.parametrize(("kernel", "lease_slots"), CASES)
def test_autocast_changes_no_bit_and_keeps_no_cast_weight(kernel: str, lease_slots: int) -> None:
    def forward(model: Any, ids: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return loss(model, ids)

    twin = Twin.of(tiny_config("qwen3_moe"), kernel=kernel, lease_slots=lease_slots)
    kept = saved_bytes(lambda: forward(twin.stored, tokens()))
    experts = len(twin.namespace.layers) * twin.layout.expert_elements * 2  # one of each layer, in bfloat16
    without_experts = saved_bytes(lambda: forward(twin.stock, tokens())) - kept
    assert kernel != "eager" or without_experts > experts, "the unmodified model keeps the cast weights, the stored one does not"
    train(twin, forward)


@pytest.fixture
def process_group() -> Iterator[None]:
    """This process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("reduce_dtype", [None, torch.float32])
@pytest.mark.parametrize(("kernel", "lease_slots"), [*CASES, ("batched_mm", 3)])
def test_mixed_precision_of_fsdp2_changes_no_bit(kernel: str, lease_slots: int, reduce_dtype: torch.dtype | None) -> None:
    """Of an fp32 model that computes in bfloat16. The stacked gradients of `batched_mm` are compared on one thread."""
    twin = Twin.of(tiny_config("qwen3_moe"), kernel=kernel, lease_slots=lease_slots)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduce_dtype)
    for model in (twin.stock, twin.stored):
        for layer in model.model.layers:
            fully_shard(layer, mp_policy=policy)
        fully_shard(model, mp_policy=policy)
    train(twin, loss, passes=2)


@pytest.mark.parametrize(("kernel", "lease_slots"), CASES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_model_that_is_cast_once_loaded_computes_in_its_new_dtype(kernel: str, lease_slots: int, dtype: torch.dtype) -> None:
    twin = Twin.of(tiny_config("qwen3_moe"), kernel=kernel, lease_slots=lease_slots)
    for model in (twin.stock, twin.stored):
        model.to(dtype)
    with torch.no_grad():
        assert torch.equal(twin.stored(tokens()).logits, twin.stock(tokens()).logits)
    kept = saved_bytes(lambda: loss(twin.stored, tokens()))
    whole = saved_bytes(lambda: loss(twin.stock, tokens()))
    experts = len(twin.namespace.layers) * twin.layout.expert_elements * dtype.itemsize
    assert whole - kept > experts, "the cast weights are not kept"
    train(twin, loss)


def saved_bytes(forward: Callable[[], Tensor]) -> int:
    """Bytes of distinct storages that autograd keeps for backward of what `forward` returns."""
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor.detach()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = forward()
    del output
    return sum(kept.values())


@pytest.mark.parametrize(("kernel", "lease_slots"), CASES)
def test_accumulated_gradients_add_up(kernel: str, lease_slots: int) -> None:
    train(Twin.of(tiny_config("mixtral"), kernel=kernel, lease_slots=lease_slots), loss, passes=3)


def test_bfloat16_model_equals_the_unmodified_one() -> None:
    train(Twin.of(tiny_config("qwen3_moe"), kernel="eager", lease_slots=3, dtype=torch.bfloat16), loss)


@pytest.mark.parametrize(("kernel", "lease_slots"), CASES)
def test_second_backward_pushes_again(kernel: str, lease_slots: int) -> None:
    twin = Twin.of(tiny_config("mixtral"), kernel=kernel, lease_slots=lease_slots)
    for model in (twin.stock, twin.stored):
        value = loss(model, tokens())
        value.backward(retain_graph=True)
        value.backward()
    twin.check_gradients()


@pytest.mark.parametrize(("kernel", "lease_slots"), CASES)
def test_frozen_dense_part_still_gets_expert_gradients(kernel: str, lease_slots: int) -> None:
    twin = Twin.of(tiny_config("mixtral"), kernel=kernel, lease_slots=lease_slots)
    for model in (twin.stock, twin.stored):
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(".experts." in name)
    loss(twin.stock, tokens()).backward()
    loss(twin.stored, tokens()).backward()
    twin.check_gradients()
    assert twin.namespace.pending


@pytest.mark.parametrize(("kernel", "lease_slots"), CASES)
def test_experts_without_gradients_pass_on_those_of_the_rest(kernel: str, lease_slots: int) -> None:
    twin = Twin.of(tiny_config("qwen2_moe"), kernel=kernel, lease_slots=lease_slots, is_trained=False)
    loss(twin.stock, tokens()).backward()
    loss(twin.stored, tokens()).backward()
    reference = dict(twin.stock.named_parameters())
    for name, parameter in twin.stored.named_parameters():
        assert torch.equal(parameter.grad, reference[name].grad), name
    assert not twin.namespace.pending
    assert not in_use(twin), "the end of backward gives the leases back"


@pytest.mark.parametrize(("kernel", "lease_slots"), CASES)
def test_gradients_of_some_inputs_alone_push_nothing(kernel: str, lease_slots: int) -> None:
    twin = Twin.of(tiny_config("mixtral"), kernel=kernel, lease_slots=lease_slots)
    weight = twin.stored.model.embed_tokens.weight
    (gradient,) = torch.autograd.grad(loss(twin.stored, tokens()), [weight])
    (expected,) = torch.autograd.grad(loss(twin.stock, tokens()), [twin.stock.model.embed_tokens.weight])
    assert torch.equal(gradient, expected)
    assert not twin.namespace.pending
    assert not in_use(twin)


@pytest.mark.parametrize(("kernel", "lease_slots"), CASES)
def test_backward_that_fails_leaves_nothing_leased_for_the_next_pass(kernel: str, lease_slots: int) -> None:
    class Boom(Exception):
        pass

    def fail(grad: Tensor) -> Tensor:
        raise Boom

    twin = Twin.of(tiny_config("mixtral"), kernel=kernel, lease_slots=lease_slots)
    value = loss(twin.stored, tokens())
    twin.stored.model.layers[1].mlp.gate.weight.register_hook(fail)
    with pytest.raises(Boom):
        value.backward()
    twin.namespace.pending.clear()
    twin.stored.zero_grad()
    twin.stored.model.layers[1].mlp.gate.weight._backward_hooks.clear()
    train(twin, loss)


@pytest.mark.parametrize(("kernel", "lease_slots"), CASES)
def test_update_between_forward_and_backward_is_refused(kernel: str, lease_slots: int) -> None:
    twin = Twin.of(tiny_config("mixtral"), kernel=kernel, lease_slots=lease_slots)
    loss(twin.stored, tokens()).backward()
    value = loss(twin.stored, tokens())
    twin.namespace.apply(AdamW(lr=0.1))
    with pytest.raises(StepMismatch, match="version 1"):
        value.backward()


@pytest.mark.parametrize(("kernel", "lease_slots"), CASES)
def test_hooks_around_the_model_see_the_experts_activations(kernel: str, lease_slots: int) -> None:
    twin = Twin.of(tiny_config("qwen3_moe"), kernel=kernel, lease_slots=lease_slots)
    seen: list[int] = []

    def pack(tensor: Tensor) -> Tensor:
        seen.append(tensor.shape[-1] if tensor.dim() else 0)
        return tensor.clone()

    def forward(model: Any, ids: Tensor) -> Tensor:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            return loss(model, ids)

    train(twin, forward)
    seen.clear()
    forward(twin.stored, tokens())
    inner = twin.layout.tensors[1].shape[1]
    assert inner in seen, "what is saved between an expert's two matrices"


@pytest.mark.parametrize(("kernel", "lease_slots"), CASES)
def test_dead_loss_takes_its_graph_along(kernel: str, lease_slots: int) -> None:
    twin = Twin.of(tiny_config("gpt_oss"), kernel=kernel, lease_slots=lease_slots)  # its gate saves an output of its own
    gc.collect()
    gc.disable()
    try:
        before = supplies()
        value = loss(twin.stored, tokens())
        assert supplies() == before + 2
        del value
        assert supplies() == before, "a cycle keeps the graph"
    finally:
        gc.enable()


def supplies() -> int:
    return sum(_LeasedSupply in type(thing).__mro__ for thing in gc.get_objects())


def test_copy_of_a_model_shares_its_experts() -> None:
    twin = Twin.of(tiny_config("mixtral"), lease_slots=3)
    again = copy.deepcopy(twin.stored)
    with torch.no_grad():
        assert torch.equal(again(tokens()).logits, twin.stored(tokens()).logits)


@pytest.mark.parametrize("kernel", [*KERNELS, "batched_mm"])
@pytest.mark.parametrize("is_trained", [True, False])
def test_generation_gives_the_same_tokens(kernel: str, is_trained: bool) -> None:
    twin = Twin.of(tiny_config("qwen3_moe"), kernel=kernel, lease_slots=2, is_trained=is_trained)
    prompt = tokens(length=5)
    options = {"max_new_tokens": 6, "do_sample": False}
    assert torch.equal(twin.stored.generate(prompt, **options), twin.stock.generate(prompt, **options))
    assert not in_use(twin)


def test_inference_mode_then_training_works() -> None:
    twin = Twin.of(tiny_config("qwen3_moe"), kernel="grouped_mm", lease_slots=2)
    with torch.inference_mode():
        assert torch.equal(twin.stored(tokens()).logits, twin.stock(tokens()).logits)
    train(twin, loss)
