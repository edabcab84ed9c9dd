"""Fences: which volumes get no new extents any more, and why. A store stops writing where writing failed.

- A failed flush fences its volume at once: what was written to it since its last good flush may be gone, and no later flush
  will report that. Until the store is opened anew nothing can be proven there, so no step can be committed.
- The second failed write fences its volume: one failure may be one bad place, two mean a device that somebody must look at.
  Its flushes and notes still count, so steps are committed with records on the other volumes.
- Reads of a fenced volume go on. Fences are not stored: whoever opens the store anew has looked at the device.
"""

from __future__ import annotations

import logging
from collections import Counter

from paramstore.errors import VolumeError

logger = logging.getLogger(__name__)

WRITE_FAILURES_MAX = 2
"""Failed writes of one volume since the store was opened that fence it. A record whose write failed is written elsewhere once."""
WAY_ON = "restart the daemon after looking at the device, or making room where it is full"


class Fences:
    """Counts failed writes and keeps the fences of all volumes. One thread (the event loop's) uses it."""

    def __init__(self) -> None:
        self._write_failures: Counter[int] = Counter()
        self._reasons: dict[int, str] = {}
        """For each fenced volume, the failure that fenced it."""
        self._unflushed: dict[int, str] = {}
        """For each volume of which a flush failed, the first such error."""

    def fail_write(self, volume: int, error: Exception) -> None:
        """Counts a failed write of a record, a note or zeros; fences the volume if it is one too many."""
        self._write_failures[volume] += 1
        if self._write_failures[volume] >= WRITE_FAILURES_MAX:
            self._fence(volume, f"{self._write_failures[volume]} writes failed, the last: {error}")

    def fail_flush(self, volume: int, error: Exception) -> None:
        """Fences a volume whose flush failed."""
        self._unflushed.setdefault(volume, str(error))
        self._fence(volume, f"a flush failed: {error}")

    def _fence(self, volume: int, reason: str) -> None:
        if volume not in self._reasons:
            self._reasons[volume] = reason
            logger.error("volume %d is fenced, it gets no new extents: %s; %s", volume, reason, WAY_ON)

    def is_fenced(self, volume: int) -> bool:
        return volume in self._reasons

    def reason(self, volume: int) -> str | None:
        """Why the volume is fenced; None if it is not. A failed flush is named first, even if something else fenced it before."""
        if volume in self._unflushed:
            return f"a flush failed: {self._unflushed[volume]}"
        return self._reasons.get(volume)

    def write_failures(self, volume: int) -> int:
        """Number of failed writes since the store was opened."""
        return self._write_failures[volume]

    def check_provable(self) -> None:
        """Raises VolumeError if a step that is begun now could not be proven: a flush of some volume has failed."""
        if self._unflushed:
            raise VolumeError(f"no step can be committed: {self._told(self._unflushed)}")

    def hint(self) -> str:
        """Text to add to an error about missing space; empty while no volume is fenced."""
        return f"; {self._told(self._reasons)}" if self._reasons else ""

    def first(self, lack: str) -> str:
        """The text of an error about missing space: `lack`, after the fences and what helps against them, if there are any."""
        return f"{self._told(self._reasons)}. Without it: {lack}" if self._reasons else lack

    def _told(self, volumes: dict[int, str]) -> str:
        told = (f"volume {volume} is fenced ({self.reason(volume)})" for volume in sorted(volumes))
        return f"{', '.join(told)}: {WAY_ON}"
