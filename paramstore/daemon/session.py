"""One client's session: its requests, in the order they came, and what it owns: views, leases, tickets, upload areas.

A request is answered once, under its own id. What can be answered at once is (a lease of resident keys costs one turn of the
loop); the rest runs in a task of the session, which sends its result or error. Tasks start in the order of their requests.

When the connection ends, the session ends: what waits is cancelled, pending gradients are dropped, the area is closed. A
lease ends with the client *process* (its mapping may still be read): leases of a connection that ended while its process
lives stay until the process is gone.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable, Coroutine
from typing import Any

from paramstore.daemon.channel import Channel
from paramstore.daemon.handlers import ORDERED, Handler, Handlers, Sent
from paramstore.daemon.held_requests import HeldRequests
from paramstore.daemon.lost import LostRequests
from paramstore.daemon.peer import Peer
from paramstore.daemon.service import Service
from paramstore.daemon.session_extents import SessionExtents
from paramstore.daemon.session_leases import SessionLeases
from paramstore.daemon.session_loans import SessionLoans
from paramstore.daemon.uploads import Uploads
from paramstore.daemon.welcome import refusal_of, welcome_to
from paramstore.engine.tables.namespace import View
from paramstore.errors import ParamStoreError, ProtocolError, StoreUnavailable, TicketCancelled
from paramstore.wire import messages as m
from paramstore.wire.codec import FRAME_BYTES_MAX, broken_request, decode_request

logger = logging.getLogger(__name__)

TASKS_MAX = 1 << 16
"""Most requests of one session under way at once."""
HELLO_TIMEOUT_S = 2.0



class Session:
    """Owner of what one connection holds. on_gone: called once, when nothing is left of the session."""

    def __init__(self, service: Service, sock: socket.socket, *, on_gone: Callable[[Session], None]) -> None:
        self._store = service.store
        self._loop = asyncio.get_running_loop()
        self._on_gone = on_gone
        self._process = Peer(self._loop, sock, on_ended=self._process_ended)
        self._views: dict[int, View] = {}
        self._next_handle = 1
        self._uploads = Uploads()
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._cancels: dict[int, Callable[[], None]] = {}  # by request id, what ends an open, a prefetch or a scrub under way
        self._label = ""
        self.is_known = False
        self.is_ended = False
        """Whether the connection is gone; leases may stay until the process is gone, too."""
        self._channel = Channel(self._loop, sock, on_frame=self._on_frame, on_end=self._on_end)
        late = ProtocolError(f"no hello within {HELLO_TIMEOUT_S} s")
        self._hello_timer = self._loop.call_later(HELLO_TIMEOUT_S, self._channel.refuse, late)
        extents = SessionExtents(service.extents, self._channel)
        self._leases = SessionLeases(self._store, self._channel, client=self, fail=self._fail, extents=extents)
        self.loans = SessionLoans(self._store, self._channel)
        self._requests = Handlers(
            service, self._channel, client=self, views=self._views, uploads=self._uploads, cancels=self._cancels
        )
        self._handlers: dict[type[m.Message], Handler] = {
            **self._requests.table(),
            m.CreateNamespace: self._open, m.OpenNamespace: self._open, m.CreateRank: self._open, m.OpenRank: self._open,
            m.CloseNamespace: self._close_namespace, m.Borrow: lambda r: self.loans.borrow(self._requests.view(r), r),
            m.AcquireExtents: lambda r: extents.acquire(self._requests.view(r), r),
        }  # fmt: skip
        self._held = HeldRequests(self._loop, run=self._take_up, fail=self._fail)
        self._lost: LostRequests | None = None
        """What broken requests have left behind; None while none came."""

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def name(self) -> str:
        """The client's process id, with the label that it gave itself."""
        return f"pid {self.pid} ({self._label})" if self._label else f"pid {self.pid}"

    @property
    def _ended_how(self) -> str:
        return f"is gone: the session of its process (pid {self.pid}) ended"

    @property
    def uid(self) -> int:
        return self._process.uid

    # --- frames

    def _on_frame(self, body: bytes) -> None:
        try:
            request: Any = decode_request(body)
        except ProtocolError as error:
            self._broken(body, error)
            return
        if not self.is_known or isinstance(request, m.Hello):
            self._hello(request)
        elif self._lost is not None and (refusal := self._lost.refusal_of(request)) is not None:
            self._fail(request.id, refusal)
        elif isinstance(request, m.Acquire):
            self._acquire(request)
        elif isinstance(request, m.Release):
            self._leases.release(request.leases)
        elif isinstance(request, m.Cancel | m.Unmapped | m.DeviceReport | m.ExtentModes | m.GiveBack):
            self._one_way(request)
        else:
            self._answer(request)

    def _broken(self, body: bytes, error: ProtocolError) -> None:
        """Fails the request that `body` was meant to be. If nobody can tell which, nothing behind it can be trusted: hangs up."""
        broken = broken_request(body) if self.is_known else None
        try:
            if broken is None or broken.kind is m.Hello:
                raise error
            self._check_admissible(broken.id)
        except ProtocolError as reason:
            self._channel.refuse(reason)
            return
        self._lost = self._lost or LostRequests()
        self._lost.add(broken, error, self._views)
        self._fail(broken.id, error)

    def _hello(self, request: m.Message) -> None:
        if self.is_known or not isinstance(request, m.Hello) or request.magic != m.MAGIC:
            self._channel.refuse(ProtocolError("the first frame must be a hello, and no other may be one"))
            return
        if (refusal := refusal_of(request)) is not None:
            self._channel.send(refusal)
            self._channel.close(None)
            return
        self._hello_timer.cancel()
        self._leases.tells_absent = request.minor >= m.ABSENT_MINOR
        self.is_known, self._label = True, "".join(filter(str.isprintable, request.label))[: m.LABEL_MAX]
        self._channel.raise_limit(FRAME_BYTES_MAX)
        self._channel.send(m.Done(request.id, welcome_to(self._store)))

    def _check_admissible(self, request_id: int) -> None:
        leases, held = self._leases, self._held.by_id
        tables = (self._tasks, leases.granted, leases.waiting, held, leases.extents)
        is_taken = any(request_id in table for table in tables)
        if is_taken or request_id <= 0:
            raise ProtocolError(f"request id {request_id} is in use, or not above 0")
        if len(self._tasks) + len(held) >= TASKS_MAX:
            raise ProtocolError(f"more than {TASKS_MAX} requests under way")

    def _answer(self, request: Any) -> None:
        """Runs the handler now; if it gave a coroutine, in a task of its own."""
        try:
            self._check_admissible(request.id)
            view = self._views.get(request.handle) if type(request) in ORDERED else None
            if view is not None and view.is_ranked and self._held.stops(view):
                self._held.add(view, request)
                return
            result = self._handlers[type(request)](request)
        except Exception as error:  # noqa: BLE001 - goes to whoever asked; `_told` logs what nobody foresaw
            self._fail(request.id, self._told(request.id, error))
            return
        if asyncio.iscoroutine(result):
            self._start(request.id, result)
        elif not isinstance(result, Sent):
            self._done(request.id, result)

    def _take_up(self, request: Any) -> None:
        """Carries out a request that was held back."""
        if isinstance(request, m.Acquire):
            self._acquire(request)
        else:
            self._answer(request)

    def _start(self, request_id: int, coroutine: Coroutine[Any, Any, object]) -> None:
        task = self._loop.create_task(self._run(request_id, coroutine))
        task.add_done_callback(lambda _: coroutine.close())  # a task stopped before it began never awaited it
        self._tasks[request_id] = task

    async def _run(self, request_id: int, coroutine: Coroutine[Any, Any, object]) -> None:
        try:
            result = await coroutine
        except Exception as error:  # noqa: BLE001 - as in `_answer`
            self._fail(request_id, self._told(request_id, error))
        else:
            if not isinstance(result, Sent):
                self._done(request_id, result)
        finally:
            self._tasks.pop(request_id, None)
            self._cancels.pop(request_id, None)
            self._close_uploads_if_ended()

    def _told(self, request_id: int, error: Exception) -> ParamStoreError:
        """Turns `error` into what the client is told. A bug here must not end the session of whoever met it."""
        if isinstance(error, ParamStoreError):
            return error
        logger.error("request %d of pid %d failed", request_id, self.pid, exc_info=error)
        return ParamStoreError(f"internal error: {error!r}")

    def _done(self, request_id: int, result: object) -> None:
        try:
            self._channel.send(m.Done(request_id, result))
        except ProtocolError as error:  # more than a frame holds
            self._fail(request_id, error)
        if self._lost is not None:
            self._lost.settle(request_id, is_done=True)

    def _fail(self, request_id: int, error: ParamStoreError) -> None:
        if self._lost is not None:
            self._lost.settle(request_id, is_done=False)
        self._channel.send(m.Failed(request_id, type(error).__name__, str(error)))

    # --- namespaces

    def _open(self, r: Any) -> Coroutine[Any, Any, object]:
        return self._opened(self._requests.opening(r))

    async def _opened(self, opening: Coroutine[Any, Any, View]) -> object:
        view = await opening
        if self.is_ended:
            self._store.close_view(view, reason=self._ended_how)
            raise StoreUnavailable("the session ended")
        handle = self._next_handle
        self._next_handle += 1
        self._views[handle] = view
        with self._store.transfers.deciding() as planner:
            planner.views.introduce(view, self)
        return {"handle": handle, **self._store.describe_view(view)}

    def _close_namespace(self, r: m.CloseNamespace) -> None:
        view = self._requests.view(r)
        del self._views[r.handle]
        self._end_view(view)

    def calls_go_on(self, view: View) -> None:
        """Lets requests that the view's rank sent after a collective call take effect: in a later turn, not within that call."""
        self._loop.call_soon(self._held.go_on, view)

    def _end_view(self, view: View, *, reason: str = "closed the namespace") -> None:
        self._store.close_view(view, reason=reason)
        self._leases.forget(view)
        self.loans.forget(view)

    # --- leases

    def _acquire(self, r: m.Acquire) -> None:
        try:
            self._check_admissible(r.id)
            view = self._requests.view(r)
            if view.is_ranked and self._held.stops(view):
                self._held.add(view, r)
                return
            lease = self._leases.request(view, r)
        except ParamStoreError as error:
            self._fail(r.id, error)
            return
        if lease.is_finished:
            self._leases.grant(r.id, lease)
        else:
            self._start(r.id, self._leases.wait(r, lease))

    def _one_way(self, request: m.Message) -> None:
        try:
            if isinstance(request, m.Cancel):
                self._cancel(request.target)
            elif isinstance(request, m.Unmapped):
                self._store.host.unmapped(self, request.segments)
            elif isinstance(request, m.GiveBack):
                self.loans.take_back(self._views.get(request.handle), request.kept)
            elif isinstance(request, m.DeviceReport):
                self._store.report_device(self._requests.view(request), request.resident, request.touched, request.bytes_resident)
            elif isinstance(request, m.ExtentModes):
                self._leases.extents.note_modes(self._requests.view(request), dict(request.modes))
        except ParamStoreError:
            logger.warning("pid %d: one-way message ignored", self.pid, exc_info=True)

    def _cancel(self, target: int) -> None:
        if self._leases.cancel(target, TicketCancelled("the lease request was cancelled")):
            return
        if (cancel := self._cancels.get(target)) is not None:
            cancel()
        else:
            self._held.cancel(target)

    # --- the end

    def unmap(self, segments: list[int]) -> None:
        """Asks the client to give these segments up; it answers Unmapped."""
        if not self.is_ended:
            self._channel.send(m.Unmap(segments))

    def close(self, reason: Exception | None = None) -> None:
        """Disconnects the client. On return the session has ended."""
        self._channel.close(reason)
        self._on_end(reason)

    def _on_end(self, reason: Exception | None) -> None:
        if self.is_ended:
            return
        self.is_ended = True
        self._hello_timer.cancel()
        self._store.transfers.log.end(self)
        if reason is not None:
            logger.info("session of pid %d ended: %s", self.pid, reason)
        self._held.clear()
        for cancel in list(self._cancels.values()):
            cancel()
        self._leases.cancel_all(StoreUnavailable("the session ended"))
        self.loans.close()
        self._leases.extents.close()
        for handle, view in list(self._views.items()):
            if not (self._process.is_watched and (view.leased or self._leases.extents.holds(view))):
                del self._views[handle]
                self._end_view(view, reason=self._ended_how)
            else:
                self._store.end_writing(view, reason=self._ended_how)
        self._close_uploads_if_ended()
        if not self._views:
            self._gone()

    def _close_uploads_if_ended(self) -> None:
        """Closes the upload area of an ended session, once no request that reads gradients is under way."""
        if self.is_ended and not self._tasks:
            self._uploads.close()
            self._store.uploads.drop(self)

    def _process_ended(self) -> None:
        """Ends what is left of the session: the client process is gone, so nobody reads its mappings any more."""
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
