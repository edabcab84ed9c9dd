"""The HBM tier: a cache of experts in device memory, owned by the process that computes.

- A copy is served only if its identity (epoch, version) is the one that the session sees now: after an update the stale
  copy is superseded and the key fetched again.
- Eviction never takes what the request under way needs, nor what is leased; victims come from `paramstore.policy`.
- Host leases end as soon as the copies from them are done; at most `namespace.lease_slots` keys are held meanwhile, and
  half of them are asked for at once, so that copies and loads overlap.

With `device="cpu"` the same class runs on host tensors without streams: the twin that every test runs on.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from types import TracebackType

import torch
from torch import Tensor

from paramstore.config import PolicyConfig
from paramstore.core.arguments import text, whole_number, wrong
from paramstore.core.key import ExpertKey
from paramstore.core.location import Identity
from paramstore.core.schema import Schema
from paramstore.errors import CapacityError, ConfigError, LeaseError, ParamStoreError, SchemaMismatch, UnknownKey
from paramstore.policy.make import make_policy
from paramstore_client.device.copier import REACHED, Mark, make_copier
from paramstore_client.device.slots import DeviceCopy, DeviceSlots
from paramstore_client.handle.base import plain_keys
from paramstore_client.source import HostSource, HostTicket, WeightLease

REPORT_EVERY = 64
"""Acquires between two reports of residency to the daemon."""
PREFETCHES_MAX = 16
"""Most prefetches that wait for the host; beyond it the oldest is forgotten here and stays a host prefetch."""

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class DeviceStats:
    """Counts of keys since the tier was made. A refetch is a miss where a stale copy was here; prefetched keys are misses too."""

    hits: int = 0
    misses: int = 0
    refetches: int = 0
    evictions: int = 0
    prefetched: int = 0
    bytes_copied: int = 0


class DeviceLease:
    """Copies held in their slots until released. Views are ordered after the copies on the stream that acquired them."""

    def __init__(self, tier: DeviceTier, copies: Sequence[DeviceCopy]) -> None:
        self._tier = tier
        self._copies = {copy.key: copy for copy in copies}
        self._is_released = False

    def __getitem__(self, key: ExpertKey, /) -> Mapping[str, Tensor]:
        if self._is_released:
            raise LeaseError(f"the lease of {key} on {self._tier.device} was released: acquire it again")
        return self._tier.slots.views(self._copy(key))

    def identity(self, key: ExpertKey, /) -> Identity:
        return self._copy(key).identity

    def keys(self) -> list[ExpertKey]:
        return list(self._copies)

    def release(self) -> None:
        if not self._is_released:
            self._is_released = True
            self._tier.slots.end_lease(self._copies.values())
            self._tier.settle()

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

    def __init__(self, tier: DeviceTier, keys: tuple[ExpertKey, ...], host: HostTicket) -> None:
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


def device_of(device: torch.device | str) -> torch.device:
    """`device` as a torch device. Raises ConfigError where there is none of that name."""
    if not isinstance(device, str | torch.device):
        raise wrong("device", device, "a torch.device, or its name")
    try:
        return torch.device(device)
    except RuntimeError as error:
        raise ConfigError(f"device={device!r}: {str(error).splitlines()[0]}") from error


class DeviceTier:
    """An `ExpertSource` in front of a namespace: `StoredExperts(tier, layer)` computes on the device.

    slots: experts it has room for. policy: see `paramstore.policy`. Used by one thread at a time (the autograd thread
    of a backward counts as its caller's). Owner of the slots, the prefetches and the host leases under way.

    A hit costs no round trip while `namespace.view_change_count` stands still; when it has grown, each key is leased from the
    host once to compare identities, and copied again only if they differ. Host memory is registered with CUDA until the
    namespace says that it goes (`before_unmap`). What is resident and used is reported every REPORT_EVERY acquires.
    """

    def __init__(self, namespace: HostSource, slots: int, *, device: torch.device | str, policy: str = "decayed_lfu") -> None:
        if not isinstance(namespace, HostSource):
            raise wrong("namespace", namespace, "an open namespace")
        slots = whole_number("slots", slots, least=1)
        self.device = device_of(device)
        self.stats = DeviceStats()
        self.schema: Schema = namespace.schema
        self.layers: Sequence[int] = namespace.layers
        self.experts: int = namespace.experts
        self.namespace = namespace
        self._part = self.schema.part("param")
        self._copier = make_copier(self.device, bounce_bytes=self._part.image_bytes)
        self.slots = DeviceSlots(
            self._part,
            slots,
            device=self.device,
            policy=make_policy(PolicyConfig(name=text("policy", policy)), slots),
            copier=self._copier,
        )
        self._host_leases: deque[tuple[Mark, WeightLease, int]] = deque()
        self._prefetches: deque[DeviceTicket] = deque()
        self._touched: dict[ExpertKey, None] = {}
        self._acquire_count = 0
        self._stop_watching = namespace.before_unmap(self._forget_memory)

    @property
    def lease_slots(self) -> int:
        """How many keys one caller may hold leased at once: as many as there are slots."""
        return self.slots.count

    def describe(self) -> dict[str, object]:
        """For people: device, sizes, how host memory is copied, and the counts."""
        return {
            "device": str(self.device),
            "slots": self.slots.count,
            "free_slots": self.slots.free_count,
            "bytes": sum(field.nbytes for field in self.slots.fields.values()),
            "host_memory": self._copier.describe(),
            **asdict(self.stats),
        }

    # --- the source's calls ---

    def acquire(self, keys: Sequence[ExpertKey], /, part: str = "param", timeout_s: float | None = None) -> DeviceLease:
        """Leases all `keys` on the device, or none.

        Raises CapacityError above `slots` keys, LeaseError where this process's leases hold the slots, and what the
        namespace's `acquire` raises; then nothing is leased, and what was copied before the error stays cached.
        """
        wanted = self._check(keys, part)
        self._load(wanted, timeout_s=timeout_s)
        copies = [copy for key in wanted if (copy := self.slots.find(key)) is not None]
        assert len(copies) == len(wanted), "a key was evicted by the request that needs it"
        self.slots.begin_lease(copies)
        self._touch(wanted)
        self._take_prefetched()
        return DeviceLease(self, copies)

    def fetch(self, keys: Sequence[ExpertKey]) -> DeviceLease:
        """Acquires `keys`: in `with tier.fetch(keys) as held:`, `held[layer, expert]["gate_up"]` is a view of the slot."""
        return self.acquire(keys)

    def prefetch(self, keys: Sequence[ExpertKey], /, part: str = "param") -> DeviceTicket:
        """Asks the host for the keys that are not here; each later call of the tier copies those that have arrived since."""
        missing = tuple(key for key in plain_keys(keys) if self.slots.find(key) is None)[: self.slots.count]
        ticket = DeviceTicket(self, missing, self.namespace.prefetch(missing, part=part))
        self._prefetches.append(ticket)
        if len(self._prefetches) > PREFETCHES_MAX:
            self._prefetches.popleft().is_settled = True
        self.settle()
        return ticket

    def push(self, gradients: Mapping[ExpertKey, Mapping[str, Tensor]], /) -> object:
        """Hands the gradients to the namespace."""
        return self.namespace.push(gradients)

    def settle(self) -> None:
        """Ends host leases whose copies are done, and copies prefetched keys that have reached the host."""
        self._release_host_leases()
        self._take_prefetched()

    def report(self) -> None:
        """Tells the service which keys are here and which were used since the last report."""
        keys = self.slots.keys
        self.namespace.report_device(
            resident=keys, touched=list(self._touched), bytes_resident=len(keys) * self._part.image_bytes
        )
        self._touched.clear()

    def close(self) -> None:
        """Waits for copies under way, gives every host lease back and forgets every copy."""
        self._prefetches.clear()
        self._reserve_host_leases(self.namespace.lease_slots)
        self._copier.close()
        self._stop_watching()
        self.slots.clear()
        self.report()

    def __enter__(self) -> DeviceTier:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    # --- loading ---

    def _check(self, keys: Sequence[ExpertKey], part: str) -> tuple[ExpertKey, ...]:
        if self.schema.part(part) != self._part:
            raise SchemaMismatch(f"part {part!r} is never on a device; the tier holds {self._part.name!r}")
        wanted = tuple(dict.fromkeys(plain_keys(keys)))
        if len(wanted) > self.slots.count:
            raise CapacityError(
                f"{len(wanted)} keys asked of a device tier of {self.slots.count} slots on {self.device}: ask in parts, or "
                "give DeviceTier more slots"
            )
        return wanted

    def _load(self, wanted: Sequence[ExpertKey], *, timeout_s: float | None = None) -> None:
        """Brings current copies of `wanted` into slots; none of them is evicted meanwhile."""
        view = self.namespace.view_change_count
        unchecked = [key for key in wanted if self._checked_at(key) != view]
        self.stats.hits += len(wanted) - len(unchecked)
        kept = frozenset(wanted)
        while unchecked:
            chunk = unchecked[: max(1, self.namespace.lease_slots // 2)]
            host = self._lease_from_host(chunk, timeout_s)
            del unchecked[: len(chunk)]
            mark: Mark = REACHED
            try:
                changed = self._drop_stale(chunk, host)
                self.stats.evictions += self.slots.make_room(len(changed), kept=kept)
                for key in changed:
                    mark = self._place(key, host)
            finally:
                self._host_leases.append((mark, host, len(chunk)))
                self._release_host_leases()
            for key in chunk:
                copy = self.slots.find(key)
                assert copy is not None
                copy.checked_at = view

    def _lease_from_host(self, keys: Sequence[ExpertKey], timeout_s: float | None) -> WeightLease:
        self._reserve_host_leases(len(keys))
        try:
            return self.namespace.acquire(keys, timeout_s=timeout_s)
        except LeaseError:  # others lease through this handle too, and the tier can give back the leases that it still has
            if not self._host_leases:
                raise
            self._reserve_host_leases(self.namespace.lease_slots)
            return self.namespace.acquire(keys, timeout_s=timeout_s)

    def _checked_at(self, key: ExpertKey) -> int | None:
        copy = self.slots.find(key)
        return None if copy is None else copy.checked_at

    def _drop_stale(self, chunk: Sequence[ExpertKey], host: WeightLease) -> list[ExpertKey]:
        """Drops stale copies; returns the keys of `chunk` that have no copy of the bytes that `host` holds."""
        changed = []
        for key in chunk:
            copy = self.slots.find(key)
            if copy is not None and copy.identity == host.identity(key):
                self.stats.hits += 1
                continue
            self.stats.misses += 1
            changed.append(key)
            if copy is not None:
                self.stats.refetches += 1
                self.slots.drop(key)
        return changed

    def _place(self, key: ExpertKey, host: WeightLease) -> Mark:
        fields = host[key]
        self.stats.bytes_copied += sum(tensor.nbytes for tensor in fields.values())
        return self.slots.place(key, fields, host.identity(key)).ready

    def _take_prefetched(self) -> None:
        """Copies what prefetches have brought to the host, into as many slots as are not leased."""
        while self._prefetches and (self._prefetches[0].is_settled or self._prefetches[0].host.done()):
            ticket = self._prefetches.popleft()
            if ticket.is_settled:
                continue
            ticket.is_settled = True
            try:
                missing = [key for key in self._arrived(ticket) if self.slots.find(key) is None]
                fitting = missing[: self.slots.unleased_count]
                self._load(fitting)
            except ParamStoreError as error:  # demand will ask again and raise the error where it matters
                _log.warning("prefetch of %d keys to %s given up: %s", len(ticket.keys), self.device, error)
                continue
            self.stats.prefetched += len(fitting)

    @staticmethod
    def _arrived(ticket: DeviceTicket) -> Sequence[ExpertKey]:
        """The keys that the host had room for. It takes them in order, so what it skipped is at the end; asking for those
        here would wait for the volume."""
        return ticket.keys[: len(ticket.keys) - ticket.host.wait()["skipped"]]

    # --- host leases and reports ---

    def _release_host_leases(self) -> None:
        while self._host_leases and self._host_leases[0][0].is_reached():
            self._host_leases.popleft()[1].release()

    def _reserve_host_leases(self, key_count: int) -> None:
        """Waits for the oldest copies until `key_count` more keys may be leased from the host."""
        limit = self.namespace.lease_slots - key_count
        while self._host_leases and sum(count for _, _, count in self._host_leases) > limit:
            mark, lease, _ = self._host_leases.popleft()
            mark.wait_on_host()
            lease.release()

    def _forget_memory(self, address: int, length_bytes: int) -> None:
        # No copy from there is under way, unless the store was closed under it: leases keep memory mapped.
        for mark, _, _ in list(self._host_leases):
            mark.wait_on_host()
        self._copier.forget_memory(address, length_bytes)

    def _touch(self, keys: Sequence[ExpertKey]) -> None:
        self.slots.record_use(keys)
        self._touched.update(dict.fromkeys(keys))
        self._acquire_count += 1
        if self._acquire_count % REPORT_EVERY == 0:
            self.report()
