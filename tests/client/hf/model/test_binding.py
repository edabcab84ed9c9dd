from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from paramstore.core.schema import Schema
from paramstore.errors import ConfigError, SchemaMismatch
from paramstore.testing.memory_namespace import MemoryNamespace
from paramstore_client.device.host_slots import HostSlots
from paramstore_client.device.tier import DeviceTier
from paramstore_client.hf.model.binding import ATTRIBUTE, bind, layer_of, stored_experts
from paramstore_client.hf.model.compact_buffers import CompactBuffers
from paramstore_client.hf.model.layer_experts import ModelExperts
from paramstore_client.hf.model.layout import experts_modules
from paramstore_testkit.training.moe_families import EXPERTS, tiny_config
from paramstore_testkit.training.moe_models import Twin, tokens

pytestmark = pytest.mark.slow


def test_source_of_other_experts_is_refused() -> None:
    twin = Twin.of(tiny_config("mixtral"))
    with pytest.raises(SchemaMismatch, match="gate_up"):
        bind(twin.stored, ModelExperts(MemoryNamespace.of_swiglu(), anchor=None), kernel="eager")


def test_schema_without_gradients_takes_no_anchor() -> None:
    namespace = MemoryNamespace(Schema.param({"w": ((2,), "float32")}), layers=1, experts=1, lease_slots=1)
    with pytest.raises(SchemaMismatch, match="param schema"):
        ModelExperts(namespace, anchor=lambda layer: torch.zeros(()))


def test_module_that_was_not_bound_says_how_to_load_it() -> None:
    twin = Twin.of(tiny_config("mixtral"))
    module = next(iter(experts_modules(twin.stored).values()))
    del module.__dict__[ATTRIBUTE]
    with pytest.raises(ConfigError, match=r"ps\.hf\.from_pretrained"):
        twin.stored(tokens())


@pytest.mark.parametrize("save", [pickle.dumps, lambda thing: torch.save(thing, io.BytesIO())], ids=["pickle", "torch.save"])
def test_bound_model_cannot_be_pickled_as_a_whole_or_in_part(save: Callable[[Any], object]) -> None:
    model = Twin.of(tiny_config("mixtral")).stored
    for thing in (model, torch.nn.Sequential(model), *experts_modules(model).values()):
        with pytest.raises(ConfigError, match="save_pretrained"):
            save(thing)
    for again in (copy.copy(model), copy.deepcopy(model)):
        assert type(again) is type(model)
        assert again.state_dict().keys() == model.state_dict().keys()


def test_next_layers_likely_experts_are_prefetched_before_their_gate_is_known() -> None:
    twin = Twin.of(tiny_config("mixtral"))
    with torch.no_grad():
        twin.stored(tokens())
        twin.namespace.events.clear()
        twin.stored(tokens())
    kinds = [(kind, {layer for layer, _ in keys}) for kind, keys in twin.namespace.happened("acquire", "prefetch")]
    assert kinds == [("acquire", {0}), ("prefetch", {1}), ("acquire", {1}), ("prefetch", {0})]


def test_backward_prefetches_the_layer_below() -> None:
    twin = Twin.of(tiny_config("mixtral"))
    value = twin.stored(tokens(), labels=tokens()).loss
    twin.namespace.events.clear()
    value.backward()
    kinds = [(kind, {layer for layer, _ in keys}) for kind, keys in twin.namespace.happened("acquire", "prefetch", "push")]
    assert kinds == [("acquire", {1}), ("prefetch", {0}), ("push", {1}), ("acquire", {0}), ("push", {0})]


def test_no_token_is_no_work() -> None:
    twin = Twin.of(tiny_config("mixtral"))
    module = next(iter(experts_modules(twin.stored).values()))
    nothing = stored_experts(module, torch.empty(0, 32), torch.empty(0, 2, dtype=torch.long), torch.empty(0, 2))
    assert nothing.shape == (0, 32)
    assert not list(twin.namespace.happened("acquire"))


def test_layers_know_their_number() -> None:
    twin = Twin.of(tiny_config("deepseek_v3"))
    assert [layer_of(module).layer for module in experts_modules(twin.stored).values()] == [1, 2]


