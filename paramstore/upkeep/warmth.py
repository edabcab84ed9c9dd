"""Keeps what the policies have counted in a file beside the catalog, so that the next daemon starts warm.

- The file is a hint. One that is missing, damaged, of another version or another store is a cold start, and no error; a disk that
  takes none is told of once, in the log.
- It is written at most every INTERVAL_S, if anything was counted since, and at the daemon's end.
- Namespaces are known by name, keys and epoch. Counts of one that is gone, or of an epoch that has not come yet, are left out.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from concurrent.futures import Executor
from functools import partial
from itertools import chain, repeat
from pathlib import Path

from paramstore.core.counts import Counts
from paramstore.engine.planner.arenas import keep_counts
from paramstore.engine.tables.namespace import NamespaceState
from paramstore.errors import CapacityError, CorruptRecord
from paramstore.policy.base import CountingPolicy
from paramstore.storage.format.counts import COUNTS_BYTES_MAX, NamespaceCounts, pack_counts, unpack_counts
from paramstore.upkeep.hint_file import HintFile, Threads
from paramstore.upkeep.scrubber import Pause

logger = logging.getLogger(__name__)

INTERVAL_S = 10.0
"""The least time between two writes: what a killed daemon forgets."""
DISK_TIMEOUT_S = 5.0
"""How long the daemon's start waits for the file to be read, and its end for the file to be written."""


def counts_path(directory: Path) -> Path:
    """Where the counts of the store in `directory` lie."""
    return directory / "counts"


class Warmth:
    """Reads the file at a daemon's start and writes it from then on; owns its task."""

    def __init__(
        self, directory: Path, namespaces: Mapping[str, NamespaceState], *, store_uuid: bytes, pause: Pause = asyncio.sleep,
        threads: Executor | None = None,
    ) -> None:  # fmt: skip
        """directory: the store's. namespaces: all of the store, by name. threads: run what may wait for the disk."""
        self._path = counts_path(directory)
        self._file = HintFile(self._path, threads or Threads())
        self._namespaces = namespaces
        self._store_uuid = store_uuid
        self._pause = pause
        self._task: asyncio.Task[None] | None = None
        self._resting: asyncio.Future[object] | None = None
        self._is_closing = False
        self._is_behind = False
        """Whether something was counted that the file does not have."""
        self._has_failed = False

    async def start(self) -> None:
        """Takes over what the file has of the namespaces there are, none of them open yet, and begins to keep the file."""
        try:
            async with asyncio.timeout(DISK_TIMEOUT_S):
                data = await self._file.read(COUNTS_BYTES_MAX)
            found = unpack_counts(data, self._store_uuid)
        except FileNotFoundError:
            found = ()
        except (OSError, CorruptRecord) as error:
            reason = str(error) or "the disk did not answer"
            logger.warning("%s is not used, so the policies start cold: %s", self._path, reason)
            found = ()
        for counts in found:
            if (namespace := self._namespaces.get(counts.name)) is not None and _fits(counts, namespace):
                keep_counts(namespace, counts.parts)
        self._task = asyncio.get_running_loop().create_task(self._run(), name="warmth")

    async def close(self) -> None:
        """Writes the file a last time, if something was counted since, and waits for that at most DISK_TIMEOUT_S."""
        self._is_closing = True
        if self._task is None:
            return
        if self._resting is not None:
            self._resting.cancel()
        await asyncio.wait([self._task], timeout=DISK_TIMEOUT_S)
        if not self._task.done():
            logger.warning("%s: not written in %g s; the next daemon starts with older counts, or cold", self._path, DISK_TIMEOUT_S)
            self._task.cancel()
        elif not self._task.cancelled() and (bug := self._task.exception()) is not None:
            logger.error("keeping the counts of the policies failed", exc_info=bug)

    async def _run(self) -> None:
        while not self._is_closing:
            self._resting = asyncio.ensure_future(self._pause(INTERVAL_S))
            await asyncio.wait([self._resting])
            await self._write()
        await self._write()  # what was counted during the one before

    # --- writing

    async def _write(self) -> None:
        """Writes the file, if it is behind."""
        for namespace in list(self._namespaces.values()):
            await self._collect(namespace)
        if not self._is_behind:
            return
        self._is_behind = False
        try:
            await self._replace()
        except (OSError, CapacityError) as error:
            self._is_behind = True
            if not self._has_failed:
                logger.warning("%s cannot be written; the next daemon starts with older counts, or cold: %s", self._path, error)
        self._has_failed = self._is_behind

    async def _collect(self, namespace: NamespaceState) -> None:
        """Reads what the namespace's policies have counted; the loop turns after each run of keys."""
        parts = dict(namespace.kept_counts)
        for part, arena in namespace.arenas_by_part().items():
            if isinstance(arena.policy, CountingPolicy):
                runs, kept = [], chain(parts.get(part, ()), repeat(Counts()))
                for keys in namespace.keys.runs():
                    runs.append(arena.policy.counts(keys))
                    self._is_behind |= runs[-1] != next(kept)
                    await asyncio.sleep(0)
                parts[part] = tuple(runs)
        keep_counts(namespace, parts)

    async def _replace(self) -> None:
        """Puts a new file in place of the old one."""
        counted = [NamespaceCounts(one.name, one.epoch, one.keys, one.kept_counts) for one in self._namespaces.values()]
        await self._file.replace(partial(pack_counts, self._store_uuid, counted))


def _fits(counts: NamespaceCounts, namespace: NamespaceState) -> bool:
    """Whether `counts` are of this namespace, as it was at this epoch or an earlier one."""
    return counts.epoch <= namespace.epoch and counts.keys == namespace.keys
