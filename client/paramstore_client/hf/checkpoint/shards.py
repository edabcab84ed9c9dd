"""A checkpoint as transformers writes and reads it: one safetensors file, or shards with an index, in a directory.

An open checkpoint has been looked at as a whole: every file of the index is there, and every tensor of the index in its file.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from paramstore.errors import CheckpointError
from paramstore_client.checkpoint_directory import checkpoint_directory
from paramstore_client.safetensors_file import StoredTensor, read_header

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """An open checkpoint. tensors: all of its tensors, by name."""

    directory: Path
    tensors: Mapping[str, StoredTensor]


def open_checkpoint(path: str | os.PathLike[str]) -> Checkpoint:
    """The checkpoint in a directory, or in the hub's cache. Raises CheckpointError naming file and tensor."""
    directory = checkpoint_directory(path)
    index = directory / INDEX
    if not index.exists():
        file = directory / WEIGHTS
        if not file.exists():
            way_on = "save_pretrained of the model that transformers loads from there writes them"
            raise CheckpointError(f"{directory} has neither {INDEX} nor {WEIGHTS}: {way_on}")
        return Checkpoint(directory, read_header(file))
    weight_map = _weight_map(index)
    headers = {name: read_header(directory / name) for name in sorted(set(weight_map.values()))}
    tensors = {}
    for name, file_name in weight_map.items():
        tensor = headers[file_name].get(name)
        if tensor is None:
            raise CheckpointError(f"{directory / file_name} lacks tensor {name!r}, which {index.name} places there")
        tensors[name] = tensor
    return Checkpoint(directory, tensors)


def _weight_map(index: Path) -> dict[str, str]:
    try:
        weight_map = json.loads(index.read_bytes())["weight_map"]
        if all(isinstance(name, str) and Path(file).name == file for name, file in weight_map.items()):
            return dict(weight_map)
    except OSError as error:
        raise CheckpointError(f"{index}: cannot be read: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{index}: no index of safetensors files: {error!r}") from error
    raise CheckpointError(f"{index}: it names files that are not beside it")
