"""Belady's optimum: the policy that knows the future, for copies of one size (IBM Systems Journal 5(2), 1966: MIN).

Evicting what is needed furthest in the future gives the most hits that any policy can have on the same uses, whatever it
knows. A copy that will be superseded before its next use counts as never needed.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Hashable, Iterable
from heapq import heappop, heappush, nsmallest
from math import inf

from paramstore.policy.base import Policy


class Belady(Policy):
    """The policy of one arena whose future is known. Time counts the recorded uses; or, with `is_waves`, the expected waves: an
    apply takes what is resident first, so the order within one wave is not known beforehand.

    uses: the times of each name's uses, ascending. endings: for each name, the times before which its copy is superseded.
    """

    def __init__(
        self, uses: dict[Hashable, list[int]], endings: dict[Hashable, list[int]] | None = None, *, is_waves: bool = False
    ) -> None:
        self._uses = uses
        self._endings = endings or {}
        self._is_waves = is_waves
        self._now = 0
        self._arrived: dict[Hashable, int] = {}
        """Held names, with the time of their last use or arrival, oldest first."""
        self._wave: set[Hashable] = set()
        self._furthest: list[tuple[float, int, Hashable]] = []
        """Without waves: a heap of (minus the next use, number of the arrival, name). What has arrived again since, or was
        forgotten, still lies among the others: an arrival tells the next use, which nothing changes until then."""
        self._arrivals: dict[Hashable, int] = {}
        """Without waves: held name -> number of its last arrival or use."""
        self._arrival = 0

    @classmethod
    def of(cls, uses: Iterable[Hashable]) -> Belady:
        """The policy for exactly these uses, one after the other."""
        times: dict[Hashable, list[int]] = {}
        for time, name in enumerate(uses):
            times.setdefault(name, []).append(time)
        return cls(times)

    def record(self, name: Hashable) -> None:
        self._arrived.pop(name, None)
        self._arrived[name] = self._now
        if self._is_waves:
            self._wave.discard(name)
        else:
            self._now += 1
            self._push(name)

    def hold(self, name: Hashable) -> None:
        self._arrived.pop(name, None)
        self._arrived[name] = self._now
        if not self._is_waves:
            self._push(name)

    def expect(self, names: Iterable[Hashable]) -> None:
        if self._is_waves:
            self._now += 1
            self._wave = set(names)

    def forget(self, name: Hashable) -> None:
        self._arrived.pop(name, None)
        self._arrivals.pop(name, None)

    def victims(self, count: int, protected: Callable[[Hashable], bool]) -> list[Hashable] | None:
        if self._is_waves:
            free = (name for name in self._arrived if not protected(name))
            found = nsmallest(count, free, key=lambda name: -self.next_use(name))
        else:
            found = self._furthest_first(count, protected)
        return found if len(found) == count else None

    def heat(self, name: Hashable) -> float:
        return 1.0 / (1.0 + self.next_use(name) - self._now) if name in self._arrived else 0.0

    def _push(self, name: Hashable) -> None:
        self._arrival += 1
        self._arrivals[name] = self._arrival
        heappush(self._furthest, (-self.next_use(name), self._arrival, name))

    def _furthest_first(self, count: int, protected: Callable[[Hashable], bool]) -> list[Hashable]:
        found, looked_at = list[Hashable](), []
        while self._furthest and len(found) < count:
            _, arrival, name = entry = heappop(self._furthest)
            if self._arrivals.get(name) != arrival:
                continue
            looked_at.append(entry)
            if not protected(name):
                found.append(name)
        for entry in looked_at:
            heappush(self._furthest, entry)
        return found

    def next_use(self, name: Hashable) -> float:
        """Time of the next use of `name`: now or later, infinity for never."""
        if name in self._wave:
            return self._now
        times = self._uses.get(name, ())
        index = bisect_left(times, self._now + self._is_waves)
        if index == len(times):
            return inf
        endings = self._endings.get(name, ())
        after = bisect_right(endings, self._arrived.get(name, self._now - 1))
        return inf if after < len(endings) and endings[after] <= times[index] else times[index]
