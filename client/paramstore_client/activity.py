"""Decayed counts of the experts that each layer used; a prefetch ahead of the routing chooses by them.

Every visit multiplies a layer's counts by `beta` and adds one to those used (the hits of Algorithm 2 of MoESys,
arXiv 2205.10034, section 3.2.2, kept per layer). Ties go to the lower expert, so the ranking is repeatable.
"""

from __future__ import annotations

from collections.abc import Iterable

FORGET_BELOW = 1e-3
"""Counts below this are dropped; at the default beta that is after ten visits without use."""


class Activity:
    """Owner of the counts, of which there are at most layers x experts. Used from several threads at once it may lose some of them;
    what one thread reads no other changes."""

    def __init__(self, *, beta: float = 0.5) -> None:
        self._beta = beta
        self._counts: dict[int, dict[int, float]] = {}

    def record(self, layer: int, experts: Iterable[int]) -> None:
        """Counts a visit of `layer` that used `experts`."""
        decayed = {expert: count * self._beta for expert, count in self._counts.get(layer, {}).items()}
        self._counts[layer] = {expert: count for expert, count in decayed.items() if count >= FORGET_BELOW}
        self.add(layer, experts)

    def add(self, layer: int, experts: Iterable[int]) -> None:
        """Adds `experts` to the visit of `layer` that was recorded last."""
        counts = dict(self._counts.get(layer, {}))
        for expert in experts:
            counts[expert] = counts.get(expert, 0.0) + 1.0
        self._counts[layer] = counts

    def likely(self, layer: int, limit: int) -> tuple[int, ...]:
        """Up to `limit` experts that `layer` used, the most used first. Empty before the first visit."""
        counts = self._counts.get(layer, {})
        return tuple(sorted(counts, key=lambda expert: (-counts[expert], expert))[: max(limit, 0)])
