"""A store that records every call to a volume or the catalog, and lets chosen ones fail: for tests of commits."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from paramstore.engine.store import Store
from paramstore.engine.tables.namespace import View
from paramstore.errors import CatalogError, VolumeError
from paramstore.storage.catalog.base import Catalog, Change
from paramstore.storage.format.structures import Superblock, extents_start_bytes
from paramstore.storage.volume.base import Volume
from paramstore.testing.catalogs import WrappedCatalog
from paramstore.testing.volumes import FaultyVolume
from paramstore_testkit.disks.machine import Machine
from paramstore_testkit.stores.small_store import create, run, train

NOTES_END = extents_start_bytes(Superblock(bytes(16), bytes(16), 0))
Event = tuple[str, int]


class RecordingVolume(FaultyVolume):
    """A volume that records what is done to it, and fails at the stage that it is told to."""

    def __init__(self, inner: Volume, events: list[Event]) -> None:
        super().__init__(inner, [])
        self.events = events
        self.failing = ""

    def write(self, offset_bytes: int, data: Sequence[memoryview]) -> None:
        self._pass("note" if offset_bytes < NOTES_END else "record")
        super().write(offset_bytes, data)

    def flush(self) -> None:
        self._pass("flush")
        super().flush()

    def _pass(self, stage: str) -> None:
        if stage == self.failing:
            raise VolumeError(f"{stage} of volume {self.index} fails as planned")
        self.events.append((stage, self.index))


class RecordingCatalog(WrappedCatalog):
    """A catalog that records what is done to it; `failing` is the call that raises."""

    def __init__(self, inner: Catalog, events: list[Event]) -> None:
        super().__init__(inner)
        self.events = events
        self.failing = ""

    def reserve(self, row_count: int, *, kept_rows: int = 0) -> None:
        self._pass("reserve")
        super().reserve(row_count, kept_rows=kept_rows)

    def apply(self, change: Change) -> None:
        self._pass("apply")
        super().apply(change)

    def _pass(self, stage: str) -> None:
        if stage == self.failing:
            raise CatalogError(f"{stage} fails as planned")
        self.events.append((stage, -1))


class Site:
    """A store of two volumes whose every call is recorded, with a writer whose records are at version 1, not committed."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.machine = Machine(seed=1, volume_count=2)
        self.volumes = {index: RecordingVolume(disk, self.events) for index, disk in self.machine.disks.items()}
        self.machine.volumes = dict(self.volumes)
        self.machine.catalog = self.catalog = RecordingCatalog(self.machine.durable, self.events)
        self.store: Store = self.machine.start()
        self.view: View

    async def prepare(self) -> None:
        self.view = await create(self.store)
        await train(self.store, self.view)
        await self.store._transactions.apply_change(Change())  # so that the next commit asks for room anew
        self.events.clear()

    @property
    def free_note_slots(self) -> int:
        return self.store.committer._prover._note_slots.free_count

    async def reopened(self) -> View:
        await self.machine.crash()
        self.store = self.machine.start()
        return await self.store.admission.open("moe", mode="write", at=None, host_bytes=None)


def on_site(scenario: Callable[[Site], Coroutine[Any, Any, None]]) -> None:
    async def prepared() -> None:
        site = Site()
        await site.prepare()
        await scenario(site)

    run(prepared())


def fail(site: Site, stage: str) -> None:
    """Lets `stage` fail from here on; with an empty text, nothing fails."""
    fakes: list[RecordingVolume | RecordingCatalog] = [*site.volumes.values(), site.catalog]
    for fake in fakes:
        fake.failing = stage
