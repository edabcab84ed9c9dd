"""Lives of a device tier that a seed decides; what its kernels read is compared, byte for byte, with what the store held.

Runs on the simulated device and on a real one: a scenario knows streams by torch's names alone.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random

import torch
from torch import Tensor

from paramstore.core.key import ExpertKey
from paramstore.core.location import Identity
from paramstore.core.optimizers import AdamW
from paramstore.core.schema import Part
from paramstore.testing.memory_namespace import MemoryNamespace
from paramstore_client.device.copier import REACHED, CudaCopier
from paramstore_client.device.device_lease import DeviceLease
from paramstore_client.device.tier import DeviceTier
from paramstore_testkit.streams.cuda import simulated_cuda
from paramstore_testkit.streams.device_tensor import peek, poison
from paramstore_testkit.streams.world import StreamWorld

STEPS = 24
SLOTS = 5
LEASE_SLOTS = (2, 16)
"""With few, a tier waits for its host leases; with many, for hardly one, so that no such wait hides that another is missing."""
DEVICE = torch.device("cuda", 0)
ACTS = {"use": 8, "go_through": 4, "hold": 3, "let_go": 3, "prefetch": 4, "update": 2, "ask": 4, "unmap": 2}


class PastHost:
    """Stands for a `RecordSource`: records come in a stream of their own that waits for nobody, as those that kvikio reads do."""

    keys_at_once = 2

    def __init__(self, namespace: MemoryNamespace) -> None:
        self.part: Part = namespace.schema.part("param")
        self.reader = self
        self._namespace = namespace

    def lease(self, keys: Sequence[ExpertKey], timeout_s: float | None) -> PastHost:
        return self

    def __enter__(self) -> PastHost:
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing was leased."""

    def read(self, lease: PastHost, key: ExpertKey, image: Tensor) -> Identity:
        """Fills the image's fields, and waits on the host until they are there."""
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        values = self._namespace.values(key)
        with torch.cuda.stream(stream):
            for field in lease.part.fields:
                value = values[field.name].contiguous().flatten().view(torch.uint8)
                image[field.offset_bytes :][: field.length_bytes].copy_(value)
        stream.synchronize()
        return self._namespace.identity(key)


