from __future__ import annotations

from typing import Any

import pytest
import torch

from paramstore.errors import SchemaMismatch, UnsupportedModel
from paramstore_client.hf import ExpertTensor, find_layout
from paramstore_client.hf.compat import modeling
from paramstore_client.hf.model.stripping import strip
from paramstore_testkit.training.moe_families import CHANGES, EXPERTS, families, modeling_class, tiny_config
from paramstore_testkit.training.moe_models import FAMILIES

pytestmark = pytest.mark.slow


def built(family: str, **changes: Any) -> Any:
    return modeling.on_meta(modeling_class(families()[family]), tiny_config(family, **changes))


@pytest.mark.parametrize("family", FAMILIES)
def test_layout_is_the_same_before_and_after_stripping(family: str) -> None:
    model = built(family)
    before = find_layout(model)
    strip(model)
    assert find_layout(model) == before
    assert before.experts == EXPERTS
    assert len(before.layers) == 2


def test_fields_are_the_modules_tensors_in_its_order() -> None:
    layout = find_layout(built("gpt_oss"))
    assert layout.tensors == (
        ExpertTensor("gate_up_proj", (32, 48), torch.float32), ExpertTensor("gate_up_proj_bias", (48,), torch.float32),
        ExpertTensor("down_proj", (24, 32), torch.float32), ExpertTensor("down_proj_bias", (32,), torch.float32),
    )  # fmt: skip
    assert layout.expert_elements == 32 * 48 + 48 + 24 * 32 + 32


def test_layers_keep_the_decoders_numbers() -> None:
    assert find_layout(built("deepseek_v3")).layers == (1, 2), "the first layer is dense"


def test_schemas_for_training_and_for_inference() -> None:
    layout = find_layout(built("mixtral"))
    assert layout.schema().updates == "exact"
    assert layout.schema("adamw", updates="touched").is_trainable
    assert layout.schema("sgd", state_dtype="bfloat16").kind == "sgd"
    assert layout.schema("adagrad").kind == "adagrad"
    assert layout.schema(None).kind == "param"
    with pytest.raises(SchemaMismatch, match="optimizer='lion'"):
        layout.schema("lion")


def test_dtypes_that_cannot_be_trained_are_refused() -> None:
    model = built("mixtral").to(torch.float64)
    with pytest.raises(UnsupportedModel, match="float64"):
        find_layout(model).schema()


def test_dense_model_is_refused_as_such() -> None:
    with pytest.raises(UnsupportedModel, match="has no experts"):
        find_layout(built("qwen3_moe", mlp_only_layers=[0, 1]))


def test_experts_that_are_tied_are_refused() -> None:
    with pytest.raises(UnsupportedModel, match=r"encoder\.language_model\.layers\.0\.experts\.\w+ is model\.decoder.*tied"):
        find_layout(built("diffusion_gemma"))


def test_experts_that_could_be_tied_and_are_not_are_taken() -> None:
    parts = {"text_config": {"tie_word_embeddings": False}, "vision_config": {"model_type": "gemma4_vision"}}
    assert len(find_layout(built("diffusion_gemma", tie_word_embeddings=False, **parts)).layers) == 4


def test_two_kinds_of_experts_in_a_layer_are_refused_of_equal_shapes_too() -> None:
    for sizes in ([24, 24], [24, 12]):
        text = {**CHANGES["ernie4_5_vl_moe"]["text_config"], "moe_intermediate_size": sizes}
        with pytest.raises(UnsupportedModel, match=r"text_moe.experts and .*vision_moe.experts.*transformers alone"):
            find_layout(built("ernie4_5_vl_moe", text_config=text))


def test_layers_of_different_shapes_are_refused() -> None:
    model = built("mixtral")
    experts = model.model.layers[1].mlp.experts
    experts.down_proj = torch.nn.Parameter(torch.empty(EXPERTS, 32, 40, device="meta"))
    with pytest.raises(UnsupportedModel, match=r"layers\.1.*\[32, 40\]"):
        find_layout(model)
