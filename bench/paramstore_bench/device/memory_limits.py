"""Lets the device's memory run out, when slots are made and later, and looks at what is left: fewer slots and the right bytes, or
a clear error."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from paramstore.bench.report.rows import Row
from paramstore.errors import CapacityError
from paramstore.testing.memory_namespace import MemoryNamespace
from paramstore_bench.device.place import Place
from paramstore_bench.device.plan import MIB, Plan, yes_or_no
from paramstore_client.device.slots import DeviceSlots
from paramstore_client.device.tier import DeviceTier
from paramstore_client.hf.loading.served_place import make_tier
from paramstore_client.hf.model.binding import ATTRIBUTE, bind
from paramstore_client.hf.model.kernels import ExpertStack
from paramstore_client.hf.model.layer_experts import ModelExperts
from paramstore_testkit.training.moe_families import EXPERTS, tiny_config
from paramstore_testkit.training.moe_models import Twin

ASKED = 16
SIZES = {"hidden_size": 512, "moe_intermediate_size": 1024}
TOKENS = 4096


def measure_memory_limits(place: Place, plan: Plan, directory: Path) -> Iterator[Row]:
    """Takes memory away before a tier is made, and while a layer computes."""
    yield from _at_the_start(place)
    yield from _later(place)


def _at_the_start(place: Place) -> Iterator[Row]:
    namespace = MemoryNamespace.of_swiglu(layers=2, experts=8, hidden=512, inner=1024, lease_slots=64)
    image_bytes = namespace.schema.part("param").image_bytes
    with limited(place, 7 * image_bytes):
        with make_tier(namespace, ASKED, device=place.device, policy="schedule") as tier:
            slots, wrong = tier.lease_slots, 0
            for key in namespace.space:
                with tier.fetch([key]) as held:
                    wrong += sum(not torch.equal(held[key][name].cpu(), value) for name, value in namespace.values(key).items())
            del held
        del tier
    yield yes_or_no(
        "memory runs out when slots are made", f"{ASKED} asked, room for 7", is_so=slots == 4 and not wrong, slots=slots,
        wrong_fields=wrong, image_bytes=image_bytes,
    )  # fmt: skip
    told = ""
    with limited(place, image_bytes // 2):
        try:
            make_tier(namespace, ASKED, device=place.device, policy="schedule").close()
        except CapacityError as error:
            told = str(error)
    yield yes_or_no("memory runs out when slots are made", "no room for one", is_so=bool(told), note=told)


def _later(place: Place) -> Iterator[Row]:
    """Calls one experts module, which needs more memory than there is until the tier has given some of its slots back."""
    config = tiny_config("qwen3_moe", sizes={} if place.is_twin else SIZES)
    twin = Twin.of(config, kernel="grouped_mm", dtype=torch.bfloat16, is_trained=False)
    count = len(twin.layout.layers) * EXPERTS
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(TOKENS // (64 if place.is_twin else 1), config.hidden_size, generator=generator).bfloat16().to(place.device)
    ids = torch.randint(2, (len(x), 1), generator=generator).to(place.device)
    gate = torch.ones(len(x), 1, dtype=torch.bfloat16, device=place.device)
    given, of_one = (x, ids, gate), (x, torch.zeros_like(ids), gate)
    stored = next(module for module in twin.stored.modules() if ATTRIBUTE in module.__dict__)
    path = next(name for name, module in twin.stored.named_modules() if module is stored)
    stock = twin.stock.get_submodule(path).to(place.device)
    with torch.no_grad():
        needed, expected = needed_bytes(place, stock, given)
        with DeviceTier(twin.namespace, count, device=place.device) as tier:
            bind(twin.stored, ModelExperts(tier, anchor=None), kernel="grouped_mm")
            stored(*given)  # what libraries allocate at first use is there from here on
            with limited(place, needed - tier.slots.bytes // 4, fails=1):
                y = stored(*given)
            slots, is_equal = tier.lease_slots, torch.equal(y, stored(*given))
            yield yes_or_no(
                "memory runs out in a layer", "slots give way, and no bit", is_so=1 < slots < count and is_equal,
                slots_before=count, slots=slots, equals_unmodified=torch.equal(y, expected), needed_bytes=needed,
            )  # fmt: skip
            told = ""
            with limited(place, -tier.slots.bytes, fails=100):
                try:
                    stored(*of_one)
                except (CapacityError, torch.OutOfMemoryError) as error:
                    told = f"{type(error).__name__}: {error}"
            yield yes_or_no("memory runs out in a layer", "for good", is_so=told.startswith("CapacityError"), note=told)


def needed_bytes(place: Place, module: Any, given: tuple[Tensor, ...]) -> tuple[int, Tensor]:
    """(bytes that a call takes beyond what is allocated before it, its result)."""
    if place.is_twin:
        return MIB, module(*given)
    module(*given)
    torch.cuda.reset_peak_memory_stats(place.device)
    before = torch.cuda.memory_allocated(place.device)
    y = module(*given)
    return torch.cuda.max_memory_allocated(place.device) - before, y


@contextmanager
def limited(place: Place, length_bytes: int, *, fails: int = 0) -> Iterator[None]:
    """Within it this process may allocate so many bytes on the device more than it has by now; negative: so many less.

    fails: on the twin, where nothing runs out, the number of multiplications that do; there slots take bytes alone.
    """
    if place.is_twin:
        with _planted(length_bytes, fails):
            yield
        return
    gc.collect()
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(place.device).total_memory
    allowed = torch.cuda.memory_reserved(place.device) + length_bytes
    torch.cuda.set_per_process_memory_fraction(min(1.0, max(allowed, 1) / total), place.device)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, place.device)


@contextmanager
def _planted(length_bytes: int, fails: int) -> Iterator[None]:
    make, multiply = DeviceSlots.__init__, ExpertStack.grouped_mm
    left = fails

    def made(self: DeviceSlots, part: Any, count: int, **options: Any) -> None:
        if not fails and count * part.image_bytes > length_bytes:
            raise torch.OutOfMemoryError("planted")
        make(self, part, count, **options)

    def multiplied(self: ExpertStack, *inputs: Tensor) -> Tensor:
        nonlocal left
        if left:
            left -= 1
            raise torch.OutOfMemoryError("planted")
        return multiply(self, *inputs)

    with patch.object(DeviceSlots, "__init__", made), patch.object(ExpertStack, "grouped_mm", multiplied):
        yield
