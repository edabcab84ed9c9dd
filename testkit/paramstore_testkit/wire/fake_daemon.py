"""A daemon in a thread: speaks the wire protocol over a real socket, keeps everything in memory, does what a test scripts.

It records every request. A test may hold requests of a kind back, fail the next one, send any bytes, ask for segments
back, or die. It is no model of the service: no residency, no fencing, no limits but those a test sets.
"""

from __future__ import annotations

import array
import contextlib
import select
import socket
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from paramstore.core.key import KeySpace
from paramstore.core.schema import Schema
from paramstore.errors import (
    CapacityError,
    NamespaceExists,
    ParamStoreError,
    ProtocolError,
    StepDropped,
    StepOutOfOrder,
    TicketCancelled,
    UnknownNamespace,
)
from paramstore.wire import messages as m
from paramstore.wire.codec import FrameDecoder, decode_request, encode
from paramstore_testkit.wire.fake_loans import FakeLoans
from paramstore_testkit.wire.fake_namespace import FakeMemory, FakeNamespace, segment_bytes

POLL_MS = 1000
STORE_UUID = "5707e" + 27 * "0"


class FakeSession:
    """One client's connection, as the daemon sees it."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.frames = FrameDecoder()
        self.known_segments: set[int] = set()
        self.handles: dict[int, FakeNamespace] = {}
        self.leases: dict[int, list[int]] = {}
        self.held: list[m.Request] = []
        self.loans = FakeLoans()

    def close(self) -> None:
        self.sock.close()
        self.loans.close()

    def send(self, message: m.Message, fds: Sequence[int] = ()) -> None:
        self.send_bytes(bytes(encode(message)), fds)

    def send_bytes(self, data: bytes, fds: Sequence[int] = ()) -> None:
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        sent_bytes = self.sock.sendmsg([data], rights)
        if sent_bytes < len(data):  # sending nothing fails too once the client has closed, and would end what it sent before
            self.sock.sendall(data[sent_bytes:])


class FakeDaemon:
    """Serves `path` from `start` to `stop`; a context manager. Every public call is safe from the test's thread.

    lease_slots, wait_timeout_s, upload_budget_bytes: limits that clients are told and held to.
    """

    def __init__(
        self, path: Path, *, lease_slots: int = 16, wait_timeout_s: float = 5.0, upload_budget_bytes: int = 64 << 20
    ) -> None:
        self.path = path
        self.lease_slots = lease_slots
        self.wait_timeout_s = wait_timeout_s
        self.upload_budget_bytes = upload_budget_bytes
        self.minor = m.PROTOCOL_MINOR
        self.gradient_share_bytes: int | None = None
        self.memory = FakeMemory()
        self.namespaces: dict[str, FakeNamespace] = {}
        self.sessions: list[FakeSession] = []
        self.received: list[m.Request] = []
        self.upload_bytes = 0
        self._scripts: dict[type[m.Message], Callable[[FakeSession, Any], None]] = {}
        self._changed = threading.Condition(threading.RLock())
        self._is_paused = False
        self._is_stopping = False
        self._next_handle = 1
        self._wake_reader, self._wake_writer = socket.socketpair()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._thread = threading.Thread(target=self._serve, name="fake-daemon", daemon=True)

    # --- what a test does with it ---

    def start(self) -> FakeDaemon:
        self._listener.bind(str(self.path))
        self._listener.listen(16)
        self._thread.start()
        return self

    def stop(self) -> None:
        """Drops every connection, as a killed daemon would, and ends the thread. Idempotent."""
        if self._is_stopping:
            return
        self._is_stopping = True
        self.resume()
        self._wake_writer.send(b"x")
        self._thread.join(timeout=10)
        for sock in (self._listener, self._wake_reader, self._wake_writer):
            sock.close()
        self.path.unlink(missing_ok=True)
        self.memory.close()

    def __enter__(self) -> FakeDaemon:
        return self.start()

    def __exit__(self, *error: object) -> None:
        self.stop()

    def script(self, kind: type[m.Message], handler: Callable[[FakeSession, Any], None]) -> None:
        """Gives every request of `kind` to `handler` from here on, instead of the daemon."""
        with self._changed:
            self._scripts[kind] = handler

    def hold(self, kind: type[m.Message]) -> None:
        """Leaves requests of `kind` unanswered until `let_go`."""
        self.script(kind, lambda session, request: session.held.append(request))

    def let_go(self, kind: type[m.Message]) -> None:
        """Handles the held requests, in order, and holds no more. Those of a client that has gone go with it."""
        with self._changed:
            self._scripts.pop(kind, None)
            for session in self.sessions:
                held, session.held = session.held, []
                with contextlib.suppress(BrokenPipeError):
                    for request in held:
                        self._handle(session, request)

    def fail(self, kind: type[m.Message], error: ParamStoreError) -> None:
        """Refuses the next request of `kind` with `error`."""

        def refuse(session: FakeSession, request: Any) -> None:
            self._scripts.pop(kind, None)
            session.send(m.Failed(request.id, type(error).__name__, str(error)))

        self.script(kind, refuse)

    def pause(self) -> None:
        """Reads nothing more until `resume`, so that sockets fill up."""
        with self._changed:
            self._is_paused = True
        self._wake_writer.send(b"x")

    def resume(self) -> None:
        with self._changed:
            self._is_paused = False
        self._wake_writer.send(b"x")

    def ask_back(self, segments: Sequence[int]) -> None:
        """Sends Unmap to every session that knows them, and uses them no more."""
        with self._changed:
            for namespace in self.namespaces.values():
                for segment in segments:
                    namespace.forget_segment(segment)
            for session in self.sessions:
                session.send(m.Unmap(list(segments)))

    def wait_until(self, is_so: Callable[[], bool], *, timeout_s: float = 5.0) -> None:
        """Waits until `is_so`, which is asked after every request and every end of a connection."""
        with self._changed:
            assert self._changed.wait_for(is_so, timeout_s), f"not so after {timeout_s} s; received {self.received}"

    def wait_for(self, kind: type[m.Message], count: int = 1) -> list[Any]:
        """Waits until there are `count` requests of `kind`; gives all of that kind so far."""
        self.wait_until(lambda: len(self.requests(kind)) >= count)
        return self.requests(kind)

    def requests(self, kind: type[m.Message]) -> list[Any]:
        return [request for request in self.received if isinstance(request, kind)]

    @property
    def lease_count(self) -> int:
        return sum(len(session.leases) for session in self.sessions)

    # --- the thread ---

    def _serve(self) -> None:
        while not self._is_stopping:
            with self._changed:
                listening = [] if self._is_paused else [self._listener, *(session.sock for session in self.sessions)]
            ready, _, _ = select.select([*listening, self._wake_reader], [], [], POLL_MS / 1000)
            if self._wake_reader in ready:
                self._wake_reader.recv(64)
                continue
            with self._changed:
                for sock in ready:
                    self._take(sock)
                self._changed.notify_all()
        for session in self.sessions:
            session.close()

    def _take(self, sock: socket.socket) -> None:
        if sock is self._listener:
            self.sessions.append(FakeSession(self._listener.accept()[0]))
            return
        session = next(session for session in self.sessions if session.sock is sock)
        try:
            data = sock.recv(1 << 16)
            for body in session.frames.feed(data):
                self._receive(session, decode_request(body))
        except OSError:
            data = b""
        if not data:
            self.sessions.remove(session)
            session.close()

    def _receive(self, session: FakeSession, request: m.Request) -> None:
        self.received.append(request)
        scripted = self._scripts.get(type(request))
        if scripted is not None:
            scripted(session, request)
        else:
            self._handle(session, request)

    def _handle(self, session: FakeSession, request: m.Request) -> None:
        try:
            answer = self._answer(session, request)
        except ParamStoreError as error:
            session.send(m.Failed(request.id, type(error).__name__, str(error)))  # type: ignore[union-attr]
            return
        if answer is not None:
            fds = [self.memory.segments[segment].fd for segment in self._new_segments(session, answer)]
            session.send(answer, [fd for fd in fds if fd is not None])

    def _new_segments(self, session: FakeSession, answer: m.Answer) -> list[int]:
        if isinstance(answer, m.Granted):
            return [segment for segment, _ in answer.segments]
        return [answer.segment] if isinstance(answer, m.Uploaded) else []

    # --- answers ---

    def _answer(self, session: FakeSession, request: m.Request) -> m.Answer | None:
        """Makes the answer of a daemon that keeps everything in memory; None for one-way messages."""
        match request:
            case m.Hello():
                return m.Done(request.id, {"minor": self.minor, "store_uuid": STORE_UUID, "wait_timeout_s": self.wait_timeout_s})
            case m.Namespaces():
                return m.Done(request.id, [namespace.describe() for namespace in self.namespaces.values()])
            case m.Verify():
                return m.Done(request.id, {"records": 0, "bytes_read": 0, "found": 0, "findings": [], "copy_findings": []})
            case m.Stats():
                return m.Done(request.id, {"leases": self.lease_count})
            case m.CreateNamespace() | m.OpenNamespace() | m.OpenRank():
                return m.Done(request.id, self._open(session, request))
            case m.OpenUpload():
                return self._open_upload(request)
            case m.Acquire():
                return self._grant(session, request)
            case m.Borrow():
                session.send(*session.loans.lend(request))
            case m.GiveBack():
                session.loans.take_back(request.handle, request.kept)
            case m.Release():
                for lease in request.leases:
                    session.leases.pop(lease, None)
            case m.Cancel():
                self._cancel(session, request.target)
            case m.Unmapped():
                for segment in request.segments:
                    if segment in self.memory.segments:  # a client may say it twice
                        self.memory.drop(segment)
            case m.DeviceReport() | m.ExtentModes():
                pass
            case m.BeginApply():  # answered when the apply ends
                session.handles[request.handle].opened = request
            case _:
                return m.Done(request.id, self._result(session, request))
        return None

    def _result(self, session: FakeSession, request: Any) -> object:
        """Makes the results of requests on a handle."""
        namespace = session.handles[request.handle]
        match request:
            case m.InitializePut():
                namespace.put(request.key, request.segment, request.offset_bytes)
            case m.Prefetch():
                return {"loaded": 0, "resident": len(request.keys), "skipped": 0, "bytes": 0}
            case m.AwaitRoom():
                return []  # gradients are read when the apply ends
            case m.Push():
                places = {(layer, expert): (segment, at) for layer, expert, segment, at in request.entries}
                known = {key: place for key, place in namespace.pending.items() if key in places}
                if any(not request.is_last or places[key] != place for key, place in known.items()):
                    raise ProtocolError("a key was pushed that has a pending gradient; a client adds to it in place")
                namespace.pending |= places
            case m.GradientNorm():
                return namespace.norm()
            case m.Apply():
                return {"records": namespace.apply(request.lr, request.grad_scale), "bytes_read": 12, "bytes_written": 8}
            case m.EndApply():
                opened, namespace.opened = namespace.opened, None
                if opened is None:
                    raise StepOutOfOrder("no apply is open")
                result = {"records": namespace.apply(opened.lr, opened.grad_scale), "bytes_read": 12, "bytes_written": 8}
                session.send(m.Done(opened.id, result))
                return result
            case m.Abort():
                namespace.opened = None
                count = len(namespace.pending)
                namespace.pending.clear()
                return count
            case m.WriteBack():
                return {"written": 0, "bytes": 0}
            case m.Evict():
                return {"evicted": 0, "skipped": []}
            case m.Read():
                version = namespace.write_record(request.key, request.segment, request.offset_bytes)
                return {"epoch": namespace.epoch, "version": version}
            case m.Residency():
                return {"layers": list(namespace.space.layers), "experts": namespace.space.experts}
            case m.CloseNamespace() | m.InitializeBegin():
                namespace.pending.clear()
            case _:
                return self._step_result(namespace, request)
        return None

    def _step_result(self, namespace: FakeNamespace, request: Any) -> object:
        match request:
            case m.Prepare():
                namespace.prepared = (request.step, request.extra)
                return {"step": request.step, "records": 0, "bytes_written": 0, "seconds": 0.0}
            case m.Finalize():
                if namespace.prepared is None or namespace.prepared[0] != request.step:
                    raise StepOutOfOrder(f"step {request.step} is not prepared")
                namespace.commit(*namespace.prepared)
                namespace.prepared = None
            case m.Commit():
                namespace.commit(request.step, request.extra)
                return {"step": request.step, "records": 0, "bytes_written": 0, "seconds": 0.0}
            case m.Steps():
                return sorted(namespace.extras)
            case m.Refresh():
                step = namespace.committed_step if request.step is None else request.step
                if step not in namespace.extras:
                    raise StepDropped(f"step {step} is not retained")
                return {"step": step, "keys": 3, "bytes": 96} if request.is_counted else step
            case m.Extra():
                if request.step not in namespace.extras:
                    raise StepDropped(f"step {request.step} is not retained")
                return namespace.extras[request.step]
            case m.Rollback():
                namespace.pending.clear()
                namespace.epoch += 1
                return namespace.epoch
        return None

    def _open(self, session: FakeSession, request: m.CreateNamespace | m.OpenNamespace | m.OpenRank) -> dict[str, object]:
        if isinstance(request, m.CreateNamespace):
            if request.name in self.namespaces:
                raise NamespaceExists(f"namespace {request.name!r} is there already")
            schema, space = Schema.from_description(request.schema), KeySpace.of(request.layers, request.experts)
            self.namespaces[request.name] = FakeNamespace(request.name, schema, space, self.memory)
        namespace = self.namespaces.get(request.name)
        if namespace is None:
            raise UnknownNamespace(f"there is no namespace {request.name!r}")
        handle, self._next_handle = self._next_handle, self._next_handle + 1
        session.handles[handle] = namespace
        is_reader = isinstance(request, m.OpenNamespace) and request.mode == "read"
        return {
            **namespace.describe(), "handle": handle, "lease_slots": self.lease_slots, "wait_timeout_s": self.wait_timeout_s,
            "view_step": namespace.committed_step if is_reader else None, "gradient_share_bytes": self.gradient_share_bytes,
        }  # fmt: skip

    def _open_upload(self, request: m.OpenUpload) -> m.Uploaded:
        size_bytes = segment_bytes(request.size_bytes)
        if self.upload_bytes + size_bytes > self.upload_budget_bytes:
            raise CapacityError(f"upload areas would take {self.upload_bytes + size_bytes} bytes: raise --gradient-budget")
        self.upload_bytes += size_bytes
        return m.Uploaded(request.id, self.memory.add_upload(size_bytes), size_bytes)

    def _grant(self, session: FakeSession, request: m.Acquire) -> m.Granted:
        if len(request.keys) > self.lease_slots + session.loans.lent.get(request.handle, 0):
            raise CapacityError(f"{len(request.keys)} keys in one lease; this session may lease {self.lease_slots} slots at once")
        slots = [session.handles[request.handle].slot(key) for key in request.keys]
        used = dict.fromkeys(segment for segment, *_ in slots)
        new = [segment for segment in used if segment not in session.known_segments]
        session.known_segments.update(new)
        session.leases[request.id] = list(used)
        return m.Granted(request.id, slots, [(segment, self.memory.segments[segment].length_bytes) for segment in new])

    def _cancel(self, session: FakeSession, target: int) -> None:
        for request in session.held:
            if request.id == target:  # type: ignore[union-attr]
                session.held.remove(request)
                with contextlib.suppress(OSError):
                    session.send(m.Failed(target, TicketCancelled.__name__, "cancelled as asked"))
                return
