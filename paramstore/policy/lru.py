"""Least recently used: the name that was used longest ago goes first.

Every call but `victims` takes constant time; `victims` looks at the names it returns and the protected ones
before them.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Sequence
from itertools import islice

from paramstore.core.counts import Counts
from paramstore.policy.base import CountingPolicy


class Lru(CountingPolicy):
    """A policy that keeps the held names in order of use."""

    def __init__(self) -> None:
        self._used_at: OrderedDict[Hashable, int] = OrderedDict()
        """Held names, least recently used first, with the number of the access that used them last."""
        self._accesses = 0

    def record(self, name: Hashable) -> None:
        self._accesses += 1
        self._used_at[name] = self._accesses
        self._used_at.move_to_end(name)

    def record_all(self, names: Iterable[Hashable]) -> None:
        used_at, accesses, move_to_end = self._used_at, self._accesses, self._used_at.move_to_end
        for name in names:
            accesses += 1
            used_at[name] = accesses
            move_to_end(name)
        self._accesses = accesses

    def hold(self, name: Hashable) -> None:
        """Counts as a use: an LRU order knows nothing else."""
        self.record(name)

    def forget(self, name: Hashable) -> None:
        self._used_at.pop(name, None)

    def victims(self, count: int, protected: Callable[[Hashable], bool]) -> list[Hashable] | None:
        found = list(islice((name for name in self._used_at if not protected(name)), count))
        return found if len(found) == count else None

    def heat(self, name: Hashable) -> float:
        """1 / (1 + accesses of the arena since the last use): 1 for the name used last, 0 for one that is not held."""
        used_at = self._used_at.get(name)
        return 0.0 if used_at is None else 1.0 / (1 + self._accesses - used_at)

    def counts(self, names: Sequence[Hashable]) -> Counts:
        """Returns nothing: it orders what is held by use, and a new policy holds only what was used since."""
        return Counts()

    def warm(self, names: Sequence[Hashable], counts: Counts) -> None:
        """Does nothing, for the same reason."""
