"""What a device tier hands out: leases on its slots, tickets of loads ahead, and counts."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from paramstore.core.key import ExpertKey
from paramstore.core.location import Identity
from paramstore.policy.slot_visit import Held, SlotVisit
from paramstore_client.device.copies import DeviceCopies
from paramstore_client.device.slots import DeviceCopy
from paramstore_client.device.visit_lease import VisitLease
from paramstore_client.source import HostTicket

TURN_KEYS = 8
"""Most keys that are asked for at once where others are computed with meanwhile: the daemon reads so many records at once."""


@dataclass(frozen=True, slots=True)
class DeviceStats:
    """Counts of keys since the tier was made. hits: there when the visit began; late: on their way then; passed: copied in their
    turn, and gone after it. prefetched: copied ahead; useful, wasted: of these, used then, or gone before. refetches: stale copies
    that were dropped, of whatever use."""

    hits: int
    late: int
    misses: int
    passed: int
    refetches: int
    evictions: int
    prefetched: int
    useful: int
    wasted: int
    bytes_copied: int


class SlotOwner(Protocol):
    """Who decides visits, and has the slots: `DeviceTier`."""

    device: torch.device
    copies: DeviceCopies

    def let_in(self, visit: SlotVisit, *, view: int, timeout_s: float | None, due: object = None) -> None:
        """Copies as many keys that pass by as there are slots for. view: the view that the visit began with. due: the key that is
        used next."""
        ...

    def let_out(self, visit: SlotVisit, held: Held, copy: DeviceCopy) -> None:
        """Gives back the slot of what has passed by, whose last kernel has been given to the current stream."""
        ...

    def end_visit(self, visit: SlotVisit, copies: Collection[DeviceCopy]) -> None:
        """Ends the visit of a lease, whose last kernel has been given to the current stream."""
        ...

    def settle(self) -> None:
        """Takes up what has come since the last call."""
        ...


class DeviceLease(VisitLease):
    """The right to the slots of one visit's keys. Views are ordered after the copies on the stream that asked for them, and asking
    for a key that was not loaded yet loads it."""

    def __init__(self, tier: SlotOwner, visit: SlotVisit, *, view: int, timeout_s: float | None) -> None:
        super().__init__(visit, view=view, timeout_s=timeout_s, where=f" on {tier.device}")
        self._tier = tier
        self._used: dict[Held, DeviceCopy] = {}
        """What the current stream has been made to wait for."""

    def load(self) -> None:
        """Loads what was not loaded yet of the keys that stand; the current stream goes on only after all of them are there. Raises
        what a load raises."""
        self._use(self._visit.held)

    def in_turn(self) -> Iterator[ExpertKey]:
        """Yields each key once, those in their slots first, so that the device computes while the host loads. What passes by may be
        used by what is given to the current stream in its turn. Raises what a load raises."""
        visit = self._visit
        there, coming = list[Held](), list[Held]()
        for held in visit.held:
            (there if self._tier.copies.has(held) else coming).append(held)
        for few, keys in ((1, there), (TURN_KEYS, coming)):
            for start in range(0, len(keys), few):
                self._use(keys[start : start + few])
                yield from (held.key for held in keys[start : start + few])  # type: ignore[misc]  # the names are keys here
        while visit.waiting or visit.through:
            self._let_in()
            held = visit.through[0]
            self._by_key = None
            self._use([held])
            yield held.key  # type: ignore[misc]  # the names are keys here
            self._check_held(held.key)
            self._let_out(held)
            self._by_key = None

    def __getitem__(self, key: ExpertKey, /) -> Mapping[str, Tensor]:
        return self._tier.copies.slots.views(self._copy(key))

    def identity(self, key: ExpertKey, /) -> Identity:
        return self._copy(key).identity

    def slot(self, key: ExpertKey, /) -> int:
        """The slot of `key`: its place in the tier's fields, [S, ...]. Raises LeaseError after the release, UnknownKey."""
        self[key]  # proves that the slot is still its own
        return self._copy(key).slot

    def keys(self) -> list[ExpertKey]:
        """The keys that stand."""
        return [held.key for held in self._visit.held]  # type: ignore[misc]  # the names are keys here

    def release(self) -> None:
        if not self._visit.is_over:
            self._tier.end_visit(self._visit, self._used.values())

    def _let_in(self, due: ExpertKey | None = None) -> None:
        visit = self._visit
        is_due = bool(visit.waiting) and visit.waiting[0] == due
        if is_due or visit.passing_slots >= len(visit.through):  # half at a time: one message for several, copies beside kernels
            self._tier.let_in(visit, view=self._view, timeout_s=self._timeout_s, due=due)

    def _let_out(self, held: Held) -> None:
        self._tier.let_out(self._visit, held, self._used.pop(held))

    def _use(self, used: Sequence[Held]) -> None:
        for held in used[:1]:
            self._check_held(held.key)
        new = [held for held in used if held not in self._used]
        self._used.update(zip(new, self._tier.copies.begin_use(new, self._timeout_s), strict=True))

    def _copy(self, key: ExpertKey) -> DeviceCopy:
        held = self._held(key)
        if held not in self._used:
            self._use([held])
        return self._used[held]


class DeviceTicket:
    """A prefetch on its way to the device. It is done when its copies are in the stream, or were given up."""

    def __init__(self, tier: SlotOwner, keys: tuple[ExpertKey, ...], host: HostTicket) -> None:
        self.keys = keys
        self.host = host
        self.is_settled = False
        self.on_host: Sequence[ExpertKey] | None = None
        """What the host has brought of it and is not copied yet; None while that is not known."""
        self.given_up: set[int] = set()
        """Layers that have begun, or were skipped, since it was asked for: nothing is copied ahead of them any more."""
        self._tier = tier

    def done(self) -> bool:
        self._tier.settle()
        return self.is_settled

    def cancel(self) -> object:
        self.is_settled = True
        return self.host.cancel()
