"""Gives namespaces their arenas, adds slots to them, and takes them back, as the host tier has memory for them."""

from __future__ import annotations

from collections.abc import Iterator

from paramstore.core.counts import PartCounts
from paramstore.engine.tables.arena import Arena, Arenas, SegmentMemory
from paramstore.engine.tables.namespace import NamespaceState
from paramstore.policy.base import CountingPolicy


def open_arenas(namespace: NamespaceState, param: Arena, working: Arena) -> None:
    """Gives the namespace its arenas, which have no slots yet. For a param schema both are one."""
    namespace.open_memory(Arenas(param, working))


def close_arenas(namespace: NamespaceState) -> None:
    """Takes the arenas away; nothing in them may be in use."""
    namespace.close_memory()


def keep_counts(namespace: NamespaceState, counts: PartCounts) -> None:
    """Keeps what policies of the namespace's arenas have counted, for those of its next ones."""
    namespace.kept_counts = counts


def warm(policy: CountingPolicy, namespace: NamespaceState, part: str) -> Iterator[None]:
    """Lets a new policy go on from what is kept of `part`; yields after each run of keys."""
    for keys, counts in zip(namespace.keys.runs(), namespace.kept_counts.get(part, ()), strict=False):
        policy.warm(keys, counts)
        yield


def plan_segment(arena: Arena, segment_id: int, memory: SegmentMemory, *, slots: int) -> None:
    """Notes a segment whose pages are still to be touched."""
    arena.planned_segments.append((segment_id, memory, slots))


def next_segment(arena: Arena) -> tuple[int, SegmentMemory, int] | None:
    """Takes (segment id, memory, slots) of the next segment to touch; None if there is none."""
    return arena.planned_segments.popleft() if arena.planned_segments else None


def add_segment(arena: Arena, segment_id: int, memory: SegmentMemory, *, slots: int) -> None:
    """Makes the slots of a segment available, whose pages are touched."""
    arena.add_segment(segment_id, memory, slots=slots)


def stop_growing(arena: Arena, *, is_final: bool = False) -> None:
    """Adds no more segments. is_final: the machine has no memory for them, so the slots that there are count as all."""
    arena.planned_segments.clear()
    if is_final:
        arena.planned_slots = arena.slots.count
