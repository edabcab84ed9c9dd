"""`paramstore stop`: ends a running daemon, reachable or not."""

from __future__ import annotations

import signal
import sys

import typer

from paramstore.cli.address import ADDRESS_HELP
from paramstore.errors import StoreUnavailable, WaitTimeout

STOP_TIMEOUT_S = 45.0
"""Seconds that a daemon gets to end: longer than it gives its own transfers to finish, unless it is set otherwise."""


def stop(
    address: str = typer.Argument(None, help=ADDRESS_HELP),
    timeout_s: float = typer.Option(STOP_TIMEOUT_S, "--timeout", min=0.0, max=86_400.0, help="Seconds to wait for its end."),
) -> None:
    """End a running daemon, and return when it is gone: nothing committed is lost. Exit code 3 if none runs, or if who listens
    there is none."""
    from paramstore_client.connection.address import absence, default_path, parse_address, url
    from paramstore_client.running import find_daemon

    path = default_path() if address is None else parse_address(address)
    daemon = find_daemon(path)
    if daemon is None:
        raise StoreUnavailable(f"{absence(path)}, and none holds its store: there is nothing to stop")
    with daemon:
        daemon.send(signal.SIGTERM)
        if not daemon.has_ended(timeout_s):
            raise WaitTimeout(
                f"daemon {daemon.pid} at {url(path)} has been told to end, and has not within {timeout_s:g} s: wait longer with "
                f"--timeout, or `kill -9 {daemon.pid}`, after which the store opens at its last committed steps"
            )
    sys.stdout.write(f"stopped daemon {daemon.pid} at {url(path)}\n")
