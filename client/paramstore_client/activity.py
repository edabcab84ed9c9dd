"""Decayed counts of the experts that each layer used: what a prefetch ahead of the routing goes by.

Every visit multiplies a layer's counts by `beta` and adds one to those used (the hits of Algorithm 2 of MoESys,
arXiv 2205.10034, section 3.3.1, kept per layer). Ties go to the lower expert, so the ranking is repeatable.
"""

from __future__ import annotations

from collections.abc import Iterable

FORGET_BELOW = 1e-3
"""A count below this is dropped: ten visits unused at the default beta."""


class Activity:
    """Owner of the counts; bounded by layers x experts."""

    def __init__(self, *, beta: float = 0.5) -> None:
        self._beta = beta
        self._counts: dict[int, dict[int, float]] = {}

    def record(self, layer: int, experts: Iterable[int]) -> None:
        """`layer` was visited and used `experts`."""
        decayed = {expert: count * self._beta for expert, count in self._counts.get(layer, {}).items()}
        self._counts[layer] = {expert: count for expert, count in decayed.items() if count >= FORGET_BELOW}
        self.add(layer, experts)

    def add(self, layer: int, experts: Iterable[int]) -> None:
        """The visit recorded last used these too."""
        counts = self._counts.setdefault(layer, {})
        for expert in experts:
            counts[expert] = counts.get(expert, 0.0) + 1.0

    def likely(self, layer: int, limit: int) -> tuple[int, ...]:
        """Up to `limit` experts that `layer` used, the most used first. Empty before the first visit."""
        counts = self._counts.get(layer, {})
        return tuple(sorted(counts, key=lambda expert: (-counts[expert], expert))[: max(limit, 0)])
