"""Every MoE model of the installed transformers that is not in its experts registry is supported as a list of modules, or refused
with its reason. Nothing has memory here.
"""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest

from paramstore.errors import UnsupportedModel
from paramstore_client.hf import find_layout
from paramstore_client.hf.compat import modeling
from paramstore_testkit.training.moe_families import families, modeling_class

pytestmark = pytest.mark.slow

NOT_IN_REGISTRY = "do not go through transformers' experts registry"
REFUSED = {"dbrx", "doge", "jetmoe", "llama4", "longcat_flash", "step3p7", "vitpose_backbone"}
MODULE_LISTS = {"nllb_moe", "switch_transformers"}
"""Supported: a module per expert."""

CHANGES: dict[str, dict[str, Any]] = {
    "dbrx": {"attn_config": {"rope_theta": 10000.0, "kv_n_heads": 8}},
    "doge": {"is_moe": True, "num_hidden_layers": 2},
    "vitpose_backbone": {"num_experts": 4, "part_features": 32},
}
"""Where a model's default config makes no model, or a dense one."""


def sources() -> dict[str, Path]:
    """The modeling files that have experts and are not in the registry, by model, without importing transformers."""
    spec = importlib.util.find_spec("transformers")
    if spec is None or spec.origin is None:
        return {}
    files = Path(spec.origin).parent.glob("models/*/modeling_*.py")
    experts = re.compile(r"^class \w*(Expert|MoE|Moe)\w*\(nn\.Module", re.MULTILINE)
    found = {path.parent.name: path for path in sorted(files) if experts.search(path.read_text())}
    return {model: path for model, path in found.items() if model not in families()}


SOURCES = sources()


@pytest.mark.parametrize("model", SOURCES)
def test_model_outside_of_the_registry_is_supported_or_refused_with_its_reason(model: str) -> None:
    built = modeling_class(SOURCES[model])
    network = modeling.on_meta(built, built.config_class(**CHANGES.get(model, {})))
    if model in MODULE_LISTS:
        assert find_layout(network).schema("adamw", updates="touched").is_trainable
    else:
        assert model in REFUSED
        with pytest.raises(UnsupportedModel, match=NOT_IN_REGISTRY):
            find_layout(network)


def test_list_of_refused_models_names_none_that_is_gone() -> None:
    assert REFUSED - SOURCES.keys() <= {"step3p7"}, "it came with a later version of transformers"
