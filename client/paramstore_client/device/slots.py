"""Slots in device memory: which key's copy is in which slot, who holds it, and which copies go when room is needed.

- A slot is overwritten only when no lease holds it and every kernel that used it has run.
- A lease proves its slots' generation at each use: a slot given away cannot be read by mistake.
- A superseded copy stays where it is until its last lease ends.
"""

# S slots

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from paramstore.core.key import ExpertKey
from paramstore.core.location import Identity
from paramstore.core.schema import Part
from paramstore.core.slots import SlotTable
from paramstore.errors import LeaseError
from paramstore.policy.base import Policy
from paramstore_client.device.copier import REACHED, Copier, Mark


@dataclass(slots=True, eq=False)
class DeviceCopy:
    """One key's bytes in a slot. ready: reached when they are there. checked_at: the view change count of the last check."""

    key: ExpertKey
    slot: int
    generation: int
    identity: Identity
    ready: Mark
    checked_at: int | None = None
    lease_count: int = 0
    is_superseded: bool = False


class DeviceSlots:
    """Owner of the slot tensors (one [S, *shape] per field), of the copies in them, and of the policy that ranks them."""

    def __init__(self, part: Part, count: int, *, device: torch.device, policy: Policy, copier: Copier) -> None:
        self.fields = {
            field.name: torch.zeros((count, *field.shape), dtype=getattr(torch, field.dtype), device=device)
            for field in part.fields
        }
        self._device = device
        self._table = SlotTable()
        self._table.grow(count)
        self._last_use: list[Mark] = [REACHED] * count
        self._copies: dict[ExpertKey, DeviceCopy] = {}
        self._policy = policy
        self._copier = copier

    @property
    def count(self) -> int:
        return self._table.count

    @property
    def free_count(self) -> int:
        return self._table.free_count

    @property
    def keys(self) -> list[ExpertKey]:
        """The keys with a copy that is not superseded."""
        return list(self._copies)

    @property
    def unleased_count(self) -> int:
        """Slots that a request could get: free, or with a copy that nobody holds."""
        return self._table.free_count + sum(copy.lease_count == 0 for copy in self._copies.values())

    def find(self, key: ExpertKey) -> DeviceCopy | None:
        return self._copies.get(key)

    def make_room(self, key_count: int, *, kept: Collection[ExpertKey]) -> int:
        """Makes `key_count` slots free, evicting neither leased keys nor `kept`. Returns how many were evicted.

        Raises LeaseError where there are not so many; then nothing is evicted.
        """
        needed = key_count - self._table.free_count
        if needed <= 0:
            return 0
        victims = self._policy.victims(needed, lambda name: name in kept or self._copies[cast(ExpertKey, name)].lease_count > 0)
        if victims is None:
            raise LeaseError(
                f"{key_count} slots needed on {self._device}: {self._table.free_count} of {self.count} are free, and leases of "
                "this process hold too many of the others; release some first, or give DeviceTier more slots"
            )
        for victim in victims:
            self.drop(cast(ExpertKey, victim))
        return len(victims)

    def place(self, key: ExpertKey, sources: Mapping[str, Tensor], identity: Identity) -> DeviceCopy:
        """Copies `sources` into a free slot. There must be one, and no other copy of `key`."""
        assert key not in self._copies, f"{key} has a copy that was not dropped"
        slot = self._table.take()
        pairs = [(field[slot], sources[name]) for name, field in self.fields.items()]
        ready = self._copier.copy(pairs, after=self._last_use[slot])
        copy = self._copies[key] = DeviceCopy(key, slot, self._table.generation(slot), identity, ready)
        self._policy.record(key)
        return copy

    def drop(self, key: ExpertKey) -> None:
        """Withdraws the copy of `key` from further requests; its slot is free now, or when its last lease ends."""
        copy = self._copies.pop(key)
        self._policy.forget(key)
        copy.is_superseded = True
        if copy.lease_count == 0:
            self._table.free(copy.slot)

    def record_use(self, keys: Iterable[ExpertKey]) -> None:
        for key in keys:
            self._policy.record(key)

    def begin_lease(self, copies: Iterable[DeviceCopy]) -> None:
        """Holds the copies; the caller's current stream goes on only after they are there."""
        for copy in copies:
            copy.lease_count += 1
            copy.ready.wait_on_stream()

    def end_lease(self, copies: Iterable[DeviceCopy]) -> None:
        """Ends a hold on the copies: the holder has given its last kernel on them to the current stream."""
        last_use = self._copier.mark_use()
        for copy in copies:
            if copy.lease_count == 0:  # another holder's slot would be given away
                raise LeaseError(f"the lease of {copy.key} on {self._device} was ended twice")
            self._last_use[copy.slot] = last_use
            copy.lease_count -= 1
            if copy.is_superseded and copy.lease_count == 0:
                self._table.free(copy.slot)

    def views(self, copy: DeviceCopy) -> dict[str, Tensor]:
        """The fields of a held copy. Raises LeaseError where its slot was given away: another key's bytes are there."""
        if self._table.generation(copy.slot) != copy.generation:
            raise LeaseError(f"slot {copy.slot} of {copy.key} on {self._device} was given away")
        return {name: field[copy.slot] for name, field in self.fields.items()}

    def clear(self) -> None:
        """Drops every copy."""
        for key in self.keys:
            self.drop(key)
