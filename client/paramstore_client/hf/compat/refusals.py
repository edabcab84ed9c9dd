"""Refuses models and arguments before anything is loaded, and says what the user can do instead."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from torch import nn

from paramstore.errors import UnsupportedModel
from paramstore_client.hf.compat.quantization import method_of, quantized_parts

ARGUMENTS = {
    "tp_plan": "tensor parallelism would shard expert parameters, which the model has no more; use FSDP2 or DDP for the dense part",
    "tp_size": "tensor parallelism would shard expert parameters, which the model has no more; use FSDP2 or DDP for the dense part",
    "distributed_config": "expert and tensor parallelism shard expert parameters, which the model has no more; "
    "expert_parallel=ps.moe.ExpertParallel() has each rank compute its own experts from the store they share",
    "quantization_config": "quantized layers replace the experts module; load the checkpoint without it (one of fp8 or mxfp4 is "
    "served as it is with mode='infer')",
    "gguf_file": "a GGUF file has no safetensors to read expert by expert; convert it first",
    "variant": "experts are read from the files without a variant, the dense part from those with it; load a copy without",
    "state_dict": "experts are read from the checkpoint's files, not from a state dict; save it as a checkpoint first",
    "adapter_kwargs": "adapters replace modules while loading; add them to the loaded model",
}
"""Arguments of from_pretrained that cannot go together with stored experts, and why."""


SERVED = ("fp8", "mxfp4")
"""Methods of quantization whose experts are served as they are."""


def check_arguments(arguments: Mapping[str, Any]) -> None:
    """Raises UnsupportedModel for an argument of from_pretrained that stored experts exclude."""
    for name, reason in ARGUMENTS.items():
        if arguments.get(name) is not None:
            raise UnsupportedModel(f"{name}={arguments[name]!r} together with stored experts: {reason}")
    if arguments.get("trust_remote_code"):
        raise UnsupportedModel("trust_remote_code=True: experts are stored for models of transformers itself; leave it out")


def check_code(file: Path, error: Exception) -> None:
    """Raises UnsupportedModel if what transformers refused with `error` was to run the Python that `file`, a JSON of a checkpoint,
    names."""
    with suppress(OSError, ValueError):
        if "trust_remote_code" in str(error) and json.loads(file.read_bytes()).get("auto_map"):
            raise UnsupportedModel(
                f"{file}: its auto_map names Python of the checkpoint's own, which is not run; what transformers has itself is "
                "loaded. Take a copy of the model in transformers' own format"
            ) from error


def check_config(config: Any, *, mode: str = "train") -> None:
    """Raises UnsupportedModel for a checkpoint whose experts are quantized, unless it is one that can be served and `mode` is
    "infer"."""
    for part in quantized_parts(config):
        method = method_of(part)
        copy = "Load it once with dequantize=True in its quantization config, save_pretrained that, load the copy"
        if method in SERVED and mode == "infer":
            continue
        if method in SERVED:
            raise UnsupportedModel(
                f"the checkpoint is quantized ({method}): such experts are served, by ps.hf.from_pretrained with mode='infer', and "
                f"not trained. {copy}"
            )
        raise UnsupportedModel(
            f"the checkpoint is quantized ({method}): its experts are not the tensors that a kernel computes with; of quantized "
            f"ones {' and '.join(SERVED)} are served. {copy}"
        )


def why_no_experts(model: nn.Module) -> str:
    """The reason why no experts were found in `model`, for a person."""
    suspects = sorted({type(module).__name__ for module in model.modules() if _looks_like_experts(module)})
    name = type(model).__name__
    if any("FP8" in suspect or "Mxfp4" in suspect for suspect in suspects):
        return f"{name}: quantized experts ({', '.join(suspects)}) cannot be stored; load with dequantize=True and save a copy"
    if suspects:
        return (
            f"{name}: its {', '.join(suspects)} do not go through transformers' experts registry, nor hold one module per expert; "
            "they cannot be stored. Store such experts with ps.nn.StoredExperts in a model of your own"
        )
    return f"{name} has no experts: it is dense with this configuration; load it with transformers alone"


def _looks_like_experts(module: nn.Module) -> bool:
    name = type(module).__name__
    is_layer = name.endswith(("MoE", "Moe", "MOE"))
    return (is_layer or "Expert" in name) and any(parameter.dim() >= 2 for parameter in module.parameters(recurse=is_layer))
