"""The demo's own daemon: started by `autostart`, killed on purpose, and never left behind.

The process is found by asking the kernel who holds the store or listens on its socket, so one that an earlier, killed demo left
behind is found too.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from types import TracebackType

import paramstore as ps
from paramstore.errors import ConfigError
from paramstore_client.connection.address import PATH_BYTES_MAX
from paramstore_client.connection.autostart import started_in
from paramstore_client.running import find_daemon

START_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 45.0
"""Seconds that the daemon gets to stop: longer than it gives its own transfers to finish."""


class DemoDaemon:
    """One daemon over one directory of the demo's. A context manager: on leaving it no daemon runs there, unless it is kept.

    Raises ConfigError where the directory's path is too long for a socket in it, before anything is made.
    """

    def __init__(self, directory: Path, *, host_budget_bytes: int, reader_slots: int | None = None) -> None:
        self.directory = directory
        self._is_kept = False
        self._options = ps.ServeOptions(
            dir=directory, host_budget=host_budget_bytes, settings={} if reader_slots is None else {"reader_slots": reader_slots}
        )
        length_bytes = len(os.fsencode(self._options.socket_path()))
        if length_bytes > PATH_BYTES_MAX:
            raise ConfigError(
                f"--dir {directory.parent}: the daemon's socket there would have a path of {length_bytes} bytes, the limit is "
                f"{PATH_BYTES_MAX}: give a shorter --dir"
            )

    def connect(self) -> ps.Store:
        """Opens a new session; the daemon is started if none runs."""
        return ps.connect(autostart=self._options, timeout_s=START_TIMEOUT_S)

    def kill(self) -> None:
        """Kills the daemon with SIGKILL, so that it finishes, flushes and closes nothing. Returns when it is gone."""
        self._end(signal.SIGKILL)

    def stop(self) -> None:
        """Stops the daemon with SIGTERM, or SIGKILL if that takes too long. Returns when no daemon runs there, or is about to."""
        if not self._end(signal.SIGTERM):
            self._end(signal.SIGKILL)
        if (process := started_in(self.directory)) is not None:  # a daemon that was interrupted before it held the store
            process.kill()
            process.wait()

    def keep(self) -> None:
        """Lets the daemon live on when the context ends."""
        self._is_kept = True

    def __enter__(self) -> DemoDaemon:
        self.stop()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if not self._is_kept:
            self.stop()

    def _end(self, number: signal.Signals) -> bool:
        """Sends the signal, and waits for the end. False if a daemon still runs there after STOP_TIMEOUT_S."""
        daemon = find_daemon(self._options.socket_path())
        if daemon is None:
            return True
        with daemon:
            daemon.send(number)
            return daemon.has_ended(STOP_TIMEOUT_S)
