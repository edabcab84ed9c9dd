"""The order of a ring (ring memory, SE-MoE, arXiv 2205.10034, section 3.3.2): the slots of the layer that was left go to the one
that comes around.

The paper gives slot t mod K to turn t. Here any slot may take any key, and what goes is what the ring reaches last: with whole
layers ahead that is the layer just left, as in the paper; with some experts of a layer alone no slot lies empty.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Sequence
from itertools import chain, islice

from paramstore.policy.base import Policy, layer_of


class RingOrder(Policy):
    """A policy that keeps where the ring is. Names are (layer, expert) keys; a name of no layer of the ring goes first.

    layers: in the order of their visits, again and again.
    """

    def __init__(self, layers: Sequence[int]) -> None:
        self._place: dict[object, int] = {layer: place for place, layer in enumerate(layers)}
        self._here = 0
        self._held: dict[int | None, dict[Hashable, None]] = {}
        """Place of a layer -> its held names in the order of their last uses; None: those of no layer of the ring."""

    def begin_visit(self, names: Collection[Hashable]) -> None:
        for name in names:
            self._here = self._place.get(layer_of(name), self._here)

    def record(self, name: Hashable) -> None:
        held = self._held.setdefault(self._place_of(name), {})
        held.pop(name, None)
        held[name] = None

    def hold(self, name: Hashable) -> None:
        self.record(name)

    def forget(self, name: Hashable) -> None:
        self._held.get(self._place_of(name), {}).pop(name, None)

    def victims(self, count: int, protected: Callable[[Hashable], bool]) -> list[Hashable] | None:
        furthest_first = chain.from_iterable(self._held[place] for place in sorted(self._held, key=self._turns, reverse=True))
        found = list(islice((name for name in furthest_first if not protected(name)), count))
        return found if len(found) == count else None

    def heat(self, name: Hashable) -> float:
        """1 / turns until the ring reaches the name's layer; 0 for a name that is not held."""
        place = self._place_of(name)
        return 1.0 / self._turns(place) if name in self._held.get(place, {}) else 0.0

    def _place_of(self, name: Hashable) -> int | None:
        return self._place.get(layer_of(name))

    def _turns(self, place: int | None) -> int:
        """Turns until the ring is at that place, a whole round from where it is."""
        count = len(self._place)
        return count + 1 if place is None else (place - self._here - 1) % count + 1
