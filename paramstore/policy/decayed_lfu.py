"""Decayed least frequently used: Algorithm 2 of MoESys (SE-MoE, arXiv 2205.10034, its hierarchical storage).

From the paper: a table of `hits` per sparse parameter; a `threshold`; every K steps each count is multiplied by β, a moving
average that lets old habits fade. When room is needed, the parameter with the fewest hits goes (LFU).

Two rules differ from the paper's:
- The paper looks for the fewest hits at or above `threshold`, which leaves in the cache what was used least of all. Here names
  whose hits are below it go first, then those with the fewest hits.
- The paper deletes the hits of what it evicts. Here counts outlive eviction: in a cache that holds a part of the experts each of
  them comes and goes, and one that began at 0 whenever it came would be the next to go.

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
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from itertools import chain, islice
from math import nan

from paramstore.core.counts import Counts, dropping_zeros
from paramstore.policy.base import CountingPolicy

UNIT_MAX = 1e150
"""Weights are scaled back before they leave the range of a float."""
MOVED_MAX = 1024
"""The most names whose place may be out of date: putting one in its place takes half a microsecond."""


class _Place:
    """The names of one weight, in order of use: the first goes first. weight: NaN for the cold names."""

    __slots__ = ("names", "weight")

    def __init__(self, weight: float) -> None:
        self.weight = weight
        self.names: OrderedDict[Hashable, None] = OrderedDict()


class DecayedLfu(CountingPolicy):
    """A policy that keeps the counts of one arena and the order that follows from them.

    A count is kept as a weight, hits x unit. Decaying all counts is then one division of the unit by β, and touches only
    the names that fall below the threshold. `record` counts and remembers the order of use; names are put in their place
    when that order is asked for, so a name used often is moved once. `victims` looks at the names it returns and the
    protected ones before them.

    Invariant: a held name is in `_moved` or in the one place that `_places` has for it, or in both; no bucket is empty.
    """

    def __init__(self, *, threshold: float, beta: float, decay_steps: int, capacity: int) -> None:
        """capacity: slots of the arena, at least 1. For the others see `config.PolicyConfig`."""
        self._threshold = threshold
        self._beta = beta
        self._accesses_per_decay = decay_steps * capacity
        self._accesses = 0
        """Number of accesses since the last decay."""
        self._unit = 1.0
        self._weights: dict[Hashable, float] = {}
        """Weight of every name ever used: at most the names of the namespace."""
        self._moved: dict[Hashable, None] = {}
        """Names used since they were last put in their place, last used last."""
        self._places: dict[Hashable, _Place] = {}
        self._cold = _Place(nan)
        self._buckets: dict[float, _Place] = {}
        self._bucket_weights: list[float] = []
        """The keys of `_buckets`, ascending."""

    def record(self, name: Hashable) -> None:
        self.record_all((name,))

    def record_all(self, names: Iterable[Hashable]) -> None:
        weights, moved, unit = self._weights, self._moved, self._unit
        for name in names:
            if self._accesses == self._accesses_per_decay:
                self._decay()
                weights, unit = self._weights, self._unit
            self._accesses += 1
            weights[name] = weights.get(name, 0.0) + unit
            if name in moved:
                del moved[name]
            moved[name] = None
        if len(moved) > MOVED_MAX:
            self._place_moved()

    def hold(self, name: Hashable) -> None:
        """Counts as a use."""
        self.record(name)

    def forget(self, name: Hashable) -> None:
        self._moved.pop(name, None)
        self._take_out(name)

    def victims(self, count: int, protected: Callable[[Hashable], bool]) -> list[Hashable] | None:
        self._place_moved()
        found = list(islice((name for name in self._worst_first() if not protected(name)), count))
        return found if len(found) == count else None

    def heat(self, name: Hashable) -> float:
        """The name's decayed hits, also of one that is not held."""
        return self._weights.get(name, 0.0) / self._unit

    @property
    def counts_unheld(self) -> bool:
        return True

    def counts(self, names: Sequence[Hashable]) -> Counts:
        weights, unit = self._weights, self._unit
        return Counts(hits=dropping_zeros(tuple([weights.get(name, 0.0) / unit for name in names])), accesses=self._accesses)

    def warm(self, names: Sequence[Hashable], counts: Counts) -> None:
        self._accesses = min(counts.accesses, self._accesses_per_decay)  # the earlier arena may have had more slots
        for name, hits in zip(names, counts.hits, strict=False):
            if hits:
                self._weights[name] = hits * self._unit

    def _worst_first(self) -> Iterator[Hashable]:
        buckets = (self._buckets[weight].names for weight in self._bucket_weights)
        return chain(self._cold.names, chain.from_iterable(buckets))

    def _place_moved(self) -> None:
        for name in self._moved:
            self._take_out(name)
            self._put(name)
        self._moved.clear()

    def _put(self, name: Hashable) -> None:
        weight = self._weights[name]
        if weight < self._threshold * self._unit:
            place = self._cold
        elif (place := self._buckets.get(weight, self._cold)) is self._cold:
            place = self._buckets[weight] = _Place(weight)
            insort(self._bucket_weights, weight)
        place.names[name] = None
        self._places[name] = place

    def _take_out(self, name: Hashable) -> None:
        place = self._places.pop(name, None)
        if place is None:
            return  # It is not held, or was never put in a place yet.
        del place.names[name]
        if not place.names and place is not self._cold:
            del self._buckets[place.weight]
            del self._bucket_weights[bisect_left(self._bucket_weights, place.weight)]

    def _decay(self) -> None:
        """Multiplies every count by β."""
        self._place_moved()
        self._accesses = 0
        if self._unit < self._beta * UNIT_MAX:
            self._unit /= self._beta
        else:
            self._scale(self._beta / self._unit)
        fallen = bisect_left(self._bucket_weights, self._threshold * self._unit)
        for weight in self._bucket_weights[:fallen]:
            for name in self._buckets.pop(weight).names:
                self._cold.names[name] = None
                self._places[name] = self._cold
        del self._bucket_weights[:fallen]

    def _scale(self, factor: float) -> None:
        """Multiplies every weight by `factor` and makes the unit 1 again. It looks at every name, but is needed rarely: with β =
        0.5 at each 500th decay, only with β = 0 at each."""
        self._unit = 1.0
        self._weights = {name: weight * factor for name, weight in self._weights.items()}
        buckets: dict[float, _Place] = {}
        for weight in self._bucket_weights:
            place = buckets.setdefault(weight * factor, _Place(weight * factor))
            for name in self._buckets[weight].names:
                place.names[name] = None
                self._places[name] = place
        self._buckets = buckets
        self._bucket_weights = list(buckets)
