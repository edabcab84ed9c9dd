"""Expert buffering ("Towards MoE Deployment", arXiv 2303.06182, section VI-B): what the last visit did not use goes first, then
what came last.

The paper evicts an expert that is inactive in the current batch, and where all are active the one that was loaded last: in a scan
the next use of what came first is the nearest. It does not say which of several inactive ones goes; here it is the one loaded last
too. Its buffer belongs to one layer. Here layers share one, and a key counts as active while the last visit of *its* layer used it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable
from itertools import islice

from paramstore.policy.base import Policy, layer_of


class LifoInactive(Policy):
    """A policy that keeps when each held name came, and which names each layer's last visit used. Names are (layer, expert) keys;
    other names are one layer."""

    def __init__(self) -> None:
        self._arrived: dict[Hashable, None] = {}
        """Held names in the order in which they came."""
        self._active: dict[object, frozenset[Hashable]] = {}

    def begin_visit(self, names: Collection[Hashable]) -> None:
        layers: dict[object, list[Hashable]] = {}
        for name in names:
            layers.setdefault(layer_of(name), []).append(name)
        self._active.update((layer, frozenset(active)) for layer, active in layers.items())

    def record(self, name: Hashable) -> None:
        if name not in self._arrived:
            self.hold(name)

    def hold(self, name: Hashable) -> None:
        self._arrived.pop(name, None)
        self._arrived[name] = None

    def forget(self, name: Hashable) -> None:
        self._arrived.pop(name, None)

    def victims(self, count: int, protected: Callable[[Hashable], bool]) -> list[Hashable] | None:
        found: list[Hashable] = []
        for is_active in (False, True):
            newest_first = (name for name in reversed(self._arrived) if self._is_active(name) is is_active and not protected(name))
            found.extend(islice(newest_first, count - len(found)))
        return found if len(found) == count else None

    def heat(self, name: Hashable) -> float:
        """1 for a held name that its layer's last visit used, 1/2 for another held one, 0 for one that is not held."""
        return 0.0 if name not in self._arrived else 1.0 if self._is_active(name) else 0.5

    def _is_active(self, name: Hashable) -> bool:
        return name in self._active.get(layer_of(name), ())
