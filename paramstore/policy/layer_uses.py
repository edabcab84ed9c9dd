"""One layer as the `schedule` policy knows it: when it is visited, which of its names are held, and how likely each is used.

The chance of a name is its share of the layer's routed visits, older ones counted less: each visit multiplies what was
counted before by `beta` (the decayed hits of MoESys, arXiv 2205.10034, Algorithm 2, per visit of the layer). As in `decayed_lfu`,
a count is kept as a weight whose unit grows, so that a decay touches no name.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Hashable, Iterator, Sequence
from functools import partial
from math import inf
from typing import NamedTuple

from paramstore.core.counts import Counts, dropping_zeros
from paramstore.core.visits import CHOSEN, USES, Visit, VisitKind

UNIT_MAX = 1e150
"""Weights are scaled back before they leave the range of a float."""
NEVER = 1e300
"""Visits until the next use of a name that has never been used: more than for any other name whose copy has not ended."""

BETA = 0.98
"""Factor of every count at a routed visit of its layer: habits last for many visits (0.8 to 0.995 were tried)."""
BETA_GATHERED = 0.3
"""Factor of every count at a gathered visit: what matters is how lately an expert was trained (0.1 to 0.95 were tried)."""
Ranked = tuple[float, int, Hashable]
"""(minus the visits until a name's next use, number of its last use, name): the least goes first."""


class Outlook(NamedTuple):
    """Visits from one position of the cycle to the layer's next use, next routed visit, next ending (which supersedes copies)."""

    use: float
    routed: float
    ending: float


class _Tiers(NamedTuple):
    """The held names in three groups: those whose copies the next ending supersedes, the least recently used first; those that may
    be used, the least likely first; those that the layer's next visit surely uses."""

    ended: list[Hashable]
    likely: list[Hashable]
    sure: list[Hashable]


class DecayedCounts:
    """Counts how often each name was used, older uses counted less; at most one count for each of a layer's names."""

    __slots__ = ("_full", "_unit", "_weights")

    def __init__(self) -> None:
        self._weights: dict[Hashable, float] = {}
        self._unit = 1.0
        self._full = 0.0
        """The weight of a name that was used every time."""

    def decay(self, beta: float) -> None:
        """Begins a visit: multiplies what was counted before by `beta`."""
        self._unit /= beta
        self._full += self._unit
        if self._unit > UNIT_MAX:
            self._weights = {name: weight / self._unit for name, weight in self._weights.items()}
            self._full /= self._unit
            self._unit = 1.0

    def add(self, name: Hashable) -> None:
        """Counts that the visit uses `name`."""
        self._weights[name] = self._weights.get(name, 0.0) + self._unit

    def share(self, name: Hashable) -> float:
        """The share of the visits, older ones counted less, that used `name`: 0 to 1."""
        weight = self._weights.get(name)
        return 0.0 if weight is None else weight / self._full

    def counts(self, names: Sequence[Hashable]) -> Counts:
        """Returns what was counted of `names`, and of how many visits."""
        weights, unit = self._weights, self._unit
        return Counts(routed=dropping_zeros(tuple([weights.get(name, 0.0) / unit for name in names])), visits=self._full / unit)

    def warm(self, names: Sequence[Hashable], counts: Counts) -> None:
        """Counts on from `counts` of `names`; to be called before any visit."""
        self._full = counts.visits * self._unit
        for name, uses in zip(names, counts.routed, strict=False):
            if uses:
                self._weights[name] = uses * self._unit


class LayerUses:
    """One layer's counts and held names. Positions count the cycle's visits from 0."""

    __slots__ = (
        "_tiers", "counts", "cycle", "done", "endings", "fresh", "gap", "held", "is_gathered", "kinds", "last",
        "position", "replaces_all", "routed", "touched", "uses", "visits", "wave",
    )  # fmt: skip

    def __init__(self) -> None:
        self.held: dict[Hashable, int] = {}
        """Held names, each with the number of its last use or arrival, ascending."""
        self.counts = DecayedCounts()
        self._tiers: dict[tuple[bool, bool], _Tiers] = {}
        """Cached tiers, by which of the layer's next visits comes first; emptied when anything happens in the layer."""
        self.place((), cycle=1)

    def place(self, visits: Sequence[tuple[int, Visit]], *, cycle: int) -> None:
        """Sets the layer's visits, with their positions in a cycle of `cycle` visits; counts stay."""
        self.cycle = cycle
        self._tiers.clear()
        self.kinds = {position: visit.kind for position, visit in visits}
        self.uses = [position for position, visit in visits if visit.kind in USES]
        self.routed = [position for position, visit in visits if visit.kind in CHOSEN]
        self.endings = [position for position, visit in visits if visit.kind not in USES]
        self.replaces_all = VisitKind.REPLACED in self.kinds.values()
        self.gap = cycle / max(1, len(self.routed))
        """Visits from one routed visit of the layer to the next, on average."""
        self.is_gathered = VisitKind.GATHERED in self.kinds.values()
        self.position = -1
        """Position of the visit begun last."""
        self.visits = 0
        self.wave = 0
        self.done: set[Hashable] = set()
        """Names used in the visit begun last."""
        self.last: set[Hashable] = set()
        """Names used in the last routed visit, which a repeated visit uses again."""
        self.touched: set[Hashable] = set()
        """Names used since the last ending, whose copies the next one supersedes where it is an update."""
        self.fresh: dict[Hashable, int] = {}
        """Names held ahead of use, each with the number of visits begun when it came."""

    # --- events

    def begin(self, position: int) -> None:
        """Begins a visit at `position`; -1 for a layer that is not in the declared order."""
        if self.position >= 0 and self.endings and _ahead(self.endings, self.position, self.cycle) <= self._steps_to(position):
            self.touched.clear()
        self.position = position
        self._tiers.clear()
        self.fresh = {name: visits for name, visits in self.fresh.items() if visits == self.visits}
        self.visits += 1
        self.done = set()
        if self.is_routed:
            self.last = set()
            self.counts.decay(BETA_GATHERED if self.is_gathered else BETA)

    @property
    def is_routed(self) -> bool:
        """Whether the visit begun last is a routed one."""
        return self.kinds.get(self.position, VisitKind.ROUTED) in CHOSEN

    def use(self, name: Hashable, number: int) -> None:
        """Notes that the visit begun last uses `name`."""
        if name not in self.done:
            self.done.add(name)
            if self.is_routed:
                self.last.add(name)
                self.counts.add(name)
        self.touched.add(name)
        self.fresh.pop(name, None)
        self._arrive(name, number)

    def hold(self, name: Hashable, number: int) -> None:
        """Holds `name` anew, ahead of its use."""
        self.fresh[name] = self.visits
        self.touched.discard(name)
        self._arrive(name, number)

    def _arrive(self, name: Hashable, number: int) -> None:
        self.held.pop(name, None)
        self.held[name] = number
        self._tiers.clear()

    def forget(self, name: Hashable) -> None:
        """Holds `name` no more; its count stays."""
        if self.held.pop(name, None) is not None:
            self.fresh.pop(name, None)
            self.touched.discard(name)

    def _steps_to(self, position: int) -> int:
        return (position - self.position) % self.cycle or self.cycle

    # --- forecasts

    def chance(self, name: Hashable) -> float:
        """The chance that a routed visit uses `name`; 0 for a name never used."""
        return self.counts.share(name)

    def next_use(self, cursor: int) -> int:
        """The position of the layer's next use after `cursor`; `cursor` itself if the cycle has no other."""
        return (cursor + _ahead(self.uses, cursor, self.cycle)) % self.cycle

    def outlook(self, cursor: int) -> Outlook:
        """The outlook from `cursor`, the visit there not counted. A layer that is not in the declared order is expected one cycle
        later; gathered layers come in no order known beforehand, so none of them is nearer than another."""
        if not self.uses:
            return Outlook(self.cycle, self.cycle, inf)
        if self.is_gathered:
            return Outlook(0, 0, inf)
        ending = _ahead(self.endings, cursor, self.cycle) if self.endings else inf
        return Outlook(_ahead(self.uses, cursor, self.cycle), _ahead(self.routed, cursor, self.cycle), ending)

    def worst_first(self, cursor: int) -> Iterator[Ranked]:
        """Yields the held names while `cursor` is at another layer's visit, those first whose next use is furthest.

        First come names whose copies end before their next use, then those used by chance, the least likely first, then sure ones.
        """
        outlook = self.outlook(cursor)
        held = self.held
        for name in self._tiers_at(outlook).ended:
            if name in held:
                yield (-inf, held[name], name)
        for name in self._tiers_at(outlook).likely:
            if name in held:
                yield (-self._by_chance_from(outlook.routed, name), held[name], name)
        for name in self._tiers_at(outlook).sure:
            if name in held:
                yield (-outlook.use, held[name], name)

    def _tiers_at(self, outlook: Outlook) -> _Tiers:
        """The held names (and some that no longer are) in their tiers; computed anew only after something happened in the layer."""
        kind = outlook.ending < outlook.routed, outlook.use < min(outlook.routed, outlook.ending)
        tiers = self._tiers.get(kind)
        if tiers is None:
            ended, likely, sure = [], [], []
            for name in self.held:
                if self._is_sure(name, outlook):
                    sure.append(name)
                elif kind[0] and self._is_ended(name):
                    ended.append(name)
                else:
                    likely.append(name)
            likely.sort(key=self.chance)
            tiers = self._tiers[kind] = _Tiers(ended, likely, sure)
        return tiers

    def worst_first_now(self, cursor: int) -> Iterator[Ranked]:
        """Yields the held names likewise during the layer's own visit at `cursor`, which may still use what it has not used yet."""
        outlook = self.outlook(cursor)
        until = partial(self.visits_until, outlook=outlook, is_current=True)
        return iter(sorted((-until(name), number, name) for name, number in self.held.items()))

    def visits_until(self, name: Hashable, outlook: Outlook, *, is_current: bool) -> float:
        """Expected number of visits to the next use of `name`. is_current: the outlook is from the layer's own visit."""
        if is_current and name not in self.done:
            if not self.is_routed:
                if name in self.last:
                    return 0.0
            elif name in self.fresh:
                return 0.0
            else:
                return self._by_chance_from(0, name)
        if self._is_sure(name, outlook):
            return outlook.use
        if outlook.ending < outlook.routed and self._is_ended(name):
            return inf
        return self._by_chance_from(outlook.routed, name)

    def _by_chance_from(self, distance: float, name: Hashable) -> float:
        """Expected visits to a use by chance: with chance c at each routed visit from `distance` on, 1/c - 1 of them pass first."""
        chance = self.chance(name)
        return distance + (1.0 / chance - 1.0) * self.gap if chance else NEVER

    def _is_sure(self, name: Hashable, outlook: Outlook) -> bool:
        """Whether the layer's next visit uses `name`: it was held ahead of that visit, or the visit repeats one that used it."""
        if self.fresh.get(name) == self.visits:
            return True
        return outlook.use < outlook.routed and outlook.use < outlook.ending and name in self.last

    def _is_ended(self, name: Hashable) -> bool:
        """Whether the layer's next ending, which comes before its next routed visit, supersedes the copy of `name`."""
        return self.replaces_all or name in self.touched


def _ahead(positions: list[int], cursor: int, cycle: int) -> int:
    """Number of visits from `cursor` to the first of `positions` after it, at least one."""
    index = bisect_right(positions, cursor)
    return (positions[index] if index < len(positions) else positions[0] + cycle) - cursor
