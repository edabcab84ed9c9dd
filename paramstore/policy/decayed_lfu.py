"""Decayed least frequently used: Algorithm 2 of MoESys (SE-MoE, arXiv 2205.10034, its hierarchical storage).

Of the paper: a table of `hits` per sparse parameter, kept for what is not cached too; when room is needed, cached
parameters whose hits are below `threshold` go first, then those with the fewest hits (LFU); every K steps each count is
multiplied by β, a moving average that lets old habits fade.

Where the paper is silent, this file decides:
- Ties go to the least recently used.
- Below the threshold small counts say little: names go in the order in which they fell below it or were last used below
  it; of those that fell at once, the fewest hits first. (Ordered by count alone they would stand first anyway, and the
  threshold would change nothing.)
- A step is `capacity` accesses of the arena. An arena knows no training steps, and inference has none.
- Counts decay when the K-th step is full, before the next access is counted.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from itertools import chain, islice

UNIT_MAX = 1e150
"""Weights are scaled back before they leave the range of a float."""

Names = OrderedDict[Hashable, None]
"""An ordered set: first in, first to go."""


class DecayedLfu:
    """Owner of the counts of one arena and of the order that follows from them.

    A count is kept as a weight, hits x unit. Decaying all counts is then one division of the unit by β, and touches only
    the names that fall below the threshold. `record` and `forget` take microseconds whatever the number of names;
    `victims` looks at the names it returns and the protected ones before them.

    Invariant: a held name is in `_cold` or in the bucket of its weight, never in both; no bucket is empty.
    """

    def __init__(self, *, threshold: float, beta: float, decay_steps: int, capacity: int) -> None:
        """capacity: slots of the arena, at least 1. The others: see `config.PolicyConfig`."""
        self._threshold = threshold
        self._beta = beta
        self._accesses_per_decay = decay_steps * capacity
        self._accesses = 0
        """Since the last decay."""
        self._unit = 1.0
        self._weights: dict[Hashable, float] = {}
        """Of every name ever used: at most the names of the namespace."""
        self._cold: Names = OrderedDict()
        self._buckets: dict[float, Names] = {}
        """Held names by weight, each in order of use."""
        self._bucket_weights: list[float] = []
        """The keys of `_buckets`, ascending."""

    def record(self, name: Hashable) -> None:
        if self._accesses == self._accesses_per_decay:
            self._decay()
        self._accesses += 1
        self.forget(name)
        weight = self._weights[name] = self._weights.get(name, 0.0) + self._unit
        if weight < self._threshold * self._unit:
            self._cold[name] = None
            return
        bucket = self._buckets.get(weight)
        if bucket is None:
            bucket = self._buckets[weight] = OrderedDict()
            insort(self._bucket_weights, weight)
        bucket[name] = None

    def forget(self, name: Hashable) -> None:
        if name in self._cold:
            del self._cold[name]
            return
        weight = self._weights.get(name)
        bucket = self._buckets.get(weight) if weight is not None else None
        if weight is None or bucket is None or name not in bucket:
            return  # It is not held.
        del bucket[name]
        if not bucket:
            del self._buckets[weight]
            del self._bucket_weights[bisect_left(self._bucket_weights, weight)]

    def victims(self, count: int, protected: Callable[[Hashable], bool]) -> list[Hashable] | None:
        found = list(islice((name for name in self._worst_first() if not protected(name)), count))
        return found if len(found) == count else None

    def heat(self, name: Hashable) -> float:
        """Hits, decayed; of a name that is not held too."""
        return self._weights.get(name, 0.0) / self._unit

    def _worst_first(self) -> Iterator[Hashable]:
        return chain(self._cold, chain.from_iterable(self._buckets[weight] for weight in self._bucket_weights))

    def _decay(self) -> None:
        """Multiplies every count by β."""
        self._accesses = 0
        if self._unit < self._beta * UNIT_MAX:
            self._unit /= self._beta
        else:
            self._scale(self._beta / self._unit)
        fallen = bisect_left(self._bucket_weights, self._threshold * self._unit)
        for weight in self._bucket_weights[:fallen]:
            self._cold.update(self._buckets.pop(weight))
        del self._bucket_weights[:fallen]

    def _scale(self, factor: float) -> None:
        """Multiplies every weight by `factor` and makes the unit 1 again. Looks at every name: with β = 0.5
        at each 500th decay, with β = 0 at each."""
        self._unit = 1.0
        self._weights = {name: weight * factor for name, weight in self._weights.items()}
        buckets: dict[float, Names] = {}
        for weight in self._bucket_weights:
            buckets.setdefault(weight * factor, OrderedDict()).update(self._buckets[weight])
        self._buckets = buckets
        self._bucket_weights = list(buckets)
