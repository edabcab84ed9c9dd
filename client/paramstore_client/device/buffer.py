"""Expert buffering ("Towards MoE Deployment", arXiv 2303.06182, section VI): a few experts of all layers stand where they are used,
and those that this batch does not need give way first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import TracebackType

import torch
from torch import Tensor

from paramstore.core.arguments import text, whole_number, wrong
from paramstore.core.key import ExpertKey
from paramstore.core.schema import Schema
from paramstore.errors import CapacityError
from paramstore.policy.slot_visit import SlotCounts
from paramstore_client.device.slot_cache import open_slots
from paramstore_client.device.tier import device_of
from paramstore_client.handle.base import plain_keys
from paramstore_client.source import AheadTicket, ArrivingLease, HostSource, WeightLease


class ExpertBuffer:
    """`slots` experts of a namespace that stand between their uses: an `ExpertSource`. A context manager; owner of its slots.

    device: where the weights are needed; on the CPU a slot is a lease that stands, without a copy. policy: which gives way, one of
    `paramstore.policy.make.SLOT_POLICIES`. Closing it releases what stands. Used by one thread at a time on a device.

    Where it differs from the paper: all layers share the slots, where the paper gives each layer a buffer of its own; what was
    loaded ahead is spared until its layer's next visit; of several inactive experts the one loaded last goes, which the paper
    leaves open.

        with ps.ExpertBuffer(ns, slots=L * E // 4) as buffer, torch.no_grad():
            model = Model([ps.nn.StoredExperts(buffer, layer) for layer in range(L)])
            model.generate(prompt)
            print(buffer.counts.hits, buffer.bytes_loaded)

    Raises ConfigError on arguments of another kind and fewer slots than one, CapacityError on more slots than the namespace was
    promised on the CPU: `open_namespace(min_lease_slots=...)` asks for more.
    """

    def __init__(
        self, namespace: HostSource, slots: int, device: torch.device | str = "cpu", policy: str = "lifo_inactive"
    ) -> None:
        if not isinstance(namespace, HostSource):
            raise wrong("namespace", namespace, "an open namespace")
        self.schema: Schema = namespace.schema
        self.layers: Sequence[int] = namespace.layers
        self.experts: int = namespace.experts
        slots = min(whole_number("slots", slots, least=1), len(self.layers) * self.experts)
        place = device_of(device)
        self._slots = open_slots(namespace, slots, device=place, policy=text("policy", policy))
        if self._slots.lease_slots < slots:
            raise CapacityError(
                f"slots={slots}: {self._slots.lease_slots} experts may stand of lease_slots={namespace.lease_slots} that the "
                "namespace was promised; open it with a greater min_lease_slots, and max_lease_slots where that was given"
                + (", or give fewer slots" if namespace.lease_slots else "")
            )

    @property
    def lease_slots(self) -> int:
        """Keys that may be in use at once: all slots."""
        return self._slots.lease_slots

    @property
    def is_on_host(self) -> bool:
        """Whether its slots are leases of host memory, as on the CPU."""
        return self._slots.is_on_host

    @property
    def counts(self) -> SlotCounts:
        """Keys of all visits: hits were there when their visit began; late ones on their way then; the others were loaded."""
        return self._slots.counts

    @property
    def bytes_loaded(self) -> int:
        """Bytes of `param` images that were loaded into slots, ahead and not. On the CPU those that the daemon still has are not
        read from a volume, so that this is the most that was read."""
        return (self.counts.loads - self.counts.failed) * self.schema.part("param").image_bytes

    def acquire(self, keys: Sequence[ExpertKey], /, part: str = "param", timeout_s: float | None = None) -> WeightLease:
        """Leases all keys or none; waits for those that do not stand. Raises CapacityError above `lease_slots`, LeaseError where
        leases of this process hold the slots, and what the namespace's `acquire` raises; then nothing is leased. The end of its
        `with` raises LeaseError where another thread has closed the namespace meanwhile."""
        return self._slots.acquire(plain_keys(keys), part=text("part", part), timeout_s=timeout_s)

    def acquire_arriving(
        self, keys: Sequence[ExpertKey], /, timeout_s: float | None = None, *, may_pass: bool = False
    ) -> ArrivingLease:
        """Leases all keys or none, and waits for as few as it can. may_pass: any number of keys; those beyond what may stand pass
        by while the lease is gone through (`in_turn`), and what stands stays. Raises what `acquire` raises."""
        return self._slots.acquire_arriving(plain_keys(keys), timeout_s, may_pass=may_pass)

    def prefetch(self, keys: Sequence[ExpertKey], /, part: str = "param") -> AheadTicket:
        """Asks for those of `keys` that do not stand, as many as slots can be given to; returns at once."""
        return self._slots.prefetch(plain_keys(keys), part=text("part", part))

    def push(self, gradients: Mapping[ExpertKey, Mapping[str, Tensor]], /) -> object:
        """Hands the gradients to the namespace."""
        return self._slots.push(gradients)

    def lacking(self, keys: Sequence[ExpertKey]) -> list[ExpertKey]:
        """Those of `keys` that neither stand nor are on their way."""
        return self._slots.lacking(keys)

    def skip(self, layers: Sequence[int]) -> None:
        """Notes that these layers are not visited this time: what was loaded ahead for them is spared no more."""
        self._slots.skip(layers)

    def close(self) -> None:
        """Releases every expert that nobody uses."""
        self._slots.close()

    def __repr__(self) -> str:
        return f"<ExpertBuffer of {self.lease_slots} slots, {self.counts.hits} hits, {self.counts.loads} loads>"

    def __enter__(self) -> ExpertBuffer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()
