"""What is counted of a namespace since the daemon started: by the planner, and by those who carry out what it decides."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class CommitProgress:
    """Where a commit began: its step, when by the store's clock, and the namespace's count of bytes written then."""

    step: int
    started_s: float
    bytes_written: int


@dataclass(slots=True)
class PartStats:
    """Counters of one part of a namespace."""

    hits: int = 0
    misses: int = 0
    joins: int = 0
    evictions: int = 0
    prefetched: int = 0
    prefetched_bytes: int = 0
    wasted: int = 0
    wasted_bytes: int = 0


@dataclass(slots=True)
class NamespaceStats:
    param: PartStats = field(default_factory=PartStats)
    optim: PartStats = field(default_factory=PartStats)
    bytes_read: int = 0
    bytes_written: int = 0
    records_updated: int = 0
    records_caught_up: int = 0
    """Of those updated, the ones without a gradient."""
    records_advanced: int = 0
    """`param` copies, and records read, that were made of a record with missed steps."""
    missed_steps_made: int = 0
    """Missed steps that were made, for these and in updates."""
    records_written: int = 0
    commits: int = 0
    bytes_committed: int = 0
    """Of the records that commits published: what had to be written, once each."""
    note_bytes: int = 0
    """Of the commit notes, in all copies on all volumes."""
    applies: int = 0
