"""Counters of a namespace since the daemon started; the planner counts, and so do those who carry out what it decides."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class CommitProgress:
    """Start of a commit: its step, the time by the store's clock, and the namespace's count of bytes written then."""

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
    """Counters of one namespace."""

    param: PartStats = field(default_factory=PartStats)
    optim: PartStats = field(default_factory=PartStats)
    bytes_read: int = 0
    bytes_written: int = 0
    records_read_for_sums: int = 0
    """Records that were read for nothing but their device sums, as a client leased the extent first."""
    records_updated: int = 0
    records_caught_up: int = 0
    """Updates in `records_updated` that had no gradient: the record made steps with a gradient of zeros only."""
    records_advanced: int = 0
    """`param` copies and whole records read for which missed steps were made on a private copy."""
    missed_steps_made: int = 0
    """Missed steps that were made, on private copies and in updates."""
    records_written: int = 0
    commits: int = 0
    bytes_committed: int = 0
    """Bytes of the records that commits published: what had to be written, counted once for each record."""
    note_bytes: int = 0
    """Bytes of the commit notes that were written, in all copies on all volumes."""
    applies: int = 0
