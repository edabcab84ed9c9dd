"""How fast each volume reads, measured once, and the speed classes that follow from it.

Where there are several volumes each is probed when the store is opened: all in turn, ROUNDS times, a few reads side by side over
bytes that were written before. A volume is slower than others only if nearly each of their rounds was RATIO times as fast as nearly
each of its own: noise makes no classes. A volume that fails, or takes TURN_S for a turn, leaves the probe, and all volumes together
are probed for TOTAL_S at most, writes of zeros included; none is tried twice. When a volume first has room later, all are probed
anew, if nothing else moves; else it has no figure until the next start. Reads through the page cache would measure memory: such
volumes are not probed. A volume without a figure goes with the slowest of its kind, and by kind, PMem first, where no other of its
kind has one.
"""

from __future__ import annotations

import asyncio
import logging
import mmap
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass
from functools import partial

from paramstore.clock import Clock, MonotonicClock
from paramstore.core.location import Tier
from paramstore.engine.capacity.entitlements import SMALLEST_BYTES
from paramstore.engine.capacity.prefill import Prefill
from paramstore.engine.transfers.runner import BACKGROUND_LANE, Runner, volume_lane
from paramstore.errors import VolumeError, WaitTimeout
from paramstore.storage.space.extents import Space
from paramstore.storage.volume.base import Volume, granularity_of

logger = logging.getLogger(__name__)

RATIO = 1.5
ROUNDS, LEAST_ROUNDS = 8, 4
READ_BYTES, READS = 1 << 20, 4
"""Size and number of the reads of one round: so many side by side keep a disk busy."""
ROUND_BYTES = READS * READ_BYTES
PROBE_S = 0.25
"""After LEAST_ROUNDS no more begins for a volume that has taken so long, so that a slow one holds up nobody."""
TURN_S, TOTAL_S = 0.25, 1.0
"""How long a volume's turn may take, and a probe of all volumes, whatever hangs."""


@dataclass(frozen=True, slots=True)
class Speed:
    """Bytes a second that a volume was read at, in nearly each round at least `low` and at most `high`."""

    low: float
    high: float

    @classmethod
    def of(cls, rounds: list[float]) -> Speed:
        """Leaves out a quarter of the rounds at either end."""
        ordered, out = sorted(rounds), len(rounds) // 4
        return cls(ordered[out], ordered[-1 - out])


Measure = Callable[[Mapping[int, Volume]], Awaitable[Mapping[int, Speed]]]
"""Measures volumes, by index; leaves out those of which it can tell nothing."""
MakeMeasure = Callable[[Space, Prefill, Runner], Measure]


def speed_classes(tiers: Mapping[int, Tier], speeds: Mapping[int, Speed]) -> dict[int, int]:
    """The speed class of each volume, from 0 on without gaps, the fastest first. speeds: of those that were measured."""
    classes: dict[int, int] = {}
    current, low = 0, 0.0
    for index in sorted(speeds, key=lambda index: (-speeds[index].high, index)):
        speed = speeds[index]
        if low >= RATIO * speed.high:
            current, low = current + 1, 0.0
        classes[index] = current
        low = min(low or speed.low, speed.low)
    slowest = {Tier.PMEM: -1, Tier.NVME: current + 1}  # of kinds of which none was measured
    for index in sorted(classes, key=classes.__getitem__):
        slowest[tiers[index]] = classes[index]
    placed = {index: classes.get(index, slowest[tier]) for index, tier in tiers.items()}
    numbers = {found: number for number, found in enumerate(sorted(set(placed.values())))}
    return {index: numbers[found] for index, found in placed.items()}


class Speeds:
    """Owner of the measured speeds; tells the space the classes."""

    def __init__(self, volumes: Mapping[int, Volume], space: Space, runner: Runner, measure: Measure | None = None) -> None:
        """measure: None measures nothing, and classes go by kind."""
        self._volumes = volumes
        self._space = space
        self._runner = runner
        self._measure = measure
        self._speeds: dict[int, Speed] = {}
        self._tried: set[int] = set()
        self._classify()

    async def measure(self) -> None:
        """Measures the volumes, where there are several and one that has room was not tried yet."""
        usable = {index: volume for index, volume in self._volumes.items() if self._is_usable(index)}
        new = usable.keys() - self._tried
        if self._measure is None or not new or len(self._volumes) == 1:
            return
        is_first, self._tried = not self._tried, self._tried | new
        if not is_first and any(transfer.lane != BACKGROUND_LANE for transfer in self._runner.under_way):
            logger.warning("volumes %s are not measured beside traffic: they go by kind until the next start", sorted(new))
            return
        self._speeds.update(await self._measure(usable))
        self._classify()

    def _is_usable(self, index: int) -> bool:
        has_room = self._space.size_bytes_of(index) >= SMALLEST_BYTES + ROUND_BYTES
        return has_room and not self._space.fences.is_fenced(index)

    def _classify(self) -> None:
        tiers = {index: volume.tier for index, volume in self._volumes.items()}
        self._space.preference.set_classes(speed_classes(tiers, self._speeds))
        if self._space.preference.class_count > 1:
            logger.info("volumes by speed: %s", {index: self.describe(index) for index in self._volumes})

    def describe(self, index: int) -> dict[str, object]:
        """Returns {speed_class, read_bytes_per_s}: 0 is the fastest; None where it was not measured."""
        speed, speed_class = self._speeds.get(index), self._space.preference.class_of(index)
        return {"speed_class": speed_class, "read_bytes_per_s": None if speed is None else round(speed.low)}


