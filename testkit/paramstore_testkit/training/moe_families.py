"""A tiny configuration of every family of transformers' experts registry.

The families are read from the installed transformers, so that a new one is noticed. A configuration is made small by the names
that families share; CHANGES has what a family needs beyond that.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

VOCABULARY = 64
EXPERTS = 8

# With three experts a token, a wrong order of summation shows; with two it would not.
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY, "unpadded_vocab_size": VOCABULARY, "vocab_size_per_layer_input": VOCABULARY,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "max_position_embeddings": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 8, "swa_head_dim": 8, "global_head_dim": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8,
    "kv_lora_rank": 16, "q_lora_rank": 16, "index_head_dim": 16, "index_n_heads": 2, "index_topk": 16,
    "intermediate_size": 48, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 24, "shared_intermediate_size": 24,
    "moe_shared_expert_intermediate_size": 24, "hidden_size_per_layer_input": 8, "router_hidden_size": 16, "moe_hidden_size": 16,
    "num_experts": EXPERTS, "num_local_experts": EXPERTS, "n_routed_experts": EXPERTS, "moe_num_experts": EXPERTS,
    "n_shared_experts": 1, "num_experts_per_tok": 3, "moe_k": 3, "top_k_experts": 3, "n_group": 1, "topk_group": 1,
    "first_k_dense_replace": 1,
    "linear_head_dim": 8, "linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_num_heads": 4, "linear_num_key_heads": 2,
    "linear_num_value_heads": 2, "mamba_num_heads": 4, "mamba_head_dim": 8, "mamba_n_heads": 8, "mamba_d_state": 8,
    "mamba_chunk_size": 8, "ssm_state_size": 8, "n_groups": 2,
    "depth": 2, "num_heads": 4, "num_layers": 2, "image_size": 64, "out_hidden_size": 32, "projector_hidden_size": 32,
    "position_embedding_size": 16, "projection_intermediate_size": 48, "output_channels": 8, "downsample_channels": [8, 32],
    "downsample_hidden_size": 8,
}  # fmt: skip
"""Attributes of configurations, whether of text, vision or audio."""

_HYBRID = {"layer_types": ["linear_attention", "full_attention"]}
_DENSE_FIRST = {"mlp_layer_types": ["dense", "sparse"]}
_ROPE = {"rope_type": "default", "rope_theta": 10000.0}

CHANGES: dict[str, dict[str, Any]] = {
    "bailing_hybrid": _HYBRID,
    "beam": _DENSE_FIRST,
    "deepseek_ocr2": {"text_config": _DENSE_FIRST},
    "deepseek_v3": {"n_group": 2},
    "diffusion_gemma": {"vision_config": {"model_type": "gemma4_vision"}},
    "ernie4_5_vl_moe": {
        "text_config": {"moe_intermediate_size": [24, 24], "rope_parameters": {**_ROPE, "mrope_section": [1, 1, 2]}},
    },
    "flint": {"mlp_only_layers": [0]},
    "gemma4": {"enable_moe_block": True},
    "glm4v_moe": {"text_config": {"rope_parameters": {**_ROPE, "partial_rotary_factor": 1.0, "mrope_section": [1, 1, 2]}}},
    "glm5_next": {"text_config": {**_HYBRID, **_DENSE_FIRST, "qk_rope_head_dim": 0}},
    "gpt_oss": {
        "intermediate_size": 24, "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 16,
        "rope_parameters": _ROPE,
    },
    "granitemoehybrid": {"layer_types": ["mamba", "attention"]},
    "hy_v4_vl": {"text_config": {"rope_parameters": {**_ROPE, "mrope_section": [1, 1, 2]}}},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "kimi_linear": _HYBRID,
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "mistral4": {
        "head_dim": 8, "rope_parameters": {**_ROPE, "llama_4_scaling_beta": 0.1, "original_max_position_embeddings": 64},
    },
    "mistral_large4": {"vision_config": {"model_type": "pixtral"}},
    "muse_spark": {"audio_config": {"patch_sizes": [4, 4], "hidden_sizes": [8, 8], "depths": [1, 1]}},
    "olmoe": {"intermediate_size": 24},
    "openai_privacy_filter": {"num_labels": VOCABULARY},
    "qwen2_moe": {"shared_expert_intermediate_size": 48},
    "qwen3_5_moe": _HYBRID,
    "qwen3_next": _HYBRID,
    "qwen3_omni_moe": {"vision_start_token_id": 60},
    "qwen4_exp": {
        **_HYBRID, "indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 8, "indexer_budget": 16,
        "indexer_compress_ratio": 4,
    },
    "zaya": {"num_experts_per_tok": 1},
}  # fmt: skip
"""Further attributes of a family's configuration, by the family's name, or of a part of it, by the part's name."""

