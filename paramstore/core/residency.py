"""The two residency tables: every legal (state, event) pair and the state it leads to. All others raise.

Working copy of the stored part, one per key:      `param` copies, one per (key, epoch, version), immutable:

  ABSENT ─load→ LOADING ─loaded→ CLEAN               ABSENT ─load→ LOADING ─loaded→ READY
  ABSENT ─fill→ UPDATING                             READY ─evict→ ABSENT
  CLEAN | DIRTY ─update→ UPDATING ─updated→ DIRTY    LOADING | READY ─retire→ RETIRED
  DIRTY ─write→ WRITING ─written→ CLEAN              RETIRED ─free→ ABSENT
  CLEAN ─evict→ ABSENT

UPDATING forbids evict, write and materialise; WRITING forbids update. `discard` (rollback) leads to ABSENT from every other
state: a slot that a worker still uses is orphaned, and freed when that worker returns.
"""

from __future__ import annotations

from enum import StrEnum
from typing import TypeVar


class Working(StrEnum):
    """State of a key's working copy."""

    ABSENT = "absent"
    LOADING = "loading"
    CLEAN = "clean"
    UPDATING = "updating"
    DIRTY = "dirty"
    WRITING = "writing"


class WorkingEvent(StrEnum):
    LOAD = "load"
    LOADED = "loaded"
    LOAD_FAILED = "load_failed"
    FILL = "fill"
    UPDATE = "update"
    UPDATED = "updated"
    UPDATE_FAILED = "update_failed"
    WRITE = "write"
    WRITTEN = "written"
    WRITE_FAILED = "write_failed"
    EVICT = "evict"
    DISCARD = "discard"


class Copy(StrEnum):
    """State of one immutable `param` copy."""

    ABSENT = "absent"
    LOADING = "loading"
    READY = "ready"
    RETIRED = "retired"


class CopyEvent(StrEnum):
    LOAD = "load"
    LOADED = "loaded"
    LOAD_FAILED = "load_failed"
    EVICT = "evict"
    RETIRE = "retire"
    FREE = "free"


W, WE, C, CE = Working, WorkingEvent, Copy, CopyEvent

WORKING_TABLE: dict[tuple[Working, WorkingEvent], Working] = {
    (W.ABSENT, WE.LOAD): W.LOADING,
    (W.ABSENT, WE.FILL): W.UPDATING,
    (W.LOADING, WE.LOADED): W.CLEAN,
    (W.LOADING, WE.LOAD_FAILED): W.ABSENT,
    (W.LOADING, WE.DISCARD): W.ABSENT,
    (W.CLEAN, WE.UPDATE): W.UPDATING,
    (W.CLEAN, WE.EVICT): W.ABSENT,
    (W.CLEAN, WE.DISCARD): W.ABSENT,
    (W.UPDATING, WE.UPDATED): W.DIRTY,
    (W.UPDATING, WE.UPDATE_FAILED): W.ABSENT,  # torn bytes are never written and never materialised
    (W.UPDATING, WE.DISCARD): W.ABSENT,
    (W.DIRTY, WE.UPDATE): W.UPDATING,
    (W.DIRTY, WE.WRITE): W.WRITING,
    (W.DIRTY, WE.DISCARD): W.ABSENT,
    (W.WRITING, WE.WRITTEN): W.CLEAN,
    (W.WRITING, WE.WRITE_FAILED): W.DIRTY,
    (W.WRITING, WE.DISCARD): W.ABSENT,
}

COPY_TABLE: dict[tuple[Copy, CopyEvent], Copy] = {
    (C.ABSENT, CE.LOAD): C.LOADING,
    (C.LOADING, CE.LOADED): C.READY,
    (C.LOADING, CE.LOAD_FAILED): C.ABSENT,
    (C.LOADING, CE.RETIRE): C.RETIRED,  # its bytes still land, for the leases that wait for it
    (C.READY, CE.EVICT): C.ABSENT,
    (C.READY, CE.RETIRE): C.RETIRED,
    (C.RETIRED, CE.LOADED): C.RETIRED,
    (C.RETIRED, CE.LOAD_FAILED): C.ABSENT,
    (C.RETIRED, CE.FREE): C.ABSENT,
}

State = TypeVar("State", Working, Copy)


class IllegalTransition(AssertionError):
    """A (state, event) pair that the table forbids: always a bug."""


def next_working(state: Working, event: WorkingEvent) -> Working:
    """Returns the state after `event`; raises IllegalTransition if the table forbids it, and then nothing has changed."""
    after = WORKING_TABLE.get((state, event))
    if after is None:
        raise IllegalTransition(f"working copy in state {state} got {event}")
    return after


def next_copy(state: Copy, event: CopyEvent) -> Copy:
    """Returns the state after `event`; raises IllegalTransition if the table forbids it, and then nothing has changed."""
    after = COPY_TABLE.get((state, event))
    if after is None:
        raise IllegalTransition(f"param copy in state {state} got {event}")
    return after


MAY_MATERIALISE = frozenset({W.CLEAN, W.DIRTY, W.WRITING})
"""States in which the slot's bytes are whole and stay so while a reader holds the slot against updates."""
EVICTABLE = frozenset({W.CLEAN})
"""States in which a working copy can be evicted: eviction never writes, so only a clean one."""
