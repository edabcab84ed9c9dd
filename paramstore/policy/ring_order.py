"""The order of a ring (ring memory, SE-MoE, arXiv 2205.10034, section 3.3.2): the slots of the layer that was left go to the one
that comes around.

The paper gives slot t mod K to turn t. Here any slot may take any key, and what goes is what the ring reaches last: with whole
layers ahead that is the layer just left, as in the paper; with some experts of a layer alone no slot lies empty.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Sequence
from heapq import nsmallest

from paramstore.policy.base import Policy, layer_of


class RingOrder(Policy):
    """A policy that keeps where the ring is. Names are (layer, expert) keys; a name of no layer of the ring goes first.

    layers: in the order of their visits, again and again.
    """

    def __init__(self, layers: Sequence[int]) -> None:
        self._place: dict[object, int] = {layer: place for place, layer in enumerate(layers)}
        self._here = 0
        self._used_at: dict[Hashable, int] = {}
        self._uses = 0

    def begin_visit(self, names: Collection[Hashable]) -> None:
        for name in names:
            self._here = self._place.get(layer_of(name), self._here)

    def record(self, name: Hashable) -> None:
        self._uses += 1
        self._used_at[name] = self._uses

    def hold(self, name: Hashable) -> None:
        self.record(name)

    def forget(self, name: Hashable) -> None:
        self._used_at.pop(name, None)

    def victims(self, count: int, protected: Callable[[Hashable], bool]) -> list[Hashable] | None:
        found = nsmallest(count, (name for name in self._used_at if not protected(name)), key=self._rank)
        return found if len(found) == count else None

    def heat(self, name: Hashable) -> float:
        """1 / turns until the ring reaches the name's layer; 0 for a name that is not held."""
        return 0.0 if name not in self._used_at else 1.0 / self._distance(name)

    def _rank(self, name: Hashable) -> tuple[int, int]:
        return -self._distance(name), self._used_at[name]

    def _distance(self, name: Hashable) -> int:
        """Turns until the ring is at the layer of `name`, a whole round from the layer where it is."""
        place = self._place.get(layer_of(name))
        count = len(self._place)
        return count + 1 if place is None else (place - self._here - 1) % count + 1
