"""The HBM tier: a cache of experts in device memory, owned by the process that computes.

- `SlotPlan` decides what stands and what goes; here bytes are copied, and identities compared.
- A copy is served only if its identity (epoch, version) is the one that the session sees now: after an update the stale
  copy is dropped and the key fetched again.
- Host leases end as soon as the copies from them are done.
- A visit of more keys than slots runs the rest through a few slots, each overwritten after its kernel (`in_turn`).
- Loading ahead copies what is on the host by now, as far as host leases are free for it, and waits for nothing.

With `device="cpu"` the same class runs on host tensors without streams: the twin that every test runs on.
It was never run on a GPU.
"""

from __future__ import annotations

import logging
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from types import TracebackType

import torch
from torch import Tensor

from paramstore.core.arguments import choice, indices, text, whole_number, wrong
from paramstore.core.key import ExpertKey
from paramstore.core.schema import PARAM_DTYPES, Schema
from paramstore.errors import CapacityError, ConfigError, LeaseError, ParamStoreError, SchemaMismatch, StepMismatch
from paramstore.policy.make import make_slot_policy
from paramstore.policy.slot_plan import SlotPlan
from paramstore.policy.slot_visit import Held, SlotCounts, SlotVisit
from paramstore_client.device.copier import make_copier
from paramstore_client.device.copies import DeviceCopies
from paramstore_client.device.device_lease import TURN_KEYS, DeviceLease, DeviceStats, DeviceTicket
from paramstore_client.device.slots import DeviceCopy, DeviceSlots, Packed
from paramstore_client.extents.record_source import RecordSource
from paramstore_client.handle.base import plain_keys
from paramstore_client.quantized.packed import is_packed, packed_tensors, unpack_all, unpacked
from paramstore_client.source import HostSource, load_ahead

REPORT_EVERY = 64
"""Acquires between two reports to the daemon. Told of each, it would keep host copies of what the device uses most, and has."""
PREFETCHES_MAX = 16
"""Most prefetches that wait for the host; beyond it the oldest is forgotten here and stays a host prefetch."""

_log = logging.getLogger(__name__)


def device_of(device: torch.device | str) -> torch.device:
    """`device` as a torch device; "cuda" is the current one, with its index, as tensors have it. Raises ConfigError where there is
    none of that name."""
    if not isinstance(device, str | torch.device):
        raise wrong("device", device, "a torch.device, or its name")
    try:
        found = torch.device(device)
    except RuntimeError as error:
        raise ConfigError(f"device={device!r}: {str(error).splitlines()[0]}") from error
    if found.type != "cuda":
        return found
    if not torch.cuda.is_available():
        raise ConfigError(f"device={device!r}: torch {torch.__version__} finds no CUDA device here")
    return torch.device("cuda", torch.cuda.current_device()) if found.index is None else found


def _out_of_memory(tier: DeviceTier) -> CapacityError:
    return CapacityError(
        f"{tier.device} ran out of memory, and slots have no more to give: free some of it, compute fewer tokens at once, or give "
        "less expert_memory from the start"
    )


def _plan_of(policy: str, layers: Sequence[int], slots: int) -> SlotPlan:
    return SlotPlan(slots, make_slot_policy(policy, slots, layers))


def _weakly(method: Callable[[int, int], None]) -> Callable[[int, int], None]:
    """The method, called while its object is there."""
    reference = weakref.WeakMethod(method)

    def told(address: int, length_bytes: int) -> None:
        if (alive := reference()) is not None:
            alive(address, length_bytes)

    return told


