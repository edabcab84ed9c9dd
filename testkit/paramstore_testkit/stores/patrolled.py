"""A patrol of a simulated machine's store, on a clock that its own pauses advance: months pass without a sleep."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from paramstore.engine.transfers.hashing import Hashing
from paramstore.storage.format.notes import read_superblock
from paramstore.testing.clock import ManualClock
from paramstore.upkeep.notes import NoteScrub
from paramstore.upkeep.patrol import DAY_S, Patrol
from paramstore.upkeep.scrubber import Scrubber
from paramstore_testkit.disks.machine import Machine
from paramstore_testkit.stores.small_store import SCHEMA, turns

RECORD_BYTES = SCHEMA.record_bytes
Stats = dict[str, Any]


class Patrolled:
    """A machine's store with a patrol, on a clock that its pauses advance. reads: when, and how many bytes."""

    def __init__(self, machine: Machine, *, scrub_days: float = 14.0, start_at: float = 0.0) -> None:
        self.machine = machine
        self.clock = ManualClock()
        self.pauses_s: list[float] = []
        self.reads: list[tuple[float, int]] = []
        self.read_s: Callable[[int], float] = lambda length_bytes: 0.0
        self.ends_at_s = float("inf")
        self.meanwhile: Callable[[], Awaitable[object]] | None = None
        store = machine.store
        assert store is not None
        volumes: Any = {index: _Watched(volume, self) for index, volume in machine.volumes.items()}
        superblocks = {index: read_superblock(volume) for index, volume in machine.volumes.items()}
        self.scrubber = Scrubber(
            store.transfers, volumes, store.namespaces, store_uuid=store.store_uuid, hashing=Hashing(at_once=1),
            clock=self.clock, pause=self.pause, notes=NoteScrub(volumes, superblocks),
        )  # fmt: skip
        self.patrol = Patrol(self.scrubber, scrub_days=scrub_days, start_at=start_at, clock=self.clock, pause=self.pause)

    async def pause(self, seconds: float) -> None:
        self.pauses_s.append(seconds)
        if self.clock.now_s() + seconds > self.ends_at_s:
            await asyncio.Event().wait()
        self.clock.advance(seconds)
        if self.meanwhile is not None:
            await self.meanwhile()
        await asyncio.sleep(0)

    async def until(self, days: float) -> Stats:
        """Patrols up to the last pause that ends before this day, on the patrol's clock."""
        self.ends_at_s = days * DAY_S
        self.patrol.start()
        assert self.patrol._task is not None
        before = None
        while before != (before := (self.clock.now_s(), len(self.reads), len(self.pauses_s))):
            await turns(300)
        stats = self.patrol.stats()
        await self.patrol.close()
        return stats

    def records_read(self) -> list[float]:
        """Times at which records were read; each is one piece."""
        return [at_s for at_s, length_bytes in self.reads if length_bytes == RECORD_BYTES]


class _Watched:
    """A volume that records its reads, each of which takes time on the clock."""

    def __init__(self, inner: Any, patrolled: Patrolled) -> None:
        self._inner = inner
        self._patrolled = patrolled

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def read(self, offset_bytes: int, into: Any) -> None:
        length_bytes = sum(buffer.nbytes for buffer in into)
        self._patrolled.reads.append((self._patrolled.clock.now_s(), length_bytes))
        self._patrolled.clock.advance(self._patrolled.read_s(length_bytes))
        self._inner.read(offset_bytes, into)
