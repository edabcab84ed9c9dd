"""Leases of extents: a client reads records from the volumes itself, past the daemon's memory, and proves them where they land.

- A leased extent is pinned: its bytes stay, whatever supersedes the record, until the lease ends. Nobody waits for that end, so
  what leases keep is missing on the volumes like any other bytes that are held.
- A fenced volume is read on: what was whole there stays so.
- Whoever gets a lease gets the device sums of each record too; where there are none yet, the daemon reads the record first.
- A descriptor shows the whole volume, so there are no such leases unless the setting `extent_leases` says how many.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from weakref import WeakKeyDictionary

from paramstore.core.key import ExpertKey
from paramstore.core.location import Located
from paramstore.engine.tables.namespace import View
from paramstore.engine.transfers.runner import until_woken
from paramstore.engine.transfers.transfers import Transfers
from paramstore.errors import CapacityError, ConfigError, LeaseError, SchemaMismatch, StepDropped, VolumeError
from paramstore.storage.volume.base import HasFile, Volume

READS_FOR_SUMS_MAX = 1
"""The most records of one volume that are read for their sums at once. Each has a buffer of about 3 MiB beside the host budget."""


@dataclass(slots=True, eq=False)
class ExtentLease:
    """One client's right to read these records from the volumes. sums: of each, in the same order, once it is granted. finding:
    what finds them; it outlives a lease that ends while a volume hangs, and the pins with it."""

    view: View
    located: Sequence[Located]
    sums: list[bytes]
    finding: asyncio.Task[None] | None = None
    is_ended: bool = False


class Extents:
    """Owner of all leases of extents. extent_leases: the most extents that may be leased at once."""

    def __init__(
        self, transfers: Transfers, volumes: Mapping[int, Volume], *, extent_leases: int, wait_timeout_s: float
    ) -> None:
        self._transfers = transfers
        self._volumes = volumes
        self._extent_leases = extent_leases
        self._wait_timeout_s = wait_timeout_s
        self._leases: set[ExtentLease] = set()
        self.leased_count = 0
        """How many extents are leased, each as often as it is: each request asks."""
        self._modes: WeakKeyDictionary[View, Mapping[int, str]] = WeakKeyDictionary()
        self._reading_for_sums = {index: asyncio.Semaphore(READS_FOR_SUMS_MAX) for index in volumes}

    def begin(self, view: View, keys: Sequence[ExpertKey]) -> ExtentLease:
        """Pins the extents of the records that `view` sees of `keys`; `grant` says when they may be read, `end` unpins them.

        Raises LeaseError where the daemon leases none or the view is a writer's, SchemaMismatch where `param` does not lie on the
        volumes as it is, ConfigError for no key, CapacityError above the limit, UnknownKey, StepDropped; nothing is pinned then.
        """
        namespace, name = view.namespace, view.namespace.name
        if not keys:
            raise ConfigError("a lease of no extents: ask for one key at least")
        if not self._extent_leases:
            raise LeaseError("this daemon leases no extents: start it with the setting extent_leases, which says how many it may")
        if namespace.schema.is_trainable:
            raise SchemaMismatch(f"namespace {name!r} is trained: its `param` is made from masters, and lies on no volume")
        view.check_open()
        if view.is_writer:
            raise LeaseError(f"extents of {name!r} are leased to readers: open it with mode='read'")
        namespace.keys.check(keys, namespace=name)
        leased = self.leased_count
        if leased + len(keys) > self._extent_leases:
            raise CapacityError(
                f"{len(keys)} more extents cannot be leased: {leased} are, and extent_leases={self._extent_leases} is the limit"
            )
        lease = ExtentLease(view, [_committed(view, key) for key in keys], [])
        for located in lease.located:
            self._transfers.space.pin(located.extent)
            self._transfers.space.pins.note_lease(located.extent)
        self._leases.add(lease)
        self.leased_count += len(keys)
        return lease

    async def grant(self, lease: ExtentLease, keys: Sequence[ExpertKey]) -> None:
        """Finds the device sums of the lease's records, in order of its `keys`. Raises VolumeError, CorruptRecord, WaitTimeout, and
        what says that the view was closed meanwhile; the lease stays to be ended."""
        lease.finding = asyncio.get_running_loop().create_task(self._find_sums(lease, keys), name="device sums")
        what = f"device sums of {len(keys)} records of {lease.view.namespace.name!r}"
        await until_woken(lease.finding, self._transfers.runner, stall_s=self._wait_timeout_s, what=what)
        lease.finding.result()

    async def _find_sums(self, lease: ExtentLease, keys: Sequence[ExpertKey]) -> None:
        namespace, sums = lease.view.namespace, self._transfers.sums
        for key, located in zip(keys, lease.located, strict=True):
            if sums.find(namespace.name, key, located) is None:
                async with self._reading_for_sums[located.extent.volume]:
                    if lease.is_ended:
                        return
                    lease.view.check_open()
                    if sums.find(namespace.name, key, located) is None:  # nobody has read it meanwhile
                        await self._transfers.read_for_sums(namespace, key, located)
            found = sums.find(namespace.name, key, located)
            assert found is not None, f"{key} of {namespace.name!r} was verified, and has no device sums"
            lease.sums.append(found)

    def end(self, lease: ExtentLease) -> None:
        """Ends the lease: its extents are unpinned, and whoever waits for space goes on; at once, or when a worker that reads one
        of them for its sums has returned."""
        lease.is_ended = True
        if lease.finding is None or lease.finding.done():
            self._unpin(lease)
        else:
            lease.finding.add_done_callback(partial(self._end_finding, lease))

    def _end_finding(self, lease: ExtentLease, finding: asyncio.Task[None]) -> None:
        if not finding.cancelled():
            finding.exception()  # seen: nobody waits for these sums any more
        self._unpin(lease)

    def _unpin(self, lease: ExtentLease) -> None:
        self._leases.remove(lease)
        self.leased_count -= len(lease.located)
        with self._transfers.deciding() as planner:
            for located in lease.located:
                self._transfers.space.pins.forget_lease(located.extent)
                self._transfers.space.unpin(located.extent)
            planner.go_on([lease.view.namespace])

    def note_modes(self, view: View, modes: Mapping[int, str]) -> None:
        """Notes how the view's client has found extents of each volume to be read to its device."""
        self._modes[view] = modes

    def stats(self) -> dict[str, object]:
        """How many extents are leased and may be, and by volume the words of clients that are there for how they are read."""
        modes: dict[str, set[str]] = {}
        for volume, word in (pair for view, said in self._modes.items() if not view.is_closed for pair in said.items()):
            modes.setdefault(str(volume), set()).add(word)
        return {
            "leased": self.leased_count, "leases_max": self._extent_leases,
            "modes": {volume: sorted(modes[volume]) for volume in sorted(modes)},
        }  # fmt: skip

    def open_volume(self, index: int) -> int:
        """A new descriptor of the volume, read-only, which the caller closes. Raises VolumeError."""
        volume = self._volumes[index]
        if not isinstance(volume, HasFile):
            raise VolumeError(f"volume {index} has no file that a client could read")
        return volume.open_to_read()


def _committed(view: View, key: ExpertKey) -> Located:
    _, located = view.locate(key)
    if located is None:
        raise StepDropped(f"{key} of {view.namespace.name!r} has no record at step {view.step}")
    return located
