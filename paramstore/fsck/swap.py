"""Puts the new catalog in the place of the old one, which stays as `catalog.before-rebuild-N`.

At every moment there is a whole catalog under the catalog's name. Wherever this process dies, the old one is left under some name
that no later rebuild removes.
"""

from __future__ import annotations

import ctypes
import os
import shutil
from pathlib import Path

from paramstore.directories import flush_directory
from paramstore.errors import CatalogError
from paramstore.storage.catalog.base import Catalog, Change
from paramstore.storage.catalog.lmdb_catalog import LmdbCatalog

CATALOG_NAME = "catalog"
NEW_NAME = "catalog.rebuilding"
OLD_NAME = "catalog.before-rebuild"
RENAME_EXCHANGE = 2
AT_FDCWD = -100


def fill(catalog: Catalog, change: Change) -> None:
    """Puts everything into a new, empty catalog. Raises CatalogError."""
    catalog.load()
    catalog.reserve(len(change.put_rows) + len(change.put_steps) + len(change.put_namespaces) + len(change.put_volumes))
    catalog.apply(change)


def replace_catalog(directory: Path, store: bytes, change: Change) -> Path | None:
    """Makes a catalog of `change` alone, durably, in `directory`. Gives where the old one is now; None if there was none.

    Raises CatalogError; then the old one is in its place, unless the message says that it was replaced.
    """
    current, new = directory / CATALOG_NAME, directory / NEW_NAME
    try:
        if new.exists():
            shutil.rmtree(new)  # left from a rebuild that was interrupted
        catalog = LmdbCatalog(new, store_uuid=store)
        try:
            fill(catalog, change)
        finally:
            catalog.close()
        if not current.exists():
            new.rename(current)
            flush_directory(directory)
            return None
        old = _free_name(directory)
        new.rename(old)  # first, so that the old one never has NEW_NAME: what has that name is removed
        try:
            _exchange(old, current)
        except OSError:
            old.rename(new)
            raise
    except OSError as error:
        raise CatalogError(f"catalog {current}: cannot be replaced: {error}") from error
    try:
        flush_directory(directory)
    except OSError as error:
        raise CatalogError(
            f"catalog {current}: it was replaced, the old one is {old}; after a power cut it may be the other way round: {error}"
        ) from error
    return old


def _free_name(directory: Path) -> Path:
    number = 1
    while (directory / f"{OLD_NAME}-{number}").exists():
        number += 1
    return directory / f"{OLD_NAME}-{number}"


def _exchange(one: Path, other: Path) -> None:
    """Exchanges two names in one step, so that there is a whole catalog at every moment. Raises OSError, also where the file system
    cannot do it."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.renameat2(AT_FDCWD, os.fsencode(one), AT_FDCWD, os.fsencode(other), RENAME_EXCHANGE) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), str(one), None, str(other))
