"""When the daemon looks for cycles of garbage: never among what its tables keep.

A full collection looks at every object there is. The tables of 131,072 records are some millions of them, which would hold the loop
for a second and more, in the middle of a commit. So whatever survives a full collection is frozen, and later ones look at what came
since, more often. A frozen object goes when nobody refers to it any more, like any other; only cycles of frozen ones stay. Those
are sessions for the most part: whoever counts them has everything looked at when many have ended and none is open, or very many.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

THRESHOLDS = (700, 5, 3)
"""Python's own are 700, 10 and 10. A full collection finds 10,000 new objects, in 1 ms, where it would find 70,000."""
BURST = 8192
"""So many new objects are no garbage but rows of a large commit: its allocations come with as many frees, so Python counts none."""
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


def _freeze(phase: str, info: dict[str, int]) -> None:
    is_burst = phase == "start" and len(gc.get_objects(0)) > BURST
    if is_burst or (phase == "stop" and info["generation"] == 2):
        gc.freeze()


def look_at_everything() -> None:
    """Frees all cycles of garbage, frozen ones too. It holds the process for a second where there are millions of objects."""
    if _freeze not in gc.callbacks:
        return  # this process freezes nothing: Python looks at everything by itself
    gc.callbacks.remove(_freeze)  # it would take this for a burst
    gc.unfreeze()
    gc.collect()
    gc.callbacks.append(_freeze)
