"""Small checkpoints whose experts are quantized, as the hub has them: files that transformers alone reads."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional
from transformers import AutoModelForCausalLM, DeepseekV3Config, GptOssConfig, Qwen3MoeConfig

BLOCK, GROUP = 128, 32
E4M3_MAX = 448.0
E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
"""Magnitudes that four bits can have, by their lower three."""
E2M1_LARGEST_EXPONENT, SCALE_BIAS = 2, 127
MXFP4_NAMES = ("experts.gate_up_proj", "experts.down_proj")
FILE = "model.safetensors"
Tensors = dict[str, Tensor]


def qwen3_config() -> Qwen3MoeConfig:
    """The configuration of a small model whose experts are whole blocks of fp8."""
    return Qwen3MoeConfig(  # type: ignore[call-arg]  # its stub lacks one
        vocab_size=128, hidden_size=2 * BLOCK, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=64,
        intermediate_size=BLOCK, moe_intermediate_size=BLOCK, num_experts=8, num_experts_per_tok=2, norm_topk_prob=True,
    )  # fmt: skip


def gpt_oss_config() -> GptOssConfig:
    """The configuration of a small model whose experts are whole groups of mxfp4."""
    return GptOssConfig(
        vocab_size=128, hidden_size=2 * GROUP, intermediate_size=3 * GROUP, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, num_local_experts=8, num_experts_per_tok=2, max_position_embeddings=256,
    )  # fmt: skip


def deepseek_config() -> DeepseekV3Config:
    """The configuration of a small model whose experts are whole blocks of fp8; its `kv_a_proj_with_mqa` is one and a half."""
    return DeepseekV3Config(
        vocab_size=128, hidden_size=2 * BLOCK, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=4,
        intermediate_size=BLOCK, moe_intermediate_size=BLOCK, first_k_dense_replace=1, n_routed_experts=8, n_shared_experts=1,
        num_experts_per_tok=2, n_group=2, topk_group=1, q_lora_rank=BLOCK, kv_lora_rank=BLOCK, qk_rope_head_dim=64,
        qk_nope_head_dim=64, v_head_dim=64, max_position_embeddings=256,
    )  # fmt: skip


def to_fp8(tensors: Tensors) -> Tensors:
    """A checkpoint's tensors with every projection in fp8, and a scale for each block of it; the last ones may be smaller."""
    made: Tensors = {}
    for name, tensor in tensors.items():
        if not name.endswith(("_proj.weight", "_proj_with_mqa.weight")):
            made[name] = tensor
            continue
        rows, columns = tensor.shape
        whole = functional.pad(tensor.float(), (0, -columns % BLOCK, 0, -rows % BLOCK))
        blocks = whole.view(whole.shape[0] // BLOCK, BLOCK, whole.shape[1] // BLOCK, BLOCK)
        scales = blocks.abs().amax(dim=(1, 3)) / E4M3_MAX
        quantized = (blocks / scales[:, None, :, None]).view(whole.shape)[:rows, :columns]
        made[name] = quantized.to(torch.float8_e4m3fn).contiguous()
        made[f"{name}_scale_inv"] = scales
    return made


def from_fp8(tensors: Tensors) -> Tensors:
    """What `to_fp8` gave, in bf16: products in fp32, rounded."""
    made: Tensors = {}
    for name, tensor in tensors.items():
        if (scales := tensors.get(f"{name}_scale_inv")) is not None:
            each = scales.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
            made[name] = (tensor.float() * each[: tensor.shape[0], : tensor.shape[1]]).to(torch.bfloat16)
        elif not name.endswith("_scale_inv"):
            made[name] = tensor
    return made


def fp8_quantization(layers: int) -> dict[str, Any]:
    """What the configuration of a Qwen3-MoE says whose projections are in fp8."""
    kept = ["lm_head", *(f"model.layers.{layer}.mlp.gate" for layer in range(layers))]
    return {
        "quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [BLOCK, BLOCK], "modules_to_not_convert": kept,
    }  # fmt: skip


def mxfp4_of(experts: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Matrices [E, columns, rows] in mxfp4, the nearest value each: blocks, scales, and the values that they stand for."""
    rows = experts.float().transpose(1, 2)
    groups = rows.reshape(*rows.shape[:2], -1, GROUP)
    exponents = groups.abs().amax(3).clamp(min=2.0**-100).log2().floor() - E2M1_LARGEST_EXPONENT
    scaled = groups / exponents.exp2()[..., None]
    magnitudes = (scaled.abs()[..., None] - E2M1).abs().argmin(-1)
    codes = (magnitudes | (scaled < 0).long() << 3).to(torch.uint8)
    values = (E2M1[magnitudes] * scaled.sign() * exponents.exp2()[..., None]).flatten(2).transpose(1, 2)
    return codes[..., 0::2] | codes[..., 1::2] << 4, (exponents + SCALE_BIAS).to(torch.uint8), values


def to_mxfp4(tensors: Tensors) -> Tensors:
    """A checkpoint's tensors with the experts' matrices in mxfp4."""
    made: Tensors = {}
    for name, tensor in tensors.items():
        if name.endswith(MXFP4_NAMES):
            made[f"{name}_blocks"], made[f"{name}_scales"], _ = mxfp4_of(tensor)
        else:
            made[name] = tensor
    return made


def mxfp4_quantization() -> dict[str, Any]:
    """What the configuration of a gpt-oss says whose experts are in mxfp4."""
    kept = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    return {"quant_method": "mxfp4", "modules_to_not_convert": kept}


def fp8_checkpoint(directory: Path, *, seed: int = 0) -> Path:
    """A Qwen3-MoE as Qwen3-FP8 is: every projection in fp8 with a scale for each 128 x 128."""

    config = qwen3_config()
    return _checkpoint(directory, config, to_fp8, fp8_quantization(config.num_hidden_layers), seed=seed)


def deepseek_checkpoint(directory: Path, *, seed: int = 0) -> Path:
    """A DeepSeek-V3 as the hub has it."""
    quantization = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [BLOCK, BLOCK]}
    return _checkpoint(directory, deepseek_config(), to_fp8, quantization, seed=seed)


def mxfp4_checkpoint(directory: Path, *, seed: int = 0) -> Path:
    """A gpt-oss as the hub has it: experts in mxfp4, all else in bf16. The experts' values are drawn anew."""

    def quantize(tensors: Tensors) -> Tensors:
        made = to_mxfp4(tensors)
        for name, tensor in made.items():
            if name.endswith("_blocks"):
                made[name] = torch.randint(256, tensor.shape, dtype=torch.uint8)
            elif name.endswith("_scales"):
                made[name] = torch.randint(119, 123, tensor.shape, dtype=torch.uint8)
        return made

    return _checkpoint(directory, gpt_oss_config(), quantize, mxfp4_quantization(), seed=seed)


CHECKPOINTS: dict[str, Callable[..., Path]] = {"fp8": fp8_checkpoint, "mxfp4": mxfp4_checkpoint}


def _checkpoint(
    directory: Path, config: Any, quantize: Callable[[Tensors], Tensors], quantization: dict[str, Any], *, seed: int
) -> Path:  # fmt: skip
    torch.manual_seed(seed)
    model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)  # type: ignore[no-untyped-call]
    model.save_pretrained(directory)
    return quantize_files(directory, quantize, quantization)


def quantize_files(directory: Path, quantize: Callable[[Tensors], Tensors], quantization: dict[str, Any]) -> Path:
    """Quantizes the checkpoint of one file that lies in `directory`, which it gives back."""
    plain = {name: tensor.clone() for name, tensor in load_file(directory / FILE).items()}  # not mapped: the file is replaced
    save_file(quantize(plain), directory / FILE, metadata={"format": "pt"})
    file = directory / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "quantization_config": quantization}))
    return directory
