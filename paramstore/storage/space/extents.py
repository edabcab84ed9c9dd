"""The free space of all volumes: which byte ranges may be written next. Pure code; nothing here is stored.

Free space is derived at open: every range is free unless a catalog row names it (`occupy`). Guarantees:

- `reserve` hands out an extent only while nobody holds it: after its release *and* its last unpin.
- A quarantined extent (its write or flush failed) is not handed out again until the store is opened anew.
- A fenced volume (`fences`) gives no extent and no range for zero-fill; what is held there stays held and readable.
- Written space comes first: never-written blocks halve the rate of write-back.
- An owner (a namespace) takes more than it is entitled to only while what the others are entitled to stays free.
- What an owner has *borrowed*, for older steps of readers, does not count as taken of its entitlement, and is of what nobody is
  entitled to.
- After somebody found no space, no range is taken for zero-fill until an extent is freed.

A claimed extent counts as written, since whoever reserves one writes it; one that is released unwritten costs
speed once, never correctness. All sizes are bytes and multiples of 4 KiB.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from paramstore.core.location import Extent
from paramstore.core.schema import round_up
from paramstore.errors import CorruptCatalog
from paramstore.storage.space.fences import Fences
from paramstore.storage.space.pins import Pins
from paramstore.storage.space.preference import Preference
from paramstore.storage.space.volume_space import VolumeSpace
from paramstore.storage.volume.base import ALIGNMENT_BYTES


@dataclass(frozen=True, slots=True)
class VolumeSpaceStats:
    """One volume's space. free_bytes: bytes that `reserve` can use, without prefilling and quarantined ones; 0 if it is fenced."""

    volume: int
    size_bytes: int
    free_bytes: int
    largest_free_bytes: int
    written_bytes: int
    prefilling_bytes: int
    quarantined_bytes: int
    write_failures: int = 0
    fenced: str | None = None
    """Reason for which the volume is fenced; None if it is not."""


