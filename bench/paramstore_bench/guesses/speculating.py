"""Judges decoding with guesses of the next layer's router beside decoding without, on the same texts in the same process.

Hits are keys whose bytes stood when their visit began; loads are bytes that the volume read. The wait of a demand read is from the
moment at which the client asked for the key, or its read was submitted if that was later, to the end of the read: a read that began
as a guess and is awaited then counts from where it is awaited.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

import msgspec

from paramstore.bench.pairs import percentile
from paramstore.bench.report.rows import SUBJECT, Row, Target, judged
from paramstore.core.key import ExpertKey

HITS_MORE, LOADS_MOST = 0.3, 1.3
"""Asked where a quarter of the experts stand."""
SPEED_LEAST, SPEED_LEAST_IN_REACH = 0.98, 1.15
"""Asked everywhere; and where loads take 0.5 to 1.5 times as long as arithmetic."""
WAIT_MOST = 1.1
REACH = (0.5, 1.5)


@dataclass(frozen=True, slots=True)
class Decoded:
    """One timed run. visited, hits: keys; read_bytes: by the volume; waits_s: of its demand reads."""

    seconds: float
    visited: int
    hits: int
    read_bytes: int
    waits_s: Sequence[float]

    def with_more(self, other: Decoded) -> Decoded:
        """Both runs as one."""
        return Decoded(
            self.seconds + other.seconds, self.visited + other.visited, self.hits + other.hits,
            self.read_bytes + other.read_bytes, [*self.waits_s, *other.waits_s],
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Cell:
    """A combination that is measured. bytes_per_s: the limit of the volume's reads; None: the disk's own. note: of what model."""

    share: float
    batch: int
    threads: int
    bytes_per_s: float | None = None
    note: str = ""

    @property
    def case(self) -> str:
        limit = "" if self.bytes_per_s is None else f", volume of {self.bytes_per_s / 1e9:.2f} GB/s"
        return f"{self.share:.0%} of the experts, batch {self.batch}, {self.threads} threads{limit}"


def waits_of(transfers: Sequence[Sequence[object]], asked: Mapping[ExpertKey, Sequence[float]]) -> list[float]:
    """The waits of demand reads. transfers: rows of `Store.trace_end`; asked: when the client asked for each key, ascending."""
    waits = []
    for _, _, layer, expert, urgency, _, submitted_s, _, ended_s in transfers:
        assert isinstance(layer, int)
        assert isinstance(expert, int)
        assert isinstance(submitted_s, float)
        assert isinstance(ended_s, float)
        before = [asked_s for asked_s in asked.get((layer, expert), ()) if asked_s <= ended_s]
        if urgency == "demand" and before:
            waits.append(ended_s - max(submitted_s, before[-1]))
    return waits


def rows_of(cell: Cell, pairs: Sequence[tuple[Decoded, Decoded]], *, tokens: int, compute_s: float, record_bytes: int) -> list[Row]:
    """The rows of one cell. pairs: (with guesses, without). compute_s: the same run with everything in memory."""
    ons, offs = [on for on, _ in pairs], [off for _, off in pairs]
    parts = {
        "memory_s": compute_s, "on_s": median(on.seconds for on in ons), "off_s": median(off.seconds for off in offs),
        "on_hits": hit_rate(ons), "off_hits": hit_rate(offs), "on_read_bytes": median(on.read_bytes for on in ons),
        "off_read_bytes": median(off.read_bytes for off in offs), "load_of_compute": load_of_compute(cell, offs, compute_s),
        "on_p99_us": p99_us(ons), "off_p99_us": p99_us(offs),
    }  # fmt: skip
    is_in_reach = cell.bytes_per_s is not None and REACH[0] <= parts["load_of_compute"] <= REACH[1]
    common = Row(
        name="decode", case=cell.case, subject=SUBJECT, unit="tokens/s", record_bytes=record_bytes, against="without guesses",
        value=tokens / parts["on_s"], limit=tokens / parts["off_s"], parts=parts, note=cell.note,
    )  # fmt: skip
    return [
        _beside(common, [off.seconds / on.seconds for on, off in pairs], SPEED_LEAST_IN_REACH if is_in_reach else SPEED_LEAST),
        _waits(common, parts),
        *(_hits_and_loads(common, pairs, parts) if cell.bytes_per_s is None else ()),
    ]


def hit_rate(runs: Sequence[Decoded]) -> float:
    """Hits of all keys visited."""
    return sum(run.hits for run in runs) / max(1, sum(run.visited for run in runs))


def p99_us(runs: Sequence[Decoded]) -> float:
    """The 99th percentile of all waits; 0 where nothing was awaited."""
    waits = [wait for run in runs for wait in run.waits_s]
    return 1e6 * percentile(waits, 99) if waits else 0.0


def load_of_compute(cell: Cell, offs: Sequence[Decoded], compute_s: float) -> float:
    """Times that loads take beside arithmetic: by the limit where there is one, else what a run takes beyond arithmetic."""
    if cell.bytes_per_s is None:
        return max(0.0, median(off.seconds for off in offs) / compute_s - 1)
    return median(off.read_bytes for off in offs) / cell.bytes_per_s / compute_s


def _beside(common: Row, ratios: Sequence[float], least: float) -> Row:
    row = _renamed(common, ratio=median(ratios), ratio_min=min(ratios), ratio_max=max(ratios), target=Target("ratio", ">=", least))
    return judged(row)


def _waits(common: Row, parts: Mapping[str, float]) -> Row:
    on_us, off_us = parts["on_p99_us"], parts["off_p99_us"]
    return judged(
        _renamed(
            common, name="p99 of a demand read", unit="us", value=on_us, limit=off_us, ratio=on_us / off_us if off_us else 0.0,
            target=Target("ratio", "<=", WAIT_MOST),
        )
    )


def _hits_and_loads(common: Row, pairs: Sequence[tuple[Decoded, Decoded]], parts: Mapping[str, float]) -> list[Row]:
    is_asked = common.case.startswith("25%")
    more = parts["on_hits"] - parts["off_hits"]
    hits = _renamed(
        common, name="hits", unit="more of all visits", value=more, limit=None,
        target=Target("value", ">=", HITS_MORE) if is_asked else None,
    )  # fmt: skip
    ratios = [on.read_bytes / max(1, off.read_bytes) for on, off in pairs]
    loads = _renamed(
        common, name="loads", unit="bytes a run", value=parts["on_read_bytes"], limit=parts["off_read_bytes"],
        ratio=median(ratios), ratio_min=min(ratios), ratio_max=max(ratios),
        target=Target("ratio", "<=", LOADS_MOST) if is_asked else None,
    )  # fmt: skip
    return [judged(hits), judged(loads)]


def _renamed(row: Row, **changes: object) -> Row:
    return msgspec.structs.replace(row, **changes)


def limited(cell: Cell, bytes_per_s: float) -> Cell:
    """The cell on a volume of this rate."""
    return replace(cell, bytes_per_s=bytes_per_s)
