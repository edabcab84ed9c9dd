"""Access to records: waits for leases, prefetches and held working copies. The planner decides; this file waits.

Every wait has a bound, and whoever stops waiting leaves nothing behind: a lease that timed out is cancelled, a slot that
came too late is given back.
"""

from __future__ import annotations

import asyncio
from collections.abc import Container, Sequence

from paramstore.core.key import ExpertKey
from paramstore.engine.planner.waiting import await_change, await_request
from paramstore.engine.tables.copies import WorkingCopy
from paramstore.engine.tables.namespace import LeaseRequest, NamespaceState, View
from paramstore.engine.tables.requests import PrefetchRequest, SlotRequest, Urgency
from paramstore.engine.transfers.runner import until_woken
from paramstore.engine.transfers.transfers import Transfers
from paramstore.errors import ParamStoreError, SchemaMismatch, StepFailed, WaitTimeout


class Access:
    """Makes requests for bytes in host memory, and waits for them."""

    def __init__(self, transfers: Transfers, *, wait_timeout_s: float) -> None:
        self._transfers = transfers
        self._wait_timeout_s = wait_timeout_s

    def acquire(self, view: View, lease_id: int, keys: Sequence[ExpertKey], part: str) -> LeaseRequest:
        """Plans a lease, finished at once if all is resident; else await `wait_lease`. Raises as `LeasePlanner.request_lease`."""
        if part != "param":
            view.namespace.schema.part(part)
            raise SchemaMismatch(f"part {part!r} cannot be leased: the daemon alone sees it; use read() for a copy")
        request = LeaseRequest(view, lease_id, keys)
        with self._transfers.deciding() as planner:
            planner.leases.request_lease(request)
        return request

    async def wait_lease(self, request: LeaseRequest, timeout_s: float) -> None:
        """Waits until the lease is granted. Raises its error, or WaitTimeout: then the request is gone."""
        if not request.is_finished:
            future = asyncio.get_running_loop().create_future()
            await_request(request, future)
            await asyncio.wait([future], timeout=timeout_s)
        if not request.is_finished:
            is_queued = any(request in arena.waiting for arena in request.view.namespace.arenas())
            reason = "waiting for slots to come free" if is_queued else f"{request.missing} still loading"
            what = f"lease of {len(request.keys)} keys of {request.view.namespace.name!r}"
            self.cancel_lease(request, WaitTimeout(f"{what}: {reason}"))
        if request.error is not None:
            raise request.error

    def cancel_lease(self, request: LeaseRequest, error: ParamStoreError) -> None:
        """Ends a waiting lease with `error`; releases a granted one."""
        with self._transfers.deciding() as planner:
            planner.leases.cancel_lease(request, error)

    def release(self, view: View, lease_id: int) -> None:
        with self._transfers.deciding() as planner:
            planner.leases.release(view, lease_id)

    def prefetch(self, view: View, keys: Sequence[ExpertKey], part: str, deadline_s: float | None) -> PrefetchRequest:
        """Starts loading what fits. deadline_s: seconds from now until the keys are needed; what is needed sooner moves first.

        Raises UnknownKey or SchemaMismatch, and nothing was started.
        """
        view.namespace.schema.part(part)
        needed_at_s = None if deadline_s is None else asyncio.get_running_loop().time() + deadline_s
        request = PrefetchRequest(view.namespace, part, needed_at_s)
        with self._transfers.deciding() as planner:
            planner.leases.request_prefetch(request, view, keys)
        return request

    async def wait_prefetch(self, request: PrefetchRequest) -> dict[str, int]:
        """Waits for the prefetch and returns its counts. Raises the first error among its loads, once all are over; WaitTimeout."""
        if not request.is_finished:
            future = asyncio.get_running_loop().create_future()
            await_request(request, future)
            await until_woken(future, self._transfers.runner, stall_s=self._wait_timeout_s, what=f"prefetch of {request.part}")
        if request.error is not None:
            raise request.error
        return {
            "loaded": request.loaded, "resident": request.resident, "skipped": request.skipped, "bytes": request.bytes_loaded,
        }  # fmt: skip

    async def hold(
        self, namespace: NamespaceState, key: ExpertKey, *, is_fill: bool = False, urgency: Urgency = Urgency.DEMAND,
        spared: Container[ExpertKey] = (),
    ) -> WorkingCopy:  # fmt: skip
        """Waits for the key's working copy and returns it in its slot, held (`is_fill`: in state UPDATING, to be filled). Raises
        its load's error, or WaitTimeout. urgency, spared: see `SlotRequest`."""
        request = SlotRequest(namespace, key, is_fill=is_fill, urgency=urgency, spared=spared)
        with self._transfers.deciding() as planner:
            planner.working.request_slot(request)
        working = namespace.residency.working[key]
        try:
            await self._until_held(request)
        except asyncio.CancelledError:
            self._let_go(request, working)
            raise
        finally:
            if not request.is_finished:
                error = WaitTimeout(f"{key} of {namespace.name!r}: its request was given up")
                with self._transfers.deciding() as planner:
                    planner.leases.cancel_slot(request, error)
        if request.error is not None:
            raise request.error
        return working

    async def _until_held(self, request: SlotRequest) -> None:
        if not request.is_finished:
            future = asyncio.get_running_loop().create_future()
            await_request(request, future)
            what = f"a slot for {request.key} of {request.namespace.name!r}"
            await until_woken(future, self._transfers.runner, stall_s=self._wait_timeout_s, what=what)

    def _let_go(self, request: SlotRequest, working: WorkingCopy) -> None:
        """Gives the slot back where the caller was cancelled in the very moment in which it got it."""
        if not request.is_finished or request.error is not None:
            return
        with self._transfers.deciding() as planner:
            if request.is_fill:
                error = WaitTimeout(f"{request.key} of {request.namespace.name!r}: its initial value was given up")
                planner.settle_fill(request.namespace, working, error)
            else:
                planner.working.unhold(request.namespace, working)
                planner.after_working(request.namespace, working)

    async def changed(self, namespace: NamespaceState, working: WorkingCopy) -> None:
        """Waits for the next change of `working`. Raises WaitTimeout."""
        what = f"{working.key} of {namespace.name!r}, {working.state}"
        await self._until_woken(working.waiters, what)

    async def cut_over(self, namespace: NamespaceState) -> None:
        """Waits until the commit under way is over. Raises StepFailed on a broken namespace: there it may never be."""
        if namespace.writing.broken is not None:
            raise StepFailed(namespace.writing.broken)
        await self._until_woken(namespace.steps.cut_waiters, f"the commit of {namespace.name!r} under way")

    async def space_freed(self) -> None:
        """Waits until an extent of any namespace comes free. Raises WaitTimeout."""
        future = asyncio.get_running_loop().create_future()
        with self._transfers.deciding() as planner:
            planner.await_space(future)
        await until_woken(future, self._transfers.runner, stall_s=self._wait_timeout_s, what="space on the volumes")

    async def _until_woken(self, waiters: list[object], what: str) -> None:
        future = asyncio.get_running_loop().create_future()
        await_change(waiters, future)
        await until_woken(future, self._transfers.runner, stall_s=self._wait_timeout_s, what=what)
