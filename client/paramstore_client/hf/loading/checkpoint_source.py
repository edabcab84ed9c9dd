"""The checkpoint that a model is loaded from, for its experts: which files, what they hold, and whether they stayed the same."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paramstore.core.key import KeySpace
from paramstore.core.schema import Schema
from paramstore.errors import CheckpointError
from paramstore_client.checkpoint_directory import checkpoint_directory
from paramstore_client.handle.given_heat import Heat, packed_heat
from paramstore_client.hf.checkpoint.shards import FileState, check_unchanged, state_of
from paramstore_client.hf.import_checkpoint import check_imported, import_checkpoint, packed_schema
from paramstore_client.hf.model.layout import ExpertLayout
from paramstore_client.namespace import Namespace

CACHE_OPTIONS = ("cache_dir", "revision")
"""Arguments of from_pretrained that say which files of the hub's cache are meant."""


def directory_of(path: str | os.PathLike[str], options: Mapping[str, Any]) -> Path:
    """The directory of the files that `from_pretrained` with these options means. Raises CheckpointError."""
    cached = {key: options[key] for key in CACHE_OPTIONS if options.get(key) is not None}
    return checkpoint_directory(path, **cached) / (options.get("subfolder") or "")


@dataclass(frozen=True, slots=True)
class Seen:
    """The checkpoint's files as they were before its dense part was loaded: its experts must be of the same ones."""

    states: Mapping[Path, FileState]

    @classmethod
    def of(cls, path: str | os.PathLike[str], options: Mapping[str, Any]) -> Seen:
        """Looks at what is there; where nothing is, whoever loads it says so."""
        try:
            directory = directory_of(path, options)
        except CheckpointError:
            return cls({})
        return cls({file: state_of(file) for file in directory.glob("*.safetensors")})

    def check(self) -> None:
        """Raises CheckpointError naming a file that changed since."""
        check_unchanged(self.states, self.states)


@dataclass(frozen=True, slots=True)
class CheckpointSource:
    """The checkpoint that a model was loaded from. options: those of `from_pretrained`. is_quantized: as its configuration says."""

    path: str | os.PathLike[str]
    options: Mapping[str, Any]
    model: Any
    progress: Any
    heat: Heat | None = None
    is_quantized: bool = False

    def directory(self) -> Path:
        """The directory of its files. Raises CheckpointError."""
        return directory_of(self.path, self.options)

    def look(self, layout: ExpertLayout) -> Schema | None:
        """The schema of quantized experts as they are in the checkpoint, None for others. Raises CheckpointError where the experts
        cannot be imported, before a namespace is made, which stays; ConfigError where the heat is of others."""
        packed_heat(self.heat, KeySpace.of(layout.layers, layout.experts), namespace=str(self.path))
        schema = packed_schema(self.directory(), layout, self.model)
        if schema is not None and not self.is_quantized:
            raise CheckpointError(
                f"{self.path}: its experts are quantized, and its configuration has no quantization_config, without which the "
                "dense part cannot be loaded: dequantize it first"
            )
        return schema

    def fill(self, namespace: Namespace) -> None:
        """Imports the experts into a new namespace; of several ranks, this one's share."""
        import_checkpoint(
            self.directory(), namespace, self.model, progress=self.progress, rank=namespace.rank, world_size=namespace.world_size,
            heat=self.heat,
        )  # fmt: skip

    def check(self, namespace: Namespace) -> bool:
        """Returns whether a committed namespace is known to hold what was imported from this checkpoint, or was trained from it.
        Raises CheckpointError where it was another one."""
        try:
            directory = self.directory()
        except CheckpointError:
            return False  # in a format whose experts could not have been imported either
        return check_imported(directory, namespace, self.model)
