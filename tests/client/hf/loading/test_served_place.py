from __future__ import annotations

import copy
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import paramstore as ps
from paramstore.errors import CapacityError, ConfigError, UnsupportedModel
from paramstore.testing.memory_namespace import MemoryNamespace
from paramstore_client.device.slots import DeviceSlots
from paramstore_client.device.tier import DeviceTier
from paramstore_client.hf.compat import caches, modeling
from paramstore_client.hf.loading import served_place
from paramstore_client.hf.loading.expert_memory import ExpertMemory
from paramstore_client.hf.loading.served_place import (
    RESERVE_BYTES,
    UNPACKED_AT_ONCE,
    ServedPlace,
    cache_bytes,
    check_device_map,
    check_shape,
    device_of_experts,
    make_tier,
    slots_that_fit,
)  # fmt: skip
from paramstore_client.hf.model.binding import layer_of
from paramstore_client.hf.model.layout import experts_modules, find_layout
from paramstore_testkit.training.moe_families import tiny_config
from paramstore_testkit.training.moe_models import tokens

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")
ATTENTION = ("qwen3_moe", "mixtral", "gpt_oss", "deepseek_v2", "deepseek_v3", "olmoe", "glm4_moe")
"""Grouped queries, a sliding window, latents."""


def model_on_meta(family: str = "qwen3_moe") -> Any:
    config = tiny_config(family)
    return modeling.on_meta(modeling.concrete_class(modeling.transformers().AutoModelForCausalLM, config), copy.deepcopy(config))


def held_bytes(cache: Any) -> int:
    return sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)


@pytest.mark.parametrize("family", ATTENTION)
@pytest.mark.parametrize("length", [5, 40])
def test_cache_is_as_large_as_transformers_makes_it(family: str, length: int) -> None:
    config = tiny_config(family)
    torch.manual_seed(0)
    model = modeling.transformers().AutoModelForCausalLM.from_config(config).eval()
    static = modeling.transformers().StaticCache(config=config, max_cache_len=length)
    grown = modeling.transformers().DynamicCache(config=config)
    with torch.no_grad():
        for cache in (static, grown):
            model(tokens(batch=3, length=length), **{caches.name_in(model.forward): cache})
    expected = cache_bytes(config, (3, length), itemsize=4)
    assert held_bytes(static) == expected
    one_token = cache_bytes(config, (3, 1), itemsize=4)
    assert expected - one_token <= held_bytes(grown) <= expected, "a growing window keeps a token less"


def test_latents_are_cached_as_all_heads_keys_and_values_before_transformers_keeps_them(monkeypatch: pytest.MonkeyPatch) -> None:
    config = tiny_config("deepseek_v3")
    monkeypatch.setattr(modeling, "caches_latents", lambda: False)
    per_token = config.num_attention_heads * (config.qk_nope_head_dim + config.qk_rope_head_dim + config.v_head_dim)
    assert cache_bytes(config, (3, 5), itemsize=4) == config.num_hidden_layers * 3 * 5 * per_token * 4


def test_cache_of_other_layers_is_not_taken_for_less_than_attention() -> None:
    config = tiny_config("qwen3_next")
    assert cache_bytes(config, (1, 8), itemsize=2) == 2 * 2 * 2 * 8 * 8 * 2


def test_slots_take_what_is_free_beside_cache_and_reserve() -> None:
    gib = 1 << 30
    assert slots_that_fit(16 * gib, cache=3 * gib, image_bytes=gib, key_count=100) == 12
    assert slots_that_fit(16 * gib, cache=3 * gib, image_bytes=gib, key_count=5) == 5
    assert slots_that_fit(RESERVE_BYTES + 10, cache=0, image_bytes=10, key_count=5) == 1
    with pytest.raises(CapacityError, match="smaller cache_shape"):
        slots_that_fit(RESERVE_BYTES + 9, cache=0, image_bytes=10, key_count=5)


