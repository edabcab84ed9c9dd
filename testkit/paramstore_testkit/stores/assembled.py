"""A store as the daemon assembles it in a directory, on real files, without its sockets."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from pathlib import Path
from typing import Any

from paramstore.config import Config
from paramstore.daemon.assembly import assemble, take_lock
from paramstore.engine.capacity.speeds import MakeMeasure, Probe, Speed
from paramstore.engine.store import Store
from paramstore.storage.volume.base import Volume

MIB = 1 << 20
LIMIT_S = 20.0


def config(directory: Path, **settings: Any) -> Config:
    return Config(dir=directory, **{"host_budget_bytes": 32 * MIB, "prefill": False, "io_workers": 1, **settings})


def at_speeds(*bytes_per_s: float) -> MakeMeasure:
    """Makes what says how fast each volume is, in order of index, whatever the disk."""

    async def measure(volumes: Mapping[int, Volume]) -> dict[int, Speed]:
        return {index: Speed(bytes_per_s[index], bytes_per_s[index]) for index in volumes if index < len(bytes_per_s)}

    return lambda *_: measure


def with_store(
    settings: Config, use: Callable[[Store], Coroutine[Any, Any, Any]], *, make_measure: MakeMeasure = Probe
) -> Any:
    """Runs `use` on the store that `settings` open, and gives its result; the store is closed afterwards."""

    async def main() -> Any:
        lock = take_lock(settings)
        try:
            service = await assemble(settings, make_measure=make_measure)
            try:
                return await use(service.store)
            finally:
                await service.close()
        finally:
            lock.release()

    return asyncio.run(asyncio.wait_for(main(), LIMIT_S))
