"""Models that are served: the logits of the unmodified model bit for bit, whatever stands, and what is computed where it lies."""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from paramstore.errors import LeaseError
from paramstore.testing.memory_namespace import MemoryNamespace
from paramstore_client.device.buffer import ExpertBuffer
from paramstore_client.device.host_slots import HostSlots
from paramstore_client.device.ring import RingMemory
from paramstore_client.device.tier import DeviceTier
from paramstore_client.hf.compat import modeling
from paramstore_client.hf.loading.expert_memory import POLICIES
from paramstore_client.hf.model.binding import bind, layer_of
from paramstore_client.hf.model.layer_experts import LayerExperts, ModelExperts
from paramstore_client.hf.model.layout import experts_modules
from paramstore_client.source import ExpertSource
from paramstore_testkit.training.moe_families import (
    EXPERTS,
    NOT_GROUPED,
    NOT_SERVED,
    SERVED_ALWAYS,
    families,
    modeling_class,
    tiny_config,
)  # fmt: skip
from paramstore_testkit.training.moe_models import Twin, tokens

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]

FAMILIES = families()
PROMISES = 64, 14, 3, 1
"""Slots that may be leased: everything stands; a layer stands, and guesses of the next one beside it; two experts; one."""
RINGS = (1, None), (1, 1), (2, None), (2, 2), (3, None)
"""Layers that a ring has slots for, and how many experts of a layer it loads ahead."""
BUFFERS = 1, 2, 9, 16
"""Experts that a buffer has slots for: one, fewer than a token chooses, a layer and one more, both layers."""
NOT_FOUND = {"jamba"}
"""Families of `SERVED_ALWAYS` whose routers make no guesses."""


def served() -> list[Any]:
    names = sorted({*FAMILIES} - NOT_SERVED)
    return [pytest.param(name, marks=() if name in SERVED_ALWAYS else pytest.mark.soak) for name in names]


def layers_of(twin: Twin) -> list[LayerExperts]:
    return [layer_of(module) for module in experts_modules(twin.stored).values()]


def source_of(twin: Twin) -> HostSlots:
    source = layers_of(twin)[0].source
    assert isinstance(source, HostSlots)
    return source


def logits(model: Any, ids: Tensor) -> Tensor:
    found = model(input_ids=ids)
    value: Tensor = found.logits if hasattr(found, "logits") else found.last_hidden_state
    return value


