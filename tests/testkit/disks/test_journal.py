"""A replay stands where the run stood after the same events, and its crashes leave the replay itself alone."""

from __future__ import annotations

import pytest

from paramstore.errors import VolumeError
from paramstore.storage.catalog.base import Change
from paramstore.testing.catalogs import MemoryCatalog, namespace_row
from paramstore.testing.volumes import MemoryVolume, keep_all, keep_none
from paramstore_testkit.disks.journal import (
    Applied,
    Flushed,
    FlushFailed,
    Journal,
    JournaledCatalog,
    JournaledVolume,
    Replay,
    Wrote,
)

PAGE = bytes([1]) * 4096


def content(volume: MemoryVolume) -> bytes:
    found = bytearray(volume.size_bytes)
    volume.read(0, [memoryview(found)])
    return bytes(found)


def test_writes_flushes_and_transactions_are_written_down_in_order() -> None:
    journal = Journal()
    volume = JournaledVolume(MemoryVolume(8192, index=3), journal)
    catalog = JournaledCatalog(MemoryCatalog(), journal)
    catalog.load()
    change = Change(put_namespaces=(namespace_row(),))
    volume.write(4096, [memoryview(PAGE)])
    catalog.apply(change)
    volume.flush()
    assert journal.events == [Wrote(3, 4096, PAGE), Applied(change), Flushed(3)]


def test_a_machine_has_what_the_crash_left_and_the_replay_goes_on() -> None:
    replay = Replay(volume_count=1, volume_bytes=8192)
    replay.advance(Wrote(0, 0, PAGE))
    replay.advance(Applied(Change(put_namespaces=(namespace_row(),))))
    assert replay.unflushed == [(0, 0, 8)]
    lost = replay.machine({0: keep_none}, host_budget_bytes=1)
    kept = replay.machine({0: keep_all}, host_budget_bytes=1)
    assert content(lost.disks[0]) == bytes(8192)
    assert content(kept.disks[0]) == PAGE + bytes(4096)
    for machine in (lost, kept):
        assert list(machine.catalog.load().namespaces) == ["moe"]
    replay.advance(Flushed(0))
    assert replay.unflushed == []
    assert content(replay.machine({0: keep_none}, host_budget_bytes=1).disks[0]) == PAGE + bytes(4096)


def test_a_volume_that_would_grow_cannot_be_journaled() -> None:
    with pytest.raises(AssertionError, match="fixed size"):
        JournaledVolume(MemoryVolume(4096), Journal()).grow(8192)


def test_a_planned_failure_happens_once_and_is_written_down_as_what_reached_the_disk() -> None:
    journal = Journal()
    disk = MemoryVolume(16384)
    volume = JournaledVolume(disk, journal)
    volume.failing = ["write", "flush"]
    with pytest.raises(VolumeError, match="write"):
        volume.write(0, [memoryview(PAGE * 2)])
    with pytest.raises(VolumeError, match="flush"):
        volume.flush()
    assert content(disk) == PAGE + bytes(12288)
    assert disk.unflushed
    volume.write(4096, [memoryview(PAGE)])
    volume.flush()
    assert not disk.unflushed
    assert journal.events == [Wrote(0, 0, PAGE), FlushFailed(0), Wrote(0, 4096, PAGE), Flushed(0)]
