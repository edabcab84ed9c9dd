"""Bytes that are not the record asked for are never handed out, whatever put them there and whoever asks."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace

import pytest

from paramstore.core.location import Located
from paramstore.engine.store import Store
from paramstore.engine.tables.namespace import View
from paramstore.errors import CorruptRecord, StepFailed
from paramstore.storage.format.structures import pack_header, unpack_header
from paramstore.testing.volumes import MemoryVolume
from paramstore_testkit.disks.machine import Machine, PlainSegment
from paramstore_testkit.stores.small_store import SCHEMA, create, keys_of, lease, train

Damage = Callable[[MemoryVolume, Located, Located], None]
"""Does something to the first record, given another one's place."""
PART = SCHEMA.stored


def put(disk: MemoryVolume, offset_bytes: int, data: bytes) -> None:
    disk.write(offset_bytes, [memoryview(data)])
    disk.flush()


def get(disk: MemoryVolume, located: Located) -> bytearray:
    data = bytearray(PART.image_bytes)
    disk.read(located.extent.offset_bytes, [memoryview(data)])
    return data


def another_record(disk: MemoryVolume, record: Located, other: Located) -> None:
    put(disk, record.extent.offset_bytes, bytes(get(disk, other)))


def zeros(disk: MemoryVolume, record: Located, other: Located) -> None:
    put(disk, record.extent.offset_bytes, bytes(PART.image_bytes))


def header_made_anew(disk: MemoryVolume, record: Located, other: Located) -> None:
    """Whole, and of this record, but not the one that the catalog knows."""
    header = unpack_header(get(disk, record), PART)
    put(disk, record.extent.offset_bytes, pack_header(replace(header, optimizer_step=7), PART))


def flipped_in(number: int) -> Damage:
    def flip(disk: MemoryVolume, record: Located, other: Located) -> None:
        field = PART.fields[number]
        disk.corrupt(record.extent.offset_bytes + field.offset_bytes + field.length_bytes - 1, 0x10)

    flip.__name__ = f"flipped_in_{PART.fields[number].name}"
    return flip


DAMAGES: list[Damage] = [another_record, zeros, header_made_anew, *(flipped_in(number) for number in range(len(PART.fields)))]
MASTERS = {0, 1}
"""Fields that a lease of `param` reads."""


async def read(store: Store, view: View) -> None:
    key = keys_of(view)[0]
    target = PlainSegment(PART.image_bytes).view(0, PART.image_bytes)
    await store.reading.read(view, key, target)


async def lease_one(store: Store, view: View) -> None:
    await lease(store, view, keys_of(view)[:1])


async def update(store: Store, view: View) -> None:
    """The optimizer reads the record, too; what it meets fails the apply."""
    writer = await store.admission.open("moe", mode="write", at=None, host_bytes=None)
    with pytest.raises(StepFailed) as failure:
        await train(store, writer, keys_of(view)[:1])
    assert failure.value.__cause__ is not None
    raise failure.value.__cause__


async def refuses(damage: Damage, use: Callable[[Store, View], object]) -> None:
    machine = Machine(seed=3)
    view = await create(machine.start())
    assert machine.store is not None
    await train(machine.store, view)
    await machine.store.committer.commit(view, 1, b"")
    await machine.crash()
    store = machine.start()
    reader = await store.admission.open("moe", mode="read", at=None, host_bytes=None)
    ledger = reader.namespace.steps.ledger
    first, second = (ledger.at(key, 1) for key in keys_of(reader)[:2])
    assert first is not None
    assert second is not None
    damage(machine.disks[0], first, second)
    with pytest.raises(CorruptRecord):
        await use(store, reader)  # type: ignore[misc]


def refuses_all() -> None:
    """Every damage, for everybody who reads what it hit."""
    for number, damage in enumerate(DAMAGES):
        asyncio.run(refuses(damage, read))
        asyncio.run(refuses(damage, update))
        if number < len(DAMAGES) - len(PART.fields) + len(MASTERS):
            asyncio.run(refuses(damage, lease_one))


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: str(damage.__name__))
@pytest.mark.parametrize("use", [read, update])
def test_damaged_bytes_reach_nobody(damage: Damage, use: Callable[[Store, View], object]) -> None:
    asyncio.run(refuses(damage, use))


@pytest.mark.parametrize("damage", DAMAGES[: len(DAMAGES) - len(PART.fields) + len(MASTERS)], ids=lambda d: str(d.__name__))
def test_damaged_masters_are_not_leased(damage: Damage) -> None:
    asyncio.run(refuses(damage, lease_one))
