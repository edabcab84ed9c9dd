"""What there is of a run's store before the run: the budget of the daemon that serves it, and what of its experts is on the disk.
Nothing is made, and nothing is raised: whoever opens the store next is told what is wrong with it."""

from __future__ import annotations

from dataclasses import dataclass

import paramstore_client as client
from paramstore.errors import ParamStoreError
from paramstore.holder import daemon_of
from paramstore.run.home import Home
from paramstore.storage.catalog.copied import read_catalog

CATALOG_NAME = "catalog"


@dataclass(frozen=True, slots=True)
class RunStore:
    """budget_bytes: host budget of the daemon that serves it; None where none does. there_bytes: of the namespace's records on the
    volumes; None: it is committed, or what it has cannot be known now, so that no room is asked for."""

    budget_bytes: int | None = None
    there_bytes: int | None = 0


def look(home: Home) -> RunStore:
    """What there is of the store of `home`, and of its namespace there."""
    try:
        return _from_catalog(home) if daemon_of(home.directory) is None else _from_daemon(home)
    except (ParamStoreError, OSError):
        return RunStore(None, None)


def _from_daemon(home: Home) -> RunStore:
    with client.connect(home.directory) as store:
        stats = store.stats()
    namespace = stats["namespaces"].get(home.namespace)
    is_new = namespace is None
    return RunStore(int(stats["tiers"]["host"]["budget_bytes"]), 0 if is_new else None)


def _from_catalog(home: Home) -> RunStore:
    path = home.directory / CATALOG_NAME
    contents = read_catalog(path).namespaces if path.is_dir() else {}
    if (found := contents.get(home.namespace)) is None:
        return RunStore()
    if any(step >= 0 for step in found.steps):
        return RunStore(None, None)
    return RunStore(None, sum(row.located.extent.length_bytes for rows in found.rows.values() for row in rows))