def test_models_are_placed_where_their_dense_part_is(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_on_meta()
    layout = find_layout(model)
    schema, memory = layout.schema(None), ExpertMemory.of(None, "auto", mode="infer")
    with pytest.raises(UnsupportedModel, match=r"device_map=\{'': 0\}"):
        device_of_experts(model, layout)  # as accelerate leaves what it offloads
    model.model.layers[0].to_empty(device="cpu")
    with pytest.raises(UnsupportedModel, match="cpu, meta"):
        device_of_experts(model, layout)
    model.to_empty(device="cpu")
    unsaid = ServedPlace.of(model, layout, schema, memory, cache_shape=None)
    assert (unsaid, unsaid.lease_bounds(3)) == (ServedPlace(None, None), (3, None))
    said = ServedPlace.of(model, layout, schema, ExpertMemory("lru", 5), cache_shape=None)
    assert (said.lease_bounds(0), said.lease_bounds(7)) == ((5, 5), (7, 7))
    device = torch.device("cuda", 0)
    monkeypatch.setattr(served_place, "device_of_experts", lambda model, layout: device)
    image_bytes = schema.part("param").image_bytes
    free = RESERVE_BYTES + cache_bytes(model.config, (2, 9), itemsize=4) + 3 * image_bytes
    monkeypatch.setattr(served_place, "free_bytes", lambda of: free)
    placed = ServedPlace.of(model, layout, schema, memory, cache_shape=(2, 9))
    assert (placed, placed.lease_bounds(0)) == (ServedPlace(device, 3), (0, None)), "copies end their leases"
    assert ServedPlace.of(model, layout, schema, ExpertMemory("lru", 5), cache_shape=None) == ServedPlace(device, 5)
    free += UNPACKED_AT_ONCE * image_bytes
    unpacked = ServedPlace.of(model, layout, schema, memory, cache_shape=(2, 9), is_packed=True)
    assert unpacked == ServedPlace(device, 3), "what unpacking takes there is left free"


def test_quantized_experts_stand_in_slots_on_the_cpu_too_of_a_part_of_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_on_meta().to_empty(device="cpu")
    layout = find_layout(model)
    schema = layout.schema(None)
    monkeypatch.setattr(served_place, "available_bytes", lambda: 4 * 3 * schema.record_bytes)
    for memory, slots in ((ExpertMemory("lru", 5), 5), (ExpertMemory("lru"), 3)):
        assert ServedPlace.of(model, layout, schema, memory, cache_shape=None, is_packed=True) == ServedPlace(CPU, slots)
    monkeypatch.setattr(served_place, "available_bytes", lambda: 0)
    assert ServedPlace.of(model, layout, schema, ExpertMemory("lru"), cache_shape=None, is_packed=True) == ServedPlace(CPU, 1)


@pytest.mark.parametrize(
    "there", [None, "auto", "cpu", 1, "cuda", "cuda:1", {"": torch.device("cuda")}, {"a": "disk", "": "meta"}], ids=str
)
def test_places_that_may_be_there_are_taken(there: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    check_device_map(there)


@pytest.mark.parametrize("place", [2, "cuda:2", {"": 1, "lm_head": torch.device("cuda", 3)}], ids=str)
def test_places_that_are_not_there_are_refused(place: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ConfigError, match=r"device_map=.*finds 2 CUDA devices here$"):
        check_device_map(place)


@pytest.mark.parametrize("shape", [(0, 4), (1,), (1, 2.0), 7, "ab", (True, 3)])
def test_wrong_shapes_are_refused(shape: Any) -> None:
    with pytest.raises(ConfigError, match="cache_shape"):
        check_shape(shape, mode="infer")
    with pytest.raises(ConfigError, match="cache_shape"):
        check_shape((1, 2), mode="train")


def full_above(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    make = DeviceSlots.__init__

    def made(self: DeviceSlots, part: Any, count: int, **options: Any) -> None:
        if count > most:
            raise torch.OutOfMemoryError("planted")
        make(self, part, count, **options)

    monkeypatch.setattr(DeviceSlots, "__init__", made)


def test_a_full_device_gets_fewer_slots_and_says_so(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    full_above(3, monkeypatch)
    ns = MemoryNamespace.of_swiglu()
    with caplog.at_level(logging.WARNING), make_tier(ns, 12, device=CPU, policy="schedule") as tier:
        assert tier.lease_slots == 3
        with tier.fetch([(0, 0)]) as held:
            assert torch.equal(held[0, 0]["down"], ns.values((0, 0))["down"])
    assert "no memory for 12 experts" in caplog.text
    assert (ns.leased, ns.watchers) == ([], {}), "attempts that failed watch nothing"


def test_a_device_without_memory_for_one_expert_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    full_above(0, monkeypatch)
    ns = MemoryNamespace.of_swiglu()
    with pytest.raises(CapacityError, match="no memory for one expert"):
        make_tier(ns, 12, device=CPU, policy="schedule")
    assert ns.watchers == {}


def test_module_without_tensors_around_it_is_on_the_host() -> None:
    assert served_place._device_around(nn.Sequential(nn.Identity()), "0") == CPU


@pytest.mark.parametrize("slots", [16, 6, 1])
def test_a_loaded_model_computes_in_slots_as_in_leases(
    store: ps.Store, tmp_path: Path, slots: int, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    """The device's twin on the CPU, before a real daemon; a device asks for no leases that stand."""
    auto, options = modeling.transformers().AutoModelForCausalLM, {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    given: dict[str, Any] = {"store": store, "name": "placed", "mode": "infer", "experts_kernel": "grouped_mm"}
    torch.manual_seed(0)
    leased = ps.hf.from_config(auto, tiny_config("qwen3_moe"), **given)
    leased.save_pretrained(tmp_path)
    monkeypatch.setattr(ServedPlace, "of", lambda model, layout, schema, memory, **_: ServedPlace(CPU, memory.given))
    there = ps.hf.from_pretrained(auto, tmp_path, expert_memory=slots, residency="ring", **given)
    with ps.hf.namespace(leased), ps.hf.namespace(there), torch.no_grad():
        tier = layer_of(next(iter(experts_modules(there).values()))).source
        assert isinstance(tier, DeviceTier)
        assert (tier.lease_slots, tier.namespace) == (slots, ps.hf.namespace(there))
        assert torch.equal(there(tokens()).logits, leased(tokens()).logits)
        assert torch.equal(there.generate(tokens(), **options), leased.generate(tokens(), **options))
        tier.close()
