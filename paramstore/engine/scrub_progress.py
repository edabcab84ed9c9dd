"""The state of a scrub: what was asked, how far it came, what it found. Values only; the scrubber and the patrol write them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field

from paramstore.core.key import ExpertKey
from paramstore.engine.scrub_notes import CopyFinding
from paramstore.engine.tables.namespace import NamespaceState
from paramstore.errors import ParamStoreError


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
class Scrub:
    """One scrub: what was asked, how far it came, what it found."""

    chosen: Sequence[NamespaceState]
    keys: Sequence[ExpertKey] | None
    bytes_per_s: int | None
    started_s: float
    due_s: float
    """Time from which all pieces read so far are paid for; the next piece's cost is added to it."""
    busy_share_max: float = 1.0
    """Largest share of the time in which a piece of it is under way, by the seconds that its pieces take."""
    paid_s: float = 0.0
    """Seconds that were added to `due_s` for the last piece before it was read."""
    debt_s_max: float = 0.0
    """Seconds that it may be ahead of its rate, so that it does not pause after each small record."""
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
    found: int = 0
    findings: list[Finding] = field(default_factory=list)
    copy_findings: list[CopyFinding] = field(default_factory=list)
    error: ParamStoreError | None = None
    task: asyncio.Task[None] | None = None
    buffer: memoryview = field(default_factory=lambda: memoryview(b""))
    """Buffer that its pieces are read into."""

    @property
    def bytes_left(self) -> int:
        return self.bytes_total - self.bytes_read

    def describe(self, now_s: float) -> dict[str, object]:
        """Progress, and in the end the result, as plain values that can be sent to a client."""
        return {
            "namespaces": [namespace.name for namespace in self.chosen], "bytes_per_s": self.bytes_per_s, "state": self.state,
            "records": self.records, "records_total": self.records_total, "bytes_read": self.bytes_read,
            "bytes_total": self.bytes_total, "superseded": self.superseded, "copies": self.copies, "found": self.found,
            "findings": [asdict(finding) for finding in self.findings],
            "copy_findings": [asdict(finding) for finding in self.copy_findings],
            "seconds": (now_s if self.ended_s is None else self.ended_s) - self.started_s,
        }  # fmt: skip
