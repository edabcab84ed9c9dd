"""Reads a catalog that no daemon has open, from a copy: nothing is written beside the store."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from paramstore.errors import CapacityError, CatalogError
from paramstore.storage.catalog.base import Contents
from paramstore.storage.catalog.lmdb_catalog import LmdbCatalog
from paramstore.storage.mounts import DISK_FULL


def read_catalog(path: Path) -> Contents:
    """Reads the catalog at `path` from a copy, so that LMDB does not touch the file. Raises CatalogError; CapacityError where there
    is no room for the copy, so that nothing is known of the catalog."""
    file = path / "data.mdb"
    try:
        with tempfile.TemporaryDirectory(prefix="paramstore-catalog-") as place:
            shutil.copyfile(file, Path(place) / file.name)
            catalog = LmdbCatalog(Path(place))
            try:
                return catalog.load()
            finally:
                catalog.close()
    except OSError as error:
        if error.errno in DISK_FULL or error.filename != str(file):  # it failed to write, not to read
            raise CapacityError(f"catalog {path}: no room for a copy of it: {error}: free some there, or set TMPDIR") from error
        raise CatalogError(f"catalog {path}: cannot be read: {error}") from error
    except CatalogError as error:
        raise type(error)(f"catalog {path}, read from a copy: {error}") from error
