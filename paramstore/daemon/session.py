"""One client: its requests, in the order they came, and everything it owns: views, leases, tickets, upload areas.

A request is answered once, by the same id. What can be answered at once is (a lease of resident keys costs one turn of the
loop); the rest is a task of the session, which sees its error and sends it. Tasks start in the order of their requests.

When the connection ends, the session ends: what waits is cancelled, pending gradients are dropped, the area is closed. A
lease ends with the client *process* (its mapping may still be read): leases of a connection that ended while its process
lives stay until the process is gone.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

from paramstore.daemon.channel import Channel
from paramstore.daemon.peer import Peer
from paramstore.daemon.uploads import Uploads
from paramstore.daemon.welcome import refusal_of, welcome_to
from paramstore.engine.arena import SegmentMemory
from paramstore.engine.namespace import View
from paramstore.engine.requests import LeaseRequest
from paramstore.engine.store import Store
from paramstore.errors import LeaseError, ParamStoreError, ProtocolError, StoreUnavailable, TicketCancelled
from paramstore.wire import messages as m
from paramstore.wire.codec import FRAME_BYTES_MAX, decode_request
from paramstore.wire.options import options_of

logger = logging.getLogger(__name__)

TASKS_MAX = 1 << 16
"""Requests of one session under way at once."""
HELLO_TIMEOUT_S = 2.0

Handler = Callable[[Any], object]
"""Gives the result at once, or a coroutine that gives it."""


class Session:
    """Owner of what one connection holds. on_gone: told once, when nothing is left of the session."""

    def __init__(self, store: Store, sock: socket.socket, *, on_gone: Callable[[Session], None]) -> None:
        self._store = store
        self._loop = asyncio.get_running_loop()
        self._on_gone = on_gone
        self._process = Peer(self._loop, sock, on_ended=self._process_ended)
        self._views: dict[int, View] = {}
        self._next_handle = 1
        self._uploads = Uploads()
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._leases: dict[int, LeaseRequest] = {}
        self._cancels: dict[int, Callable[[], None]] = {}  # prefetches and scrubs under way: what ends them
        self.is_known = False
        self.is_ended = False
        """The connection is gone; leases may be left until the process is, too."""
        self._channel = Channel(self._loop, sock, on_frame=self._on_frame, on_end=self._on_end)
        self._hello_timer = self._loop.call_later(HELLO_TIMEOUT_S, self._hello_is_late)
        self._handlers: dict[type[m.Message], Handler] = {
            m.Namespaces: lambda _: self._store.admission.list_namespaces(),
            m.CreateNamespace: self._create,
            m.OpenNamespace: self._open,
            m.CloseNamespace: self._close_namespace,
            m.Refresh: lambda r: self._store.refresh(self._view(r)),
            m.OpenUpload: self._open_upload,
            m.InitializeBegin: lambda r: self._store.initialize_begin(self._view(r)),
            m.InitializePut: self._initialize_put,
            m.InitializeEnd: lambda r: self._store.initialize_end(self._view(r)),
            m.Prefetch: self._prefetch,
            m.Push: self._push,
            m.GradientNorm: lambda r: self._store.gradient_norm(self._view(r)),
            m.Apply: lambda r: self._store.apply(self._view(r), options_of(r), r.grad_scale),
            m.Abort: lambda r: self._store.abort(self._view(r)),
            m.WriteBack: lambda r: self._store.write_back(self._view(r), r.keys),
            m.Evict: lambda r: self._store.evict(self._view(r), r.keys, r.part),
            m.Protect: lambda r: self._store.protect(self._view(r), r.keys, is_wanted=r.is_wanted),
            m.Commit: lambda r: self._store.commit(self._view(r), r.step, r.extra),
            m.Prepare: lambda r: self._store.prepare(self._view(r), r.step, r.extra),
            m.Finalize: lambda r: self._store.finalize(self._view(r), r.step),
            m.Steps: lambda r: self._store.steps(self._view(r)),
            m.Extra: lambda r: self._store.extra(self._view(r), r.step),
            m.Rollback: lambda r: self._store.rollback(self._view(r), r.step),
            m.Snapshot: lambda r: self._store.snapshot(self._view(r), r.step),
            m.DropSnapshot: lambda r: self._store.drop_snapshot(self._view(r), r.step),
            m.Snapshots: lambda r: self._store.snapshots(self._view(r)),
            m.Read: self._read,
            m.Residency: lambda r: self._store.residency(self._view(r)),
            m.Stats: lambda _: self._store.stats(),
            m.Verify: self._verify,
            m.TraceBegin: lambda _: self._store.transfer_log.listen(self),
            m.TraceEnd: lambda _: self._store.transfer_log.end(self),
        }

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def uid(self) -> int:
        return self._process.uid

    # --- frames

    def _on_frame(self, body: bytes) -> None:
        try:
            request = decode_request(body)
        except ProtocolError as error:
            self._channel.refuse(error)
            return
        if not self.is_known or isinstance(request, m.Hello):
            self._hello(request)
        elif isinstance(request, m.Acquire):
            self._acquire(request)
        elif isinstance(request, m.Release):
            self._release(request)
        elif isinstance(request, m.Cancel | m.Unmapped | m.DeviceReport):
            self._one_way(request)
        else:
            self._answer(request)

    def _hello(self, request: m.Message) -> None:
        if self.is_known or not isinstance(request, m.Hello) or request.magic != m.MAGIC:
            self._channel.refuse(ProtocolError("the first frame must be a hello, and no other may be one"))
            return
        if (refusal := refusal_of(request)) is not None:
            self._channel.send(refusal)
            self._channel.close(None)
            return
        self._hello_timer.cancel()
        self.is_known = True
        self._channel.raise_limit(FRAME_BYTES_MAX)
        self._channel.send(m.Done(request.id, welcome_to(self._store)))

    def _hello_is_late(self) -> None:
        self._channel.refuse(ProtocolError(f"no hello within {HELLO_TIMEOUT_S} s"))

    def _check_admissible(self, request_id: int) -> None:
        if request_id <= 0 or request_id in self._tasks or request_id in self._leases:
            raise ProtocolError(f"request id {request_id} is in use, or not above 0")
        if len(self._tasks) >= TASKS_MAX:
            raise ProtocolError(f"more than {TASKS_MAX} requests under way")

    def _answer(self, request: Any) -> None:
        """Runs the handler now; if it gave a coroutine, in a task of its own."""
        try:
            self._check_admissible(request.id)
            result = self._handlers[type(request)](request)
        except Exception as error:  # noqa: BLE001 - belongs to whoever asked, `_told` logs what nobody foresaw
            self._fail(request.id, self._told(request.id, error))
            return
        if asyncio.iscoroutine(result):
            self._start(request.id, result)
        else:
            self._done(request.id, result)

    def _start(self, request_id: int, coroutine: Coroutine[Any, Any, object]) -> None:
        task = self._loop.create_task(self._run(request_id, coroutine))
        task.add_done_callback(lambda _: coroutine.close())  # one that was stopped before it began was never awaited
        self._tasks[request_id] = task

    async def _run(self, request_id: int, coroutine: Coroutine[Any, Any, object]) -> None:
        try:
            result = await coroutine
        except Exception as error:  # noqa: BLE001 - as in `_answer`
            self._fail(request_id, self._told(request_id, error))
        else:
            if not isinstance(result, _Sent):
                self._done(request_id, result)
        finally:
            self._tasks.pop(request_id, None)
            self._cancels.pop(request_id, None)
            self._close_uploads_if_ended()

    def _told(self, request_id: int, error: Exception) -> ParamStoreError:
        """`error` as the client is told it. A bug here must not end the session of whoever met it."""
        if isinstance(error, ParamStoreError):
            return error
        logger.error("request %d of pid %d failed", request_id, self.pid, exc_info=error)
        return ParamStoreError(f"internal error: {error!r}")

    def _done(self, request_id: int, result: object) -> None:
        try:
            self._channel.send(m.Done(request_id, result))
        except ProtocolError as error:  # more than a frame holds
            self._fail(request_id, error)

    def _fail(self, request_id: int, error: ParamStoreError) -> None:
        self._channel.send(m.Failed(request_id, type(error).__name__, str(error)))

    # --- namespaces

    def _view(self, request: Any) -> View:
        view = self._views.get(request.handle)
        if view is None:
            raise LeaseError(f"namespace handle {request.handle} is not open in this session")
        return view

    def _create(self, r: m.CreateNamespace) -> Coroutine[Any, Any, object]:
        opening = self._store.admission.create(r.name, r.schema, layers=r.layers, experts=r.experts, host_bytes=r.host_bytes)
        return self._opened(opening)

    def _open(self, r: m.OpenNamespace) -> Coroutine[Any, Any, object]:
        return self._opened(self._store.admission.open(r.name, mode=r.mode, at=r.at, host_bytes=r.host_bytes))

    async def _opened(self, opening: Coroutine[Any, Any, View]) -> object:
        view = await opening
        if self.is_ended:
            self._store.close_view(view)
            raise StoreUnavailable("the session ended")
        handle = self._next_handle
        self._next_handle += 1
        self._views[handle] = view
        self._store.tell_lease_slots(view.namespace)
        view.client = self
        return {"handle": handle, **self._store.describe_view(view)}

    def _close_namespace(self, r: m.CloseNamespace) -> None:
        view = self._view(r)
        del self._views[r.handle]
        self._end_view(view)

    def lease_slots_changed(self, view: View, slots: int) -> None:
        """Another session opened or closed the view's namespace."""
        for handle, open_view in self._views.items():
            if open_view is view:
                self._channel.send(m.LeaseSlots(handle, slots))

    def _end_view(self, view: View) -> None:
        self._store.close_view(view)
        self._store.tell_lease_slots(view.namespace)
        self._leases = {lease_id: lease for lease_id, lease in self._leases.items() if lease.view is not view}

    # --- leases

    def _acquire(self, r: m.Acquire) -> None:
        try:
            self._check_admissible(r.id)
            lease = self._store.acquire(self._view(r), r.id, r.keys, r.part)
        except ParamStoreError as error:
            self._fail(r.id, error)
            return
        self._leases[r.id] = lease
        if lease.is_finished:
            self._grant(r.id, lease)
        else:
            self._start(r.id, self._wait_lease(r, lease))

    async def _wait_lease(self, r: m.Acquire, lease: LeaseRequest) -> object:
        try:
            await self._store.wait_lease(lease, r.timeout_s)
        except BaseException:
            self._leases.pop(r.id, None)
            raise
        self._grant(r.id, lease)
        return _Sent()

    def _grant(self, request_id: int, lease: LeaseRequest) -> None:
        if request_id not in self._leases:
            lease.error = lease.error or LeaseError(f"namespace {lease.view.namespace.name!r} was closed")
        if lease.error is not None:
            self._leases.pop(request_id, None)
            self._fail(request_id, lease.error)
            return
        slots = self._store.lease_places(lease)
        new = self._store.host.give(self, {slot[0] for slot in slots})
        segments = [(segment, length_bytes) for segment, length_bytes, _ in new]
        self._channel.send(m.Granted(request_id, slots, segments), [fd for _, _, fd in new])

    def _release(self, r: m.Release) -> None:
        for lease_id in r.leases:
            if lease_id in self._tasks:
                continue  # not granted yet: there is nothing to release, and `Cancel` is what ends it
            lease = self._leases.pop(lease_id, None)
            if lease is not None:
                self._store.release(lease.view, lease_id)

    def _one_way(self, request: m.Message) -> None:
        try:
            if isinstance(request, m.Cancel):
                self._cancel(request.target)
            elif isinstance(request, m.Unmapped):
                self._store.host.unmapped(self, request.segments)
            elif isinstance(request, m.DeviceReport):
                self._store.report_device(self._view(request), request.resident, request.touched, request.bytes_resident)
        except ParamStoreError:
            logger.warning("pid %d: one-way message ignored", self.pid, exc_info=True)

    def _cancel(self, target: int) -> None:
        lease, cancel = self._leases.get(target), self._cancels.get(target)
        if lease is not None and not lease.is_finished:
            self._store.cancel_lease(lease, TicketCancelled("the lease request was cancelled"))
        elif cancel is not None:
            cancel()

    # --- requests with memory

    def _prefetch(self, r: m.Prefetch) -> object:
        request = self._store.prefetch(self._view(r), r.keys, r.part, r.deadline_s)
        self._cancels[r.id] = partial(self._store.cancel_prefetch, request)
        return self._store.wait_prefetch(request)

    def _verify(self, r: m.Verify) -> object:
        scrub = self._store.verify(r.namespace, r.keys, r.bytes_per_s)
        self._cancels[r.id] = partial(self._store.scrubber.cancel, scrub, TicketCancelled("the verify was cancelled"))
        return self._store.scrubber.wait(scrub)

    def _open_upload(self, r: m.OpenUpload) -> object:
        segment, memory = self._store.open_upload(self, r.size_bytes, list(self._views.values()))
        self._uploads.add(segment, memory)
        return self._sent_upload(r.id, segment, memory)

    async def _sent_upload(self, request_id: int, segment: int, memory: SegmentMemory) -> object:
        assert memory.fd is not None
        self._channel.send(m.Uploaded(request_id, segment, memory.length_bytes), [memory.fd])
        return _Sent()

    def _initialize_put(self, r: m.InitializePut) -> object:
        view = self._view(r)
        length_bytes = view.namespace.schema.initial_bytes
        memory = self._uploads.holding(r.segment, r.offset_bytes, length_bytes)
        return self._store.initialize_put(view, r.key, memory.view(r.offset_bytes, length_bytes))

    def _push(self, r: m.Push) -> None:
        view = self._view(r)
        self._store.push(view, self._uploads.ranges(r.entries, view.namespace.schema.gradient_bytes))

    def _read(self, r: m.Read) -> object:
        view = self._view(r)
        length_bytes = view.namespace.schema.record_bytes
        memory = self._uploads.holding(r.segment, r.offset_bytes, length_bytes)
        return self._read_record(view, r, memory.view(r.offset_bytes, length_bytes))

    async def _read_record(self, view: View, r: m.Read, target: memoryview) -> dict[str, int]:
        identity = await self._store.read(view, r.key, target)
        return {"epoch": identity.epoch, "version": identity.version}

    # --- the end

    def unmap(self, segments: list[int]) -> None:
        """Asks the client to give these segments up; it answers Unmapped."""
        if not self.is_ended:
            self._channel.send(m.Unmap(segments))

    def close(self, reason: Exception | None = None) -> None:
        """Disconnects the client; the session has ended on return."""
        self._channel.close(reason)
        self._on_end(reason)

    def _on_end(self, reason: Exception | None) -> None:
        if self.is_ended:
            return
        self.is_ended = True
        self._hello_timer.cancel()
        self._store.transfer_log.end(self)
        if reason is not None:
            logger.info("session of pid %d ended: %s", self.pid, reason)
        for cancel in list(self._cancels.values()):
            cancel()
        for lease in list(self._leases.values()):
            if not lease.is_finished:
                self._store.cancel_lease(lease, StoreUnavailable("the session ended"))
        for handle, view in list(self._views.items()):
            if not (self._process.is_watched and view.leased):
                del self._views[handle]
                self._end_view(view)
            else:
                view.end_writing()
        self._close_uploads_if_ended()
        if not self._views:
            self._gone()

    def _close_uploads_if_ended(self) -> None:
        """The area goes with the session, once no request that reads gradients is under way."""
        if self.is_ended and not self._tasks:
            self._uploads.close()
            self._store.host.drop_uploads(self)

    def _process_ended(self) -> None:
        """The client process is gone: nobody reads its mappings any more."""
        self._channel.close(None)
        self._on_end(None)  # at once, if the connection has not ended before
        if self._views:
            for view in self._views.values():
                self._end_view(view)
            self._views.clear()
            self._gone()

    def _gone(self) -> None:
        self._process.close()
        self._store.host.unmapped(self)
        self._on_gone(self)


class _Sent:
    """What a handler gives when it has sent its answer itself."""
