"""A device tier of a few slots on the CPU, and calls on it."""

import torch

from paramstore.core.optimizers import AdamW
from paramstore.testing.memory_namespace import MemoryNamespace
from paramstore_client.device.copier import HostCopier
from paramstore_client.device.device_lease import DeviceLease
from paramstore_client.device.tier import DeviceTier

KEYS = [(0, expert) for expert in range(6)]


def make_namespace(*, lease_slots: int = 64) -> MemoryNamespace:
    return MemoryNamespace.of_swiglu(lease_slots=lease_slots)


def make_tier(ns: MemoryNamespace, slots: int = 4, *, policy: str = "decayed_lfu") -> DeviceTier:
    return DeviceTier(ns, slots, device="cpu", policy=policy)


def use(tier: DeviceTier, keys: list[tuple[int, int]]) -> None:
    with tier.fetch(keys):
        pass


def update(ns: MemoryNamespace, keys: list[tuple[int, int]]) -> None:
    ns.push({key: {name: torch.ones_like(value) for name, value in ns.values(key).items()} for key in keys})
    ns.apply(AdamW(lr=0.1))


def assert_holds(ns: MemoryNamespace, held: DeviceLease, keys: list[tuple[int, int]]) -> None:
    for key in keys:
        for name, value in ns.values(key).items():
            assert torch.equal(held[key][name], value), f"{key} {name}"


class WatchfulCopier(HostCopier):
    """Notes which memory it was told to forget."""

    def __init__(self) -> None:
        self.forgotten: list[tuple[int, int]] = []

    def forget_memory(self, address: int, length_bytes: int) -> None:
        self.forgotten.append((address, length_bytes))
