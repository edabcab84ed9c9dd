"""Everything that the measurements of a run share: plan, clock, a directory to work in, and where progress is told."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from paramstore.bench.limits.pages import MemoryKind, Slab
from paramstore.bench.limits.raw import RawFile, RecordStore
from paramstore.bench.pairs import Pairs
from paramstore.bench.plan import Plan
from paramstore.bench.report.rows import Row, Target, judged
from paramstore.clock import Clock, MonotonicClock

GIGA = 1e9


class PeerMaker(Protocol):
    """Makes a peer that keeps `record_count` records, taken from `slab`, in `directory`."""

    def __call__(self, directory: Path, slab: Slab, *, record_bytes: int, record_count: int) -> RecordStore: ...


@dataclass(frozen=True, slots=True)
class Bench:
    """One run. directory: empty, and removed by whoever made the run."""

    plan: Plan
    directory: Path
    peers: tuple[PeerMaker, ...] = ()
    tell: Callable[[str], None] = lambda _: None
    clock: Clock = field(default_factory=MonotonicClock)

    @contextmanager
    def folder(self, name: str) -> Iterator[Path]:
        """Makes a new folder in `directory`, removed with all it holds at the end."""
        path = self.directory / name
        path.mkdir(mode=0o700)
        try:
            yield path
        finally:
            shutil.rmtree(path)

    @contextmanager
    def raw_file(self, folder: Path, kind: MemoryKind, *, record_bytes: int, record_count: int) -> Iterator[RawFile]:
        """Opens the baseline over the folder's raw file, which the first call creates; it has memory of `kind` for its lifetime."""
        slab = Slab(kind, record_bytes * record_count)
        try:
            raw = RawFile(folder / "raw", slab, record_bytes=record_bytes, record_count=record_count, clock=self.clock)
            try:
                yield raw
            finally:
                raw.close()
        finally:
            slab.close()


def row_of_pairs(
    pairs: Pairs, *, name: str, case: str, subject: str, record_bytes: int, against: str, target: Target | None = None
) -> Row:
    """Makes a row of pairs whose work is counted in bytes."""
    row = Row(
        name=name, case=case, subject=subject, record_bytes=record_bytes, against=against, target=target, unit="GB/s",
        value=pairs.rate / GIGA, limit=pairs.limit_rate / GIGA,
        ratio=pairs.ratio, ratio_min=pairs.ratio_min, ratio_max=pairs.ratio_max, parts=pairs.parts(),
    )  # fmt: skip
    return judged(row)
