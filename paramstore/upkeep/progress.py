"""The state of a scrub: what was asked, its pace, how far it came, what it found. The scrubber and the patrol write it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field

from paramstore.core.key import ExpertKey
from paramstore.engine.tables.namespace import NamespaceState
from paramstore.errors import ParamStoreError
from paramstore.upkeep.notes import CopyFinding

FINDINGS_MAX = 1000
"""Findings of each kind that are described at most; further ones are only counted."""
STATS_FINDINGS_MAX = 20
"""Findings of each kind that `stats` describes at most of each scrub: it is asked for often, and for figures."""


@dataclass(frozen=True, slots=True)
class Finding:
    """A record that could not be read, or is not what it must be. steps: the committed ones that need it, which may be none yet."""

    namespace: str
    key: ExpertKey
    steps: tuple[int, ...]
    epoch: int
    version: int
    volume: int
    offset_bytes: int
    reason: str


@dataclass(slots=True, eq=False)
class Findings:
    """All damage that a scrub found."""

    count: int = 0
    records: list[Finding] = field(default_factory=list)
    copies: list[CopyFinding] = field(default_factory=list)

    def add_record(self, finding: Finding) -> None:
        self.count += 1
        if len(self.records) < FINDINGS_MAX:
            self.records.append(finding)

    def add_copy(self, finding: CopyFinding) -> None:
        self.count += 1
        if len(self.copies) < FINDINGS_MAX:
            self.copies.append(finding)


@dataclass(slots=True, eq=False)
class Pace:
    """How fast a scrub may read: each piece is paid for with time, by its bytes and by the seconds that it took."""

    bytes_per_s: int | None
    due_s: float
    """Time from which all pieces read so far are paid for; the next piece's cost is added to it."""
    busy_share_max: float = 1.0
    """Largest share of the time in which a piece is under way, by the seconds that the pieces take."""
    debt_s_max: float = 0.0
    """Seconds that the scrub may be ahead of its rate, so that it does not pause after each small record."""
    paid_s: float = 0.0
    """Seconds that were added to `due_s` for the last piece before it was read."""

    def charge_bytes(self, length_bytes: int) -> None:
        self.paid_s = length_bytes / self.bytes_per_s if self.bytes_per_s is not None else 0.0
        self.due_s += self.paid_s

    def charge_seconds(self, seconds: float) -> None:
        """Adds what the piece just read cost by its seconds beyond what it cost by its bytes."""
        self.due_s += max(0.0, seconds / self.busy_share_max - self.paid_s)

    def wait_s(self, now_s: float) -> float:
        """Seconds that the scrub has to pause now before it reads on; 0.0 for none."""
        return wait_s if (wait_s := self.due_s - now_s) > self.debt_s_max else 0.0


@dataclass(slots=True, eq=False)
class Scrub:
    """One scrub: what was asked, how far it came, what it found."""

    chosen: Sequence[NamespaceState]
    keys: Sequence[ExpertKey] | None
    pace: Pace
    started_s: float
    state: str = "running"
    """One of "running", "done", "cancelled", "failed"."""
    ended_s: float | None = None
    records: int = 0
    records_total: int = 0
    bytes_read: int = 0
    bytes_total: int = 0
    superseded: int = 0
    """Records that were gone when their turn came."""
    copies: int = 0
    """Copies of superblocks and notes that were checked."""
    findings: Findings = field(default_factory=Findings)
    error: ParamStoreError | None = None
    task: asyncio.Task[None] | None = None
    buffer: memoryview = field(default_factory=lambda: memoryview(b""))
    """Buffer that its pieces are read into."""

    @property
    def bytes_left(self) -> int:
        return self.bytes_total - self.bytes_read

    def describe(self, now_s: float) -> dict[str, object]:
        """Describes progress, and in the end the result, as plain values that can be sent to a client."""
        return self._describe(now_s, FINDINGS_MAX)

    def summarise(self, now_s: float) -> dict[str, object]:
        """Describes what `describe` does, with the newest few findings of those that it has."""
        return self._describe(now_s, STATS_FINDINGS_MAX)

    def _describe(self, now_s: float, findings_max: int) -> dict[str, object]:
        return {
            "namespaces": [namespace.name for namespace in self.chosen], "bytes_per_s": self.pace.bytes_per_s,
            "state": self.state,
            "records": self.records, "records_total": self.records_total, "bytes_read": self.bytes_read,
            "bytes_total": self.bytes_total, "superseded": self.superseded, "copies": self.copies,
            "found": self.findings.count,
            "findings": [asdict(finding) for finding in self.findings.records[-findings_max:]],
            "copy_findings": [asdict(finding) for finding in self.findings.copies[-findings_max:]],
            "seconds": (now_s if self.ended_s is None else self.ended_s) - self.started_s,
        }  # fmt: skip
