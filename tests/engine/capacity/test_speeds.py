"""How fast volumes are: classes by clear ratios only, a probe that is bounded, and a guess by kind where nothing was measured."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Hashable, Sequence
from typing import Any

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
from paramstore.engine.transfers.runner import BACKGROUND_LANE, CPU_LANE, volume_lane
from paramstore.errors import VolumeError
from paramstore.testing.clock import ManualClock
from paramstore.testing.volumes import MemoryVolume
from paramstore.testing.workers import InlineWorkers
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
        self.attempts = 0

    def read(self, offset_bytes: int, into: Sequence[memoryview]) -> None:
        self.attempts += 1
        if self.is_broken:
            raise VolumeError("the disk is gone")
        super().read(offset_bytes, into)
        self.reads.append(offset_bytes)
        slower = 1 + self._noise * self._random.random()
        self._clock.advance(slower * sum(map(len, into)) / self._bytes_per_s)

    def describe(self) -> dict[str, object]:
        return {**super().describe(), "mode": self._mode}


IN_PEACE = {"turn_s": 60.0, "total_s": 60.0}
"""Bounds of a probe that a busy machine does not reach."""


class StuckWorkers(InlineWorkers):
    """Workers of which those of one lane begin nothing."""

    stuck: Hashable = None

    def run(self, lane: Hashable, *rest: Any) -> None:
        if lane != self.stuck:
            super().run(lane, *rest)


def stuck_shelf(make_measure: MakeMeasure, stuck: Hashable, *volumes: TimedVolume, written_bytes: int = START + 16 * MIB) -> Shelf:
    shelf = Shelf(volumes=volumes, written_bytes=written_bytes, make_measure=make_measure)
    workers = StuckWorkers(asyncio.get_running_loop())
    workers.stuck = stuck
    shelf.runner.workers = workers
    return shelf


def probing(clock: ManualClock) -> MakeMeasure:
    return lambda space, prefill, runner: Probe(space, prefill, runner, clock=clock, **IN_PEACE)


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
        measuring = asyncio.ensure_future(Probe(shelf.space, shelf.prefill, shelf.runner, clock=clock, **IN_PEACE)(shelf.volumes))
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


def test_a_volume_that_cannot_be_read_leaves_the_others_told_apart_and_is_not_tried_again() -> None:
    async def scenario() -> None:
        clock = ManualClock()
        broken, fast, slow = (TimedVolume(clock, rate, index=index) for index, rate in enumerate((1e9, 5e9, 1e9)))
        broken.is_broken = True
        shelf = await measured(clock, broken, fast, slow)
        assert classes_of(shelf) == [1, 0, 1]
        attempts = broken.attempts
        await shelf.make_room(10)
        assert broken.attempts == attempts > 0

    run(scenario())


@pytest.mark.parametrize(("stuck", "written_bytes"), [(volume_lane(0), START + 16 * MIB), (BACKGROUND_LANE, SMALLEST_BYTES)])
def test_a_volume_that_hangs_is_waited_for_no_longer_than_a_turn(stuck: Hashable, written_bytes: int) -> None:
    async def scenario() -> None:
        clock = ManualClock()
        disks = [TimedVolume(clock, rate, index=index) for index, rate in enumerate((1e9, 5e9, 1e9))]
        shelf = stuck_shelf(
            lambda *of: Probe(*of, clock=clock, turn_s=0.3, total_s=60.0), stuck, *disks, written_bytes=written_bytes
        )
        await shelf.set.speeds.measure()
        is_zero_filled = stuck == BACKGROUND_LANE
        assert classes_of(shelf) == ([0, 0, 0] if is_zero_filled else [1, 0, 1])
        assert shelf.space.is_prefilling == is_zero_filled, "what zeros may still come to is not free"

    run(scenario())


def test_a_probe_is_over_in_time_whatever_hangs(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        clock = ManualClock()
        disks = [TimedVolume(clock, 1e9, index=0), TimedVolume(clock, 5e9, index=1)]
        shelf = stuck_shelf(lambda *of: Probe(*of, clock=clock, turn_s=60.0, total_s=0.02), volume_lane(0), *disks)
        await shelf.set.speeds.measure()
        assert classes_of(shelf) == [0, 0]

    run(scenario())
    assert "volume 0: its speed could not be measured: it has not returned in 0.0" in caplog.text


@pytest.mark.parametrize("is_busy", [False, True])
def test_when_a_volume_first_has_room_all_are_measured_anew_unless_others_move(is_busy: bool) -> None:
    async def scenario() -> None:
        clock = ManualClock()
        old, new = TimedVolume(clock, 1e9, index=0), TimedVolume(clock, 3e9, index=1, free_mib=1)
        shelf = stuck_shelf(probing(clock), CPU_LANE, old, new, written_bytes=START)
        await shelf.set.speeds.measure()
        before = len(old.reads)
        traffic = asyncio.ensure_future(shelf.runner.call(CPU_LANE, lambda: None) if is_busy else turns(1))
        await turns(3)
        await shelf.make_room(1000)
        traffic.cancel()
        assert (len(old.reads) > before, len(new.reads) > 0) == (not is_busy, not is_busy)
        assert classes_of(shelf) == ([0, 0] if is_busy else [1, 0])
        read = len(new.reads)
        await shelf.make_room(1000)
        assert len(new.reads) == read, "it is not tried again before the next start"

    run(scenario())


def test_the_first_probe_waits_for_no_scrub_that_begins_beside_it() -> None:
    async def scenario() -> None:
        clock = ManualClock()
        shelf = stuck_shelf(probing(clock), CPU_LANE, TimedVolume(clock, 1e9, index=0), TimedVolume(clock, 3e9, index=1))
        scrub = asyncio.ensure_future(shelf.runner.call(CPU_LANE, lambda: None))
        await turns(2)
        await shelf.set.speeds.measure()
        scrub.cancel()
        assert classes_of(shelf) == [1, 0]

    run(scenario())


def test_a_fenced_volume_is_not_read() -> None:
    async def scenario() -> None:
        clock = ManualClock()
        disks = [TimedVolume(clock, 1e9, index=index) for index in range(2)]
        shelf = Shelf(volumes=disks, written_bytes=START + 16 * MIB, make_measure=probing(clock))
        shelf.space.fences.fail_flush(0, VolumeError("the disk is gone"))
        await shelf.set.speeds.measure()
        assert not disks[0].reads

    run(scenario())
