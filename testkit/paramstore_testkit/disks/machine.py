"""A whole store on simulated disks: volumes in memory, a catalog in memory, workers that a seed shuffles.

`Machine` is what survives: volumes and catalog. `start` opens the store that they hold; `kill` ends it as a signal would;
`crash` throws it away as a power cut would, and keeps those unflushed writes that the seed chooses.
"""

from __future__ import annotations

import asyncio
import mmap
from pathlib import Path
from random import Random

from paramstore.config import Config, PolicyConfig
from paramstore.daemon.assembly import add_lanes, add_volume_lanes, connect
from paramstore.daemon.service import Service
from paramstore.daemon.volume_places import adopt_new_volumes
from paramstore.engine.store import Store
from paramstore.engine.transfers.runner import Runner
from paramstore.limits import HELD_STEPS, RETAINED_STEPS
from paramstore.storage.catalog.base import Catalog
from paramstore.storage.volume.base import Volume
from paramstore.testing.catalogs import MemoryCatalog
from paramstore.testing.volumes import MemoryVolume, keep_none, keep_random
from paramstore.testing.workers import InlineWorkers

MIB = 1 << 20


class PlainSegment:
    """Memory of this process, without descriptor or huge pages."""

    def __init__(self, length_bytes: int) -> None:
        self.length_bytes = length_bytes
        self.fd: int | None = None
        self._memory = memoryview(mmap.mmap(-1, length_bytes))

    def view(self, offset_bytes: int, length_bytes: int) -> memoryview:
        return self._memory[offset_bytes : offset_bytes + length_bytes]

    def touch(self) -> None:
        """Does nothing: the pages come when they are used."""

    def resident_bytes(self) -> int:
        return self.length_bytes

    def close(self) -> None:
        """Does nothing: the memory goes with the last view of it."""


class PlainMemory:
    """Makes plain segments for every purpose."""

    def shared(self, length_bytes: int) -> PlainSegment:
        return PlainSegment(length_bytes)

    private = upload = shared

    def describe(self) -> dict[str, object]:
        return {"shared_pages": "plain", "private_pages": "plain", "page_advice": ""}


class Machine:
    """Volumes and catalog, and the store that runs on them now. Everything random comes from `seed`."""

    def __init__(
        self, *, seed: int | None = None, volume_count: int = 1, volume_bytes: int = 14 * MIB, host_budget_bytes: int = 64 * MIB,
        policy: str = "lru", wait_timeout_s: float = 5.0, volume_size_bytes: int | None = None,
        prefill: bool = False, retained_steps: int = RETAINED_STEPS, held_steps: int = HELD_STEPS, scrub_days: float = 0.0,
        reader_slots: int | None = None, extent_leases: int = 0,
    ) -> None:  # fmt: skip
        """scrub_days: above 0 there is a patrol, whose timer would keep every store that a crash has left."""
        self.seed = seed
        self.disks = {index: MemoryVolume(volume_bytes, index=index) for index in range(volume_count)}
        self.volumes: dict[int, Volume] = dict(self.disks)
        """Volumes as the store sees them: replace one by a FaultyVolume before `start`."""
        self.durable = MemoryCatalog()
        self.catalog: Catalog = self.durable
        self.config = Config(
            dir=Path("/nowhere"), host_budget_bytes=host_budget_bytes, prefill=prefill, policy=PolicyConfig(name=policy),
            wait_timeout_s=wait_timeout_s, volume_size_bytes=volume_size_bytes,
            retained_steps=retained_steps, held_steps=held_steps, scrub_days=scrub_days, reader_slots=reader_slots,
            extent_leases=extent_leases,
        )  # fmt: skip
        self.speed_classes: dict[int, int] = {}
        """Speed class of each volume, from the next start on; empty for volumes that are alike."""
        self._random = Random(seed)
        self.workers: InlineWorkers | None = None
        self.service: Service
        self.store: Store | None = None
        self._bystanders: set[asyncio.Task[object]] = set()
        """Tasks that a crash spares: those that ran before the store was started."""

    def start(self) -> Store:
        """Opens the store as it is on the volumes. Raises what a daemon would raise at its start."""
        seed = None if self.seed is None else self._random.randrange(1 << 30)
        self._bystanders = asyncio.all_tasks()
        self.workers = InlineWorkers(asyncio.get_running_loop(), seed=seed)
        runner = Runner(self.workers)
        add_lanes(runner, update_workers=2)
        add_volume_lanes(runner, self.volumes, io_workers=2)
        contents = self.catalog.load()
        adopt_new_volumes(self.catalog, contents, self.volumes)
        self.service = connect(self.config, runner, self.catalog, contents, self.volumes, PlainMemory(), update_workers=2)
        self.store = self.service.store
        self.store.transfers.space.preference.set_classes(self.speed_classes)
        return self.store

    async def kill(self) -> None:
        """Ends the daemon's process: all tasks started since `start` stop. The disks have what they were given, and the power
        stays on: `start` goes on with the same volumes and catalog, faulty ones too."""
        await self._stop()
        self.catalog.reopen()

    async def _stop(self) -> None:
        assert self.workers is not None
        self.workers.pause()
        tasks = asyncio.all_tasks() - self._bystanders
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self.workers.close()
        self.store = None

    async def crash(self, *, keeps_random_writes: bool = False) -> None:
        """Cuts the power: the store is gone, unflushed writes are lost (or some survive), the catalog has what it applied."""
        await self._stop()
        for disk in self.disks.values():
            disk.crash(keep_random(self._random.randrange(1 << 30)) if keeps_random_writes else keep_none)
        self.volumes = dict(self.disks)
        self.durable = self.durable.crash()
        self.catalog = self.durable