class TierLife:
    """Random acts on a tier of a few slots. wrong: what was read, or told, and is not so. lease_slots: drawn where it is None.
    is_past_host: whether what a visit lacks comes past the host."""

    def __init__(self, seed: int, *, lease_slots: int | None = None, is_past_host: bool = False) -> None:
        self.wrong: list[str] = []
        self._random = Random(seed)
        self._namespace = MemoryNamespace.of_swiglu(
            layers=2, experts=6, hidden=8, inner=8, lease_slots=lease_slots or self._random.choice(LEASE_SLOTS), seed=1
        )
        self._tier = DeviceTier(self._namespace, SLOTS, device=DEVICE)
        if is_past_host:
            self._tier.copies._records = PastHost(self._namespace)  # type: ignore[assignment]  # it stands for one
        self._held: tuple[list[ExpertKey], DeviceLease, list[Tensor]] | None = None
        self._read: list[tuple[str, Tensor, Tensor]] = []
        """Of each kernel: the act, what it read, and what it had to."""

    def live(self, steps: int = STEPS) -> list[str]:
        """Does `steps` acts and closes the tier. Returns what went wrong."""
        for number in range(steps):
            name = self._random.choices(list(ACTS), list(ACTS.values()))[0]
            getattr(self, name)(f"act {number}, {name}")
        self.let_go("the end")
        self._tier.close()
        if self._namespace.leased or self._namespace.watchers:
            self.wrong.append("the closed tier holds leases, or watches memory")
        torch.cuda.synchronize()
        self.wrong += [act for act, read, expected in self._read if not torch.equal(read.cpu(), expected)]
        return self.wrong

    def use(self, act: str) -> None:
        keys = self._keys(3)
        with self._tier.fetch(keys) as lease:
            self._compute(act, keys, lease, self._truth(keys))

    def go_through(self, act: str) -> None:
        """Computes with more keys than there are slots, as they come and pass by."""
        keys = self._random.sample(list(self._namespace.space), self._random.randint(SLOTS + 1, len(self._namespace.space)))
        seen = list[ExpertKey]()
        with self._tier.acquire_arriving(keys, may_pass=True) as lease:
            for key in lease.in_turn():
                seen.append(key)
                self._compute(act, [key], lease, self._truth([key]))
        if sorted(seen) != sorted(keys):
            self.wrong.append(f"{act}: not each key once: {seen}")

    def hold(self, act: str) -> None:
        """Takes a lease that stays over the next acts, in place of the one that did."""
        self.let_go(act)
        keys = self._keys(2)
        self._held = keys, self._tier.fetch(keys), self._truth(keys)

    def let_go(self, act: str) -> None:
        """Computes with the lease that stayed, and ends it: it has the bytes of when it began, whatever was updated since."""
        if self._held is not None:
            keys, lease, truth = self._held
            self._compute(act, keys, lease, truth)
            lease.release()
            self._held = None

    def prefetch(self, act: str) -> None:
        self._tier.prefetch(self._keys(4))

    def update(self, act: str) -> None:
        """Updates some experts, of which the tier has one if it has any."""
        keys = {*self._keys(3), *self._tier.keys[:1]}
        self._namespace.push({key: {name: value + 1 for name, value in self._namespace.values(key).items()} for key in keys})
        self._namespace.apply(AdamW(lr=0.1))

    def ask(self, act: str) -> None:
        """Looks, without waiting, at bytes of which the tier says that they are there."""
        for key in self._tier.keys:
            if self._tier.has([key]):
                with self._tier.fetch([key]) as lease:
                    for value, expected in zip(lease[key].values(), self._truth([key]), strict=True):
                        if not torch.equal(peek(value).cpu(), expected):
                            self.wrong.append(f"{act}: the bytes of {key} are not there")

    def unmap(self, act: str) -> None:
        """Ends all host leases as a store does that is closed: whoever watches is told, and the memory goes."""
        for lease in list(self._namespace.leased):
            for tell in list(self._namespace.watchers.values()):
                for buffer in lease.buffers.values():
                    tell(buffer.ctypes.data, buffer.nbytes)
            lease.release()

    def _keys(self, most: int) -> list[ExpertKey]:
        return self._random.sample(list(self._namespace.space), self._random.randint(1, most))

    def _truth(self, keys: Sequence[ExpertKey]) -> list[Tensor]:
        return [value.clone() for key in keys for value in self._namespace.values(key).values()]

    def _compute(self, act: str, keys: Sequence[ExpertKey], lease: DeviceLease, truth: Sequence[Tensor]) -> None:
        """Runs a kernel on each field, which copies all its bytes."""
        values = [value for key in keys for value in lease[key].values()]
        self._read += [(act, value.clone(), expected) for value, expected in zip(values, truth, strict=True)]


def live_in_tier(seed: int) -> list[str]:
    """Lives a tier's life. Returns what went wrong."""
    return TierLife(seed).live()


def live_past_host(seed: int) -> list[str]:
    """Lives the life of a tier whose records come past the host. Returns what went wrong."""
    return TierLife(seed, is_past_host=True).live()


def live_long(seed: int) -> list[str]:
    """Lives a long life with each number of lease slots, and one past the host. Returns what went wrong."""
    lives = [TierLife(seed, lease_slots=count) for count in LEASE_SLOTS] + [TierLife(seed, is_past_host=True)]
    return [wrong for life in lives for wrong in life.live(2 * STEPS)]


def copy_and_close(seed: int) -> list[str]:
    """Copies once with a copier that is closed at once, whose source goes right after it. Returns what went wrong."""
    with mmap.mmap(-1, mmap.PAGESIZE) as memory:
        source = torch.frombuffer(memory, dtype=torch.float32)
        source.fill_(float(seed))
        target = torch.zeros(len(source), device=DEVICE)
        torch.cuda.synchronize()
        copier = CudaCopier(DEVICE, bounce_bytes=source.nbytes)
        copier.copy([(target, source)], after=REACHED)
        copier.close()
        poison(source)
        del source
        torch.cuda.synchronize()
    return [] if torch.equal(target.cpu(), torch.full(target.shape, float(seed))) else ["a copier was closed before its copy"]


Scenario = Callable[[int], list[str]]
SCENARIOS: tuple[Scenario, ...] = (live_in_tier, live_past_host, copy_and_close)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What went wrong in a run. wrong: what the scenario saw. races: what the checker saw."""

    wrong: list[str]
    races: list[str]


def simulate(seed: int, scenario: Scenario, *, is_lazy: bool = False, can_register: bool = True) -> Outcome:
    """Runs a scenario on the simulated device. What refuses to go on, as an assert does, counts as wrong."""
    world = StreamWorld(seed, is_lazy=is_lazy)
    with simulated_cuda(world, can_register=can_register):
        try:
            wrong = scenario(seed)
        except AssertionError as error:
            wrong = [f"refused: {error}"]
    return Outcome(wrong, world.races.found)
