"""What a device tier hands out: leases on its slots, tickets of loads ahead, and counts."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
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
        super().__init__(visit, f" on {tier.device}")
        self._tier = tier
        self._view = view
        self._timeout_s = timeout_s
        self._used: dict[Held, DeviceCopy] = {}
        """What the current stream has been made to wait for."""
        self._turn: Held | None = None
        """What passes by and was turned to."""

    def load(self) -> None:
        """Loads what was not loaded yet of the keys that stand; the current stream goes on only after all of them are there. Raises
        what a load raises."""
        self._use(self._visit.held)

    def in_turn(self) -> Iterator[ExpertKey]:
        """Yields each key once, those in their slots first, so that the device computes while the host loads. What passes by may be
        used by what is given to the current stream in its turn. Raises what a load raises."""
        visit, tier = self._visit, self._tier
        there, coming = list[Held](), list[Held]()
        for held in visit.held:
            (there if tier.copies.has(held) else coming).append(held)
        for few, keys in ((1, there), (TURN_KEYS, coming)):
            for start in range(0, len(keys), few):
                self._use(keys[start : start + few])
                yield from (held.key for held in keys[start : start + few])  # type: ignore[misc]  # the names are keys here
        slots = visit.passing_slots + len(visit.through)
        while visit.waiting or visit.through:
            if len(visit.through) <= slots // 2:  # half of them at a time: one message for several, and copies beside kernels
                tier.let_in(visit, view=self._view, timeout_s=self._timeout_s)
            held = visit.through[0]
            self._by_key = None
            self._use([held])
            yield held.key  # type: ignore[misc]  # the names are keys here
            self._check_held(held.key)
            tier.let_out(visit, held, self._used.pop(held))
            self._by_key = None

    def turn_to(self, key: ExpertKey, /) -> Mapping[str, Tensor]:
        """The fields of `key`; what passes by may be used by what is given to the current stream until another key is turned to.
        Raises LeaseError where `key` has passed by, or comes before others that have not, and what a load raises."""
        visit = self._visit
        if (visit.passing or visit.through) and (self._turn is None or self._turn.key != key):
            self._begin_turn(key)
        return self[key]

    def _begin_turn(self, key: ExpertKey) -> None:
        self._check_held(key)
        visit, tier, turn, self._turn = self._visit, self._tier, self._turn, None
        if turn is not None:
            self._by_key = None
            tier.let_out(visit, turn, self._used.pop(turn))
        is_due = bool(visit.waiting) and visit.waiting[0] == key
        if is_due or visit.passing_slots > len(visit.through):  # half of them at a time, as in `in_turn`
            tier.let_in(visit, view=self._view, timeout_s=self._timeout_s, due=key)
        self._by_key = None
        held = self._held(key)
        self._use([held])
        self._turn = held if held in visit.through else None

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

    def __enter__(self) -> DeviceLease:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.release()

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