class Space:
    """Owner of all free ranges and of every claim on an extent. One thread (the event loop's) uses it."""

    def __init__(self) -> None:
        self._volumes: dict[int, VolumeSpace] = {}
        self.fences = Fences()
        self.preference = Preference()
        self._taken: dict[Extent, str] = {}
        """Extents that are reserved or occupied and not released, with their owners."""
        self._held_bytes: dict[str, int] = {}
        """Bytes in `_taken` and `_leaving` of each owner; kept, since these are too many to count at every reserve."""
        self._entitled_bytes: dict[str, int] = {}
        self._borrowed_bytes: dict[str, int] = {}
        self._is_short = False
        """Whether somebody found no space, and none was freed since."""
        self.pins = Pins()
        self._leaving: dict[Extent, str] = {}
        """Extents that are released but still pinned, with their owners, for whom they count until they are free."""
        self.freed = 0
        """Counts how often something came free; those who wait for space look again when it has changed."""
        self._quarantined: set[Extent] = set()

    # --- volumes ---

    def add_volume(self, index: int, *, start_bytes: int, size_bytes: int, written_bytes: int) -> None:
        """Makes [start_bytes, size_bytes) free; below `written_bytes` every block was written once."""
        assert index not in self._volumes, f"volume {index} is here already"
        start_bytes, size_bytes = round_up(start_bytes, ALIGNMENT_BYTES), _whole_blocks(size_bytes)
        assert start_bytes < size_bytes, f"volume {index} has no room for extents"
        volume = self._volumes[index] = VolumeSpace(index, start_bytes, size_bytes)
        volume.fresh.add(start_bytes, size_bytes)
        volume.mark_written(_whole_blocks(written_bytes))

    def grow_volume(self, index: int, size_bytes: int) -> None:
        """Notes that the volume is `size_bytes` large now; what was added is free and never written."""
        volume, size_bytes = self._volumes[index], _whole_blocks(size_bytes)
        assert size_bytes >= volume.size_bytes, f"volume {index} shrank to {size_bytes}"
        if size_bytes > volume.size_bytes:
            volume.fresh.add(volume.size_bytes, size_bytes)
            volume.size_bytes = size_bytes
            self._is_short = False

    def entitle(self, owner: str, length_bytes: int) -> None:
        """Entitles `owner` to hold `length_bytes`: nobody else gets what it needs for that. 0 ends it."""
        self._entitled_bytes[owner] = length_bytes
        self._is_short = False

    def borrow(self, owner: str, length_bytes: int) -> None:
        """Notes how much of what `owner` holds, or will hold once what it is about to release is free, it has borrowed. The caller
        has asked `may_borrow` just before, where that is more than it was."""
        self._borrowed_bytes[owner] = length_bytes

    def may_borrow(self, owner: str, length_bytes: int, *, freed_bytes: int, slack_bytes: int) -> bool:
        """Whether everybody, `owner` too, could take all that it is entitled to if `owner` had borrowed `length_bytes` of what it
        holds, and released `freed_bytes`. slack_bytes: what may be free and of no use. False where a volume is fenced, unless it is
        for nothing: space is short then."""
        if length_bytes and len(self._usable()) < len(self._volumes):
            return False
        own = self._due_bytes(owner, borrowed_bytes=length_bytes) + freed_bytes
        return max(0, own) + slack_bytes <= self._unpromised_bytes(owner) + freed_bytes

    def occupy(self, extent: Extent, *, owner: str = "") -> None:
        """Claims an extent that a catalog row of `owner` names; used when the store is opened.

        Raises CorruptCatalog if any byte of it is not free; nothing changes then.
        """
        volume = self._volumes.get(extent.volume)
        if volume is None:
            raise CorruptCatalog(f"{describe(extent)}: the store has no such volume")
        start, end = extent.offset_bytes, extent.offset_bytes + extent.length_bytes
        if start % ALIGNMENT_BYTES or end % ALIGNMENT_BYTES or end <= start:
            raise CorruptCatalog(f"{describe(extent)} is not made of whole {ALIGNMENT_BYTES}-byte blocks")
        if start < volume.start_bytes or end > volume.size_bytes:
            raise CorruptCatalog(f"{describe(extent)} is outside of {volume.start_bytes}..{volume.size_bytes}")
        if not volume.carve(start, end):
            raise CorruptCatalog(f"{describe(extent)} overlaps another extent of the catalog")
        self._claim(extent, owner)

    # --- claims ---

    def reserve(
        self, length_bytes: int, *, owner: str = "", avoid: int | None = None, speed_class: int | None = None
    ) -> Extent | None:
        """Claims an extent of `length_bytes`, rounded up to 4 KiB, which is the caller's until `release`; or None.

        Volumes of the speed class come first, where one is given; within a class those with a larger share of free bytes, equals
        take turns. Within a volume: written space first, then the smallest range that fits, then the lowest offset. avoid: a
        volume that comes last.
        """
        assert length_bytes > 0, f"cannot reserve {length_bytes} bytes"
        extents = self.reserve_many(1, length_bytes, owner=owner, avoid=avoid, speed_classes=(speed_class,))
        return extents[0] if extents is not None else None

    def reserve_many(
        self, count: int, length_bytes: int, *, owner: str = "", avoid: int | None = None,
        speed_classes: Sequence[int | None] = (),
    ) -> list[Extent] | None:  # fmt: skip
        """Claims `count` extents as `reserve` chooses them; or None, and nothing has changed. speed_classes: of the first ones."""
        length_bytes = round_up(length_bytes, ALIGNMENT_BYTES)
        extents: list[Extent] | None = None
        if count * length_bytes <= self._room_bytes(owner):
            wanted = [*speed_classes[:count], *[None] * (count - len(speed_classes))]
            extents = self._take_one(length_bytes, avoid, *wanted) if count == 1 else self._take_many(length_bytes, avoid, wanted)
        if extents is None:
            self._is_short = True
            return None
        for extent in extents:
            assert not self._is_held(extent), f"{describe(extent)} was handed out twice"
            self._claim(extent, owner)
        return extents

    def _take_one(self, length_bytes: int, avoid: int | None, speed_class: int | None) -> list[Extent] | None:
        for volume in self.preference.order(self._usable(), avoid=avoid, speed_class=speed_class):
            offset_bytes = volume.take(length_bytes)
            if offset_bytes is not None:
                return [Extent(volume.index, offset_bytes, length_bytes)]
        return None

    def _take_many(self, length_bytes: int, avoid: int | None, speed_classes: Sequence[int | None]) -> list[Extent] | None:
        before, turn = {index: volume.copy() for index, volume in self._volumes.items()}, self.preference.turn
        extents: list[Extent] = []
        for speed_class in speed_classes:
            found = self._take_one(length_bytes, avoid, speed_class)
            if found is None:
                self._volumes, self.preference.turn = before, turn
                return None
            extents += found
        return extents

    def _room_bytes(self, owner: str) -> int:
        """Bytes that `owner` may still take: the rest of its entitlement, or what nobody else is entitled to, whichever is more."""
        return max(0, self._due_bytes(owner), self._unpromised_bytes(owner))

    def _due_bytes(self, owner: str, *, borrowed_bytes: int | None = None) -> int:
        """Bytes of its entitlement that `owner` has not taken; below 0 where it has more. borrowed_bytes: None for those noted."""
        borrowed = self._borrowed_bytes.get(owner, 0) if borrowed_bytes is None else borrowed_bytes
        return self._entitled_bytes.get(owner, 0) - self._held_bytes.get(owner, 0) + borrowed

    def _unpromised_bytes(self, owner: str) -> int:
        """Bytes that are free, or will be after zero-fill, beyond what the others are entitled to; below 0 if they lack some."""
        promised = sum(max(0, self._due_bytes(other)) for other in self._entitled_bytes if other != owner)
        return self.free_bytes + sum(volume.prefilling_bytes for volume in self._usable()) - promised

    def shortage_bytes(self, owner: str, *, slack_bytes: int = 0) -> int:
        """Bytes that are missing now of what `owner` is entitled to, because others hold more than they are entitled to.
        slack_bytes: what may be free and of no use."""
        return max(0, self._due_bytes(owner) + slack_bytes - self._unpromised_bytes(owner))

    def _claim(self, extent: Extent, owner: str) -> None:
        self._taken[extent] = owner
        self._held_bytes[owner] = self._held_bytes.get(owner, 0) + extent.length_bytes

    def _free(self, extent: Extent, owner: str) -> None:
        self._held_bytes[owner] -= extent.length_bytes
        self._volumes[extent.volume].free(extent)
        self._is_short = False
        self.freed += 1

    def release(self, extent: Extent) -> None:
        """Ends the claim: the extent is free at once, or when its last pin goes. A quarantined one stays quarantined."""
        if extent in self._quarantined:
            return  # so that whoever frees a failed step's extents need not know which of them are quarantined
        assert extent in self._taken, f"{describe(extent)} is not held"
        owner = self._taken.pop(extent)
        if extent in self.pins:
            self._leaving[extent] = owner
        else:
            self._free(extent, owner)

    def unless_fenced(self, extent: Extent | None) -> Extent | None:
        """Returns `extent`, reserved and not written yet; or releases it and returns None, if its volume was fenced since."""
        if extent is not None and self.fences.is_fenced(extent.volume):
            self.release(extent)
            return None
        return extent

    def pin(self, extent: Extent) -> None:
        """Keeps the extent's bytes, which a transfer under way needs, until `unpin`; pins are counted."""
        assert self._is_held(extent), f"{describe(extent)} is not held"
        self.pins.add(extent)

    def unpin(self, extent: Extent) -> None:
        """Ends one pin; frees the extent if it was released meanwhile and this was the last."""
        if self.pins.remove(extent) and extent in self._leaving:
            self._free(extent, self._leaving.pop(extent))

    def quarantine(self, extent: Extent) -> None:
        """Withdraws an extent whose write or flush failed: not handed out before a reopen, whatever is released or unpinned."""
        prefilling = self._volumes[extent.volume].prefilling
        assert self._is_held(extent) or extent in prefilling, f"{describe(extent)} is not held"
        for claims in (self._taken, self._leaving):
            if extent in claims:
                self._held_bytes[claims.pop(extent)] -= extent.length_bytes
        prefilling.discard(extent)
        self._quarantined.add(extent)

    # --- background fill ---

    def next_unwritten(self, volume: int, limit_bytes: int) -> Extent | None:
        """Takes the lowest free range that was never written, at most `limit_bytes`, until `finish_prefill`. None while somebody
        is short of space, or if the volume is fenced."""
        assert limit_bytes >= ALIGNMENT_BYTES, f"limit_bytes={limit_bytes} is less than one block"
        if self._is_short or self.fences.is_fenced(volume):
            return None
        space = self._volumes[volume]
        first = space.fresh.first()
        if first is None:
            return None
        start, end = first[0], min(first[1], first[0] + _whole_blocks(limit_bytes))
        space.fresh.remove(start, end)
        extent = Extent(volume, start, end - start)
        space.prefilling.add(extent)
        return extent

    def finish_prefill(self, extent: Extent) -> None:
        """Frees a range that was zero-filled; it counts as written. (One whose write failed is quarantined instead.)"""
        volume = self._volumes[extent.volume]
        volume.prefilling.remove(extent)
        volume.free(extent)
        self.freed += 1

    def written_bytes(self, volume: int) -> int:
        """Offset below which every block is claimed or was written once, as the catalog keeps it. Never decreases."""
        return self._volumes[volume].written_bytes

    # --- looking ---

    @property
    def free_bytes(self) -> int:
        """Bytes that `reserve` can use."""
        return sum(volume.free_bytes for volume in self._usable())

    def _usable(self) -> list[VolumeSpace]:
        """The volumes that are not fenced."""
        return [volume for index, volume in self._volumes.items() if not self.fences.is_fenced(index)]

    @property
    def is_prefilling(self) -> bool:
        """Whether a range is kept from `reserve` until its zero-fill ends."""
        return any(volume.prefilling for volume in self._volumes.values())

    def entitled_bytes(self, owner: str) -> int:
        """Bytes that `owner` is entitled to hold."""
        return self._entitled_bytes.get(owner, 0)

    def borrowed_bytes(self, owner: str) -> int:
        """Bytes that `owner` has borrowed."""
        return self._borrowed_bytes.get(owner, 0)

    @property
    def has_leaving(self) -> bool:
        """Whether released extents wait for nothing but the ends of transfers to be free."""
        return any(self.pins.ends_by_itself(extent) for extent in self._leaving)

    def held_bytes(self, owner: str) -> int:
        """Bytes that `owner` has reserved or occupied and that are not free again."""
        return self._held_bytes.get(owner, 0)

    def free_bytes_of(self, volume: int) -> int:
        """Bytes of one volume that `reserve` can use."""
        return 0 if self.fences.is_fenced(volume) else self._volumes[volume].free_bytes

    def lost_bytes(self) -> int:
        """Bytes that would be free if their volumes were not fenced."""
        return sum(volume.free_bytes for index, volume in self._volumes.items() if self.fences.is_fenced(index))

    def size_bytes_of(self, volume: int) -> int:
        """The volume's size, where its last extent may end."""
        return self._volumes[volume].size_bytes

    def share_bytes(self, owner: str) -> tuple[int, ...]:
        """The owner's share of each speed class, the fastest first: as much of it as of all that anybody is entitled to."""
        sizes = [0] * self.preference.class_count
        for volume in self._usable():
            sizes[self.preference.class_of(volume.index)] += volume.size_bytes - volume.start_bytes
        all_bytes = sum(self._entitled_bytes.values())
        return tuple([size * self.entitled_bytes(owner) // all_bytes if all_bytes else size for size in sizes])

    def missing_bytes(self, count: int, length_bytes: int, *, owner: str = "") -> int:
        """How many more bytes `reserve_many(count, length_bytes)` needs: 0 exactly if it can succeed."""
        length_bytes = round_up(length_bytes, ALIGNMENT_BYTES)
        found, allowed = 0, min(count, self._room_bytes(owner) // length_bytes)
        for volume in self._usable():
            twin = volume.copy()
            while found < allowed and twin.take(length_bytes) is not None:
                found += 1
        return (count - found) * length_bytes

    def stats(self) -> tuple[VolumeSpaceStats, ...]:
        """Figures of each volume, in order of index."""
        return tuple(self._stats_of(self._volumes[index]) for index in sorted(self._volumes))

    def _stats_of(self, volume: VolumeSpace) -> VolumeSpaceStats:
        quarantined = (e.length_bytes for e in self._quarantined if e.volume == volume.index)
        return VolumeSpaceStats(
            volume=volume.index,
            size_bytes=volume.size_bytes,
            free_bytes=self.free_bytes_of(volume.index),
            largest_free_bytes=max((end - start for start, end in volume.free_runs()), default=0),
            written_bytes=volume.written_bytes,
            prefilling_bytes=volume.prefilling_bytes,
            quarantined_bytes=sum(quarantined),
            write_failures=self.fences.write_failures(volume.index),
            fenced=self.fences.reason(volume.index),
        )

    def _is_held(self, extent: Extent) -> bool:
        return extent in self._taken or extent in self._leaving or extent in self._quarantined


def describe(extent: Extent) -> str:
    """Names the extent in an error message."""
    return f"extent of {extent.length_bytes} bytes at {extent.offset_bytes} of volume {extent.volume}"


def _whole_blocks(size_bytes: int) -> int:
    return size_bytes // ALIGNMENT_BYTES * ALIGNMENT_BYTES
