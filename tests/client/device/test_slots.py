"""Slots of a device: what a copy into one comes after."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from paramstore.core.location import Identity
from paramstore.core.schema import Schema
from paramstore_client.device.copier import REACHED, HostCopier, Mark, Reached, make_copier
from paramstore_client.device.slots import DeviceSlots, Packed
from paramstore_client.quantized.packed import packed_tensors, unpack_all, unpacked
from paramstore_testkit.streams.cuda import simulated_cuda
from paramstore_testkit.streams.world import StreamWorld
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


def test_quantized_records_are_unpacked_as_they_come_on_a_device_from_one_image_there() -> None:
    schema = Schema.param({"w:fp8:0": ((4, 8), "float8_e4m3fn"), "w:fp8:0:scale": ((2, 1), "float32")})
    (tensor,) = packed_tensors(schema)
    weight = torch.arange(32, dtype=torch.uint8).view(torch.float8_e4m3fn).view(4, 8)
    sources = {"w:fp8:0": weight, "w:fp8:0:scale": torch.tensor([[2.0], [0.5]])}
    expected = torch.empty(4, 8, dtype=torch.bfloat16)
    tensor.unpack(sources, expected)
    packed = Packed(schema.part("param"), partial(unpack_all, [tensor]))
    for device in (torch.device("cpu"), torch.device("cuda", 0)):
        with simulated_cuda(StreamWorld(5)):
            part = unpacked(schema, "bfloat16").part("param")
            copier = make_copier(device, bounce_bytes=schema.record_bytes)
            slots = DeviceSlots(part, 2, device=device, copier=copier, packed=packed)
            copies = [slots.place((0, place), sources, Identity(1, 1), checked_at=0) for place in range(2)]
            slots.begin_use(copies)
            for copy in copies:
                assert torch.equal(slots.views(copy)["w"].cpu(), expected), device
            copier.close()
