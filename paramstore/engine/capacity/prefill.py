"""The zero-fill of volumes ahead of use, in the background: never-written blocks halve the write rate of a drive."""

from __future__ import annotations

import asyncio
import logging
import mmap
from collections.abc import Callable, Mapping
from functools import partial

from paramstore.core.location import Extent
from paramstore.engine.transfers.runner import BACKGROUND_LANE, Runner
from paramstore.errors import ParamStoreError, WaitTimeout
from paramstore.storage.space.extents import Space
from paramstore.storage.volume.base import Volume

logger = logging.getLogger(__name__)

PIECE_BYTES = 8 << 20
PAUSE_S = 0.02
"""How long the zero-fill waits before it looks again whether nothing else moves."""


class Prefill:
    """Fills space that was never written with zeros, while nothing else moves."""

    def __init__(self, volumes: Mapping[int, Volume], *, space: Space, runner: Runner, pump: Callable[[], None]) -> None:
        """pump: lets those who wait for space go on, after some came free."""
        self._volumes = volumes
        self._space = space
        self._runner = runner
        self._pump = pump
        self.filled_bytes = dict.fromkeys(volumes, 0)
        """Bytes of zeros written to each volume since the store was opened."""
        self._zeros = memoryview(mmap.mmap(-1, PIECE_BYTES))
        self._task: asyncio.Task[None] | None = None
        self._is_wanted = False
        self._is_stopped = False
        self._has_filled = False
        """Whether somebody asked for zeros now, who may not wait for them any more."""

    def start(self) -> None:
        """Begins to zero-fill never-written space while nothing else moves; goes on whenever volumes grow."""
        self._is_wanted = True
        if self._task is not None and not self._task.done():
            return  # the running task looks at every volume's size each time round
        self._task = asyncio.get_running_loop().create_task(self._fill(), name="prefill")

    async def _fill(self) -> None:
        try:
            while any(self._has_unwritten(index) for index in self._volumes):
                is_paused = not self._runner.is_idle
                extent = None if is_paused else self._next_unwritten()
                if extent is None:
                    await asyncio.sleep(PAUSE_S)
                    continue
                await self._write(extent)
        except ParamStoreError:
            logger.exception("zero-fill stopped; volumes are used as they are")

    async def _write(self, extent: Extent) -> None:
        write = partial(self._volumes[extent.volume].write, extent.offset_bytes, (self._zeros[: extent.length_bytes],))
        try:
            await self._runner.call(BACKGROUND_LANE, write)
        except ParamStoreError as error:
            self._space.quarantine(extent)
            self._space.fences.fail_write(extent.volume, error)
            raise
        except asyncio.CancelledError:
            self._space.finish_prefill(extent)  # the store closes: nobody will get this extent or waits for it
            raise
        self._space.finish_prefill(extent)
        self.filled_bytes[extent.volume] += extent.length_bytes
        self._pump()

    async def fill(self, index: int, *, up_to_bytes: int) -> None:
        """Zero-fills what is free and was never written of a volume below `up_to_bytes`, now. Raises VolumeError, and WaitTimeout
        once the zero-fill has ended."""
        self._has_filled = True
        while (missing := min(up_to_bytes, self._space.size_bytes_of(index)) - self._space.written_bytes(index)) > 0:
            if self._is_stopped:
                raise WaitTimeout("the store closes")
            if any(stats.prefilling_bytes for stats in self._space.stats() if stats.volume == index):
                await self._runner.behind(BACKGROUND_LANE)  # the task fills it, from the lowest range on
                continue
            extent = self._space.next_unwritten(index, min(missing, PIECE_BYTES))
            if extent is None:
                return  # somebody is short of space
            await self._write(extent)

    def _next_unwritten(self) -> Extent | None:
        for index in self._volumes:
            extent = self._space.next_unwritten(index, PIECE_BYTES)
            if extent is not None:
                return extent
        return None

    def _has_unwritten(self, index: int) -> bool:
        """Whether the volume has space left to zero-fill; a fenced volume has none."""
        is_fenced = self._space.fences.is_fenced(index)
        return not is_fenced and self._space.written_bytes(index) < self._space.size_bytes_of(index)

    def go_on(self) -> None:
        """Fills what volumes have grown by, too, if the zero-fill was started."""
        if self._is_wanted:
            self.start()

    async def stop(self) -> None:
        """Ends the zero-fill: on return no worker writes zeros any more."""
        self._is_stopped = True
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        if self._task is not None or self._has_filled:
            await self._runner.behind(BACKGROUND_LANE)  # its thread may still write a piece
