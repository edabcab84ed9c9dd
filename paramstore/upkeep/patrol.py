"""The patrol: scrubs everything again and again, each pass spread over `scrub_days`, so that bit rot is found where nobody reads.

- A pass covers what the namespaces hold when it begins, superblocks and commit notes first; the next covers what comes later.
- It reads one record at a time, then pauses, so that the pass takes `scrub_days`. It never reads more than BYTES_PER_S_MAX, and has
  a piece under way for at most BUSY_SHARE_MAX of the time, so it takes at most that share of what a volume can read. The log says
  so where these limits make a pass longer than `scrub_days`.
- It stands still while a verify runs that somebody asked for, and makes up for it afterwards.
- Every pass of one daemon begins with the same key, so that two checks of a record are one pass apart. `start_at` differs between
  daemons, so that daemons that live shorter than a pass do not check the same keys again and again.
- Each damaged place is logged once, as an error, as long as the passes find it; nothing is logged for a whole one.
"""

from __future__ import annotations

import asyncio
import logging
import struct
from collections.abc import Iterator
from dataclasses import replace

import xxhash

from paramstore.clock import Clock
from paramstore.upkeep.notes import CopyFinding
from paramstore.upkeep.progress import Finding, Pace, Scrub
from paramstore.upkeep.scrubber import Pause, Scrubber

logger = logging.getLogger(__name__)

DAY_S = 86_400.0
QUIET_S = 60.0
"""How long the patrol waits after a daemon's start, when clients fill the host tier."""
BYTES_PER_S_MAX = 64 << 20
"""The fastest it reads: 77 TB in 14 days; 2 % of what one NVMe drive reads."""
BUSY_SHARE_MAX = 0.05
PAUSE_MIN_S = 0.05
"""Shorter pauses are saved up, so that no timer is needed between small records."""
RETRY_S = 3600.0
"""The pause after a pass that found nothing to read, or failed; at most as long as a pass."""

Place = Finding | CopyFinding
"""A finding without its reason and without its steps, since these change between passes."""


def patrol_start(store_uuid: bytes, started_s: float) -> float:
    """Chooses where in the order of keys a daemon's passes begin: 0 to below 1, about evenly spread over daemons."""
    return xxhash.xxh3_64_intdigest(store_uuid + struct.pack("<d", started_s)) / (1 << 64) * (1 - 2**-53)


