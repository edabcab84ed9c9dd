"""A set of volumes with all that it needs, and small namespaces that want room on it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from paramstore.engine.capacity.prefill import Prefill
from paramstore.engine.capacity.speeds import MakeMeasure
from paramstore.engine.capacity.volumes import VolumeSet
from paramstore.engine.tables.namespace import NamespaceState
from paramstore.engine.transfers.record_reads import VolumeTraffic
from paramstore.engine.transfers.runner import BACKGROUND_LANE, CATALOG_LANE, CPU_LANE, Runner, volume_lane
from paramstore.storage.catalog.base import Catalog, VolumeRow
from paramstore.storage.format.structures import Superblock, extents_start_bytes
from paramstore.storage.space.extents import Space
from paramstore.storage.volume.base import Volume
from paramstore.testing.catalogs import MemoryCatalog
from paramstore.testing.volumes import MemoryVolume
from paramstore.testing.workers import InlineWorkers
from paramstore_testkit.stores.small_host import namespace_of
from paramstore_testkit.stores.small_store import SCHEMA

MIB = 1 << 20
SUPERBLOCK = Superblock(bytes(16), bytes(16), 0)
START = extents_start_bytes(SUPERBLOCK)


class Shelf:
    """Volumes of `free_mib` beyond what they need for themselves, with all that a volume set needs."""

    def __init__(
        self, *, volumes: Sequence[Volume] | None = None, count: int = 1, free_mib: int = 1, may_grow: bool = True,
        catalog: Catalog | None = None, written_bytes: int = 0, bytes_written: int = 0, endurance_bytes: int | None = None,
        make_measure: MakeMeasure | None = None,
    ) -> None:  # fmt: skip
        given = volumes or [MemoryVolume(START + free_mib * MIB, index=index) for index in range(count)]
        self.volumes = {volume.index: volume for volume in given}
        self.catalog = catalog or MemoryCatalog()
        self.catalog.load()
        self.workers = InlineWorkers(asyncio.get_running_loop())
        self.runner = Runner(self.workers)
        for lane in (CATALOG_LANE, BACKGROUND_LANE, CPU_LANE, *map(volume_lane, self.volumes)):
            self.runner.scheduler.add_lane(lane, 1)
        self.space = Space()
        self.pumps = 0
        rows = {}
        for index, volume in self.volumes.items():
            self.space.add_volume(index, start_bytes=START, size_bytes=volume.size_bytes, written_bytes=written_bytes)
            rows[index] = VolumeRow(index, bytes(16), volume.size_bytes, written_bytes, bytes_written)
        self.traffic = {index: VolumeTraffic() for index in self.volumes}
        self.prefill = Prefill(self.volumes, space=self.space, runner=self.runner, pump=self._pump)
        self.set = VolumeSet(
            self.volumes, superblocks=dict.fromkeys(self.volumes, SUPERBLOCK), rows=rows, space=self.space, catalog=self.catalog,
            runner=self.runner, may_grow=may_grow, prefill=self.prefill, traffic=self.traffic, endurance_bytes=endurance_bytes,
            measure=make_measure and make_measure(self.space, self.prefill, self.runner),
        )  # fmt: skip

    def _pump(self) -> None:
        self.pumps += 1

    async def make_room(self, experts: int, *others: NamespaceState) -> None:
        for other in others:
            self.set.entitle(other)
        await self.set.make_room(namespace_of(SCHEMA, experts=experts), beside=others)

    @property
    def usable_bytes(self) -> int:
        return sum(volume.size_bytes - START for volume in self.volumes.values())

    async def prefilled(self) -> None:
        while not all(self.space.written_bytes(index) == volume.size_bytes for index, volume in self.volumes.items()):
            await asyncio.sleep(0)
