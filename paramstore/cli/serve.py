"""`paramstore serve`: one daemon in the foreground."""

from __future__ import annotations

import logging
import sys
from pathlib import Path

import typer

from paramstore.errors import ConfigError


def serve(
    directory: str = typer.Option(None, "--dir", help="Where catalog, socket and (without --volume) the volume lie."),
    volume: list[str] = typer.Option(None, "--volume", help="A directory for a volume, or pmem:DIR; repeat for more."),
    add_volume: list[str] = typer.Option(None, "--add-volume", help="A directory that an existing store takes as a new volume."),
    volume_size: str = typer.Option(None, help="Size of each volume, as 2TiB; without it volumes grow as needed."),
    host_budget: str = typer.Option(None, help="Host memory for all arenas and staging, as 64GiB."),
    gradient_budget: str = typer.Option(None, help="Memory for pending gradients, as 8GiB."),
    socket: str = typer.Option(None, help="Path of the Unix socket."),
    config: str = typer.Option(None, help="A TOML file of settings; flags and PARAMSTORE_* come first."),
    policy: str = typer.Option(None, help="Which slots go first: schedule (the default), decayed_lfu or lru."),
    log_level: str = typer.Option("info", help="debug, info, warning or error."),
) -> None:
    """Serve a store until SIGTERM, Ctrl-C or `paramstore stop`. Prints `ready unix:///...` when clients can connect."""
    from paramstore.config import load
    from paramstore.daemon.server import run

    level = logging.getLevelNamesMapping().get(log_level.upper())
    if level is None:
        raise ConfigError(f"--log-level {log_level!r}: use debug, info, warning or error")
    logging.basicConfig(level=level, stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    flags: dict[str, object] = {
        "dir": directory, "volumes": volume or None, "add_volumes": add_volume or None, "volume_size": volume_size,
        "host_budget": host_budget, "gradient_budget": gradient_budget, "socket": socket, "policy": policy or None,
    }  # fmt: skip
    run(load({name: value for name, value in flags.items() if value is not None}, file=None if config is None else Path(config)))
