"""Journals what a store did to its disks, in order, and makes the machine that a crash at any point of it would leave.

Run a machine with `Journal.watch`, then step a `Replay` through its events: after each, `machine` gives the computer that
comes back if the power fails just then, with any chosen part of the unflushed writes. The run happens once, however many
crashes are tried.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from paramstore.core.schema import round_up
from paramstore.errors import VolumeError
from paramstore.storage.catalog.base import Catalog, Change
from paramstore.storage.volume.base import ALIGNMENT_BYTES, Volume
from paramstore.testing.catalogs import MemoryCatalog, WrappedCatalog
from paramstore.testing.volumes import Keep, MemoryVolume, WrappedVolume
from paramstore_testkit.disks.machine import Machine


class Wrote(NamedTuple):
    volume: int
    offset_bytes: int
    data: bytes


class Flushed(NamedTuple):
    volume: int


class FlushFailed(NamedTuple):
    """A failed flush: what was written to the volume before may be lost for good, whatever a later flush says."""

    volume: int


class Persisted(NamedTuple):
    """Cache lines of a mapped volume that were written back and waited for: what was stored there before is durable."""

    volume: int
    offset_bytes: int
    length_bytes: int


class Applied(NamedTuple):
    change: Change


class Noted(NamedTuple):
    """Something the run began or was told: `created`, `started` and `acknowledged` a commit, `rolling back` and `rolled back`,
    `kept` a snapshot and `dropping` one, `preparing`, `prepared`, `finalizing` (then `acknowledged`) a step in two halves."""

    what: str
    step: int = 0


Event = Wrote | Flushed | FlushFailed | Persisted | Applied | Noted


class Journal:
    """Owner of the events of one run."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def watch(self, machine: Machine) -> None:
        """Makes everything that the store does to its volumes and catalog an event. Call it before `machine.start`."""
        machine.volumes = {index: JournaledVolume(volume, self) for index, volume in machine.volumes.items()}
        machine.catalog = JournaledCatalog(machine.catalog, self)


class JournaledVolume(WrappedVolume):
    """`inner`, with a journal of its writes and flushes. It does not grow: give the machine volumes of a fixed size."""

    def __init__(self, inner: Volume, journal: Journal) -> None:
        super().__init__(inner)
        self.failing: list[str] = []
        """Operations, `write` or `flush`, whose next call fails, once per entry; of such a write the first half is on disk."""
        self._journal = journal

    def write(self, offset_bytes: int, data: Sequence[memoryview]) -> None:
        whole = b"".join(data)
        if self._fails("write"):
            whole = whole[: round_up(len(whole) // 2, ALIGNMENT_BYTES)]
            self._write(offset_bytes, whole)
            raise VolumeError(f"volume {self.index}: a write fails as planned")
        self._write(offset_bytes, whole)

    def _write(self, offset_bytes: int, whole: bytes) -> None:
        self._journal.events.append(Wrote(self.index, offset_bytes, whole))
        self.inner.write(offset_bytes, [memoryview(whole)])

    def flush(self) -> None:
        if self._fails("flush"):
            self._journal.events.append(FlushFailed(self.index))
            raise VolumeError(f"volume {self.index}: a flush fails as planned")
        self.inner.flush()
        self._journal.events.append(Flushed(self.index))

    def _fails(self, operation: str) -> bool:
        if operation not in self.failing:
            return False
        self.failing.remove(operation)
        return True

    def grow(self, size_bytes: int) -> None:
        raise AssertionError("a journaled volume has a fixed size")


class JournaledCatalog(WrappedCatalog):
    """`inner`, with a journal of its transactions."""

    def __init__(self, inner: Catalog, journal: Journal) -> None:
        super().__init__(inner)
        self._journal = journal

    def apply(self, change: Change) -> None:
        self.inner.apply(change)
        self._journal.events.append(Applied(copy.deepcopy(change)))


class Replay:
    """Disks and catalog as they were after some of the events."""

    def __init__(self, *, volume_count: int, volume_bytes: int) -> None:
        self.disks = {index: MemoryVolume(volume_bytes, index=index) for index in range(volume_count)}
        self._catalog = MemoryCatalog()
        self._catalog.load()

    def advance(self, event: Event) -> None:
        match event:
            case Wrote(volume, offset_bytes, data):
                self.disks[volume].write(offset_bytes, [memoryview(data)])
            case Flushed(volume):
                self.disks[volume].flush()
            case Applied(change):
                self._catalog.apply(change)
            case _:
                pass  # nothing reached a disk; `crash_disk` knows what a failed flush leaves in doubt

    @property
    def unflushed(self) -> list[tuple[int, int, int]]:
        """Lists (volume, number, sectors) of every write that a crash now could undo."""
        return [
            (index, number, write.sectors) for index, disk in self.disks.items() for number, write in enumerate(disk.unflushed)
        ]

    def machine(self, keeps: Mapping[int, Keep], *, host_budget_bytes: int) -> Machine:
        """Makes the machine that comes back from a crash now. keeps: by volume, what survives of its unflushed writes."""
        machine = Machine(volume_count=0, volume_size_bytes=1, host_budget_bytes=host_budget_bytes)
        machine.disks = {index: disk.after_crash(keeps[index]) for index, disk in self.disks.items()}
        machine.volumes = dict(machine.disks)
        machine.durable = self._catalog.crash()
        machine.catalog = machine.durable
        self._catalog.reopen()
        self._catalog.load()
        return machine
