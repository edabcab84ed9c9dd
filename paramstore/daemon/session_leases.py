"""One session's leases, from the request to the release.

A lease goes to the client once, with a descriptor of every segment that is new to it. What waits is no lease of the client yet:
it is cancelled, not released.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from paramstore.daemon.channel import Channel
from paramstore.daemon.handlers import Sent
from paramstore.daemon.session_extents import SessionExtents
from paramstore.engine.store import Store
from paramstore.engine.tables.namespace import LeaseRequest, View
from paramstore.errors import LeaseError, ParamStoreError
from paramstore.wire import messages as m


class SessionLeases:
    """Owner of the leases, by the id of the request for each. extents: those of extents. client: names the session to the store;
    fail: tells the client."""

    def __init__(
        self, store: Store, channel: Channel, *, client: object, fail: Callable[[int, ParamStoreError], None],
        extents: SessionExtents,
    ) -> None:
        self._access = store.access
        self._host = store.host
        self._channel = channel
        self._client = client
        self._mapped = store.host.mapped_by(client)
        self._fail = fail
        self.extents = extents
        self.tells_absent = False
        """Whether the client understands how many keys of a lease were absent."""
        self.waiting: dict[int, LeaseRequest] = {}
        self.granted: dict[int, LeaseRequest] = {}

    def request(self, view: View, r: m.Acquire) -> LeaseRequest:
        """Asks the store for a lease: to be granted now if it is finished, else by `wait`. Raises as `Access.acquire`."""
        lease = self.waiting[r.id] = self._access.acquire(view, r.id, r.keys, r.part)
        return lease

    async def wait(self, r: m.Acquire, lease: LeaseRequest) -> Sent:
        """Waits for the lease and grants it. Raises as `Access.wait_lease`; the lease is gone then."""
        try:
            await self._access.wait_lease(lease, r.timeout_s)
        except BaseException:
            self.waiting.pop(r.id, None)
            raise
        self.grant(r.id, lease)
        return Sent()

    def grant(self, request_id: int, lease: LeaseRequest) -> None:
        """Tells the client where its finished lease lies, or why it gets none."""
        error = lease.error
        if self.waiting.pop(request_id, None) is None:
            error = error or LeaseError(f"namespace {lease.view.namespace.name!r} was closed")
        if error is not None:
            self._fail(request_id, error)
            return
        self.granted[request_id] = lease
        slots = [copy.place for copy in lease.copies]
        lacking = {slot[0] for slot in slots} - self._mapped
        new = self._host.give(self._client, lacking) if lacking else []
        segments = [(segment, length_bytes) for segment, length_bytes, _ in new]
        absent = lease.absent_count if self.tells_absent else 0
        self._channel.send(m.Granted(request_id, slots, segments, absent), [fd for _, _, fd in new])

    def release(self, lease_ids: Sequence[int]) -> None:
        """Releases these leases, those of extents too; those that are not granted, or no more, are passed over."""
        self.extents.release(lease_ids)
        for lease_id in lease_ids:
            lease = self.granted.pop(lease_id, None)
            if lease is not None:
                self._access.release(lease.view, lease_id)

    def cancel(self, lease_id: int, error: ParamStoreError) -> bool:
        """Ends a lease that still waits with `error`. Returns False if there is none of that id."""
        lease = self.waiting.get(lease_id)
        if lease is None or lease.is_finished:
            return False
        self._access.cancel_lease(lease, error)
        return True

    def cancel_all(self, error: ParamStoreError) -> None:
        """Ends every lease that still waits with `error`."""
        for lease_id in list(self.waiting):
            self.cancel(lease_id, error)

    def forget(self, view: View) -> None:
        """Forgets the leases of `view`, which is closed."""
        self.extents.forget(view)
        for leases in (self.waiting, self.granted):
            for lease_id in [lease_id for lease_id, lease in leases.items() if lease.view is view]:
                del leases[lease_id]
