"""Checks directories and files that somebody has named, and says in one wording what is wrong with them; flushes directories whose
names must last. Nothing is made here."""

from __future__ import annotations

import os
from pathlib import Path

from paramstore.errors import ConfigError


def check_directory(name: str, directory: Path) -> None:
    """Checks that there is such a directory. name: the flag or setting that it was given as. Raises ConfigError."""
    try:
        if directory.is_dir():
            return
        problem = "it is not a directory" if directory.exists() else "there is no such directory"
    except OSError as error:
        raise ConfigError(f"{name} {directory}: {error.strerror}") from error
    raise ConfigError(f"{name} {directory}: {problem}")


def check_parent(name: str, directory: Path) -> None:
    """Checks that the place is there in which `directory` lies, or is to be made: one that is not was misspelt, most likely, or its
    disk is not mounted. name: as above. Raises ConfigError."""
    missing = [parent for parent in directory.absolute().parents if is_missing(parent)]
    if missing:
        raise ConfigError(
            f"{name} {directory}: it cannot be made, as there is no directory {missing[0]}; the nearest one is "
            f"{missing[-1].parent}: mend the path, or make the directory that it is to lie in"
        )


def check_writable(name: str, file: Path) -> None:
    """Checks that `file` can be written, before work is done for it; leaves nothing behind. name: as above. Raises ConfigError."""
    try:
        is_new = not file.exists()
        with file.open("ab"):
            pass
        if is_new:
            file.unlink()
    except OSError as error:
        raise ConfigError(f"{name} {file}: cannot be written: {error.strerror}") from error


def is_missing(path: Path) -> bool:
    """Whether nothing is at `path`. False where that cannot be found out: whoever opens it is told why."""
    try:
        path.lstat()
    except FileNotFoundError:
        return True
    except OSError:
        pass
    return False


def flush_directory(directory: Path) -> None:
    """Makes the names in `directory` durable. Raises OSError."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def user_cache() -> Path:
    """Where this user keeps what can be made again: `paramstore` in XDG_CACHE_HOME, else in `~/.cache` (XDG base directories)."""
    given = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(given) if os.path.isabs(given) else Path.home() / ".cache") / "paramstore"