class DeviceTier:
    """An `ExpertSource` in front of a namespace: `StoredExperts(tier, layer)` computes on the device.

    slots: experts it has room for. policy: one of `paramstore.policy.make.SLOT_POLICIES`. layers: the order in which they are
    visited, for those policies that know one; default the namespace's. dtype: what quantized experts become in their slots (those
    of a namespace whose schema is packed); others have their own. reads: "host", or "volumes": what a visit lacks is read from
    the volumes into its slots and proven there, past the daemon's memory (readers of inference namespaces that are not packed,
    where the daemon's `extent_leases` allow it); loads ahead come from the host still. Used by one thread at a time (the autograd
    thread of a backward counts as its caller's). Owner of the plan, the copies and the prefetches under way.

    A hit costs no round trip while `namespace.view_change_count` stands still; when it has grown, each key is leased from the
    host once to compare identities, and copied again only if they differ. Host memory is registered with CUDA until the
    namespace says that it goes (`before_unmap`). What is resident and used is reported every REPORT_EVERY acquires.
    """

    is_on_host = False
    """Slots are copies, its twin's on the CPU too: no lease stands."""

    def __init__(
        self, namespace: HostSource, slots: int, *, device: torch.device | str, policy: str = "decayed_lfu",
        layers: Sequence[int] | None = None, dtype: torch.dtype = torch.bfloat16, reads: str = "host",
    ) -> None:  # fmt: skip
        if not isinstance(namespace, HostSource):
            raise wrong("namespace", namespace, "an open namespace")
        slots = whole_number("slots", slots, least=1)
        order = indices("layers", namespace.layers if layers is None else layers)
        computed = choice("dtype", str(dtype).removeprefix("torch."), PARAM_DTYPES)
        is_past_host = choice("reads", reads, ("host", "volumes")) == "volumes"
        self._make_plan = partial(_plan_of, text("policy", policy), order)
        self.device = device_of(device)
        self.schema: Schema = namespace.schema
        record = self.schema.part("param")
        self._packed: Packed | None = None
        if is_packed(self.schema):
            self.schema = unpacked(namespace.schema, computed)
            self._packed = Packed(record, partial(unpack_all, packed_tensors(namespace.schema)))
        if is_past_host and self._packed is not None:
            raise wrong("reads", reads, "'host' for quantized experts, which are unpacked into slots")
        self._records = RecordSource(namespace, self.device) if is_past_host else None  # type: ignore[arg-type]  # it looks
        self.layers: Sequence[int] = namespace.layers
        self.experts: int = namespace.experts
        self.namespace = namespace
        self._part = self.schema.part("param")
        self._copier = make_copier(self.device, bounce_bytes=record.image_bytes)
        self.copies = DeviceCopies(namespace, self._make_plan(slots), self._make_slots(slots), records=self._records)
        self._prefetches: deque[DeviceTicket] = deque()
        self._touched: dict[ExpertKey, None] = {}
        self._acquire_count = 0
        on_host = self.device.type == "cpu"
        self._stop_watching = namespace.before_unmap(_weakly(self._forget_memory) if on_host else self._forget_memory)
        if on_host:  # nothing is registered: a model that is dropped takes its tier along
            weakref.finalize(self, self._stop_watching).atexit = False

    def _make_slots(self, count: int) -> DeviceSlots:
        return DeviceSlots(self._part, count, device=self.device, copier=self._copier, packed=self._packed)

    @property
    def plan(self) -> SlotPlan:
        """Decides which keys stand."""
        return self.copies.plan

    @property
    def counts(self) -> SlotCounts:
        """What was counted since the tier was made; `stats` has it by the names of a device."""
        return self.plan.counts

    @property
    def slots(self) -> DeviceSlots:
        """The slots. Raises CapacityError after a `shrink` that found memory for none."""
        return self.copies.slots

    @property
    def lease_slots(self) -> int:
        """How many keys one caller may hold leased at once: as many as there are slots."""
        return self.slots.count

    @property
    def keys(self) -> list[ExpertKey]:
        """The keys that stand here, or are on their way."""
        return self.copies.keys

    @property
    def stats(self) -> DeviceStats:
        """The counts so far."""
        counts = self.plan.counts
        return DeviceStats(
            hits=counts.hits, late=counts.late, misses=counts.misses, passed=counts.passed, refetches=counts.dropped,
            evictions=counts.evicted, prefetched=counts.ahead, useful=counts.useful, wasted=counts.wasted,
            bytes_copied=self.copies.bytes_copied,
        )  # fmt: skip

    def describe(self) -> dict[str, object]:
        """For people: device, sizes, how host memory is copied, and the counts."""
        return {
            "device": str(self.device), "slots": self.slots.count, "free_slots": self.slots.free_count,
            "bytes": self.slots.bytes, "host_memory": self._copier.describe(),
            "volumes": self._records.describe() if self._records is not None else "", **asdict(self.stats),
        }  # fmt: skip

    # --- the source's calls ---

    def acquire(self, keys: Sequence[ExpertKey], /, part: str = "param", timeout_s: float | None = None) -> DeviceLease:
        """Leases all `keys` on the device, or none.

        Raises CapacityError above `slots` keys, LeaseError where this process's leases hold the slots, and what the
        namespace's `acquire` raises; then nothing is leased, and what was copied before the error stays cached.
        """
        if self.schema.part(part) != self._part:
            raise SchemaMismatch(f"part {part!r} is never on a device; the tier holds {self._part.name!r}")
        lease = self.acquire_arriving(keys, timeout_s)
        try:
            lease.load()
            self._take_prefetched()
        except BaseException:
            lease.release()
            raise
        return lease

    def acquire_arriving(
        self, keys: Sequence[ExpertKey], /, timeout_s: float | None = None, *, may_pass: bool = False
    ) -> DeviceLease:
        """Leases all `keys` or none, and copies none: what is not here is loaded as it is asked for. may_pass: any number of keys;
        those beyond the slots come and go while the lease is gone through (`in_turn`). Raises what `acquire` raises."""
        wanted = tuple(dict.fromkeys(plain_keys(keys)))
        if len(wanted) > self.slots.count and not may_pass:
            raise CapacityError(
                f"{len(wanted)} keys asked of a device tier of {self.slots.count} slots on {self.device}: ask in parts, or "
                "give DeviceTier more slots"
            )
        self.copies.note_arrivals()
        self.copies.recheck(wanted, timeout_s)
        lacking = self.lacking(wanted) if may_pass else []
        visit = self.plan.visit(wanted, may_pass=may_pass)
        self._forget_ahead(layer for layer, _ in wanted)
        lease = DeviceLease(self, visit, view=self.namespace.view_change_count, timeout_s=timeout_s)
        try:
            if len(lacking) > TURN_KEYS:
                load_ahead(self.namespace, lacking)  # on the host, while the first ones are copied and computed with
            self._touched.update(dict.fromkeys(wanted))
            self._acquire_count += 1
            if self._acquire_count % REPORT_EVERY == 0:
                self.report()
        except BaseException:
            lease.release()
            raise
        return lease

    def lacking(self, keys: Sequence[ExpertKey]) -> list[ExpertKey]:
        """Those of `keys` that neither stand nor are on their way."""
        return [key for key in keys if self.plan.find(key) is None]

    def has(self, keys: Sequence[ExpertKey]) -> bool:
        """Whether the current bytes of all `keys` are in their slots now."""
        self.settle()
        found = [self.plan.find(key) for key in plain_keys(keys)]
        return all(held is not None and self.copies.is_current(held) for held in found)

    def fetch(self, keys: Sequence[ExpertKey]) -> DeviceLease:
        """Acquires `keys`: in `with tier.fetch(keys) as held:`, `held[layer, expert]["gate_up"]` is a view of the slot."""
        return self.acquire(keys)

    def prefetch(self, keys: Sequence[ExpertKey], /, part: str = "param") -> DeviceTicket:
        """Asks the host for the keys that are not here; each later call of the tier copies those that have arrived since, as far as
        nothing waits for it (`DeviceCopies`). What is not copied when a visit of its layer begins is given up."""
        missing = tuple(self.lacking(plain_keys(keys)))[: self.slots.count]
        ticket = DeviceTicket(self, missing, self.namespace.prefetch(missing, part=part))
        self._prefetches.append(ticket)
        if len(self._prefetches) > PREFETCHES_MAX:
            self._prefetches.popleft().is_settled = True
        self.settle()
        return ticket

    def skip(self, layers: Sequence[int]) -> None:
        """Notes that these layers are not visited this time: what was loaded ahead for them is spared no more."""
        self.plan.skip(layers)
        self._forget_ahead(layers)

    def push(self, gradients: Mapping[ExpertKey, Mapping[str, Tensor]], /) -> object:
        """Hands the gradients to the namespace."""
        return self.namespace.push(gradients)

    def settle(self) -> None:
        """Ends host leases whose copies are done, and copies prefetched keys that have reached the host."""
        self.copies.note_arrivals()
        self._take_prefetched()

    def report(self) -> None:
        """Tells the service which keys are here and which were used since the last report."""
        keys = self.keys
        self.namespace.report_device(
            resident=keys, touched=list(self._touched), bytes_resident=len(keys) * self._part.image_bytes
        )
        self._touched.clear()

    def shrink(self) -> None:
        """Halves the slots, or more where the device has not even that memory: what stood there comes again as it is asked for.

        Raises LeaseError while something is leased here, CapacityError where one slot is all there is: then nothing has changed.
        Where not even one can be made it raises that too, and the tier has none, as every later call of it says: close it.
        """
        if self.plan.is_passing or any(held.users for held in self.plan.held):
            raise LeaseError(f"the slots on {self.device} are in use: release their leases first")
        asked = count = self.slots.count
        if count == 1:
            raise _out_of_memory(self)
        counts = self.plan.counts
        self._prefetches.clear()
        while count > 1:
            count //= 2
            plan = self._make_plan(count)
            plan.counts = counts
            self.copies.give_up(plan)  # before the smaller ones take memory
            with suppress(torch.OutOfMemoryError):
                self.copies.take_slots(self._make_slots(count))
                _log.warning("%s ran out of memory: %d of %d experts stand there from here on", self.device, count, asked)
                return
        raise _out_of_memory(self)

    def close(self) -> None:
        """Waits for copies under way, gives every host lease back and forgets every copy."""
        while self._prefetches:
            self._prefetches.popleft().cancel()
        self.copies.end_host_leases()
        self._copier.close()
        self._stop_watching()
        self.plan.clear()
        self.copies.free_gone()
        self.report()

    def __enter__(self) -> DeviceTier:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    # --- visits ---

    def let_in(self, visit: SlotVisit, *, view: int, timeout_s: float | None, due: object = None) -> None:
        """Copies as many keys that pass by as there are slots for. view: the view that the visit began with. due: the key that is
        used next."""
        if visit.waiting and self.namespace.view_change_count != view:
            raise StepMismatch("the namespace moved while a layer was computed: call refresh and rollback between forwards")
        while self.plan.let_in(visit, due=due) is not None:
            pass  # all that can have a slot now: they are asked for together
        self.copies.fill(visit.through, timeout_s)

    def let_out(self, visit: SlotVisit, held: Held, copy: DeviceCopy) -> None:
        """Gives back the slot of what has passed by, whose last kernel has been given to the current stream."""
        self.slots.end_use([copy])
        self.plan.let_out(visit, held)

    def end_visit(self, visit: SlotVisit, copies: Collection[DeviceCopy]) -> None:
        """Ends the visit of a DeviceLease, whose last kernel has been given to the current stream."""
        self.slots.end_use(copies)
        for held in (*visit.held, *visit.through):
            if held.users == 1 and not self.copies.has(held):
                self.plan.fail(held)  # nobody has asked for its bytes
        self.plan.end_visit(visit)
        self.copies.free_gone()
        self.settle()

    def _take_prefetched(self) -> None:
        """Copies what prefetches have brought to the host, in their order and as far as nobody has to wait for it; a later call
        goes on with the rest."""
        while self._prefetches and (self._prefetches[0].is_settled or self._prefetches[0].host.done()):
            ticket = self._prefetches[0]
            try:
                if not ticket.is_settled and not self._take(ticket):
                    return
            except ParamStoreError as error:  # demand will ask again and raise the error where it matters
                _log.warning("prefetch of %d keys to %s given up: %s", len(ticket.keys), self.device, error)
            ticket.is_settled = True
            self._prefetches.popleft()

    def _take(self, ticket: DeviceTicket) -> bool:
        """Copies keys of a prefetch into slots that loads ahead may have: while a visit that does not fit goes through, free ones
        alone. Whether that was all that can be."""
        if ticket.on_host is None:
            result = ticket.host.wait()
            self.counts.ahead_bytes += result["bytes"]
            # The host takes keys in their order, so what it had no room for is at the end; asking for it would wait for the volume.
            there = ticket.keys[: len(ticket.keys) - result["skipped"]]
            ticket.on_host = [key for key in there if key[0] not in ticket.given_up]
        while ticket.on_host:
            most = self.copies.ahead_keys
            if not most:
                return False
            loads, _ = self.plan.ahead(ticket.on_host, most=most, evicting=0 if self.plan.is_passing else None)
            if loads:
                self.copies.fill_ahead(loads)
            tried = {held.key for held in loads}  # those of them that lack are no longer on the host
            ticket.on_host = [key for key in self.lacking(ticket.on_host) if key not in tried] if len(loads) == most else ()
        return True

    def _forget_ahead(self, layers: Iterable[int]) -> None:
        """Gives up what still waits to be copied ahead of visits that begin, or are skipped: demand loads what is used of it."""
        over = set(layers)
        for ticket in self._prefetches:
            ticket.given_up |= over
            if ticket.on_host:
                ticket.on_host = [key for key in ticket.on_host if key[0] not in over]

    def _forget_memory(self, address: int, length_bytes: int) -> None:
        # No copy from there is under way, unless the store was closed under it: leases keep memory mapped.
        self.copies.wait_for_memory()
        self._copier.forget_memory(address, length_bytes)
