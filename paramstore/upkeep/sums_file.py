"""Keeps the device sums of records in a file beside the catalog, so that the next daemon need not read the records for them.

The file is never trusted further than its checksum: one that is missing, damaged, of another version or another store is made anew
from what is verified, and sums of other bytes than a record has are not found, since each stands under its record's root. It is
written at most every INTERVAL_S, if any sums are new, and at the daemon's end.
"""

from __future__ import annotations

import asyncio
import logging
from concurrent.futures import Executor
from functools import partial
from pathlib import Path

from paramstore.engine.transfers.device_sums import DeviceSums
from paramstore.errors import CapacityError, CorruptRecord
from paramstore.storage.format.device_sums import RUN_RECORDS, SUMS_BYTES_MAX, pack_device_sums, unpack_device_sums
from paramstore.upkeep.hint_file import HintFile, Threads
from paramstore.upkeep.scrubber import Pause

logger = logging.getLogger(__name__)

INTERVAL_S = 10.0
"""The least time between two writes: sums of so long a killed daemon forgets."""
REST_TIMES = 20
"""A write that took long is followed by so many times that long without one."""
DISK_TIMEOUT_S = 5.0
"""How long the daemon's start waits for the file to be read, and its end for the file to be written."""


def sums_path(directory: Path) -> Path:
    """Where the device sums of the store in `directory` lie."""
    return directory / "device_sums"


class SumsFile:
    """Reads the file at a daemon's start and writes it from then on; owns its task."""

    def __init__(
        self, directory: Path, sums: DeviceSums, *, store_uuid: bytes, pause: Pause = asyncio.sleep, threads: Executor | None = None
    ) -> None:
        """directory: the store's. threads: run what may wait for the disk, and unpack."""
        self._threads = threads or Threads()
        self._file = HintFile(sums_path(directory), self._threads)
        self._sums = sums
        self._store_uuid = store_uuid
        self._pause = pause
        self._task: asyncio.Task[None] | None = None
        self._resting: asyncio.Future[object] | None = None
        self._is_closing = False
        self._written_count = 0
        """Change count of the sums that the file has."""
        self._has_failed = False
        self._is_too_large = False
        self._took_s = 0.0
        """How long the last write took."""

    async def start(self) -> None:
        """Takes over what the file has, and begins to keep the file; does nothing where no sums are kept."""
        if not self._sums.is_kept:
            return
        try:
            async with asyncio.timeout(DISK_TIMEOUT_S):
                await self._take_over(await self._file.read(SUMS_BYTES_MAX))
        except FileNotFoundError:
            pass
        except (OSError, CorruptRecord) as error:
            reason = str(error) or "the disk did not answer"
            logger.warning("%s is not used, so records are read again for their device sums: %s", self._file.path, reason)
        self._task = asyncio.get_running_loop().create_task(self._run(), name="sums file")

    async def _take_over(self, data: bytes) -> None:
        """Takes over what the file's bytes say; the loop turns after each run of records. Raises CorruptRecord."""
        loop = asyncio.get_running_loop()
        records = await loop.run_in_executor(self._threads, unpack_device_sums, data, self._store_uuid)
        for start in range(0, len(records), RUN_RECORDS):
            self._sums.take_over(records[start : start + RUN_RECORDS])
            await asyncio.sleep(0)

    async def close(self) -> None:
        """Writes the file a last time, if any sums are new, and waits for that at most DISK_TIMEOUT_S."""
        if self._task is None:
            return
        self._is_closing = True
        if self._resting is not None:
            self._resting.cancel()
        await asyncio.wait([self._task], timeout=DISK_TIMEOUT_S)
        if not self._task.done():
            logger.warning("%s: not written in %g s; records are read again for their sums", self._file.path, DISK_TIMEOUT_S)
            self._task.cancel()
        elif not self._task.cancelled() and (bug := self._task.exception()) is not None:
            logger.error("keeping the device sums failed", exc_info=bug)

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        while not self._is_closing:
            self._resting = asyncio.ensure_future(self._pause(max(INTERVAL_S, REST_TIMES * self._took_s)))
            await asyncio.wait([self._resting])
            began_s = loop.time()
            await self._write()
            self._took_s = loop.time() - began_s
        await self._write()  # what was noted during the one before

    async def _write(self) -> None:
        """Writes the file, if any sums are new."""
        count = self._sums.change_count
        if count == self._written_count or self._is_too_large:
            return
        try:
            await self._file.replace(partial(pack_device_sums, self._store_uuid, self._sums.records()))
        except (OSError, CapacityError) as error:
            if not self._has_failed:
                logger.warning("%s cannot be written; records are read again for their sums: %s", self._file.path, error)
            self._has_failed, self._is_too_large = True, isinstance(error, CapacityError)
        else:
            self._written_count, self._has_failed = count, False
