"""How fast volumes are: classes by clear ratios only, a probe that is bounded, and a guess by kind where nothing was measured."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence

import pytest

from paramstore.core.location import Tier
from paramstore.engine.capacity.entitlements import SMALLEST_BYTES
from paramstore.engine.capacity.speeds import (
    LEAST_ROUNDS,
    PROBE_S,
    READ_BYTES,
    ROUND_BYTES,
    ROUNDS,
    MakeMeasure,
    Probe,
    Speed,
    speed_classes,
)
from paramstore.errors import VolumeError
from paramstore.testing.clock import ManualClock
from paramstore.testing.volumes import MemoryVolume
from paramstore_testkit.stores.small_store import run, turns
from paramstore_testkit.stores.volume_shelf import MIB, START, Shelf

FILE, PMEM = Tier.NVME, Tier.PMEM


class TimedVolume(MemoryVolume):
    """A volume whose reads take time by the clock: `bytes_per_s`, and more or less by `noise` at random."""

    def __init__(
        self, clock: ManualClock, bytes_per_s: float, *, index: int, free_mib: int = 16, noise: float = 0.0, mode: str = "direct",
        tier: Tier = FILE, seed: int = 0,
    ) -> None:  # fmt: skip
        super().__init__(START + free_mib * MIB, index=index, tier=tier)
        self._clock, self._bytes_per_s, self._noise, self._mode = clock, bytes_per_s, noise, mode
        self._random = random.Random(seed + index)
        self.reads: list[int] = []
        self.is_broken = False

    def read(self, offset_bytes: int, into: Sequence[memoryview]) -> None:
        if self.is_broken:
            raise VolumeError("the disk is gone")
        super().read(offset_bytes, into)
        self.reads.append(offset_bytes)
        slower = 1 + self._noise * self._random.random()
        self._clock.advance(slower * sum(map(len, into)) / self._bytes_per_s)

    def describe(self) -> dict[str, object]:
        return {**super().describe(), "mode": self._mode}


def probing(clock: ManualClock) -> MakeMeasure:
    return lambda space, prefill, runner: Probe(space, prefill, runner, clock=clock)


async def measured(clock: ManualClock, *volumes: TimedVolume, written_bytes: int = START + 16 * MIB) -> Shelf:
    shelf = Shelf(volumes=volumes, written_bytes=written_bytes, make_measure=probing(clock))
    await shelf.set.speeds.measure()
    return shelf


def classes_of(shelf: Shelf) -> list[int]:
    return [shelf.space.preference.class_of(index) for index in shelf.volumes]


# --- classes


@pytest.mark.parametrize(
    ("speeds", "expected"),
    [
        ([(3e9, 3e9), (1e9, 1e9)], [0, 1]),
        ([(1e9, 1e9), (3e9, 3e9)], [1, 0]),
        ([(1.4e9, 1.4e9), (1e9, 1e9)], [0, 0]),
        ([(1.5e9, 1.5e9), (1e9, 1e9)], [0, 1]),
        ([(9e9, 9e9), (1e9, 1e9), (3e9, 3e9), (1.1e9, 1.1e9)], [0, 2, 1, 2]),
        ([(1e9, 4e9), (1e9, 1e9)], [0, 0]),  # noise: the faster one was as slow as the other at times
        ([(2e9, 4e9), (0.2e9, 1.3e9)], [0, 1]),
        ([(3e9, 3e9), (2.2e9, 2.2e9), (1.6e9, 1.6e9)], [0, 0, 0]),
    ],
)
def test_a_class_ends_where_the_next_volume_is_clearly_slower(speeds: list[tuple[float, float]], expected: list[int]) -> None:
    found = speed_classes(dict.fromkeys(range(len(speeds)), FILE), {i: Speed(*speed) for i, speed in enumerate(speeds)})
    assert [found[index] for index in range(len(speeds))] == expected


FAST, SLOW = Speed(3e9, 3e9), Speed(1e9, 1e9)


@pytest.mark.parametrize(
    ("tiers", "speeds", "expected"),
    [
        ([FILE, FILE], {}, [0, 0]),
        ([FILE, PMEM], {}, [1, 0]),
        ([FILE, FILE, FILE], {0: FAST, 2: SLOW}, [0, 1, 1]),
        ([FILE, PMEM], {0: FAST}, [1, 0]),
        ([FILE, PMEM], {1: FAST}, [1, 0]),
        ([FILE, PMEM], {0: FAST, 1: FAST}, [0, 0]),
        ([FILE, PMEM], {0: FAST, 1: SLOW}, [0, 1]),
    ],
)
def test_what_was_not_measured_goes_with_its_kind(tiers: list[Tier], speeds: dict[int, Speed], expected: list[int]) -> None:
    found = speed_classes(dict(enumerate(tiers)), speeds)
    assert [found[index] for index in range(len(tiers))] == expected


def test_a_quarter_of_the_rounds_at_either_end_says_nothing() -> None:
    assert Speed.of([5.0, 1.0, 3.0, 9.0, 4.0, 3.5, 0.1, 4.5]) == Speed(3.0, 4.5)


# --- the probe


def test_a_volume_that_reads_faster_is_of_the_faster_class() -> None:
    async def scenario() -> None:
        clock = ManualClock()
        slow, fast = TimedVolume(clock, 1e9, index=0), TimedVolume(clock, 2e9, index=1)
        shelf = await measured(clock, slow, fast)
        assert classes_of(shelf) == [1, 0]
        assert shelf.set.speeds.describe(0) == {"speed_class": 1, "read_bytes_per_s": pytest.approx(1e9, rel=1e-6)}
        assert len(fast.reads) == ROUNDS * ROUND_BYTES // READ_BYTES
        await shelf.set.speeds.measure()
        assert len(fast.reads) == ROUNDS * ROUND_BYTES // READ_BYTES, "what was measured stays"

    run(scenario())


def test_noise_makes_no_classes_of_equal_disks() -> None:
    async def scenario() -> None:
        clock = ManualClock()
        disks = [TimedVolume(clock, 1e9, index=index, noise=1.0, seed=seed) for index in range(3)]
        assert classes_of(await measured(clock, *disks)) == [0, 0, 0], f"seed {seed}"

    seed = random.randrange(1 << 30)
    run(scenario())


def test_a_slow_disk_is_not_read_for_long() -> None:
    async def scenario() -> None:
        clock = ManualClock()
        slow = TimedVolume(clock, ROUND_BYTES / PROBE_S, index=0)
        shelf = await measured(clock, slow, TimedVolume(clock, 1e10, index=1))
        assert len(slow.reads) == LEAST_ROUNDS * ROUND_BYTES // READ_BYTES
        assert classes_of(shelf) == [1, 0]

    run(scenario())


def test_one_volume_is_never_read() -> None:
    async def scenario() -> None:
        clock = ManualClock()
        only = TimedVolume(clock, 1e9, index=0)
        await measured(clock, only)
        assert not only.reads

    run(scenario())


def test_what_reads_from_the_page_cache_is_not_measured() -> None:
    async def scenario() -> None:
        clock = ManualClock()
        cached = TimedVolume(clock, 1e11, index=0, mode="buffered")
        assert classes_of(await measured(clock, cached, TimedVolume(clock, 1e9, index=1))) == [0, 0]
        assert not cached.reads

    run(scenario())


def test_a_new_volume_is_zero_filled_where_it_is_read_and_counts_that() -> None:
    async def scenario() -> None:
        clock = ManualClock()
        disks = [TimedVolume(clock, 1e9 * (1 + index), index=index) for index in range(2)]
        shelf = await measured(clock, *disks, written_bytes=0)
        assert classes_of(shelf) == [1, 0]
        end = SMALLEST_BYTES + ROUND_BYTES
        assert [shelf.space.written_bytes(index) for index in range(2)] == [end, end]
        assert [shelf.set.bytes_written_total(index) for index in range(2)] == [end - START] * 2
        assert {offset for disk in disks for offset in disk.reads} == set(range(SMALLEST_BYTES, end, READ_BYTES))

    run(scenario())


def test_what_the_zero_fill_is_filling_is_waited_for() -> None:
    async def scenario() -> None:
        clock = ManualClock()
        disk = TimedVolume(clock, 1e9, index=0, free_mib=7)  # one piece of the zero-fill
        shelf = Shelf(volumes=[disk])
        shelf.workers.pause()
        shelf.prefill.start()
        await turns(2)
        assert shelf.space.is_prefilling
        measuring = asyncio.ensure_future(Probe(shelf.space, shelf.prefill, shelf.runner, clock=clock)(shelf.volumes))
        await turns(2)
        shelf.workers.resume()
        assert set(await measuring) == {0}
        await shelf.set.close()

    run(scenario())


def test_a_volume_without_room_is_measured_once_it_has_grown() -> None:
    async def scenario() -> None:
        clock = ManualClock()
        disks = [TimedVolume(clock, 1e9 * (1 + 2 * index), index=index, free_mib=1) for index in range(2)]
        shelf = await measured(clock, *disks, written_bytes=0)
        assert classes_of(shelf) == [0, 0]
        await shelf.make_room(1000)
        assert classes_of(shelf) == [1, 0]

    run(scenario())


def test_a_volume_that_cannot_be_read_is_guessed_and_nothing_else_fails(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        clock = ManualClock()
        broken = TimedVolume(clock, 1e9, index=0)
        broken.is_broken = True
        assert classes_of(await measured(clock, broken, TimedVolume(clock, 5e9, index=1))) == [0, 0]

    run(scenario())
    assert "volume 0: its speed could not be measured: the disk is gone" in caplog.text


def test_a_fenced_volume_is_not_read() -> None:
    async def scenario() -> None:
        clock = ManualClock()
        disks = [TimedVolume(clock, 1e9, index=index) for index in range(2)]
        shelf = Shelf(volumes=disks, written_bytes=START + 16 * MIB, make_measure=probing(clock))
        shelf.space.fences.fail_flush(0, VolumeError("the disk is gone"))
        await shelf.set.speeds.measure()
        assert not disks[0].reads

    run(scenario())
