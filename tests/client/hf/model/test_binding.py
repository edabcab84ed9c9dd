from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch

from paramstore.core.schema import Schema
from paramstore.errors import ConfigError, SchemaMismatch
from paramstore.testing.memory_namespace import MemoryNamespace
from paramstore_client.hf.model.binding import ATTRIBUTE, ModelExperts, bind, layer_of
from paramstore_client.hf.model.compact_buffers import CompactBuffers
from paramstore_client.hf.model.experts_function import stored_experts
from paramstore_client.hf.model.layout import experts_modules
from paramstore_testkit.training.moe_families import tiny_config
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
    monkeypatch.setattr("paramstore_client.hf.model.binding.APART_BYTES", least_bytes)
    twin = Twin.of(tiny_config("qwen3_moe"), kernel="grouped_mm", lease_slots=lease_slots)
    lent, lend = [], CompactBuffers.lent
    monkeypatch.setattr(CompactBuffers, "lent", lambda *given, **options: lent.append(given) or lend(*given, **options))
    twin.stored(tokens(), labels=tokens()).loss.backward()
    assert len(twin.namespace.pending) == 8 * len(twin.layout.modules), "all experts are active"
    assert bool(lent) == is_copied
