"""Volumes and a catalog whose process is killed at the N-th thing they do to a disk. The daemon itself knows nothing of them.

A point lies before every write, in the middle of it (its first half is in the file), before every flush, before every
transaction and after it. SIGKILL: nothing is finished, flushed, closed or said.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Sequence

from paramstore.storage.catalog import Change
from paramstore.storage.file_volume import FileVolume
from paramstore.storage.lmdb_catalog import LmdbCatalog
from paramstore.storage.volume import ALIGNMENT_BYTES


class KillPoints:
    """Counts points from 1 and ends the process at number `kill_at`; 0: never."""

    def __init__(self, kill_at: int = 0) -> None:
        self.kill_at = kill_at
        self._reached = 0
        self._lock = threading.Lock()

    def reach(self) -> None:
        with self._lock:
            self._reached += 1
            if self._reached == self.kill_at:
                os.kill(os.getpid(), signal.SIGKILL)
                signal.pause()

    @property
    def is_next(self) -> bool:
        """Whether the next point is the last."""
        return self._reached + 1 == self.kill_at


points = KillPoints()
"""Of this process."""


class KillableVolume(FileVolume):
    """A file volume with points."""

    def write(self, offset_bytes: int, data: Sequence[memoryview]) -> None:
        points.reach()
        if points.is_next:
            super().write(offset_bytes, _first_half(data))
        points.reach()
        super().write(offset_bytes, data)

    def flush(self) -> None:
        points.reach()
        super().flush()


class KillableCatalog(LmdbCatalog):
    """A catalog with points."""

    def apply(self, change: Change) -> None:
        points.reach()
        super().apply(change)
        points.reach()


def _first_half(data: Sequence[memoryview]) -> list[memoryview]:
    """Whole pages from the front: about half of the first buffer."""
    half_bytes = data[0].nbytes // 2 // ALIGNMENT_BYTES * ALIGNMENT_BYTES
    return [data[0].cast("B")[:half_bytes]]
