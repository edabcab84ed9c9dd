"""When the daemon looks for cycles of garbage: never among what its tables keep.

A full collection looks at every object there is. The tables of 131,072 records are some millions of them, which would hold the loop
for a second and more, in the middle of a commit. So whatever survives a full collection is frozen, and later ones look at what came
since, more often. What comes in thousands, as the rows of a large commit do, is frozen unseen. A frozen object goes when nobody
refers to it any more, like any other; only cycles of frozen ones stay. Those are sessions for the most part: whoever counts them
has everything looked at when many have ended and none is open, or very many.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

from paramstore.core.slices import Tally

THRESHOLDS = (500, 2, 1)
"""Python's own are 700, 10 and 10. A full collection finds 4,000 new objects where it would find 70,000; at 1 to 2 us each, since
most of what they refer to is in no cache."""
BURST = 1024
"""So many items done in slices have left objects that no collection has looked at, some for each: their allocations come with as
many frees, so Python counts none, and only then begins a collection, which would look at all of them."""
MIDDLING_MAX = 8
"""After so many collections of the middle generation a full one would find 15,000 objects. Python puts it off as long as it would
look at less than a quarter of what the last one has, which may have looked at millions."""
ENDED_SESSIONS = 64
"""Number of ended sessions, of some 50 KB each, after which everything is looked at once no session is open."""
ENDED_SESSIONS_MAX = 4096
"""Number of ended sessions after which everything is looked at although one is open."""


@contextlib.contextmanager
def tables_spared() -> Iterator[None]:
    """Makes every full collection within freeze what survives it, and every collection leave bursts alone. Not to be nested."""
    thresholds = gc.get_threshold()
    gc.set_threshold(*THRESHOLDS)
    gc.callbacks.append(_freeze)
    try:
        yield
    finally:
        gc.callbacks.remove(_freeze)
        gc.set_threshold(*thresholds)
        gc.unfreeze()


class _Freezing:
    """Python calls it before and after every collection."""

    def __init__(self) -> None:
        self._tallied = 0
        """Items that had gone through slices when a collection began last."""
        self._middling = 0
        """Number of collections of the middle generation since objects were frozen."""

    def __call__(self, phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            is_burst = Tally.items - self._tallied > BURST
            self._tallied = Tally.items
            if is_burst or (info["generation"] == 2 and self._middling > MIDDLING_MAX):
                self._freeze()
        elif info["generation"] == 2:
            self._freeze()
        else:
            self._middling += info["generation"]

    def _freeze(self) -> None:
        gc.freeze()
        self._middling = 0


_freeze = _Freezing()


def look_at_everything() -> None:
    """Frees all cycles of garbage, frozen ones too. It holds the process for a second where there are millions of objects."""
    if _freeze not in gc.callbacks:
        return  # this process freezes nothing: Python looks at everything by itself
    gc.callbacks.remove(_freeze)  # it would take this for a burst
    gc.unfreeze()
    gc.collect()
    gc.callbacks.append(_freeze)
