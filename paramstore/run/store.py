"""What there is of a run's store before the run. Nothing is made, and nothing is raised: whoever opens the store next is told what
is wrong with it."""

from __future__ import annotations

from dataclasses import dataclass

import paramstore_client as client
from paramstore.errors import ParamStoreError
from paramstore.holder import daemon_of
from paramstore.run.home import Home

CATALOG_NAME = "catalog"


@dataclass(frozen=True, slots=True)
class RunStore:
    """is_new: whether there is none yet. budget_bytes: host budget of the daemon that serves it; None where none does."""

    is_new: bool
    budget_bytes: int | None = None


def look(home: Home) -> RunStore:
    """What there is of the store of `home`."""
    if not (home.directory / CATALOG_NAME).is_dir():
        return RunStore(is_new=True)
    try:
        if daemon_of(home.directory) is None:
            return RunStore(is_new=False)
        with client.connect(home.directory) as store:
            return RunStore(is_new=False, budget_bytes=int(store.stats()["tiers"]["host"]["budget_bytes"]))
    except (ParamStoreError, OSError):
        return RunStore(is_new=False)
