"""The contract of a policy. `make.py` makes one by name."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from typing import Protocol


class Policy(Protocol):
    """Ranks what an arena holds. Names are any hashable values; the planner uses the copies' identities.

    A policy holds exactly the names that were recorded and not forgotten since; counts of forgotten names may be kept
    (that is what makes a frequency policy one), bounded by the number of names a namespace has.
    """

    def record(self, name: Hashable) -> None:
        """`name` was used now. A name seen for the first time is held from here on."""
        ...

    def record_all(self, names: Iterable[Hashable]) -> None:
        """`record` for each of `names`, in order."""
        ...

    def hold(self, name: Hashable) -> None:
        """`name` is held from here on, or held anew, and nobody uses it now: it was prefetched, or an update made it."""
        ...

    def expect(self, names: Iterable[Hashable]) -> None:
        """Each of `names`, held or not, is used at the next visit of its layer: a client prefetched it, or an apply that begins
        is to change it. Only a policy that looks ahead does something with it."""
        ...

    def forget(self, name: Hashable) -> None:
        """`name` is held no more (evicted, retired). Unknown names are ignored."""
        ...

    def victims(self, count: int, protected: Callable[[Hashable], bool]) -> list[Hashable] | None:
        """Exactly `count` held names, worst first, none of them protected; or None, if there are not so many.

        Changes nothing: the planner evicts, then calls `forget`.
        """
        ...

    def heat(self, name: Hashable) -> float:
        """How much `name` is used, for people: 0 is cold; comparable within one arena."""
        ...