class Probe:
    """Measures volumes by reading from them; what it reads was written before, if need be as zeros in free space."""

    def __init__(
        self, space: Space, prefill: Prefill, runner: Runner, *, clock: Clock | None = None, turn_s: float = TURN_S,
        total_s: float = TOTAL_S,
    ) -> None:  # fmt: skip
        self._space = space
        self._prefill = prefill
        self._runner = runner
        self._clock = clock or MonotonicClock()
        self._turn_s, self._total_s = turn_s, total_s
        self._turns: set[asyncio.Task[float | None]] = set()
        """Turns that are under way, also those that nobody waits for any more: an extent is not free while zeros may come to it."""

    async def __call__(self, volumes: Mapping[int, Volume]) -> Mapping[int, Speed]:
        probed = {index: volume for index, volume in volumes.items() if _tells(volume)}
        rounds: dict[int, list[float]] = {index: [] for index in probed}
        buffers = [memoryview(mmap.mmap(-1, READ_BYTES)) for _ in range(READS)]
        over_s = asyncio.get_running_loop().time() + self._total_s
        for _ in range(ROUNDS):
            for index, volume in list(probed.items()):
                took_s = sum(ROUND_BYTES / rate for rate in rounds[index])
                if len(rounds[index]) >= LEAST_ROUNDS and took_s > PROBE_S:
                    continue
                if asyncio.get_running_loop().time() >= over_s:
                    break
                try:
                    rate = await self._in_time(self._read(index, volume, buffers), over_s)
                except (VolumeError, WaitTimeout) as error:
                    logger.warning("volume %d: its speed could not be measured: %s", index, error)
                    del probed[index]
                    continue
                if rate is not None:
                    rounds[index].append(rate)
        return {index: Speed.of(rounds[index]) for index in probed if len(rounds[index]) >= LEAST_ROUNDS}

    async def _in_time(self, turn: Coroutine[None, None, float | None], over_s: float) -> float | None:
        """Awaits the turn; raises what it raises, and WaitTimeout if it takes too long: then it goes on by itself."""
        task = asyncio.get_running_loop().create_task(turn, name="probe")
        self._turns.add(task)
        task.add_done_callback(self._end_turn)
        left_s = min(self._turn_s, over_s - task.get_loop().time())
        done, _ = await asyncio.wait([task], timeout=max(0.0, left_s))
        if not done:
            raise WaitTimeout(f"it has not returned in {left_s:.3f} s")
        return task.result()

    def _end_turn(self, task: asyncio.Task[float | None]) -> None:
        self._turns.discard(task)
        if not task.cancelled():
            task.exception()  # seen: whoever waited for it has logged what became of it

    async def _read(self, index: int, volume: Volume, buffers: list[memoryview]) -> float | None:
        """Reads once over ROUND_BYTES that were written; returns the rate, or None where there are not so many."""
        await self._prefill.fill(index, up_to_bytes=SMALLEST_BYTES + ROUND_BYTES)
        start = self._space.written_bytes(index) - ROUND_BYTES
        if start < SMALLEST_BYTES:
            return None
        began_s = self._clock.now_s()
        reads = [partial(volume.read, start + at * READ_BYTES, (buffer,)) for at, buffer in enumerate(buffers)]
        lane = volume_lane(index)
        await asyncio.gather(*(self._runner.call(lane, read) for read in reads))
        took_s = self._clock.now_s() - began_s
        return ROUND_BYTES / took_s if took_s > 0 else None


def _tells(volume: Volume) -> bool:
    """Whether reads go to the device, not to the page cache."""
    return volume.describe().get("mode") == "direct" or granularity_of(volume).persists_writes