class Patrol:
    """Runs the patrol; owns its task and its scrub."""

    def __init__(
        self, scrubber: Scrubber, *, scrub_days: float, start_at: float, clock: Clock, pause: Pause = asyncio.sleep
    ) -> None:
        """start_at: where in the order of keys a pass begins, from 0 up to 1. pause: lets this many seconds of `clock` go by."""
        assert 0.0 <= start_at < 1.0, start_at
        self._scrubber = scrubber
        self._scrub_days = scrub_days
        self._start_at = start_at
        self._clock = clock
        self._pause = pause
        self._task: asyncio.Task[None] | None = None
        self._running: Scrub | None = None
        self._last: Scrub | None = None
        self._told: set[Place] = set()
        """Damaged places that were logged and that no pass has found whole since."""

    def start(self) -> None:
        """Begins to patrol, unless `scrub_days` is 0."""
        if self._scrub_days:
            self._task = asyncio.get_running_loop().create_task(self._run(), name="patrol")

    async def close(self) -> None:
        """Ends the patrol; on return nothing more is read, except for a piece that a worker may have under way."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    def stats(self) -> dict[str, object]:
        """Figures for `status`. running, last: as `Scrubber.stats` has them. last_ended_s: seconds since the last pass ended."""
        now_s, last = self._clock.now_s(), self._last
        return {
            "scrub_days": self._scrub_days,
            "running": self._running.summarise(now_s) if self._running is not None else None,
            "last": last.summarise(now_s) if last is not None else None,
            "last_ended_s": now_s - last.ended_s if last is not None and last.ended_s is not None else None,
        }

    async def _run(self) -> None:
        await self._pause(QUIET_S)
        while True:
            pace = Pace(BYTES_PER_S_MAX, self._clock.now_s(), busy_share_max=BUSY_SHARE_MAX, debt_s_max=PAUSE_MIN_S)
            scrub = self._running = self._scrubber.prepare(pace)
            try:
                await self._pass(scrub)
                scrub.state = "done"
            except Exception:
                scrub.state = "failed"
                logger.exception("a pass of the patrol failed")
            scrub.ended_s = self._clock.now_s()
            scrub.buffer = memoryview(b"")
            self._running, self._last = None, scrub
            self._conclude(scrub)
            await self._pause(self._rest_s(scrub))

    def _rest_s(self, scrub: Scrub) -> float:
        """Seconds until the next pass begins, which is not before all that was read is paid for."""
        assert scrub.ended_s is not None
        pass_s = self._scrub_days * DAY_S
        if scrub.state == "failed" or not scrub.bytes_read:
            return max(PAUSE_MIN_S, min(RETRY_S, pass_s))
        return max(PAUSE_MIN_S, scrub.started_s + pass_s - scrub.ended_s, scrub.pace.due_s - scrub.ended_s)

    async def _pass(self, scrub: Scrub) -> None:
        """Checks every key once."""
        scrubber, due_s = self._scrubber, scrub.started_s  # due_s: when to check the next key, so that bytes are spread evenly
        ends_s = scrub.started_s + self._scrub_days * DAY_S
        plan = await scrubber.plan(scrub)
        await scrubber.check_copies(scrub)
        self._tell(scrub)
        first = int(self._start_at * len(plan))
        for planned in (*plan[first:], *plan[:first]):
            while (wait_s := due_s - self._clock.now_s()) > PAUSE_MIN_S:
                await self._pause(wait_s)
            found, left_bytes = scrub.findings.count, scrub.bytes_left
            await scrubber.check_key(scrub, planned)
            if scrub.findings.count != found:
                self._tell(scrub)
            if left_bytes > scrub.bytes_left:
                due_s += (ends_s - due_s) * (left_bytes - scrub.bytes_left) / left_bytes

    def _tell(self, scrub: Scrub) -> None:
        """Logs findings that have not been logged yet."""
        for place, text in _places(scrub):
            if place not in self._told:
                self._told.add(place)
                logger.error("patrol: %s", text)

    def _conclude(self, scrub: Scrub) -> None:
        """Ends a pass: logs how it went, and forgets places that it did not find damaged again, so that they may be logged anew."""
        if scrub.state == "done":
            self._told = {place for place, _ in _places(scrub)}
            seconds = self._clock.now_s() - scrub.started_s
            logger.info(
                "patrol: a pass of %d records and %d copies of superblocks and commit notes took %.1f days: %d findings",
                scrub.records, scrub.copies, seconds / DAY_S, scrub.findings.count,
            )  # fmt: skip
            if seconds > self._scrub_days * DAY_S:
                logger.warning(
                    "patrol: the pass took longer than scrub_days=%g: it reads at most %d bytes a second and takes at most "
                    "%.0f %% of a volume's time", self._scrub_days, BYTES_PER_S_MAX, BUSY_SHARE_MAX * 100,
                )  # fmt: skip


def _places(scrub: Scrub) -> Iterator[tuple[Place, str]]:
    """Yields each finding's place, and the finding in words."""
    for copy in scrub.findings.copies:
        yield replace(copy, reason=""), describe_copy(copy)
    for finding in scrub.findings.records:
        yield replace(finding, steps=(), reason=""), describe(finding)


def describe(finding: Finding) -> str:
    """Describes a damaged record in words."""
    steps = ", ".join(f"step {step}" for step in finding.steps) or "uncommitted"
    return f"{finding.namespace} {finding.key}, {steps}, volume {finding.volume}, offset {finding.offset_bytes}: {finding.reason}"


def describe_copy(finding: CopyFinding) -> str:
    """Describes a damaged copy of a superblock or note in words."""
    what = finding.kind if finding.step is None else f"{finding.namespace} commit note of step {finding.step}"
    return f"{what}, copy {finding.copy}, volume {finding.volume}, offset {finding.offset_bytes}: {finding.reason}"