def test_layer_without_tokens_is_in_the_graph_as_others_are() -> None:
    twin = Twin.of(tiny_config("mixtral"))
    heard: list[torch.Tensor] = []
    twin.anchor.register_hook(heard.append)
    layer = layer_of(next(iter(experts_modules(twin.stored).values())))
    none = torch.zeros(0, 32)
    y = layer.run(twin.stored, none, torch.zeros(0, 3, dtype=torch.long), torch.zeros(0, 3))
    assert (y.shape, y.dtype) == (none.shape, none.dtype)
    y.sum().backward()
    assert len(heard) == 1, "who waits for the end of the backward hears of it"


@pytest.mark.parametrize(("least_bytes", "lease_slots", "is_copied"), [(0, 16, False), (0, 15, True), (1 << 20, 16, True)])
def test_under_a_graph_small_experts_and_those_that_do_not_fit_are_copied(
    least_bytes: int, lease_slots: int, is_copied: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("paramstore_client.hf.model.layer_experts.APART_BYTES", least_bytes)
    twin = Twin.of(tiny_config("qwen3_moe"), kernel="grouped_mm", lease_slots=lease_slots)
    lent, lend = [], CompactBuffers.lent
    monkeypatch.setattr(CompactBuffers, "lent", lambda *given, **options: lent.append(given) or lend(*given, **options))
    twin.stored(tokens(), labels=tokens()).loss.backward()
    assert len(twin.namespace.pending) == 8 * len(twin.layout.modules), "all experts are active"
    assert bool(lent) == is_copied


RING_LAYERS = 4


@contextmanager
def in_a_ring(*, on_device: bool, slots: int = 2 * EXPERTS) -> Iterator[tuple[Twin, HostSlots | DeviceTier]]:
    """A served model of RING_LAYERS layers, with `slots` slots in the order of their turns."""
    config = tiny_config("qwen3_moe", num_hidden_layers=RING_LAYERS, max_position_embeddings=256)
    twin = Twin.of(config, kernel="grouped_mm", is_trained=False, lease_slots=slots + 1)
    make = partial(DeviceTier, device="cpu") if on_device else HostSlots
    source = make(twin.namespace, slots=slots, policy="ring")
    with closing(source):
        bind(twin.stored, ModelExperts(source, anchor=None, is_ring=True), kernel="grouped_mm")
        yield twin, source


@pytest.mark.parametrize("on_device", [False, True])
@torch.no_grad()
def test_a_prompt_finds_each_layer_of_a_ring_there_where_half_of_them_have_slots(on_device: bool) -> None:
    with in_a_ring(on_device=on_device) as (twin, source):
        for seed in range(rounds := 5):
            ids = tokens(seed=seed, batch=4, length=100)
            assert torch.equal(twin.stored(ids).logits, twin.stock(ids).logits)
        counts, uses = source.counts, rounds * RING_LAYERS * EXPERTS
        assert (counts.late, counts.misses, counts.passed) == (0, EXPERTS, 0), "but for the very first layer"
        assert counts.hits == uses - EXPERTS
        assert counts.loads == uses + EXPERTS, "each layer is loaded once a prompt, and goes when its turn is over; one is ahead"


@pytest.mark.parametrize("on_device", [False, True])
@torch.no_grad()
def test_a_ring_that_cannot_hold_a_layer_and_the_next_loads_as_much_of_it_as_fits(on_device: bool) -> None:
    with in_a_ring(on_device=on_device, slots=EXPERTS + 4) as (twin, source):
        for seed in range(3):
            before, ids = replace(source.counts), tokens(seed=seed, batch=4, length=100)
            assert torch.equal(twin.stored(ids).logits, twin.stock(ids).logits)
        assert source.counts.ahead - before.ahead >= 2 * RING_LAYERS
        assert source.counts.loads - before.loads <= RING_LAYERS * EXPERTS


@pytest.mark.parametrize("on_device", [False, True])
@torch.no_grad()
def test_a_token_uses_no_layer_whole_so_none_is_loaded_whole(on_device: bool) -> None:
    with in_a_ring(on_device=on_device) as (twin, source):
        layer_of(next(iter(experts_modules(twin.stored).values()))).early.routers = {}
        for seed in range(4):
            twin.stored(tokens(seed=seed)[:1, :1])
        assert source.counts.ahead == 0