def sources_of(namespace: MemoryNamespace) -> Iterator[tuple[str, ExpertSource]]:
    """Everything that experts are served from, whatever it keeps and how much of it, each with a name; one at a time."""
    for residency, policy in POLICIES.items():
        for promised in PROMISES:
            namespace.lease_slots = promised
            with closing(HostSlots(namespace, policy=policy)) as slots:
                yield f"{residency}, {promised} promised", slots
    namespace.lease_slots = PROMISES[0]
    for layers, ahead in RINGS:
        with RingMemory(namespace, layers, experts_ahead=ahead) as ring:
            yield f"ring of {layers} layers, {ahead} experts ahead", ring
    for count in BUFFERS:
        with ExpertBuffer(namespace, count) as buffer:
            yield f"buffer of {count}", buffer


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("family", served())
def test_family_has_the_logits_of_the_unmodified_model(family: str, dtype: torch.dtype) -> None:
    """A prompt, another one that finds part of its experts, and three tokens; from each source, with guesses and without."""
    kernel, model_class = "eager" if family in NOT_GROUPED else "grouped_mm", modeling_class(FAMILIES[family])
    twin = Twin.of(tiny_config(family), kernel=kernel, dtype=dtype, is_trained=False, model_class=model_class)
    inputs = [tokens(), tokens(seed=1), *(tokens(seed=seed)[:1, :1] for seed in (2, 3, 4))]
    stock, stored, asked = twin.stock.eval(), twin.stored.eval(), Counter[str]()
    with torch.no_grad():
        expected = [logits(stock, ids) for ids in inputs]
        for speculates in (True, False):
            for name, source in sources_of(twin.namespace):
                bind(stored, ModelExperts(source, anchor=None, is_poisoned=True, speculates=speculates), kernel=kernel)
                for ids, value in zip(inputs, expected, strict=True):
                    assert torch.equal(logits(stored, ids), value), (name, speculates, ids.shape)
                asked[name] += (count := layers_of(twin)[0].early.figures.asked)
                assert speculates or not count, name
    assert twin.namespace.leased == []
    if family in SERVED_ALWAYS:
        is_asked = family not in NOT_FOUND and len(layers_of(twin)) > 1
        for residency in POLICIES:
            assert (asked[f"{residency}, 14 promised"] > 0) == is_asked, residency


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("family", served())
def test_family_in_device_slots_has_the_logits_of_the_unmodified_model(family: str, dtype: torch.dtype) -> None:
    """On the device's twin: all experts stand, those of a layer, three, one; with host leases for few copies at once."""
    kernel = "eager" if family in NOT_GROUPED else "grouped_mm"
    twin = Twin.of(
        tiny_config(family), kernel=kernel, dtype=dtype, is_trained=False, lease_slots=5,
        model_class=modeling_class(FAMILIES[family]),
    )  # fmt: skip
    stock, stored = twin.stock.eval(), twin.stored.eval()
    prompts = [tokens(), tokens(seed=1), *(tokens(seed=seed)[:1, :1] for seed in (2, 3))]
    with torch.no_grad():
        expected = [logits(stock, ids) for ids in prompts]
        for slots in (len(twin.layout.layers) * EXPERTS, EXPERTS, 3, 1):
            with DeviceTier(twin.namespace, slots, device="cpu", policy="schedule") as tier:
                bind(stored, ModelExperts(tier, anchor=None), kernel=kernel)
                for ids, theirs in zip(prompts, expected, strict=True):
                    assert torch.equal(logits(stored, ids), theirs), (slots, ids.shape)
                assert tier.counts.misses + tier.counts.passed > 0
    assert twin.namespace.leased == []


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("kernel", ["eager", "batched_mm"])
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_other_kernels_have_the_logits_of_the_unmodified_model(family: str, kernel: str, dtype: torch.dtype) -> None:
    for lease_slots in (64, 7, 3, 1):
        twin = Twin.of(tiny_config(family), kernel=kernel, dtype=dtype, is_trained=False, lease_slots=lease_slots)
        stock, stored = twin.stock.eval(), twin.stored.eval()
        with torch.no_grad():
            for ids in (tokens(), tokens(seed=1), *(tokens(seed=seed)[:1, :1] for seed in (2, 3, 4))):
                assert torch.equal(logits(stored, ids), logits(stock, ids)), (lease_slots, ids.shape)


def test_a_loop_finds_what_stood_however_few_slots_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    twin = Twin.of(tiny_config("qwen3_moe"), kernel="eager", is_trained=False, lease_slots=6)
    monkeypatch.setattr("paramstore_client.hf.model.layer_experts.StreamedSupply", None)
    with torch.no_grad():
        expected = logits(twin.stored, tokens())
        active = sum(len(asked) for _, asked in twin.namespace.happened("acquire"))
        twin.namespace.events.clear()
        assert torch.equal(logits(twin.stored, tokens()), expected)
    again = sum(len(asked) for _, asked in twin.namespace.happened("acquire"))
    assert 6 < again <= active - 3, "of slots that fewer than a layer's experts fit in"


def test_a_loop_that_takes_experts_in_an_order_of_its_own_gets_them_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    from paramstore_client.hf.model.kernels import ExpertIndex

    twin = Twin.of(tiny_config("qwen3_moe"), kernel="eager", is_trained=False, lease_slots=4)
    by_index = ExpertIndex.__getitem__

    def from_the_last(self: ExpertIndex, index: Tensor | int) -> Tensor:
        by_index(self, 5)
        return by_index(self, index)

    monkeypatch.setattr(ExpertIndex, "__getitem__", from_the_last)
    with torch.no_grad():
        assert torch.equal(logits(twin.stored, tokens()), logits(twin.stock, tokens()))


