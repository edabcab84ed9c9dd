from __future__ import annotations

from typing import Any

import pytest
import torch

from paramstore.errors import SchemaMismatch, UnsupportedModel
from paramstore.testing.moe_families import EXPERTS, tiny_config
from paramstore.testing.moe_models import FAMILIES
from paramstore_client.hf import ExpertTensor, _compat, find_layout
from paramstore_client.hf.stripping import strip

pytestmark = pytest.mark.slow


def on_meta(family: str, **changes: Any) -> Any:
    config = tiny_config(family, **changes)
    return _compat.on_meta(_compat.concrete_class(_compat.transformers().AutoModelForCausalLM, config), config)


@pytest.mark.parametrize("family", FAMILIES)
def test_layout_is_the_same_before_and_after_stripping(family: str) -> None:
    model = on_meta(family)
    before = find_layout(model)
    strip(model)
    assert find_layout(model) == before
    assert before.experts == EXPERTS
    assert len(before.layers) == 2


def test_fields_are_the_modules_tensors_in_its_order() -> None:
    layout = find_layout(on_meta("gpt_oss"))
    assert layout.tensors == (
        ExpertTensor("gate_up_proj", (32, 48), torch.float32), ExpertTensor("gate_up_proj_bias", (48,), torch.float32),
        ExpertTensor("down_proj", (24, 32), torch.float32), ExpertTensor("down_proj_bias", (32,), torch.float32),
    )  # fmt: skip
    assert layout.expert_elements == 32 * 48 + 48 + 24 * 32 + 32


def test_layers_keep_the_decoders_numbers() -> None:
    assert find_layout(on_meta("deepseek_v3")).layers == (1, 2), "the first layer is dense"


def test_schemas_for_training_and_for_inference() -> None:
    layout = find_layout(on_meta("mixtral"))
    assert layout.schema().updates == "exact"
    assert layout.schema("adamw", updates="touched").is_trainable
    assert layout.schema("sgd", state_dtype="bfloat16").kind == "sgd"
    assert layout.schema("adagrad").kind == "adagrad"
    assert layout.schema(None).kind == "param"
    with pytest.raises(SchemaMismatch, match="optimizer='lion'"):
        layout.schema("lion")


def test_dtypes_that_cannot_be_trained_are_refused() -> None:
    model = on_meta("mixtral").to(torch.float64)
    with pytest.raises(UnsupportedModel, match="float64"):
        find_layout(model).schema()


def test_dense_model_is_refused_as_such() -> None:
    with pytest.raises(UnsupportedModel, match="has no experts"):
        find_layout(on_meta("qwen3_moe", mlp_only_layers=[0, 1]))


def test_layers_of_different_shapes_are_refused() -> None:
    model = on_meta("mixtral")
    experts = model.model.layers[1].mlp.experts
    experts.down_proj = torch.nn.Parameter(torch.empty(EXPERTS, 32, 40, device="meta"))
    with pytest.raises(UnsupportedModel, match=r"layers\.1.*\[32, 40\]"):
        find_layout(model)
