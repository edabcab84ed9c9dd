"""Checkpoints of tiny models as transformers writes them, and what an exported one must equal."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paramstore.core.key import ExpertKey
from paramstore_client.hf.compat import modeling
from paramstore_client.hf.model.layout import ExpertLayout
from paramstore_client.safetensors_file import read_header
from paramstore_testkit.training.moe_families import families, modeling_class, tiny_config

SHARD_BYTES_MAX = 40_000
"""Size of a shard: small enough that a tiny model has several."""


def save_stock(
    family: str, directory: Path, *, seed: int = 0, dtype: torch.dtype = torch.bfloat16, shard_bytes_max: int = SHARD_BYTES_MAX,
    **changes: Any,
) -> Path:  # fmt: skip
    """Writes an unmodified model of `family` with random weights. changes: of its tiny config."""
    model = modeling.build(modeling_class(families()[family]), tiny_config(family, **changes))
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.05)
    model.to(dtype).save_pretrained(directory, max_shard_size=shard_bytes_max)
    return directory


def class_of(directory: Path) -> Any:
    """Finds the modeling class that a checkpoint was saved from."""
    return getattr(modeling.transformers(), json.loads((directory / "config.json").read_text())["architectures"][0])


def load_stock(directory: Path) -> Any:
    """Loads the unmodified model of a checkpoint, in the checkpoint's dtype."""
    return class_of(directory).from_pretrained(directory, dtype="auto")


def expert_values(model: Any, layout: ExpertLayout, key: ExpertKey) -> dict[str, Tensor]:
    """Gives one expert's tensors in an unmodified model, by name."""
    module = model.get_submodule(layout.modules[key[0]])
    return {tensor.name: getattr(module, tensor.name).detach()[key[1]] for tensor in layout.tensors}


def check_equal_files(expected: Path, found: Path) -> None:
    """Asserts that two checkpoints have the same files, byte for byte."""
    names = sorted(file.name for file in expected.iterdir())
    assert sorted(file.name for file in found.iterdir()) == names
    for name in names:
        assert (found / name).read_bytes() == (expected / name).read_bytes(), f"{name} differs"


def tensors_of(directory: Path) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """Reads every tensor of a checkpoint, from whichever files: dtype, shape and bytes."""
    found = {}
    for file in directory.glob("*.safetensors"):
        data = file.read_bytes()
        for name, tensor in read_header(file).items():
            bytes_of = data[tensor.offset_bytes : tensor.offset_bytes + tensor.length_bytes]
            found[name] = (tensor.dtype, tensor.shape, bytes_of)
    return found


def weight_map(directory: Path) -> dict[str, str]:
    """Reads the file that each tensor is in, from the index."""
    found: dict[str, str] = json.loads((directory / "model.safetensors.index.json").read_text())["weight_map"]
    return found
