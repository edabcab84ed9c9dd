"""Algorithm 2 of MoESys (SE-MoE, arXiv 2205.10034, its hierarchical storage) to the letter, to be compared with `DecayedLfu`.

The paper keeps a table of hits, multiplies each count by β every K steps, and where a slot is needed takes the parameter with the
lowest count *at or above* the threshold; the hits of what is evicted are *deleted*. It does not say what goes where every count is
below the threshold: here the lowest of all. Ties go to the least recently used; a step is `capacity` accesses, as in `DecayedLfu`.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from heapq import nsmallest

from paramstore.policy.base import Policy


class Algorithm2(Policy):
    """A policy that keeps the hits of what is held. Slow and plain: each decay touches every count."""

    def __init__(self, *, threshold: float, beta: float, decay_steps: int, capacity: int) -> None:
        """capacity: slots of the arena, at least 1. For the others see `config.PolicyConfig`."""
        self._threshold = threshold
        self._beta = beta
        self._accesses_per_decay = decay_steps * capacity
        self._accesses = 0
        self._hits: dict[Hashable, float] = {}
        """Of the held names alone, in order of last use."""

    def record(self, name: Hashable) -> None:
        if self._accesses and self._accesses % self._accesses_per_decay == 0:
            self._hits = {held: count * self._beta for held, count in self._hits.items()}
        self._accesses += 1
        self._hits[name] = self._hits.pop(name, 0.0) + 1

    def hold(self, name: Hashable) -> None:
        self._hits[name] = self._hits.pop(name, 0.0)

    def forget(self, name: Hashable) -> None:
        self._hits.pop(name, None)

    def victims(self, count: int, protected: Callable[[Hashable], bool]) -> list[Hashable] | None:
        hits, threshold = self._hits, self._threshold
        free = (name for name in hits if not protected(name))
        found = nsmallest(count, free, key=lambda name: (hits[name] < threshold, hits[name]))
        return found if len(found) == count else None

    def heat(self, name: Hashable) -> float:
        return self._hits.get(name, 0.0)
