"""The apply log: the options of a namespace's newest applies, so that a record can make the steps that it missed.

In a namespace with `updates="exact"` a record's version is the apply at which it stands; every apply after it is a *missed
step*, made later with a gradient of zeros.

- No record ever misses more than MISSED_MAX steps: `engine.catch_up` sees to it. So a log of that many applies is enough for the
  records of a step, and every step has one of its own.
- A record's identity after apply n is (epoch in which apply n was made, n), no matter where and when the step is made.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from paramstore.core.optimizers import Options

MISSED_MAX = 128
"""The most steps that a record may miss. More would make a lease wait longer, and the log too large for a commit note with the
longest `extra`; fewer would move more records that nobody asked for."""


class LoggedApply(NamedTuple):
    """One apply. epoch: the namespace's when it was made."""

    epoch: int
    options: Options


@dataclass(frozen=True, slots=True)
class ApplyLog:
    """The log. entries: those of the applies `first`, `first` + 1, and so on; the first apply of a namespace is 1."""

    first: int = 1
    entries: tuple[LoggedApply, ...] = ()

    @property
    def last(self) -> int:
        """The newest apply in it; 0 before the first one."""
        return self.first + len(self.entries) - 1

    def appended(self, epoch: int, options: Options) -> ApplyLog:
        """Returns the log with one more apply."""
        return ApplyLog(self.first, (*self.entries, LoggedApply(epoch, options)))

    def window(self, applies: int) -> ApplyLog:
        """Returns the entries up to `applies` that records need which stand at most MISSED_MAX applies behind it."""
        return self._cut(applies, applies)

    def trimmed(self, applies: int) -> ApplyLog:
        """Returns the entries of `window`, and all that come after `applies`."""
        return self._cut(applies, self.last)

    def _cut(self, applies: int, last: int) -> ApplyLog:
        first = max(self.first, applies - MISSED_MAX + 1)
        assert self.first - 1 <= last <= self.last, f"apply {last} of a log of {self.first} to {self.last}"
        return ApplyLog(first, self.entries[first - self.first : last - self.first + 1])

    def missed(self, *, after: int, until: int) -> tuple[Options, ...]:
        """Returns the options of the applies above `after` up to `until`, oldest first."""
        if after >= until:
            return ()
        assert self.first <= after + 1, f"apply {after + 1} of a log of {self.first} to {self.last}"
        assert until <= self.last, f"apply {until} of a log of {self.first} to {self.last}"
        return tuple(entry.options for entry in self.entries[after + 1 - self.first : until + 1 - self.first])

    def epoch_of(self, apply: int) -> int:
        """The epoch in which `apply` was made."""
        assert self.first <= apply <= self.last, f"apply {apply} of a log of {self.first} to {self.last}"
        return self.entries[apply - self.first].epoch
