"""Finds a running daemon, whoever started it, by its socket or its store, and ends it."""

from __future__ import annotations

import math
import os
import select
import signal
from dataclasses import dataclass
from pathlib import Path

from paramstore.errors import ParamStoreError, StoreUnavailable
from paramstore.holder import daemon_of
from paramstore_client.client import greet
from paramstore_client.connection.address import peer, store_of, try_connect, unreachable, url

CONNECT_TIMEOUT_S = 10.0
"""Time for the connection, and once more for the welcome."""


@dataclass(frozen=True, slots=True)
class RunningDaemon:
    """A daemon's process, never a later one with its id. A context manager: leaving it lets go of the process, which runs on."""

    pid: int
    _process: int

    def send(self, number: signal.Signals) -> None:
        """Sends the signal, unless the process has ended. Raises StoreUnavailable where it is another user's."""
        try:
            signal.pidfd_send_signal(self._process, number)
        except ProcessLookupError:
            return
        except PermissionError as error:
            raise StoreUnavailable(f"process {self.pid} is another user's: end it as that user, or as root") from error

    def has_ended(self, within_s: float) -> bool:
        """Whether the process ends within that time; returns as soon as it does."""
        poll = select.poll()
        poll.register(self._process, select.POLLIN)
        return bool(poll.poll(math.ceil(within_s * 1000)))

    def __enter__(self) -> RunningDaemon:
        return self

    def __exit__(self, *error: object) -> None:
        os.close(self._process)


def find_daemon(path: Path) -> RunningDaemon | None:
    """The daemon that holds the store whose default socket is `path`, even if it hangs or listens there no more; else the one that
    listens at `path`; None if there is none. Raises StoreUnavailable if it is another user's, or if whoever listens there does not
    welcome a client as a daemon does."""
    process_id = _find(path)
    if process_id is None:
        return None
    try:
        process = os.pidfd_open(process_id)
    except ProcessLookupError:
        return None
    except OSError as error:
        raise StoreUnavailable(f"{url(path)}: its process {process_id} cannot be reached from here: {error}") from error
    if _find(path) != process_id:  # it ended before `pidfd_open`, and another process may have its number
        os.close(process)
        return None
    return RunningDaemon(process_id, process)


def _find(path: Path) -> int | None:
    directory = store_of(path)
    try:
        daemon = daemon_of(directory) if directory is not None else None
    except OSError as error:
        raise unreachable(path, error) from error
    return _listening_at(path) if daemon is None else daemon


def _listening_at(path: Path) -> int | None:
    """Process id of the daemon that listens at `path`, as its welcome confirms: any program may listen anywhere."""
    sock = try_connect(path, timeout_s=CONNECT_TIMEOUT_S)
    if sock is None:
        return None
    process_id, _ = peer(sock)
    try:
        connection = greet(lambda timeout_s: sock, timeout_s=CONNECT_TIMEOUT_S)
    except ParamStoreError as error:
        raise _doubtful(path, process_id, str(error)) from error
    connection.close("its daemon was only asked who it is")
    if connection.daemon_pid != process_id:  # the process that listens only passes on what a daemon says
        raise _doubtful(path, process_id, f"process {connection.daemon_pid} answers")
    return process_id


def _doubtful(path: Path, process_id: int, reason: str) -> StoreUnavailable:
    return StoreUnavailable(
        f"process {process_id} listens at {url(path)}, and does not answer as a paramstore daemon does: {reason}; nothing was done "
        "to it. Where it is one, give its store's directory instead of the socket"
    )
