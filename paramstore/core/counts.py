"""What policies have counted, as values: so that the next daemon's policies go on from there."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Counts:
    """What one policy has counted of some names of one layer, held or not. Empty numbers: nothing was counted."""

    hits: tuple[float, ...] = ()
    """Uses of each name in the arena, decayed."""
    accesses: int = 0
    """Number of accesses of the arena since its last decay."""
    routed: tuple[float, ...] = ()
    """Uses of each name in the layer's routed visits, decayed."""
    visits: float = 0.0
    """Number of these visits, decayed alike."""


PartCounts = dict[str, tuple[Counts, ...]]
"""For each part with an arena, the counts of a namespace's keys, one for each of `KeySpace.runs`."""


def dropping_zeros(numbers: tuple[float, ...]) -> tuple[float, ...]:
    """Returns the numbers, or none where all are 0: a part of a model that is never used takes no space."""
    return numbers if any(numbers) else ()
