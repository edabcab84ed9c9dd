"""What a device tier hands out: leases on its slots, tickets of loads ahead, and counts."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol

import torch
from torch import Tensor

from paramstore.core.key import ExpertKey
from paramstore.core.location import Identity
from paramstore.errors import LeaseError, UnknownKey
from paramstore.policy.slot_visit import SlotVisit
from paramstore_client.device.slots import DeviceCopy, DeviceSlots
from paramstore_client.source import HostTicket


@dataclass(frozen=True, slots=True)
class DeviceStats:
    """Counts of keys since the tier was made. hits: there when the visit began; late: on their way then. prefetched: copied ahead;
    useful, wasted: of these, used then, or gone before. refetches: stale copies that were dropped, of whatever use."""

    hits: int
    late: int
    misses: int
    refetches: int
    evictions: int
    prefetched: int
    useful: int
    wasted: int
    bytes_copied: int


class SlotOwner(Protocol):
    """Who decides visits, and has the slots: `DeviceTier`."""

    device: torch.device
    slots: DeviceSlots

    def end_visit(self, visit: SlotVisit, copies: Collection[DeviceCopy]) -> None:
        """Ends the visit of a lease, whose last kernel has been given to the current stream."""
        ...

    def settle(self) -> None:
        """Takes up what has come since the last call."""
        ...


class DeviceLease:
    """Copies held in their slots until released. Views are ordered after the copies on the stream that acquired them."""

    def __init__(self, tier: SlotOwner, visit: SlotVisit, copies: Sequence[DeviceCopy]) -> None:
        self._tier = tier
        self._visit = visit
        self._copies = {copy.key: copy for copy in copies}

    def __getitem__(self, key: ExpertKey, /) -> Mapping[str, Tensor]:
        if self._visit.is_over:
            raise LeaseError(f"the lease of {key} on {self._tier.device} was released: acquire it again")
        return self._tier.slots.views(self._copy(key))

    def identity(self, key: ExpertKey, /) -> Identity:
        return self._copy(key).identity

    def slot(self, key: ExpertKey, /) -> int:
        """The slot of `key`: its place in the tier's fields, [S, ...]. Raises LeaseError after the release, UnknownKey."""
        self[key]  # proves that the slot is still its own
        return self._copy(key).slot

    def keys(self) -> list[ExpertKey]:
        return list(self._copies)

    def release(self) -> None:
        if not self._visit.is_over:
            self._tier.end_visit(self._visit, self._copies.values())

    def __enter__(self) -> DeviceLease:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.release()

    def _copy(self, key: ExpertKey) -> DeviceCopy:
        copy = self._copies.get(key)
        if copy is None:
            raise UnknownKey(f"key {key} is not in this lease of {len(self._copies)} keys on {self._tier.device}")
        return copy


class DeviceTicket:
    """A prefetch on its way to the device. It is done when its copies are in the stream, or were given up."""

    def __init__(self, tier: SlotOwner, keys: tuple[ExpertKey, ...], host: HostTicket) -> None:
        self.keys = keys
        self.host = host
        self.is_settled = False
        self._tier = tier

    def done(self) -> bool:
        self._tier.settle()
        return self.is_settled

    def cancel(self) -> object:
        self.is_settled = True
        return self.host.cancel()
