"""Slots of a device: what a copy into one comes after."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from paramstore_client.device.copier import REACHED, HostCopier, Mark, Reached
from paramstore_client.device.slots import DeviceSlots
from paramstore_testkit.training.small_tier import KEYS, make_namespace


class OrderedCopier(HostCopier):
    """Marks each end of work with its own mark, and notes which one each copy comes after."""

    def __init__(self) -> None:
        self.ends: list[Mark] = []
        self.after: list[Mark] = []

    def copy(self, fields: Sequence[tuple[Tensor, Tensor]], *, after: Mark) -> Mark:
        self.after.append(after)
        return super().copy(fields, after=after)

    def mark_use(self) -> Mark:
        self.ends.append(Reached())
        return self.ends[-1]


def test_first_copy_into_a_slot_comes_after_the_work_that_made_it_and_later_ones_after_its_last_use() -> None:
    ns, copier = make_namespace(), OrderedCopier()
    slots = DeviceSlots(ns.schema.part("param"), 1, device=torch.device("cpu"), copier=copier)
    for key in KEYS[:2]:
        copy = slots.place(key, ns.values(key), ns.identity(key), checked_at=0)
        slots.begin_use([copy])
        slots.end_use([copy])
        slots.free(copy)
    assert copier.after == copier.ends[:2]
    assert REACHED not in copier.after


def test_slots_made_in_inference_mode_are_written_to_outside_of_it() -> None:
    ns = make_namespace()
    with torch.inference_mode():
        slots = DeviceSlots(ns.schema.part("param"), 1, device=torch.device("cpu"), copier=HostCopier())
    copy = slots.place(KEYS[0], ns.values(KEYS[0]), ns.identity(KEYS[0]), checked_at=0)
    for name, value in ns.values(KEYS[0]).items():
        assert torch.equal(slots.views(copy)[name], value)
