from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from paramstore_client.hf.compat import modeling
from paramstore_client.hf.model.stripping import strip, stripped_class
from paramstore_testkit.training.moe_families import tiny_config

pytestmark = pytest.mark.slow


def model_class() -> Any:
    return modeling.transformers().Qwen3MoeForCausalLM


def test_experts_are_in_nothing_that_lists_parameters() -> None:
    model = stripped_class(model_class())(tiny_config("qwen3_moe"))
    names = [name for name, _ in model.named_parameters()] + list(model.state_dict()) + [name for name, _ in model.named_buffers()]
    assert not [name for name in names if ".experts." in name]
    assert any(".mlp.gate.weight" in name for name in names)


def test_shapes_stay_to_be_seen_on_meta() -> None:
    model = stripped_class(model_class())(tiny_config("qwen3_moe"))
    weight = model.model.layers[0].mlp.experts.gate_up_proj
    assert (weight.device.type, tuple(weight.shape)) == ("meta", (8, 48, 32))
    assert model.to(torch.bfloat16).model.layers[0].mlp.experts.gate_up_proj.device.type == "meta"


def test_class_looks_like_the_one_it_stands_for() -> None:
    stripped = stripped_class(model_class())
    assert (stripped.__name__, stripped.__module__) == (model_class().__name__, model_class().__module__)
    assert issubclass(stripped, model_class())


def test_patterns_find_the_experts_keys_alone() -> None:
    patterns = strip(modeling.on_meta(model_class(), tiny_config("qwen3_moe")))
    assert any(re.search(pattern, "model.layers.11.mlp.experts.gate_up_proj") for pattern in patterns)
    assert any(re.search(pattern, "layers.0.mlp.experts.5.down_proj.weight") for pattern in patterns)
    assert not any(re.search(pattern, "model.layers.0.mlp.shared_experts.up_proj.weight") for pattern in patterns)
    assert not any(re.search(pattern, "model.layers.0.mlp.gate.weight") for pattern in patterns)


def test_config_of_a_model_is_left_as_it_was() -> None:
    config = tiny_config("qwen3_moe")
    before = config.to_dict()
    modeling.on_meta(model_class(), config)
    assert config.to_dict() == before
