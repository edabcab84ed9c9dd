"""The daemon of a run's store: found, or started so that it ends by itself when nobody uses it any more.

The daemon decides, by its sessions: whoever loads, answers or only looks keeps it, and a run that was killed does not.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType

import paramstore_client as client
from paramstore.errors import StoreUnavailable
from paramstore.holder import daemon_of
from paramstore.run.home import Home
from paramstore_client.connection.autostart import started_in

START_TIMEOUT_S = 60.0
UNUSED_S = 0.25
"""Seconds after its last session until a daemon that a run has started ends."""
NOTICE_TIMEOUT_S = 3.0
"""Seconds that this run's own daemon gets to begin its end; one that listens after them is somebody else's, too."""
STOP_TIMEOUT_S = 45.0
"""Seconds that the daemon gets to stop: longer than it gives its own transfers to finish."""


class RunDaemon:
    """Owner of the session with the daemon of `home`. A context manager; leaving it lets the daemon end.

    host_budget: what the caller asked for; default_budget_bytes: of a daemon that is started where that is None. keeps: whether a
    daemon that is started stays, unused. tell: is given lines for people.
    """

    def __init__(
        self, home: Home, *, host_budget: str | None, default_budget_bytes: int, keeps: bool, tell: Callable[[str], object]
    ) -> None:
        self._home = home
        self._keeps = keeps
        self._tell = tell
        settings: dict[str, object] = {} if keeps else {"ends_when_unused_s": UNUSED_S}
        if host_budget is None:
            settings["host_budget"] = default_budget_bytes
        self._options = client.ServeOptions(dir=home.directory, host_budget=host_budget, settings=settings)
        self._store: client.Store | None = None

    def __enter__(self) -> client.Store:
        """Connects; starts a daemon if none serves the store, also where the one that does is just ending. Raises
        StoreUnavailable, also where the daemon of another store listens in its place, VersionMismatch and ConfigError; then no
        session is left."""
        self._home.make_parent()
        met = daemon_of(self._home.directory)
        try:
            return self._connected()
        except StoreUnavailable:
            if met is None or self._is_served():
                raise
            return self._connected()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._close()
        process = started_in(self._home.directory)
        if process is None:
            return
        if self._keeps:
            self._tell(f"daemon {process.pid} stays, as --keep asks: `paramstore stop {self._home.directory}` ends it")
        elif not self._has_ended(process):
            self._tell(f"daemon {process.pid} stays while others use it, and ends by itself")

    def _connected(self) -> client.Store:
        try:
            self._store = client.connect(autostart=self._options, timeout_s=START_TIMEOUT_S)
            if daemon_of(self._home.directory) == self._store.stats()["daemon"]["pid"]:
                return self._store
        except BaseException:
            self._close()
            raise
        address = self._store.address
        self._close()
        raise StoreUnavailable(
            f"{address}: the daemon that listens there does not serve the store in {self._home.directory}: end it with "
            f"`paramstore stop {address}`, or give another --dir"
        )

    def _is_served(self) -> bool:
        """Whether somebody listens at the store's socket, as far as that can be seen: a daemon that ends removes it first."""
        return self._options.socket_path().exists()

    def _has_ended(self, process: subprocess.Popen[bytes]) -> bool:
        """Whether the daemon has ended, so that whoever comes next finds the directory free; it is waited for if it is about to."""
        with suppress(subprocess.TimeoutExpired):
            process.wait(NOTICE_TIMEOUT_S)
        if process.poll() is None and not self._is_served():
            with suppress(subprocess.TimeoutExpired):
                process.wait(STOP_TIMEOUT_S)
        return process.poll() is not None

    def _close(self) -> None:
        store, self._store = self._store, None
        if store is not None:
            store.close()
