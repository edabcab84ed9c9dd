"""A checkpoint as transformers writes and reads it: one safetensors file, or shards with an index, in a directory.

An open checkpoint has been looked at as a whole: every file of the index is there, and every tensor of the index in its file. What
was read of a file since is of that checkpoint as long as `check_unchanged` finds the file as it was.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from paramstore.errors import CheckpointError
from paramstore_client.checkpoint_directory import checkpoint_directory
from paramstore_client.safetensors_file import StoredTensor, read_header

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
FileState = tuple[int, int, int] | None
"""Size, and times of the last write and of the last change of the file's entry, in ns; None of a file that is not there."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """An open checkpoint. tensors: all of its tensors, by name. states: of its files, as they were before they were looked at."""

    directory: Path
    tensors: Mapping[str, StoredTensor]
    states: Mapping[Path, FileState]


def check_unchanged(states: Mapping[Path, FileState], files: Iterable[Path]) -> None:
    """Raises CheckpointError naming one of `files` that was written, replaced or removed since its state was taken."""
    for file in files:
        if state_of(file) != states[file]:
            raise CheckpointError(
                f"{file} changed while it was read: what was imported before is kept. Put the file back, and the same import goes "
                "on; or import what is there now, under another name, or from the start with import_checkpoint(resume=False)"
            )


def open_checkpoint(path: str | os.PathLike[str]) -> Checkpoint:
    """The checkpoint in a directory, or in the hub's cache. Raises CheckpointError naming file and tensor."""
    directory = checkpoint_directory(path)
    index = directory / INDEX
    if not index.exists():
        file = directory / WEIGHTS
        if not file.exists():
            way_on = "save_pretrained of the model that transformers loads from there writes them"
            raise CheckpointError(f"{directory} has neither {INDEX} nor {WEIGHTS}: {way_on}")
        states = {file: state_of(file)}
        return Checkpoint(directory, read_header(file), states)
    weight_map = _weight_map(index)
    names = sorted(set(weight_map.values()))
    states = {directory / name: state_of(directory / name) for name in names}
    headers = {name: read_header(directory / name) for name in names}
    tensors = {}
    for name, file_name in weight_map.items():
        tensor = headers[file_name].get(name)
        if tensor is None:
            raise CheckpointError(f"{directory / file_name} lacks tensor {name!r}, which {index.name} places there")
        tensors[name] = tensor
    return Checkpoint(directory, tensors, states)


def state_of(file: Path) -> FileState:
    """What tells a file from the one that it was before."""
    try:
        found = file.stat()
    except OSError:
        return None
    return found.st_size, found.st_mtime_ns, found.st_ctime_ns


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
