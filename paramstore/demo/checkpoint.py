"""Checkpoints of what is not in the store: dense weights, their optimizer, generators and the data position.

File and commit are made in this order: the file and its folder are synced, then the store commits the step with the file's name
and checksum in `extra`. So a committed step always finds its file, whatever stops in between; a file without a commit is
overwritten when its step comes again. The two newest are kept, as the store keeps its two newest steps.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import xxhash
from safetensors.torch import load, save
from torch import Tensor

from paramstore.directories import flush_directory
from paramstore.errors import CorruptRecord, VolumeError

KEPT = 2
PREFIX = "dense-"
SUFFIX = ".safetensors"


@dataclass(frozen=True, slots=True)
class CheckpointName:
    """The name of a commit's checkpoint, kept in the commit's `extra`: the file, and the xxh3 of all its bytes."""

    file: str
    xxh3: str

    def to_extra(self) -> bytes:
        return json.dumps({"dense_checkpoint": self.file, "xxh3": self.xxh3}).encode()

    @classmethod
    def from_extra(cls, extra: bytes) -> CheckpointName:
        """Parses what `to_extra` gave. Raises CorruptRecord if these bytes name no checkpoint."""
        try:
            values = json.loads(extra)
            return cls(file=str(values["dense_checkpoint"]), xxh3=str(values["xxh3"]))
        except (ValueError, KeyError, TypeError) as error:
            raise CorruptRecord(f"commit's extra {extra[:80]!r} names no dense checkpoint") from error


class CheckpointFolder:
    """Owner of the checkpoint files in one directory."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        directory.mkdir(parents=True, exist_ok=True)

    def save(self, step: int, tensors: Mapping[str, Tensor]) -> CheckpointName:
        """Writes the checkpoint of `step`; on return it survives a power cut. Raises VolumeError; then the old ones still stand."""
        data = save({name: tensor.detach().contiguous() for name, tensor in tensors.items()})
        path = self.directory / f"{PREFIX}{step:08d}{SUFFIX}"
        temporary = path.with_suffix(".new")
        try:
            with temporary.open("wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
            flush_directory(self.directory)
        except OSError as error:
            temporary.unlink(missing_ok=True)
            raise VolumeError(f"checkpoint {path}: {error}") from error
        return CheckpointName(path.name, _checksum(data))

    def load(self, name: CheckpointName) -> dict[str, Tensor]:
        """Reads the tensors of a checkpoint. Raises VolumeError if it is missing, CorruptRecord if it is another one."""
        path = self.directory / name.file
        try:
            data = path.read_bytes()
        except OSError as error:
            raise VolumeError(f"checkpoint {path}: {error}; the store's step needs it") from error
        found = _checksum(data)
        if found != name.xxh3:
            raise CorruptRecord(f"checkpoint {path}: xxh3 is {found}, the commit says {name.xxh3}")
        return load(data)

    def prune(self) -> None:
        """Removes all but the KEPT newest checkpoints. Call it after the commit: until then the older ones may be needed."""
        for path in self.files()[:-KEPT]:
            path.unlink()

    def files(self) -> list[Path]:
        """Paths of the checkpoints, oldest step first."""
        return sorted(self.directory.glob(f"{PREFIX}*{SUFFIX}"))


def _checksum(data: bytes) -> str:
    return xxhash.xxh3_128_hexdigest(data)
