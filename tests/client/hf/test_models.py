"""Every MoE model of the installed transformers is supported, or refused with its reason. Nothing has memory here."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import re
from pathlib import Path
from typing import Any

import pytest

from paramstore.errors import UnsupportedModel
from paramstore_client.hf import _compat, find_layout

pytestmark = pytest.mark.slow

NOT_IN_REGISTRY = "do not go through transformers' experts registry"
REFUSED = {
    "dbrx": NOT_IN_REGISTRY,
    "doge": NOT_IN_REGISTRY,
    "ernie4_5_vl_moe": "two kinds of experts in one layer",
    "jetmoe": NOT_IN_REGISTRY,
    "llama4": NOT_IN_REGISTRY,
    "longcat_flash": NOT_IN_REGISTRY,
    "step3p7": NOT_IN_REGISTRY,
    "vitpose_backbone": NOT_IN_REGISTRY,
}
"""Model -> part of the reason. Every other one is supported."""

CHANGES: dict[str, dict[str, Any]] = {
    "dbrx": {"attn_config": {"rope_theta": 10000.0, "kv_n_heads": 8}},
    "doge": {"is_moe": True, "num_hidden_layers": 2},
    "dots1": {"n_routed_experts": 8, "n_shared_experts": 1, "num_hidden_layers": 4},
    "gemma4": {"enable_moe_block": True, "num_experts": 8, "top_k_experts": 2, "moe_intermediate_size": 64},
    "hunyuan_v1_moe": {"num_experts": 8, "head_dim": 64, "num_hidden_layers": 2},
    "vitpose_backbone": {"num_experts": 4, "part_features": 32},
}
"""Where a model's default config makes no model, or a dense one."""

UNBUILDABLE = {"deepseek_ocr2", "diffusion_gemma", "lfm2_moe", "qwen3_omni_moe", "qwen4_exp"}
"""Models whose default config makes none: their experts class is looked at instead."""

MODULE_LISTS = {"nllb_moe", "switch_transformers"}
"""Supported, and in no registry: a module per expert."""


def sources() -> dict[str, Path]:
    """The modeling files that have experts, by model, without importing transformers."""
    spec = importlib.util.find_spec("transformers")
    if spec is None or spec.origin is None:
        return {}
    files = Path(spec.origin).parent.glob("models/*/modeling_*.py")
    experts = re.compile(r"@use_experts_implementation|^class \w*(Expert|MoE|Moe)\w*\(nn\.Module", re.MULTILINE)
    return {path.parent.name: path for path in sorted(files) if experts.search(path.read_text())}


SOURCES = sources()


def language_model(modeling: Any) -> type[Any]:
    """The class that makes text, else the one nearest to it."""
    classes = [
        found
        for found in vars(modeling).values()
        if inspect.isclass(found) and found.__module__ == modeling.__name__ and getattr(found, "config_class", None) is not None
    ]
    for ending in ("ForCausalLM", "ForConditionalGeneration", "TextModel", "Model", ""):
        fitting = [found for found in classes if found.__name__.endswith(ending) and "PreTrained" not in found.__name__]
        if fitting:
            return fitting[0]
    raise AssertionError(f"{modeling.__name__} has no model")


@pytest.mark.parametrize("model", SOURCES)
def test_model_is_supported_or_refused_with_its_reason(model: str) -> None:
    modeling = importlib.import_module(f"transformers.models.{model}.{SOURCES[model].stem}")
    if model in UNBUILDABLE:
        assert "@use_experts_implementation" in SOURCES[model].read_text()
        return
    built = language_model(modeling)
    network = _compat.on_meta(built, built.config_class(**CHANGES.get(model, {})))
    if model in REFUSED:
        with pytest.raises(UnsupportedModel, match=REFUSED[model]):
            find_layout(network)
        return
    layout = find_layout(network)
    assert layout.experts > 1
    assert layout.layers
    assert layout.schema("adamw", updates="touched").is_trainable


def test_list_of_refused_models_names_none_that_is_gone() -> None:
    gone = REFUSED.keys() - SOURCES.keys()
    assert gone <= {"ernie4_5_vl_moe", "step3p7"}, "these came with later versions of transformers"


def test_page_counts_the_models_of_its_version() -> None:
    page = (Path(__file__).resolve().parents[3] / "docs" / "transformers.md").read_text()
    found = re.search(r"of transformers (\S+) (\d+) build and are supported, and (\d+) more", page)
    assert found is not None
    if found[1] != _compat.transformers().__version__:
        pytest.skip(f"the page counts those of {found[1]}")
    in_registry = SOURCES.keys() - REFUSED.keys() - UNBUILDABLE - MODULE_LISTS
    assert (int(found[2]), int(found[3])) == (len(in_registry), len(UNBUILDABLE & SOURCES.keys()))
