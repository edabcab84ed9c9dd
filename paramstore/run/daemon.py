"""The daemon of a run's store: found, or started and then ended with the run.

One that was there before, and one that others use by the time, stays: nobody's reads fail because this run is over.
"""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType

import paramstore_client as client
from paramstore.errors import ParamStoreError, StoreUnavailable
from paramstore.holder import daemon_of
from paramstore.run.home import Home
from paramstore_client.connection.autostart import started_in

START_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 45.0
"""Seconds that the daemon gets to stop: longer than it gives its own transfers to finish."""
LOOK_S, LOOKS_MAX = 0.02, 50
"""Pause between two looks at who has namespaces open, and how many there are: the session that this run has closed ends
meanwhile."""


class RunDaemon:
    """Owner of the session with the daemon of `home`, and of the daemon if this process started it. A context manager.

    host_budget: what the caller asked for; default_budget_bytes: of a daemon that is started where that is None. keeps: whether a
    daemon that was started stays. tell: is given lines for people.
    """

    def __init__(
        self, home: Home, *, host_budget: str | None, default_budget_bytes: int, keeps: bool, tell: Callable[[str], object]
    ) -> None:
        self._home = home
        self._keeps = keeps
        self._tell = tell
        settings: dict[str, object] = {} if host_budget is not None else {"host_budget": default_budget_bytes}
        self._options = client.ServeOptions(dir=home.directory, host_budget=host_budget, settings=settings)
        self._store: client.Store | None = None

    def __enter__(self) -> client.Store:
        """Connects; starts a daemon if none serves the store. Raises StoreUnavailable, also where the daemon of another store
        listens in its place, VersionMismatch and ConfigError; then no daemon of this run is left."""
        try:
            self._home.make_parent()
            self._store = client.connect(autostart=self._options, timeout_s=START_TIMEOUT_S)
            self._check_store(self._store)
        except BaseException:
            self._end()
            raise
        return self._store

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._close()
        process = started_in(self._home.directory)
        stays = "as --keep asks" if self._keeps else "others use it" if process is not None and self._has_others() else None
        if process is not None and stays is not None:
            self._tell(f"daemon {process.pid} stays, {stays}: `paramstore stop {self._home.directory}` ends it")
        else:
            self._end()

    def _check_store(self, store: client.Store) -> None:
        if daemon_of(self._home.directory) != store.stats()["daemon"]["pid"]:
            raise StoreUnavailable(
                f"{store.address}: the daemon that listens there does not serve the store in {self._home.directory}: end it with "
                f"`paramstore stop {store.address}`, or give another --dir"
            )

    def _has_others(self) -> bool:
        """Whether anybody has a namespace open there. What this run had open ends with its session, in a moment."""
        with suppress(ParamStoreError), client.connect(self._options.socket_path()) as store:
            for _ in range(LOOKS_MAX):
                if not any(namespace["views"] for namespace in store.stats()["namespaces"].values()):
                    return False
                threading.Event().wait(LOOK_S)
            return True
        return False

    def _close(self) -> None:
        store, self._store = self._store, None
        if store is not None:
            store.close()

    def _end(self) -> None:
        """Ends the session, and the daemon that this process started; returns when it is gone."""
        self._close()
        process = started_in(self._home.directory)
        if process is None:
            return
        process.terminate()
        try:
            process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