@pytest.mark.parametrize("kernel", modeling.KERNELS)
def test_nothing_is_copied_where_all_stand(kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    twin = Twin.of(tiny_config("qwen3_moe"), kernel=kernel, is_trained=False)
    with torch.no_grad():
        expected = logits(twin.stored, tokens())
        monkeypatch.setattr("paramstore_client.hf.model.compact_buffers.CompactBuffers.lent", None)
        twin.namespace.events.clear()
        assert torch.equal(logits(twin.stored, tokens()), expected)
    assert twin.namespace.events == [], "and nobody is asked"


def test_lists_name_no_family_that_is_gone() -> None:
    assert {*NOT_SERVED, *SERVED_ALWAYS, *NOT_GROUPED} <= FAMILIES.keys()


@pytest.mark.usefixtures("small_experts_lie_apart")
@pytest.mark.parametrize("lease_slots", [64, 3], ids=["where they lie", "on copies"])
def test_a_graph_has_the_gradients_of_the_unmodified_model(lease_slots: int) -> None:
    twin = Twin.of(tiny_config("qwen3_moe"), kernel="grouped_mm", is_trained=False, lease_slots=lease_slots)
    for model in (twin.stock, twin.stored):
        model(input_ids=tokens(), labels=tokens()).loss.backward()
    reference = dict(twin.stock.named_parameters())
    for name, parameter in twin.stored.named_parameters():
        assert torch.equal(parameter.grad, reference[name].grad), name


def test_leases_that_stood_in_inference_mode_serve_a_graph_later() -> None:
    twin = Twin.of(tiny_config("qwen3_moe"), kernel="eager", is_trained=False)
    with torch.inference_mode():
        expected = logits(twin.stored, tokens())
    value = logits(twin.stored, tokens())
    assert torch.equal(value, expected)
    value.sum().backward()


def test_a_step_that_comes_between_two_tokens_is_seen_by_the_next() -> None:
    twin = Twin.of(tiny_config("qwen3_moe"), kernel="grouped_mm", is_trained=False)
    with torch.no_grad():
        before = logits(twin.stored, tokens())
        twin.namespace.initialize(lambda key: {name: value * 2 for name, value in twin.namespace.values(key).items()})
        twin.namespace.view_change_count += 1
        for path in twin.layout.modules.values():
            for name, parameter in twin.stock.get_submodule(path).named_parameters():
                if name in {tensor.name for tensor in twin.layout.tensors}:
                    parameter.data.mul_(2)
        after = logits(twin.stored, tokens())
        assert not torch.equal(after, before)
        assert torch.equal(after, logits(twin.stock, tokens()))


def test_where_others_hold_the_slots_experts_come_in_parts() -> None:
    twin = Twin.of(tiny_config("qwen3_moe"), kernel="grouped_mm", is_trained=False, lease_slots=6)
    source = source_of(twin)
    with torch.no_grad():
        expected = logits(twin.stock, tokens())
        held = source.acquire([(0, expert) for expert in range(source.lease_slots - 1)])
        assert torch.equal(logits(twin.stored, tokens()), expected)
        held.release()
        held = source.acquire([(0, expert) for expert in range(source.lease_slots)])
        with pytest.raises(LeaseError, match=r"0 of \d can be had"):
            logits(twin.stored, tokens(seed=5))
        held.release()
        assert torch.equal(logits(twin.stored, tokens()), expected)


@pytest.mark.parametrize("lease_slots", [1, 4, 9])
def test_threads_generate_with_one_model(lease_slots: int) -> None:
    twin = Twin.of(tiny_config("qwen3_moe"), kernel="grouped_mm", is_trained=False, lease_slots=lease_slots)
    options: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    prompts = [tokens(seed=seed)[:1] for seed in range(4)]
    expected = [twin.stock.eval().generate(prompt, **options) for prompt in prompts]
    stored = twin.stored.eval()
    made: dict[int, Tensor] = {}

    def run(first: int) -> None:
        for index in (first, 3):
            made[index] = stored.generate(prompts[index], **options)

    threads = [threading.Thread(target=run, args=(first,)) for first in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert all(torch.equal(made[index], expected[index]) for index in range(4))


@pytest.mark.parametrize(
    "given",
    [
        {"do_sample": False}, {"do_sample": False, "num_beams": 3}, {"do_sample": True, "top_k": 5},
        {"do_sample": False, "cache_implementation": "static"},
    ],
    ids=["greedy", "beams", "sampling", "static cache"],
)  # fmt: skip
def test_generate_gives_the_tokens_of_the_unmodified_model(given: dict[str, Any]) -> None:
    """A batch of two prompts, of which one is padded on its left."""
    twin = Twin.of(tiny_config("qwen3_moe"), kernel="grouped_mm", is_trained=False, lease_slots=7)
    ids, mask = tokens()[:2].clone(), torch.ones_like(tokens()[:2])
    ids[1, :3], mask[1, :3] = 0, 0
    made = []
    for model in (twin.stock.eval(), twin.stored.eval()):
        torch.manual_seed(3)
        made.append(model.generate(ids, attention_mask=mask, max_new_tokens=10, pad_token_id=0, **given))
    assert torch.equal(*made)


@pytest.mark.parametrize("seed", range(3))
def test_tokens_are_the_same_while_slots_are_borrowed_and_asked_back(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lent and asked back by chance, before and after each layer of each token."""
    monkeypatch.setattr("paramstore_client.device.loans.ASK_PAUSE_S", 0.0)
    rng = random.Random(seed)
    twin = Twin.of(tiny_config("qwen3_moe"), kernel="grouped_mm", is_trained=False, lease_slots=4)
    source, loans = source_of(twin), twin.namespace.loans
    largest = []

    def change(*_: object) -> None:
        largest.append(source.loans.count)
        assert twin.namespace.leased_key_count <= 4 + loans.count
        loans.to_lend = rng.randint(0, 20)
        if rng.random() < 0.5:
            loans.recall(rng.randint(0, max(1, loans.count)))

    for module in experts_modules(twin.stored).values():
        module.register_forward_pre_hook(change)
        module.register_forward_hook(change)
    options: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    stock, stored = twin.stock.eval(), twin.stored.eval()
    for number in range(3):
        prompt = tokens(seed=number)[:1]
        assert torch.equal(stored.generate(prompt, **options), stock.generate(prompt, **options)), f"seed {seed}"
    assert max(largest) > 4
    loans.recall(0)
    source.skip(())
    assert (source.loans.count, loans.count) == (0, 0), "and all of it comes back once nothing is computed"


def test_a_compiled_model_has_the_logits_of_the_unmodified_one() -> None:
    """Our experts are a graph break: what surrounds them is compiled, a piece before, between and after the layers'."""
    twin = Twin.of(tiny_config("qwen3_moe"), kernel="grouped_mm", is_trained=False)
    pieces = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(twin.stored.eval(), backend=pieces)
    with torch.no_grad():
        assert torch.equal(logits(compiled, tokens()), logits(twin.stock.eval(), tokens()))
        assert pieces.frame_count > len(source_of(twin).layers)
        made = pieces.frame_count
        assert torch.equal(logits(compiled, tokens(seed=1)), logits(twin.stock, tokens(seed=1)))
        assert pieces.frame_count == made, "and not again for other tokens"


def test_a_forward_without_a_graph_has_no_backward() -> None:
    from paramstore_client.hf.model.compact_buffers import CompactBuffers
    from paramstore_client.hf.model.layer_call import BackwardPasses, LayerCall
    from paramstore_client.hf.model.weight_sources import HeldSupply

    twin = Twin.of(tiny_config("qwen3_moe"), kernel="grouped_mm", is_trained=False)
    source = source_of(twin)
    buffers = CompactBuffers(source.schema.part("param").fields)
    supply = HeldSupply(source, [(0, 0)], is_streamed=False, buffers=buffers, ahead=lambda found, slots: [])
    call = LayerCall(supply, BackwardPasses(), lambda weights_of: torch.zeros(1), anchor=None)
    with torch.no_grad():
        call.run([torch.zeros(1)])
    with pytest.raises(AssertionError, match="has a backward"):
        call.run([torch.zeros(1)])


def test_the_kernel_is_the_one_of_this_torch() -> None:
    assert not modeling.asks_for_addresses(), "else nothing here was computed where it lies"
