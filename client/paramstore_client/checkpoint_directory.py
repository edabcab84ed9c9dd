"""Finds a checkpoint's directory without torch, so that a wrong path is reported before imports that take seconds."""

from __future__ import annotations

import importlib
import os
from pathlib import Path
from typing import Any

from paramstore.errors import CheckpointError

HUB_FILES = ("*.json", "*.safetensors", "*.model", "*.txt", "*.jinja")


def checkpoint_directory(path: str | os.PathLike[str], **cached: Any) -> Path:
    """`path` itself if it is a directory, else the cached directory of the hub's model with that id; nothing is fetched.

    cached: which cached copy is meant, as `revision` and `cache_dir` say; ignored for a directory. Raises CheckpointError.
    """
    directory = Path(path)
    if directory.is_dir():
        return directory
    if directory.exists() or _is_no_id(os.fspath(path)):
        what = " is a file" if directory.exists() else ": there is no such directory"
        raise CheckpointError(f"{str(path)!r}{what}: give the directory that has the checkpoint's config.json and safetensors")
    try:
        hub = importlib.import_module("huggingface_hub")
    except ModuleNotFoundError as error:
        raise CheckpointError(
            f"{str(path)!r} is no directory, and the hub's models need transformers, 5.7 or newer: pip install transformers"
        ) from error
    try:
        return Path(hub.snapshot_download(str(path), local_files_only=True, allow_patterns=list(HUB_FILES), **cached))
    except (OSError, ValueError) as error:  # what the hub's errors derive from
        raise CheckpointError(
            f"{str(path)!r} is no directory, and the hub's cache has no model of that name: `hf download {path}` fetches it"
        ) from error


def _is_no_id(path: str) -> bool:
    """Whether no model of the hub can be called so: an id is a name, or an owner and a name."""
    return path.startswith((".", "~", "/")) or path.endswith("/") or path.count("/") > 1
