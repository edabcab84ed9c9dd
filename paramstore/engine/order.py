"""The order in which an apply updates its records, and how many it has written back ahead of itself. Pure functions."""

from __future__ import annotations

from collections.abc import Collection, Container, Iterable, Sequence
from itertools import islice

from paramstore.core.key import ExpertKey
from paramstore.core.residency import Working
from paramstore.engine.namespace import NamespaceState

LOOKAHEAD_DEPTHS = 8
"""How far ahead an apply looks for keys that need a slot, in multiples of its pipeline's depth."""


def update_order(
    keys: Iterable[ExpertKey], resident: Container[ExpertKey], *, given_up: int
) -> tuple[list[ExpertKey], list[ExpertKey]]:
    """Returns all of `keys` in the order in which to update them, and those that must not be evicted before their turn.

    Absent records pass through a few slots. So first come as many resident records as must give up theirs, `given_up`; then the
    absent ones with the other residents evenly among them, so that the volumes are busy from the first record to the last.
    Each part is in backward order, last layer first: the `param` copies made last are those that the next forward needs first.
    """
    present, absent = backward_order(keys, resident)
    if not absent:
        return present, []
    return [*present[:given_up], *_mixed(absent, present[given_up:])], present[given_up:]


def backward_order(keys: Iterable[ExpertKey], resident: Container[ExpertKey]) -> tuple[list[ExpertKey], list[ExpertKey]]:
    """Splits `keys` into resident ones and absent ones, each in the order in which a backward pass visits them."""
    present: list[ExpertKey] = []
    absent: list[ExpertKey] = []
    for key in sorted(keys, reverse=True):
        (present if key in resident else absent).append(key)
    return present, absent


def _mixed(first: Sequence[ExpertKey], second: Sequence[ExpertKey]) -> list[ExpertKey]:
    """Merges two sequences, each in its order, evenly spread."""
    parts = enumerate((first, second))
    placed = [((index + 0.5) / len(part), number, key) for number, part in parts for index, key in enumerate(part)]
    return [key for _, _, key in sorted(placed)]


def absent_ahead(queue: Iterable[ExpertKey], resident: Container[ExpertKey], *, depth: int) -> int:
    """How many slots, `depth` at most, the next keys in `queue` will ask for. It looks LOOKAHEAD_DEPTHS * depth keys ahead."""
    near = (key for key in islice(queue, LOOKAHEAD_DEPTHS * depth) if key not in resident)
    return sum(1 for _ in islice(near, depth))


def slots_to_clean(namespace: NamespaceState, wanted_slots: int, spared: Collection[ExpertKey] = ()) -> int:
    """How many dirty records must be written so that `wanted_slots` slots are free, clean or being written, without `spared`."""
    arena = namespace.working_arena
    assert arena is not None
    missing = wanted_slots - arena.slots.free_count
    for state in (Working.WRITING, Working.CLEAN):
        if missing > 0:
            ready = (key for key in reversed(namespace.in_state[state]) if key not in spared)  # the newest are likely not spared
            missing -= sum(1 for _ in islice(ready, missing))
    return max(0, missing)
