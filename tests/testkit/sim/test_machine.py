"""The simulated machine: disks that lose what they should, workers whose order repeats, and nothing of it left afterwards."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import replace
from random import Random
from typing import Any

import pytest

from paramstore.daemon import assembly, session
from paramstore.engine.records import update
from paramstore.errors import CatalogError, VolumeError
from paramstore.storage.catalog.base import Change
from paramstore.testing.catalogs import MemoryCatalog, namespace_row
from paramstore_testkit.oracles import plain_arithmetic
from paramstore_testkit.sim.loop import VirtualLoop
from paramstore_testkit.sim.machine import OrderedSet, SimCatalog, SimVolume, SimWorkers, installed
from paramstore_testkit.sim.net import SimPeer
from paramstore_testkit.sim.plan import Faults, plan_of

PAGE = 4096
ALWAYS = Faults(read=1.0, write=1.0, flush=1.0, transaction=1.0)


def volume(seed: int = 1) -> tuple[SimVolume, Counter[str]]:
    fired: Counter[str] = Counter()
    return SimVolume(8 * PAGE, Random(seed), fired, index=0), fired


def page(byte: int, count: int = 1) -> list[memoryview]:
    return [memoryview(bytearray([byte]) * (PAGE * count))]


def test_a_disk_without_faults_is_a_disk() -> None:
    disk, fired = volume()
    disk.write(0, page(7))
    disk.flush()
    found = memoryview(bytearray(PAGE))
    disk.read(0, [found])
    assert found == page(7)[0]
    assert not fired


def test_every_fault_is_counted_and_a_failed_write_is_torn() -> None:
    disk, fired = volume()
    disk.write(0, page(1, 2))
    disk.faults = ALWAYS
    with pytest.raises(VolumeError):
        disk.write(0, page(2, 2))
    with pytest.raises(VolumeError):
        disk.read(0, page(0))
    disk.faults = None
    found = memoryview(bytearray(2 * PAGE))
    disk.read(0, [found])
    assert (found[0], found[PAGE]) == (2, 1)
    assert fired == {"write error": 1, "read error": 1}


def test_a_failed_flush_has_lost_some_of_what_it_should_have_kept_and_none_of_what_was_flushed_before() -> None:
    survivors = set()
    for seed in range(20):
        disk, _ = volume(seed)
        disk.write(0, page(1))
        disk.flush()
        disk.write(PAGE, page(2))
        disk.faults = ALWAYS
        with pytest.raises(VolumeError):
            disk.flush()
        assert disk._bytes[0] == 1
        assert not disk.unflushed
        survivors.add(disk._bytes[PAGE : 2 * PAGE].count(2))
    assert {0, PAGE} < survivors


def test_a_transaction_that_raises_took_effect_or_did_not() -> None:
    outcomes = set()
    for seed in range(20):
        inner = MemoryCatalog()
        catalog = SimCatalog(inner, Random(seed), Counter())
        catalog.load()
        catalog.faults = ALWAYS
        with pytest.raises(CatalogError):
            catalog.apply(Change(put_namespaces=(namespace_row(),)))
        catalog.reopen()
        outcomes.add(len(catalog.load().namespaces))
    assert outcomes == {0, 1}


def worked(seed: int) -> tuple[list[int], list[int], float]:
    """Ten calls of one lane: when they ran, when they were told, and how long it took."""
    loop, ran, told = VirtualLoop(Random(0), shuffles=False), list[int](), list[int]()

    async def main() -> None:
        workers = SimWorkers(loop, Random(seed), replace(plan_of(1), io_s=1.0), Counter())
        for number in range(10):
            workers.run(("volume", 0), ran.append, number, lambda result, error, number=number: told.append(number))
        await asyncio.sleep(100)
        assert workers.running == 0

    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        runner.run(main())
    return ran, told, loop.time()


def test_calls_overtake_each_other_the_same_way_for_the_same_seed() -> None:
    ran, told, _ = worked(1)
    assert sorted(ran) == sorted(told) == list(range(10))
    assert told != list(range(10))
    assert ran != told, "a call may be over long before anybody is told"
    assert worked(1) == worked(1)
    assert worked(2) != worked(1)


def test_closed_workers_run_and_tell_nothing() -> None:
    loop, seen = VirtualLoop(Random(0), shuffles=False), list[object]()

    async def main() -> None:
        workers = SimWorkers(loop, Random(3), plan_of(1), Counter())
        for number in range(20):
            workers.run("cpu", lambda _: None, number, lambda result, error: seen.append(result))
        workers.close()
        await asyncio.sleep(100)

    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        runner.run(main())
    assert seen == []


def test_an_ordered_set_keeps_the_order_of_insertion() -> None:
    found: Any = OrderedSet()
    for item in (3, 1, 2):
        found.add(item)
    found.discard(1)
    found.discard(9)
    assert list(found) == [3, 2]


def test_what_is_installed_is_there_within_the_block_and_nowhere_else() -> None:
    before = (update.update, session.Peer, assembly.MonotonicClock)
    loop = VirtualLoop(Random(1), shuffles=False)
    with installed(loop, Random(1)):
        assert update.update is plain_arithmetic.update
        assert session.Peer is SimPeer
        assert assembly.MonotonicClock().now_s() == 0.0
    loop.close()
    assert (update.update, session.Peer, assembly.MonotonicClock) == before
