"""The interface of a policy. `make.py` makes one by name."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from typing import Protocol, runtime_checkable

from paramstore.core.counts import Counts


class Policy(Protocol):
    """Ranks what an arena holds. Names are any hashable values; the planner uses expert keys.

    A policy holds exactly the names that were recorded or held and not forgotten since. It may keep counts of forgotten names
    (a frequency policy needs them), at most as many as the namespace has names.
    """

    def record(self, name: Hashable) -> None:
        """Counts a use of `name` now. A name that is not held is held from here on."""
        ...

    def record_all(self, names: Iterable[Hashable]) -> None:
        """Does what `record` does for each of `names`, in order."""
        for name in names:
            self.record(name)

    def begin_visit(self, names: Collection[Hashable]) -> None:
        """Begins a visit that uses `names`, held or not; `record` of each follows. Nothing to a policy that counts uses alone."""
        return

    def hold(self, name: Hashable) -> None:
        """Holds `name` from here on, or anew, without a use now: it was prefetched, or an update made it."""
        ...

    def expect(self, names: Iterable[Hashable]) -> None:
        """Announces that each of `names`, held or not, is used at the next visit of its layer: an apply that begins is to change
        it. Nothing to a policy to which only the past counts."""
        return

    def forget(self, name: Hashable) -> None:
        """Holds `name` no more (it was evicted or retired). Unknown names are ignored."""
        ...

    def victims(self, count: int, protected: Callable[[Hashable], bool]) -> list[Hashable] | None:
        """Chooses exactly `count` held names, worst first, none of them protected; or None, if there are not so many.

        Changes nothing: the planner evicts, then calls `forget`.
        """
        ...

    def heat(self, name: Hashable) -> float:
        """How much `name` is used: 0 is cold; comparable within one arena."""
        ...

    @property
    def counts_unheld(self) -> bool:
        """Whether `heat` counts the uses of names that are not held, too, so that records may be placed by it."""
        return False


@runtime_checkable
class CountingPolicy(Policy, Protocol):
    """A policy whose counts may outlive it, as those of a daemon's arenas do."""

    def counts(self, names: Sequence[Hashable]) -> Counts:
        """What it has counted of `names`, at least one and all of one layer, as of now. Changes nothing."""
        ...

    def warm(self, names: Sequence[Hashable], counts: Counts) -> None:
        """Counts on from what an earlier policy had counted of the same `names`. To be called before any use; holds none of them.

        Warmed with all that it has counted, a new policy ranks from there on as the earlier one, had that forgotten what it held.
        """
        ...


def layer_of(name: Hashable) -> object:
    """The layer of an expert key; all other names are one layer, None."""
    return name[0] if isinstance(name, tuple) else None
