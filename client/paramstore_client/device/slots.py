"""Slots in device memory: their bytes, which lease may read them, and when one may be overwritten.

- A slot is overwritten only after every kernel that used it has run: the copy waits for that, in the stream.
- A copy proves its slot's generation at each use: a slot given away cannot be read by mistake.

Which key stands where is decided by `SlotPlan`; here a slot has no name.
"""

# S slots

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from paramstore.core.key import ExpertKey
from paramstore.core.location import Identity
from paramstore.core.schema import Field, Part
from paramstore.core.slots import SlotTable
from paramstore.errors import LeaseError
from paramstore_client.device.copier import REACHED, Copier, Mark


@dataclass(frozen=True, slots=True)
class Packed:
    """Quantized records. part: their fields. unpack: makes the slot's tensors (second argument) of the fields."""

    part: Part
    unpack: Callable[[Mapping[str, Tensor], Mapping[str, Tensor]], None]


@dataclass(slots=True, eq=False)
class DeviceCopy:
    """One key's bytes in a slot. ready: reached when they are there. checked_at: the view change count of the last check."""

    key: ExpertKey
    slot: int
    generation: int
    identity: Identity
    ready: Mark
    checked_at: int


class DeviceSlots:
    """Owner of the slots' memory, one tensor [S, bytes of an image], and of the marks of their last uses.

    part: of what stands in them. packed: of the records, where these are quantized: they are unpacked as they come, on a device
    from one more image there, which only the copies use.
    """

    def __init__(self, part: Part, count: int, *, device: torch.device, copier: Copier, packed: Packed | None = None) -> None:
        with torch.inference_mode(False):  # else, made in such a block, they could not be written to behind it
            images = torch.zeros((count, part.image_bytes), dtype=torch.uint8, device=device)
            self._images = images
            self.fields = {field.name: _over(images, field) for field in part.fields}
            self._staged: dict[str, Tensor] = {}
            if packed is not None and device.type != "cpu":
                staging = torch.zeros((1, packed.part.image_bytes), dtype=torch.uint8, device=device)
                self._staged = {field.name: _over(staging, field)[0] for field in packed.part.fields}
        self._packed = packed
        self.bytes = images.nbytes
        self.device = device
        self._table = SlotTable()
        self._table.grow(count)
        self._copier = copier
        # The zeros above, and whatever used this memory before, are work of the current stream: copies come after them too.
        self._last_use: list[Mark] = [copier.mark_use()] * count
        self._last_copy: list[Mark] = [REACHED] * count
        """Copies are in one order among themselves: only what is in no stream has to wait for them."""

    @property
    def count(self) -> int:
        return self._table.count

    @property
    def free_count(self) -> int:
        return self._table.free_count

    @property
    def keys_at_once(self) -> int | None:
        """Most copies on their way for which none waits on the host; None for any number."""
        return self._copier.keys_at_once

    def place(self, key: ExpertKey, sources: Mapping[str, Tensor], identity: Identity, *, checked_at: int) -> DeviceCopy:
        """Copies `sources` into a free slot, of which there must be one."""
        slot = self._table.take()
        try:
            ready = self._fill({name: field[slot] for name, field in self.fields.items()}, sources, after=self._last_use[slot])
        except BaseException:
            self._table.free(slot)
            raise
        self._last_copy[slot] = ready
        return DeviceCopy(key, slot, self._table.generation(slot), identity, ready, checked_at)

    def place_whole(self, key: ExpertKey, read: Callable[[Tensor], Identity], *, checked_at: int) -> DeviceCopy:
        """Has `read` fill the image of a free slot, of which there must be one, header included; it returns the identity. Waits on
        the host for the slot's last copy and use, as what reads is in no stream."""
        slot = self._table.take()
        try:
            self._last_copy[slot].wait_on_host()
            self._last_use[slot].wait_on_host()
            identity = read(self._images[slot])
        except BaseException:
            self._table.free(slot)
            raise
        return DeviceCopy(key, slot, self._table.generation(slot), identity, REACHED, checked_at)

    def _fill(self, targets: Mapping[str, Tensor], sources: Mapping[str, Tensor], *, after: Mark) -> Mark:
        if self._packed is None:
            return self._copier.copy([(target, sources[name]) for name, target in targets.items()], after=after)
        pairs = [(staged, sources[name]) for name, staged in self._staged.items()]
        return self._copier.copy(pairs, after=after, then=partial(self._packed.unpack, self._staged or sources, targets))

    def free(self, copy: DeviceCopy) -> None:
        """Gives the slot of a copy away. The next bytes go there after its own copy and its last use."""
        self._table.free(copy.slot)

    def begin_use(self, copies: Iterable[DeviceCopy]) -> None:
        """Makes the caller's current stream go on only after the copies are there."""
        for copy in copies:
            copy.ready.wait_on_stream()

    def end_use(self, copies: Iterable[DeviceCopy]) -> None:
        """Notes that the last kernel on the copies has been given to the caller's current stream."""
        last_use = self._copier.mark_use()
        for copy in copies:
            self._last_use[copy.slot] = last_use

    def views(self, copy: DeviceCopy) -> dict[str, Tensor]:
        """The fields of a copy in use. Raises LeaseError where its slot was given away: another key's bytes are there."""
        if self._table.generation(copy.slot) != copy.generation:
            raise LeaseError(f"slot {copy.slot} of {copy.key} on {self.device} was given away")
        return {name: field[copy.slot] for name, field in self.fields.items()}


def _over(images: Tensor, field: Field) -> Tensor:
    """The field of every image, [S, *shape], where it lies."""
    rows = images[:, field.offset_bytes : field.offset_bytes + field.length_bytes]
    return rows.view(getattr(torch, field.dtype)).view(len(images), *field.shape)
