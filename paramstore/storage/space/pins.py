"""Pins on extents: who still needs the bytes, a transfer or a client that leased them. Pure tables."""

from __future__ import annotations

from collections import Counter

from paramstore.core.location import Extent


class Pins:
    """Owner of the counts. A lease is a pin that ends when its client likes: nobody may wait for it as for that of a transfer."""

    def __init__(self) -> None:
        self._pins: Counter[Extent] = Counter()
        self._leases: Counter[Extent] = Counter()

    def __contains__(self, extent: object) -> bool:
        return extent in self._pins

    def __len__(self) -> int:
        """How many extents are pinned."""
        return len(self._pins)

    def add(self, extent: Extent) -> None:
        self._pins[extent] += 1

    def remove(self, extent: Extent) -> bool:
        """Removes one pin; returns whether it was the last."""
        return _remove_one(self._pins, extent)

    def note_lease(self, extent: Extent) -> None:
        """Notes that one more of the extent's pins is a lease."""
        self._leases[extent] += 1

    def forget_lease(self, extent: Extent) -> None:
        """Notes that one of the extent's pins is no lease any more, as it is about to be removed."""
        _remove_one(self._leases, extent)

    def ends_by_itself(self, extent: Extent) -> bool:
        """Whether all pins of the extent are those of transfers."""
        return extent not in self._leases


def _remove_one(counts: Counter[Extent], extent: Extent) -> bool:
    assert extent in counts, f"{extent} is not pinned"
    counts[extent] -= 1
    if counts[extent]:
        return False
    del counts[extent]
    return True
