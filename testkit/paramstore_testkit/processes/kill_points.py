"""Named points of a daemon's work at which its process is killed, or held up. The daemon itself knows nothing of them.

Disk points lie before every write, in the middle of it (its first half is in the file), before every flush, before
every transaction and after it; `instrument` adds one before and one after each function of WRAPPED. After SIGKILL nothing is
finished, flushed, closed or said. A held point waits for the process that holds the lock of its gate's file.
"""

from __future__ import annotations

import fcntl
import functools
import os
import signal
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from paramstore.daemon import assembly, volume_places
from paramstore.daemon.channel import Channel
from paramstore.engine.planner.claims import ClaimPlanner
from paramstore.engine.planner.cuts import CutPlanner
from paramstore.engine.planner.planner import Planner
from paramstore.engine.planner.working_copies import WorkingPlanner
from paramstore.engine.records import update
from paramstore.engine.records.applies import Applies
from paramstore.engine.steps import proof
from paramstore.storage.catalog.base import Change, Contents
from paramstore.storage.catalog.ledger import Ledger
from paramstore.storage.catalog.lmdb_catalog import LmdbCatalog
from paramstore.storage.space.extents import Space
from paramstore.storage.volume.base import ALIGNMENT_BYTES
from paramstore.storage.volume.file_volume import FileVolume

DISK_POINTS = ("write", "write.half", "flush", "publish", "published")
"""Points that are counted where no name is given."""
READ_POINTS = ("load", "loaded", "read")
WRAPPED: Mapping[str, tuple[Any, str]] = {
    "format": (volume_places, "format_volume"),
    "recover": (assembly, "open_store"),
    "push": (Applies, "push"),
    "begin_apply": (ClaimPlanner, "begin_updates"),
    "update": (update, "update"),
    "settle_update": (Planner, "settle_update"),
    "fill": (update, "fill_initial"),
    "settle_write": (WorkingPlanner, "settle_write"),
    "reserve": (LmdbCatalog, "reserve"),
    "cut": (CutPlanner, "begin"),
    "note": (proof, "write_note"),
    "plan_publish": (Ledger, "plan_publish"),
    "settle_ledger": (Ledger, "settling"),
    "settle_cut": (CutPlanner, "settle"),
    "release": (Space, "release"),
    "plan_rollback": (Ledger, "plan_rollback"),
    "rollback": (Planner, "roll_back"),
    "answer": (Channel, "send"),
}
"""Owner and attribute of the function that does a step of the daemon's work, by the step's name."""
NAMES = (*DISK_POINTS, *READ_POINTS, *(f"{name}.{side}" for name in WRAPPED for side in ("before", "after")))
"""Names of all points, in no order."""


class KillPoints:
    """Counts points from 1 and ends the process at number `kill_at`; 0: never. name: counts only points of that name.

    gates: name -> file; a thread that reaches such a point waits there while another process holds the file's lock.
    """

    def __init__(self, kill_at: int = 0, name: str = "", gates: Mapping[str, Path] | None = None) -> None:
        self.kill_at = kill_at
        self.name = name
        self.gates = gates or {}
        self._reached = 0
        self._lock = threading.Lock()

    def reach(self, name: str) -> None:
        with self._lock:
            if self._counts(name):
                self._reached += 1
                if self._reached == self.kill_at:
                    os.kill(os.getpid(), signal.SIGKILL)
                    signal.pause()
        if name in self.gates:
            with self.gates[name].open("rb") as gate:
                fcntl.flock(gate, fcntl.LOCK_SH)

    def is_next(self, name: str) -> bool:
        """Whether the next point of this name is the one that kills."""
        return self._counts(name) and self._reached + 1 == self.kill_at

    def _counts(self, name: str) -> bool:
        return name == self.name if self.name else name in DISK_POINTS


points = KillPoints()
"""Points of this process."""


def instrument() -> None:
    """Puts points around every function of WRAPPED, in this process and for good."""
    for name, (owner, attribute) in WRAPPED.items():
        setattr(owner, attribute, _between_points(getattr(owner, attribute), name))


def _between_points(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    @functools.wraps(function)
    def wrapped(*arguments: Any, **named: Any) -> Any:
        points.reach(f"{name}.before")
        result = function(*arguments, **named)
        points.reach(f"{name}.after")
        return result

    return wrapped


class KillableVolume(FileVolume):
    """A file volume with points."""

    def read(self, offset_bytes: int, into: Sequence[memoryview]) -> None:
        points.reach("read")
        super().read(offset_bytes, into)

    def write(self, offset_bytes: int, data: Sequence[memoryview]) -> None:
        points.reach("write")
        if points.is_next("write.half"):
            super().write(offset_bytes, _first_half(data))
        points.reach("write.half")
        super().write(offset_bytes, data)

    def flush(self) -> None:
        points.reach("flush")
        super().flush()


class KillableCatalog(LmdbCatalog):
    """A catalog with points."""

    def load(self) -> Contents:
        points.reach("load")
        contents = super().load()
        points.reach("loaded")
        return contents

    def apply(self, change: Change) -> None:
        points.reach("publish")
        super().apply(change)
        points.reach("published")


def _first_half(data: Sequence[memoryview]) -> list[memoryview]:
    """Takes whole pages from the front: about half of the first buffer."""
    half_bytes = data[0].nbytes // 2 // ALIGNMENT_BYTES * ALIGNMENT_BYTES
    return [data[0].cast("B")[:half_bytes]]