NOT_SERVED = {"diffusion_gemma", "ernie4_5_vl_moe"}
"""Families that `ps.hf` refuses."""
SERVED_ALWAYS = ("mixtral", "qwen3_moe", "deepseek_v3", "gpt_oss", "olmoe", "jamba", "phimoe", "granitemoe")
"""Those that every run of the tests serves; the others are for `make soak`."""
NOT_GROUPED = {"mistral_large4"}
"""Families whose unmodified models can be set to no kernel but their own: a part of theirs, without experts, refuses."""

ENDINGS = ("ForCausalLM", "ForConditionalGeneration", "Generation", "Diffusion", "Classification", "Model", "")
"""Endings of the names of modeling classes: the first one that a family has is built."""


@cache
def families() -> dict[str, Path]:
    """Finds the modeling file of each family, by its name, without importing transformers; none where that is not installed."""
    spec = importlib.util.find_spec("transformers")
    if spec is None or spec.origin is None:
        return {}
    files = Path(spec.origin).parent.glob("models/*/modeling_*.py")
    return {file.parent.name: file for file in sorted(files) if "@use_experts_implementation" in file.read_text()}


def modeling_class(file: Path) -> type[Any]:
    """Finds the class of a modeling file that computes a loss, else the one nearest to it."""
    modeling = importlib.import_module(f"transformers.models.{file.parent.name}.{file.stem}")
    classes = [
        found for name, found in vars(modeling).items()
        if inspect.isclass(found) and found.__module__ == modeling.__name__ and "PreTrained" not in name
        and getattr(found, "config_class", None) is not None
    ]  # fmt: skip
    return next(found for ending in ENDINGS for found in classes if found.__name__.endswith(ending))


def tiny_config(family: str, *, sizes: Mapping[str, Any] | None = None, **changes: Any) -> Any:
    """Makes a config of `family` with EXPERTS experts in each of one or two layers. sizes: used instead, as far as it has them."""
    given = {**CHANGES.get(family, {}), **changes}
    return small_config(modeling_class(families()[family]).config_class, sizes={**SIZES, **(sizes or {})}, **given)


def small_config(config_class: Any, *, sizes: Mapping[str, Any] = SIZES, **changes: Any) -> Any:
    """Makes a small configuration of a class. changes: as in CHANGES."""
    return config_class(**_small(config_class, sizes, changes))


def _small(config_class: Any, sizes: Mapping[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    names = {*inspect.signature(config_class).parameters, *config_class.attribute_map}
    names -= {alias for alias, name in config_class.attribute_map.items() if name in names & sizes.keys()}  # else the alias wins
    small = {name: value for name, value in sizes.items() if name in names}
    if "first_k_dense_replace" in names and "layer_types" not in changes:
        small["num_hidden_layers"] += 1  # the first layer has no experts
    if "kv_lora_rank" in names:
        small["num_key_value_heads"] = small["num_attention_heads"]
    parts = {name: (part, changes.get(name, {})) for name, part in config_class.sub_configs.items()}
    for name, (part, inner) in parts.items():
        part_class = _mapped(inner["model_type"]) if "model_type" in inner else part
        if getattr(part_class, "model_type", None):
            small[name] = {"model_type": part_class.model_type, **_small(part_class, sizes, inner)}
    return {**small, **{name: value for name, value in changes.items() if name not in parts}}


def _mapped(model_type: str) -> Any:
    return importlib.import_module("transformers").CONFIG_MAPPING[model_type]
