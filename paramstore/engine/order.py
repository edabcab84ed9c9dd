"""In which order an apply takes its records, and how many it has written ahead of itself. Pure."""

from __future__ import annotations

from collections.abc import Container, Iterable

from paramstore.core.key import ExpertKey
from paramstore.core.residency import Working
from paramstore.engine.namespace import NamespaceState


def update_order(keys: Iterable[ExpertKey], resident: Container[ExpertKey]) -> list[ExpertKey]:
    """`keys` with those first that are in memory, since they would be evicted otherwise; each part in backward order, as a
    declared schedule has it: the `param` copies made last are those that the next forward needs first."""
    return sorted(keys, key=lambda key: (key in resident, key), reverse=True)


def slots_to_clean(namespace: NamespaceState, wanted_slots: int, spared: Container[ExpertKey] = ()) -> int:
    """How many dirty records must be written so that `wanted_slots` are free, clean or being written; `spared` do not count."""
    arena = namespace.working_arena
    assert arena is not None
    states = [copy.state for key, copy in namespace.resident.items() if not spared or key not in spared]
    ready = arena.slots.free_count + states.count(Working.CLEAN) + states.count(Working.WRITING)
    return max(0, wanted_slots - ready)
