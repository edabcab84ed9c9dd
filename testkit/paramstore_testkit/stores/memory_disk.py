"""Simulated volumes as fsck reads them, and a small store with every case that a rebuild must tell apart."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from paramstore.core.schema import Schema
from paramstore.engine.store import Store
from paramstore.engine.tables.namespace import View
from paramstore.fsck.survey import Survey, survey
from paramstore.storage.catalog.base import Contents
from paramstore.storage.volume.base import Volume
from paramstore_testkit.disks.machine import Machine
from paramstore_testkit.stores.small_store import create, keys_of, train

OPAQUE = Schema.param({"w": ((3000,), "uint8"), "b": ((2, 2), "float32")})


class MemoryDisk:
    """`volume`, as a disk of fsck. writes: the offsets that were written."""

    def __init__(self, volume: Volume) -> None:
        self._volume = volume
        self.writes: list[int] = []

    @property
    def index(self) -> int:
        return self._volume.index

    @property
    def place(self) -> str:
        return f"volume {self.index} (memory)"

    @property
    def size_bytes(self) -> int:
        return self._volume.size_bytes

    def read(self, offset_bytes: int, length_bytes: int) -> bytes:
        buffer = bytearray(length_bytes)
        self._volume.read(offset_bytes, [memoryview(buffer)])
        return bytes(buffer)

    def write(self, offset_bytes: int, data: bytes) -> None:
        self.writes.append(offset_bytes)
        self._volume.write(offset_bytes, [memoryview(bytearray(data))])

    def flush(self) -> None:
        self._volume.flush()


def disks_of(volumes: Mapping[int, Volume]) -> dict[int, MemoryDisk]:
    return {index: MemoryDisk(volume) for index, volume in volumes.items()}


def survey_of(machine: Machine) -> Survey:
    """Surveys the machine's volumes as they are now."""
    return survey(list(disks_of(machine.volumes).values()))


async def eventful(machine: Machine) -> tuple[Store, View]:
    """Makes a running store with two namespaces: `moe` at step 9, with 4, 6, 7 before it, partial updates, a rollback, a new writer
    and uncommitted write-backs; `eval` at step 3. Gives the store and a reader of `moe` that stands on step 4."""
    store = machine.start()
    view = await create(store)
    keys = keys_of(view)
    await create(store, "eval", schema=OPAQUE, experts=3, step=3)
    await commit(store, view, 4, keys[:3], b"four")
    reader = await store.admission.open("moe", mode="read", at=4, host_bytes=None)
    await commit(store, view, 6, keys[:1], b"six")
    await train(store, view, keys)
    await store.write_back(view, None)  # disowned by the rollback
    await store.rollback(view, 6)
    await commit(store, view, 7, keys[1:2], b"seven")
    view = await store.admission.open("moe", mode="write", at=None, host_bytes=None)
    await commit(store, view, 9, keys[2:], b"nine" * 1000)
    await train(store, view, keys[:2])
    await store.write_back(view, None)  # uncommitted
    return store, reader


async def commit(store: Store, view: View, step: int, keys: Sequence[tuple[int, int]], extra: bytes = b"") -> None:
    """Makes one apply with gradients of `keys`, and commits it."""
    await train(store, view, keys)
    await store.committer.commit(view, step, extra)


def state_at(contents: Contents, name: str, step: int) -> dict[tuple[int, int], object]:
    """Lists the rows of the catalog that are in force at a step."""
    rows = contents.namespaces[name].rows
    return {key: [row.located for row in own if row.first_step <= step][-1] for key, own in rows.items()}
