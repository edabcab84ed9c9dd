"""Says where the store of a checkpoint lies, and what its namespace is called.

Both names come from the place of the checkpoint and the dtype it is loaded in: so two checkpoints of one name have two stores, and
a revision that the hub's cache got since has its own. Files that were rewritten in place are noticed by their content, at the load.
"""

from __future__ import annotations

import hashlib
import os
import re
from dataclasses import dataclass
from pathlib import Path

from paramstore.config import Config
from paramstore.core.key import check_name
from paramstore.directories import check_directory, check_parent, is_missing, user_cache
from paramstore.errors import ConfigError
from paramstore_client.checkpoint_directory import checkpoint_directory
from paramstore_client.connection.address import PATH_BYTES_MAX

NAME_LENGTH, DIGEST_LENGTH = 40, 8


@dataclass(frozen=True, slots=True)
class Home:
    """model: as the caller names it. checkpoint: the directory of its files. directory: of the store. is_default: whether that is
    ours alone, under the user's cache directory."""

    model: str
    checkpoint: Path
    directory: Path
    namespace: str
    is_default: bool

    def make_parent(self) -> None:
        """Makes the directory in which a store under the user's cache directory lies. Raises ConfigError."""
        if not self.is_default:
            return  # a path that somebody gave and that is not there was misspelt, most likely
        try:
            self.directory.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"{self.directory.parent} cannot be made: {error.strerror}; give a --dir for the store") from error


def home_of(model: str, *, directory: Path | None, namespace: str | None, dtype: str | None) -> Home:
    """The home of the checkpoint `model`, a directory or the id of a model in the hub's cache. Nothing is made.

    directory, namespace: what the caller wants instead. dtype: that the model is loaded in; None for the checkpoint's own. Raises
    CheckpointError where there is no such checkpoint, ConfigError for a name that no namespace can have, and for a directory that
    is a file, that cannot be made where it is to lie, or whose path is too long for a socket in it.
    """
    checkpoint = checkpoint_directory(model)
    if directory is not None:
        check_parent("--dir", directory)
        if not is_missing(directory):
            check_directory("--dir", directory)
    base = re.sub(r"[^A-Za-z0-9._-]+", "-", os.path.basename(os.path.abspath(model))).strip(".-")[:NAME_LENGTH] or "model"
    place = f"{os.path.realpath(checkpoint)}\0{dtype or ''}"
    name = f"{base}-{hashlib.sha256(os.fsencode(place)).hexdigest()[:DIGEST_LENGTH]}"
    home = Home(model, checkpoint, directory or user_cache() / name, check_name(namespace or name), directory is None)
    length_bytes = len(os.fsencode(Config(dir=home.directory).socket_path))
    if length_bytes > PATH_BYTES_MAX:
        raise ConfigError(
            f"{home.directory}: the daemon's socket there would have a path of {length_bytes} bytes, the limit is {PATH_BYTES_MAX}"
            ": give a shorter --dir"
        )
    return home
