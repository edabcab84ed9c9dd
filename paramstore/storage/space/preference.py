"""The order in which volumes are tried for a new extent: by speed class, then by free share, equals in turns. Pure code.

A *speed class* is a set of volumes that are about as fast as each other; 0 is the fastest. Only the order depends on it: whoever
finds no room in the class that it prefers takes what another has. Records of which nobody knows how much they are used prefer none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from paramstore.storage.space.volume_space import VolumeSpace


class Preference:
    """Owner of each volume's speed class, and of whose turn it is among equals."""

    def __init__(self) -> None:
        self._classes: dict[int, int] = {}
        self.turn = 0
        """Position of the volume that comes first among equals next time."""

    @property
    def class_count(self) -> int:
        """Number of speed classes; 1 until volumes are told apart."""
        return 1 + max(self._classes.values(), default=0)

    def class_of(self, volume: int) -> int:
        """The volume's speed class; of one that was not told apart, the fastest."""
        return self._classes.get(volume, 0)

    @property
    def faster_volumes(self) -> list[int]:
        """The volumes that are not of the slowest class."""
        return [volume for volume, found in self._classes.items() if found < self.class_count - 1]

    def set_classes(self, classes: Mapping[int, int]) -> None:
        """Tells the volumes apart: the class of each, from 0 on without gaps."""
        self._classes = dict(classes)

    def order(self, volumes: Sequence[VolumeSpace], *, avoid: int | None, speed_class: int | None) -> list[VolumeSpace]:
        """Orders the volumes: those of the class first, then the next slower ones, then those that are faster; `avoid` last."""
        count = len(volumes)

        def place(at: int) -> tuple[bool, tuple[bool, int], float, int]:
            volume = volumes[at]
            return volume.index == avoid, self._distance(volume, speed_class), -volume.free_share, (at - self.turn) % count

        order = sorted(range(count), key=place)
        self.turn = (order[0] + 1) % count if order else 0
        return [volumes[at] for at in order]

    def _distance(self, volume: VolumeSpace, wanted: int | None) -> tuple[bool, int]:
        if wanted is None:
            return False, 0
        found = self.class_of(volume.index)
        return found < wanted, abs(found - wanted)
