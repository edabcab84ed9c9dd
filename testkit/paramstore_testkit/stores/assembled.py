"""A store as the daemon assembles it in a directory, on real files, without its sockets."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from paramstore.config import Config
from paramstore.daemon.assembly import assemble, take_lock
from paramstore.engine.store import Store

MIB = 1 << 20
LIMIT_S = 20.0


def config(directory: Path, **settings: Any) -> Config:
    return Config(dir=directory, **{"host_budget_bytes": 32 * MIB, "prefill": False, "io_workers": 1, **settings})


def with_store(settings: Config, use: Callable[[Store], Coroutine[Any, Any, Any]]) -> Any:
    """Runs `use` on the store that `settings` open, and gives its result; the store is closed afterwards."""

    async def main() -> Any:
        lock = take_lock(settings)
        try:
            service = await assemble(settings)
            try:
                return await use(service.store)
            finally:
                await service.close()
        finally:
            lock.release()

    return asyncio.run(asyncio.wait_for(main(), LIMIT_S))
