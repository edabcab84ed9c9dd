"""Ranks by expected next use: for clients whose visits of the layers have a known order, as training steps and rings have.

This is Belady's rule (evict what is needed furthest in the future, IBM Systems Journal 5(2), 1966) with the future estimated: the
client declares the cycle of its visits (`core/visits.py`), which gives the distance to each layer's next one; decayed counts
give the chance that a visit uses a given expert. So in a cyclic scan larger than the arena a fixed share of the names stays
and the rest passes through the remaining slots, where a policy that looks at the past alone would evict every name in turn.

- The position of "now" in the cycle follows from the recorded uses: a use belongs to the visit under way if it can, else to its
  layer's next one. A use out of order (a reader's) moves the position to that layer's next visit, and the next use in order
  moves it back.
- A name held ahead of use (a prefetch, a copy that an update made) moves nothing, and counts as sure to be used at its layer's
  next visit.
- A name that an apply is to change (`expect`) stays until it was used, whatever the order.
- While no order is declared, another policy decides.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import replace
from heapq import heapify, heappop, heapreplace

from paramstore.core.counts import Counts
from paramstore.core.visits import USES, Visits
from paramstore.policy.base import CountingPolicy, layer_of
from paramstore.policy.layer_uses import LayerUses, Ranked

LATE_VISITS = 2
"""Number of visits that ranks of one job may be apart."""


class Schedule(CountingPolicy):
    """A policy that keeps the position in the declared cycle and what is known of each layer. Names are expert keys once an order
    is declared.

    `victims` looks at one name of each layer, the names it returns and the protected ones before them; a layer is sorted
    again after something happened in it.
    """

    def __init__(self, make_undeclared: Callable[[], CountingPolicy]) -> None:
        """make_undeclared: makes a policy for the time without a declared order."""
        self._make_undeclared = make_undeclared
        self._undeclared: CountingPolicy | None = make_undeclared()
        self._visits: Visits = ()
        self._next_uses: list[int] = []
        """For each position, the position of the next visit after it that uses copies, in whatever layer."""
        self._held: dict[Hashable, None] = {}
        """Held names while no order is declared; with one, each layer keeps its own."""
        self._layers: dict[object, LayerUses] = {}
        self._current: LayerUses | None = None
        self._cursor = -1
        self._number = 0
        """Number of the last use or arrival."""
        self._wave: set[Hashable] = set()
        """Names that were announced by `expect` and not used since."""
        self._wave_number = 0

    @property
    def visits(self) -> Visits:
        """The declared cycle; empty if there is none."""
        return self._visits

    def declare(self, visits: Visits) -> None:
        """Makes `visits` the cycle from here on; empty: none is known. Held names stay held, and counts are kept."""
        if visits == self._visits:
            return  # a client that declares again at each step loses nothing
        held = self._forget_all()
        self._visits, self._current, self._cursor = visits, None, -1
        if not visits:
            self._undeclared = self._make_undeclared()
            self._undeclared.record_all(held)
            self._held = dict.fromkeys(held)
            return
        self._undeclared = None
        self._next_uses = _next_uses(visits)
        placed: dict[object, list[tuple[int, object]]] = {layer: [] for layer in self._layers}
        for position, visit in enumerate(visits):
            placed.setdefault(visit.layer, []).append((position, visit))
        for layer, found in placed.items():
            self._layer(layer).place(found, cycle=len(visits))  # type: ignore[arg-type]
        for name in held:
            self.hold(name)
            self._layer_of(name).fresh.clear()  # these names were not held ahead of a visit, so their use is not sure

    def _forget_all(self) -> list[Hashable]:
        """Returns every held name, worst or oldest first; none is held afterwards."""
        if self._undeclared is not None:
            held = self._undeclared.victims(len(self._held), lambda name: False)
            assert held is not None
            self._held = {}
            return held
        numbers = {name: number for layer in self._layers.values() for name, number in layer.held.items()}
        for layer in self._layers.values():
            layer.held = {}
        return sorted(numbers, key=numbers.__getitem__)

    # --- the contract of a policy

    def record(self, name: Hashable) -> None:
        self.record_all((name,))

    def record_all(self, names: Iterable[Hashable]) -> None:
        if self._undeclared is not None:
            names = tuple(names)
            self._held.update(dict.fromkeys(names))
            self._undeclared.record_all(names)
            return
        for name in names:
            layer = self._layer_of(name)
            self._arrive(layer, name)
            self._number += 1
            layer.use(name, self._number)

    def hold(self, name: Hashable) -> None:
        if self._undeclared is not None:
            self._held[name] = None
            self._undeclared.hold(name)
            return
        self._number += 1
        self._layer_of(name).hold(name, self._number)

    def expect(self, names: Iterable[Hashable]) -> None:
        self._wave = set(names)
        self._wave_number += 1

    def forget(self, name: Hashable) -> None:
        if self._undeclared is not None:
            self._held.pop(name, None)
            self._undeclared.forget(name)
            return
        layer = self._layers.get(layer_of(name))
        if layer is not None:
            layer.forget(name)

    def victims(self, count: int, protected: Callable[[Hashable], bool]) -> list[Hashable] | None:
        if self._undeclared is not None:
            return self._undeclared.victims(count, protected)
        wave = self._wave
        found: list[Hashable] = []
        for name in self._worst_first(count):
            if len(found) == count:
                return found
            if name not in wave and not protected(name):
                found.append(name)
        if len(found) < count and wave:
            awaited = (name for name in self._worst_first(count) if name in wave and not protected(name))
            found.extend(name for name, _ in zip(awaited, range(count - len(found)), strict=False))
        return found if len(found) == count else None

    def heat(self, name: Hashable) -> float:
        """The chance that a visit of its layer uses `name`; 0 for one never used."""
        if self._undeclared is not None:
            return self._undeclared.heat(name)
        layer = self._layers.get(layer_of(name))
        return 0.0 if layer is None else layer.chance(name)

    @property
    def counts_unheld(self) -> bool:
        return self._undeclared is None or self._undeclared.counts_unheld

    def counts(self, names: Sequence[Hashable]) -> Counts:
        """The counts of the layer, which outlast the declared order, and those of the policy without one, if that decides now."""
        layer = self._layers.get(layer_of(names[0]))
        counted = Counts() if layer is None else layer.counts.counts(names)
        if self._undeclared is None:
            return counted
        return replace(self._undeclared.counts(names), routed=counted.routed, visits=counted.visits)

    def warm(self, names: Sequence[Hashable], counts: Counts) -> None:
        if self._undeclared is not None:
            self._undeclared.warm(names, counts)
        if counts.visits:
            self._layer_of(names[0]).counts.warm(names, counts)

    # --- the position of "now"

    def _arrive(self, layer: LayerUses, name: Hashable) -> None:
        """Moves to the visit that this use of `name` belongs to, and begins that visit if it is a new one."""
        if name in self._wave:
            self._wave.discard(name)
            self._arrive_expected(layer)
        elif not layer.uses:
            if name in layer.done or not layer.visits:
                layer.begin(-1)
        elif layer is self._current:
            after = self._next_uses[self._cursor]
            if not self._is_over(layer, name) or self._visits[after].layer != layer_of(name):
                return
            self._cursor = after
            layer.begin(after)
        elif not self._is_late(layer) or self._is_over(layer, name):
            self._current, self._cursor = layer, layer.next_use(self._cursor)
            layer.begin(self._cursor)

    def _arrive_expected(self, layer: LayerUses) -> None:
        """Moves to a layer's visit in an apply. An apply touches a layer at several times (resident records are spread among the
        rest), which count as one visit."""
        if layer is not self._current and layer.uses:
            self._current, self._cursor = layer, layer.next_use(self._cursor)
        if layer.wave != self._wave_number:
            layer.wave = self._wave_number
            layer.begin(self._cursor if layer.uses else -1)

    def _is_late(self, layer: LayerUses) -> bool:
        """Whether the layer's visit began so few visits ago that another rank may still be there."""
        cycle = len(self._visits)
        return layer.visits > 0 and (self._cursor - layer.position) % cycle <= min(LATE_VISITS, cycle // 4)

    @staticmethod
    def _is_over(layer: LayerUses, name: Hashable) -> bool:
        """Whether a use of `name` cannot belong to the layer's visit under way."""
        return name in layer.done or not (layer.is_routed or name in layer.last)

    def _layer_of(self, name: Hashable) -> LayerUses:
        return self._layer(layer_of(name))

    def _layer(self, index: object) -> LayerUses:
        layer = self._layers.get(index)
        if layer is None:
            layer = self._layers[index] = LayerUses()
            layer.place((), cycle=max(1, len(self._visits)))
        return layer

    # --- the victims

    def _worst_first(self, count: int) -> Iterator[Hashable]:
        """Yields the held names of all layers, those first whose next use is furthest; of equals the one used longest ago."""
        if not count:
            return
        rows: list[tuple[Ranked, Iterator[Ranked]]] = []
        for layer in self._layers.values():
            if layer.held:
                ranked = layer.worst_first_now(self._cursor) if layer is self._current else layer.worst_first(self._cursor)
                rows.append((next(ranked), ranked))
        heapify(rows)
        while rows:
            (_, _, name), ranked = rows[0]
            yield name
            following = next(ranked, None)
            if following is None:
                heappop(rows)
            else:
                heapreplace(rows, (following, ranked))


def _next_uses(visits: Visits) -> list[int]:
    """For each position, the position of the next visit after it that uses copies, round the end of the cycle."""
    following = next(position for position, visit in enumerate(visits) if visit.kind in USES)
    found = [0] * len(visits)
    for position in reversed(range(len(visits))):
        found[position] = following
        if visits[position].kind in USES:
            following = position
    return found
