"""The copies in a device tier's slots, and how they come there: from leases on host memory, which end as soon as the copies from
them are done.

- At most C = `lease_slots` of the namespace's keys are leased meanwhile, half of them by one message, so that copies and loads
  overlap.
- Loads ahead wait for nothing on the host: they take host leases that are free, and leave half of C to demand (all where C is 1).
- Demand waits for the device where it lacks more keys than that half, and copies made earlier, or ahead, are under way: each wait
  frees half of C, so that n keys cost ceil(n / h) - 1 waits at most, where h is C / 2, rounded down, and 1 at least.
- Where host memory cannot be registered each key beyond BOUNCE_BUFFERS waits for a buffer besides, and of loads ahead only so many
  are under way.
- A copy is current if its identity (epoch, version) is the one that the session sees now.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

from paramstore.core.key import ExpertKey
from paramstore.errors import CapacityError, LeaseError, WaitTimeout
from paramstore.policy.slot_plan import SlotPlan
from paramstore.policy.slot_visit import Held
from paramstore_client.device.copier import REACHED, Mark
from paramstore_client.device.slots import DeviceCopy, DeviceSlots
from paramstore_client.extents.record_source import RecordSource
from paramstore_client.handle.extent_lease import ExtentLease
from paramstore_client.source import HostSource, WeightLease


class DeviceCopies:
    """Carries out what a plan decides. Owner of the slots, of the copies in them, and of the host leases under way."""

    def __init__(
        self, namespace: HostSource, plan: SlotPlan, slots: DeviceSlots, *, records: RecordSource | None = None
    ) -> None:
        """records: where what is demanded is read from, past the host; None for host leases alone."""
        self.bytes_copied = 0
        self.plan = plan
        self._namespace = namespace
        self._records = records
        self._device = slots.device
        self._slots: DeviceSlots | None = slots
        self._copies: dict[Held, DeviceCopy] = {}
        self._arriving: deque[Held] = deque()
        """What was copied and is not known to be there, in the order of the copies."""
        self._host_leases: deque[tuple[Mark, WeightLease, int]] = deque()
        """In the order of the copies from them, with how many keys each has; a mark is reached after those before it."""

    @property
    def slots(self) -> DeviceSlots:
        """The slots. Raises CapacityError after memory for not even one was found."""
        if self._slots is None:
            raise CapacityError(
                f"the device tier on {self._device} has no slots since memory ran out there: close it, and make one of fewer slots"
            )
        return self._slots

    @property
    def keys(self) -> list[ExpertKey]:
        """The keys whose copies are there, or are on their way."""
        return [copy.key for held, copy in self._copies.items() if not held.is_gone]

    @property
    def host_keys(self) -> int:
        """Most keys that are leased from the host by one message."""
        return max(1, self._namespace.lease_slots // 2)

    @property
    def ahead_keys(self) -> int:
        """How many keys may be copied ahead of use now, so that neither the host waits for it nor the next demand."""
        most, at_once = self._namespace.lease_slots // 2, self.slots.keys_at_once
        return max(0, (most if at_once is None else min(most, at_once)) - self._leased_keys)

    @property
    def _leased_keys(self) -> int:
        return sum(count for _, _, count in self._host_leases)

    def give_up(self, plan: SlotPlan) -> None:
        """Waits for the copies under way, and forgets all of them, and the slots: `plan` has none until it is given some."""
        self.end_host_leases()
        self._arriving.clear()
        self._copies.clear()
        self.plan, self._slots = plan, None

    def take_slots(self, slots: DeviceSlots) -> None:
        """Has the slots that the plan decides on, after `give_up`."""
        self._slots = slots

    def has(self, held: Held) -> bool:
        """Whether `held` has a copy, which may be on its way."""
        return held in self._copies

    def is_current(self, held: Held) -> bool:
        """Whether the bytes of `held` are in its slot, and were compared in the present view."""
        return held.is_ready and self._copies[held].checked_at == self._namespace.view_change_count

    def recheck(self, wanted: Sequence[ExpertKey], timeout_s: float | None) -> None:
        """Drops those of `wanted` that stand here with other bytes than the session sees now."""
        view = self._namespace.view_change_count
        held = [held for key in wanted if (held := self.plan.find(key)) is not None and held in self._copies]
        unchecked = [one for one in held if self._copies[one].checked_at != view]
        for start in range(0, len(unchecked), self.host_keys):
            chunk = unchecked[start : start + self.host_keys]
            with self._lease_from_host([self._copies[one].key for one in chunk], timeout_s) as host:
                for one in chunk:
                    copy = self._copies[one]
                    if copy.identity == host.identity(copy.key):
                        copy.checked_at = view
                    else:
                        self.plan.drop(one)
        self.free_gone()

    def fill(self, loads: Sequence[Held], timeout_s: float | None) -> None:
        """Copies those of `loads` that were not copied yet. Where it fails, what was copied stays, and the rest is given up."""
        if loads := [held for held in loads if held not in self._copies]:
            from_host = partial(self._copy, lease_from_host=partial(self._lease_from_host, timeout_s=timeout_s))
            read = None if self._records is None else partial(self._read, self._records, timeout_s, from_host)
            self._fill(loads, read or from_host)

    def fill_ahead(self, loads: Sequence[Held]) -> None:
        """Copies `loads`, new and at most `ahead_keys`, which were on the host, and waits for nothing: those that the host has
        evicted since are given up. Fails as `fill` does."""
        self._fill(loads, self._copy_those_there)

    def begin_use(self, used: Sequence[Held], timeout_s: float | None) -> list[DeviceCopy]:
        """The copies of `used`, made where there are none; the caller's current stream goes on only after they are there."""
        self.fill(used, timeout_s)
        copies = [self._copies[held] for held in used]
        self.slots.begin_use(copies)
        return copies

    def note_arrivals(self) -> None:
        """Tells the plan which bytes are there by now, and ends the host leases that they came from."""
        while self._arriving and ((copy := self._copies.get(self._arriving[0])) is None or copy.ready.is_reached()):
            self.plan.arrive(self._arriving.popleft())
        while self._host_leases and self._host_leases[0][0].is_reached():
            self._host_leases.popleft()[1].release()

    def free_gone(self) -> None:
        """Frees the slots of what was evicted or dropped or has passed by, and is in nobody's use."""
        for held in [held for held in self._copies if held.is_gone and not held.users]:
            self.slots.free(self._copies.pop(held))

    def end_host_leases(self) -> None:
        """Waits on the host for the copies under way, and gives every host lease back."""
        self._reserve(self._namespace.lease_slots)

    def wait_for_memory(self) -> None:
        """Waits on the host until no copy reads host memory any more."""
        for mark, _, _ in list(self._host_leases):
            mark.wait_on_host()

    def _fill(self, loads: Sequence[Held], copy: Callable[[Sequence[Held]], None]) -> None:
        """Has `copy` copy as many of `loads` at once as one message leases. What has no copy then is given up."""
        self.free_gone()
        try:
            for start in range(0, len(loads), self.host_keys):
                copy(loads[start : start + self.host_keys])
        finally:
            for held in loads:
                if held not in self._copies:
                    self.plan.fail(held)

    def _copy_those_there(self, chunk: Sequence[Held]) -> None:
        """Copies what is on the host now."""
        try:
            self._copy(chunk, partial(self._namespace.acquire, timeout_s=0.0))
        except WaitTimeout:  # a lease is of all keys or none: the halves tell which are not there
            if half := len(chunk) // 2:
                self._copy_those_there(chunk[:half])
                self._copy_those_there(chunk[half:])

    def _read(
        self, records: RecordSource, timeout_s: float | None, from_host: Callable[[Sequence[Held]], None], chunk: Sequence[Held]
    ) -> None:
        """Reads records into slots from the volumes; those that cannot be leased there come from the host."""
        for start in range(0, len(chunk), records.keys_at_once):
            part, view = chunk[start : start + records.keys_at_once], self._namespace.view_change_count
            try:
                lease = records.lease([held.key for held in part], timeout_s)  # type: ignore[misc]  # the names are keys here
            except WaitTimeout:  # the daemon reads others' records for their sums; the host may have these
                from_host(part)
                continue
            if lease is None and (half := len(part) // 2):
                for fewer in (part[:half], part[half:]):
                    self._read(records, timeout_s, from_host, fewer)
            elif lease is None:
                from_host(part)
            else:
                self._place_all(records, lease, part, view)
        self.note_arrivals()

    def _place_all(self, records: RecordSource, lease: ExtentLease, part: Sequence[Held], view: int) -> None:
        with lease:
            for held in part:
                key: ExpertKey = held.key  # type: ignore[assignment]
                self._copies[held] = self.slots.place_whole(key, partial(records.reader.read, lease, key), checked_at=view)
                self._arriving.append(held)
                self.bytes_copied += lease.part.image_bytes

    def _copy(self, chunk: Sequence[Held], lease_from_host: Callable[[Sequence[ExpertKey]], WeightLease]) -> None:
        view = self._namespace.view_change_count
        host = lease_from_host([held.key for held in chunk])  # type: ignore[misc]  # the names are keys here
        mark: Mark = self._host_leases[-1][0] if self._host_leases else REACHED
        try:
            for held in chunk:
                mark = self._place(held, host, view)
        finally:
            self._host_leases.append((mark, host, len(chunk)))
            self.note_arrivals()

    def _place(self, held: Held, host: WeightLease, view: int) -> Mark:
        key: ExpertKey = held.key  # type: ignore[assignment]
        fields = host[key]
        copy = self._copies[held] = self.slots.place(key, fields, host.identity(key), checked_at=view)
        self._arriving.append(held)
        self.bytes_copied += sum(tensor.nbytes for tensor in fields.values())
        return copy.ready

    def _lease_from_host(self, keys: Sequence[ExpertKey], timeout_s: float | None) -> WeightLease:
        self._reserve(len(keys))
        try:
            return self._namespace.acquire(keys, timeout_s=timeout_s)
        except LeaseError:  # others lease through this handle too, and the tier can give back the leases that it still has
            if not self._host_leases:
                raise
            self.end_host_leases()
            return self._namespace.acquire(keys, timeout_s=timeout_s)

    def _reserve(self, key_count: int) -> None:
        """Waits, once at most, until `key_count` more keys may be leased from the host, and as many as one message has."""
        limit = self._namespace.lease_slots - key_count
        if self._leased_keys <= limit:
            return
        left, ending = self._leased_keys, 0
        while ending < len(self._host_leases) and left > min(limit, self._namespace.lease_slots - self.host_keys):
            left -= self._host_leases[ending][2]
            ending += 1
        if ending:
            self._host_leases[ending - 1][0].wait_on_host()  # and those before it are reached
        for _ in range(ending):
            self._host_leases.popleft()[1].release()
