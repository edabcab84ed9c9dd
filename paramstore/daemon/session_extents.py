"""One session's leases of extents, and the descriptors of volumes that its client has."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping

from paramstore.daemon.channel import Channel
from paramstore.daemon.handlers import Sent
from paramstore.engine.records.extents import ExtentLease, Extents
from paramstore.engine.tables.namespace import View
from paramstore.errors import StoreUnavailable
from paramstore.wire import messages as m


class SessionExtents:
    """Owner of the granted leases, by the id of the request for each, and of the descriptors, which are the session's own."""

    def __init__(self, extents: Extents, channel: Channel) -> None:
        self._extents = extents
        self._channel = channel
        self._granted: dict[int, ExtentLease] = {}
        self._descriptors: dict[int, int] = {}
        """Those that were sent, by volume; they stay open as they may wait to be."""
        self._is_closed = False

    def holds(self, view: View) -> bool:
        """Whether an extent is leased for `view`."""
        return any(lease.view is view for lease in self._granted.values())

    def __contains__(self, request_id: int) -> bool:
        return request_id in self._granted

    async def acquire(self, view: View, r: m.AcquireExtents) -> Sent:
        """Leases the extents and tells the client of them; descriptors of volumes that are new to it go along. Raises as `Extents`,
        LeaseError if the handle was closed meanwhile, StoreUnavailable if the session ended; nothing is leased then."""
        lease = self._extents.begin(view, r.keys)
        try:
            await self._extents.grant(lease, r.keys)
            view.check_open()
            if self._is_closed:
                raise StoreUnavailable("the session ended")  # nobody would close the descriptors
            self._send(r.id, lease)
        except BaseException:
            self._extents.end(lease)
            raise
        self._granted[r.id] = lease
        return Sent()

    def _send(self, request_id: int, lease: ExtentLease) -> None:
        new = {}
        try:
            for volume in sorted({located.extent.volume for located in lease.located} - self._descriptors.keys()):
                new[volume] = self._extents.open_volume(volume)
            extents = [(*located.extent, *located.identity, located.root) for located in lease.located]
            self._channel.send(m.GrantedExtents(request_id, extents, lease.sums, list(new)), list(new.values()))
        except BaseException:
            _close_all(new)
            raise
        self._descriptors |= new

    def note_modes(self, view: View, modes: Mapping[int, str]) -> None:
        """Notes how the client has found extents to be read."""
        self._extents.note_modes(view, modes)

    def release(self, lease_ids: Iterable[int]) -> None:
        """Ends these leases; what is no granted lease of extents, or no more, is passed over."""
        for lease_id in lease_ids:
            if (lease := self._granted.pop(lease_id, None)) is not None:
                self._extents.end(lease)

    def forget(self, view: View) -> None:
        """Ends the leases of `view`, which is closed. One that is not granted yet is refused when it would be."""
        self.release([lease_id for lease_id, lease in self._granted.items() if lease.view is view])

    def close(self) -> None:
        """Closes the descriptors here, as the connection has ended, and grants no more; leases end with their views."""
        self._is_closed = True
        _close_all(self._descriptors)
        self._descriptors = {}


def _close_all(descriptors: dict[int, int]) -> None:
    for descriptor in descriptors.values():
        os.close(descriptor)
