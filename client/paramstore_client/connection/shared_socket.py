"""One socket to the daemon, used from any thread and any event loop, with no thread of its own.

- Whoever waits reads: one thread at a time has the reader's role and settles everybody's tickets; the others wait and take
  the role over when the reader leaves (`ReaderRole`). An event loop reads when its selector says so.
- Whoever sends, sends in the order of the outbox. When the socket is full the sender reads too, so that it cannot
  deadlock with a daemon that waits for us to read.
- Once the connection has failed it stays so: every ticket has settled, and every later call raises. Leases stay
  readable until `close`.
- A finalizer may post: it never blocks and takes no lock that the interrupted thread may hold.
- An interrupt may come anywhere: what was read and sent is noted within single calls of C, where no handler of a signal runs; what
  a `finally` must do is its first call, of C; whatever else was left half done, the next call does again.
- It loses nothing but where Python itself does: in a finalizer. A handler that raises a ParamStoreError may end the connection.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
import os
import select
import socket
import threading
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from paramstore.clock import Clock, MonotonicClock
from paramstore.errors import (
    ConfigError,
    ForkedClient,
    ParamStoreError,
    ProtocolError,
    StoreUnavailable,
    VersionMismatch,
    WaitTimeout,
)
from paramstore.wire.codec import encode
from paramstore.wire.messages import PROTOCOL_MAJOR, Message, Request, Unmapped
from paramstore_client import this_process
from paramstore_client.connection.inbox import WAY_ON, Inbox
from paramstore_client.connection.open_tickets import OpenTickets
from paramstore_client.connection.outbox import NOTHING, Gathered, Outbox
from paramstore_client.connection.reader_role import ReaderRole, Token
from paramstore_client.connection.segments import Segments
from paramstore_client.connection.ticket import Ticket

T = TypeVar("T")

POLL_MAX_S = 2_000_000.0
"""Longest single wait, 23 days: poll(2) counts milliseconds in 32 bits, and waits on conditions have a limit too."""
STALL_POLL_S = 0.05
"""How long a sender whose socket is full sleeps before it looks again whether somebody reads."""
CLOSE_SENDS_S = 1.0
"""How long a close waits at most for a daemon that takes nothing off its socket: slots that it is not given back stay taken."""

_connections: weakref.WeakSet[Connection] = weakref.WeakSet()


class Connection:
    """Owner of the socket, the outbox, the unanswered tickets and, through `segments`, of the mapped memory."""

    def __init__(self, sock: socket.socket, *, timeout_s: float, clock: Clock | None = None) -> None:
        """sock: connected. timeout_s: how long a request without a timeout of its own waits."""
        sock.setblocking(False)
        self.segments = Segments()
        self.timeout_s = timeout_s
        self.minor = 0
        self.store_uuid = ""
        self.daemon_pid = 0
        """`minor`, `store_uuid` and `daemon_pid` hold what the daemon says of itself in its welcome."""
        self.clock: Clock = clock or MonotonicClock()
        self._sock = sock
        self._fd = sock.fileno()
        self._process_id = this_process.pid
        self._inbox = Inbox(sock, self.segments)
        self._ids = itertools.count(1)
        self._tickets = OpenTickets()
        self._outbox = Outbox()
        self._sending = threading.Lock()
        self._lock = threading.RLock()
        """Held for moments, by who adds a ticket, watches, or ends the connection."""
        self.role = ReaderRole()
        self._loops: dict[asyncio.AbstractEventLoop, int] = {}
        self._failure: ParamStoreError | None = None
        self._readable, self._either = _poller(self._fd, select.POLLIN), _poller(self._fd, select.POLLIN | select.POLLOUT)
        _connections.add(self)

    def check_minor(self, minor: int, call: str) -> None:
        """Raises VersionMismatch if the daemon is too old for `call`, which needs that minor version of the protocol."""
        if self.minor < minor:
            raise VersionMismatch(
                f"the daemon speaks protocol {PROTOCOL_MAJOR}.{self.minor}, {call} needs {PROTOCOL_MAJOR}.{minor}: restart the "
                "daemon with this version of paramstore"
            )

    def lease_slots(self, handle: int, promised: int) -> int:
        """How many keys a handle may have leased: the number promised, or the one that an older daemon has told since."""
        return self._inbox.lease_slots.get(handle, promised)

    def next_id(self) -> int:
        """An id for the next request, never used before on this connection."""
        return next(self._ids)

    def request(
        self, message: Request, *, what: str, convert: Callable[[Any], T], timeout_s: float | None = None,
        on_settled: Callable[[ParamStoreError | None], None] | None = None, is_cancellable: bool = True,
    ) -> Ticket[T]:  # fmt: skip
        """Sends `message` and returns its ticket. Requests reach the daemon in the order of these calls.

        what: names the request in messages to people. convert: makes the result from the answer, on the reading thread.
        on_settled: called on the reading thread with the request's error, or None. Raises StoreUnavailable or ForkedClient, and
        CapacityError when TICKETS_MAX requests are unanswered; then nothing was sent. Raises WaitTimeout if the daemon takes
        nothing off its socket: the request stays in the outbox, goes out in its turn, and `on_settled` is called at its end.
        """
        self.check_usable()
        request_id: int = message.id  # type: ignore[union-attr]  # the one-way messages go through `post`
        try:
            frame = encode(message)
        except ProtocolError as error:  # a value that no check caught, or more than a frame holds: nothing was sent
            raise ConfigError(f"{what}: {error}") from error
        ticket = Ticket(
            self, request_id, what=what, convert=convert, timeout_s=self.timeout_s if timeout_s is None else timeout_s,
            on_settled=on_settled, is_cancellable=is_cancellable,
        )  # fmt: skip
        self._tickets.check_room(what)
        with self._lock:
            self.check_usable()
            self._outbox.add(frame, partial(self._tickets.__setitem__, request_id, ticket))
        if not self._outbox.is_gathering:
            self._send_all(what)
        return ticket

    def post(self, message: Message, ticket: Ticket[Any] | None = None) -> None:
        """Sends a message that nobody waits for, at the latest with the next frame that goes out. Never blocks, never raises.

        ticket: takes the answer of a request. On a dead connection the message is dropped, as the daemon ends that session by
        itself; in a forked child, as the parent has it.
        """
        if self._failure is None and this_process.pid == self._process_id:
            note = NOTHING if ticket is None else partial(self._tickets.__setitem__, ticket.request_id, ticket)
            self._outbox.add(encode(message), note)
            if ticket is not None and self._failure is not None:  # meanwhile, on another thread: no answer comes
                self._tickets.pop(ticket.request_id, None)
            if not self._outbox.is_gathering:
                self._flush()

    def together(self) -> Gathered:
        """What this thread sends inside leaves in one go, before a wait or at the end, which raises WaitTimeout as `request`."""
        return self._outbox.gathered(lambda is_whole: self._send_all("what is sent together") if is_whole else self._flush())

    def end_lease(self, lease: int) -> None:
        """Notes that the lease's slots are no longer in use; acknowledges segments that were waiting for that."""
        self._acknowledge(self.segments.end_lease(lease))

    def _acknowledge(self, unmapped: list[int]) -> None:
        if unmapped:
            self.post(Unmapped(unmapped))
            self.segments.acknowledged(unmapped)

    def wait(self, ticket: Ticket[Any], timeout_s: float) -> bool:
        """Reads, or waits for the thread that reads, until `ticket` is settled; False when `timeout_s` is over first."""
        self._check_process()
        begun_s = self.clock.now_s()
        deadline_s = begun_s + timeout_s
        if self._outbox.is_gathering:  # who reads meanwhile may sleep until an answer comes, and sends nothing
            self._send_all(ticket.what)
        token = [True]
        try:
            if self._become_reader(token, ticket, deadline_s):
                while not ticket.is_settled and self._wait_readable(deadline_s):
                    self._read_once()
        finally:
            token.clear()
            self._leave_reader(token)
            self.role.waited_s += self.clock.now_s() - begun_s
        return ticket.is_settled

    def drain(self) -> None:
        """Reads what is there without blocking, unless another thread is reading already. Sends what an interrupt has left."""
        self._check_process()
        if not self._outbox.is_gathering:
            self._flush()
        token = [True]
        try:
            if self._try_become_reader(token):
                while self._failure is None and self._read_once():
                    pass
        finally:
            token.clear()
            self._leave_reader(token)

    def watch(self, loop: asyncio.AbstractEventLoop) -> None:
        """Lets `loop`, the running one, read from here on, until `unwatch` was called as often."""
        if self._outbox.is_gathering:
            self._send_all("what is sent together")
        self._flush()  # what an interrupt has left
        with self._lock:
            self._check_process()
            count = self._loops.get(loop, 0)
            self._loops[loop] = count + 1
            if count == 0 and self._failure is None:
                loop.add_reader(self._fd, self.drain)

    def unwatch(self, loop: asyncio.AbstractEventLoop) -> None:
        with self._lock:
            self._loops[loop] -= 1
            if self._loops[loop] == 0:
                del self._loops[loop]
                loop.remove_reader(self._fd)
            self._close_if_unused()

    def check_usable(self) -> None:
        """Returns on a live connection in its own process; else raises ForkedClient or StoreUnavailable."""
        self._check_process()
        if self._failure is not None:
            reason = str(self._failure)
            raise StoreUnavailable(reason if reason.endswith(WAY_ON) else f"{reason}: {WAY_ON}")

    @property
    def is_failed(self) -> bool:
        return self._failure is not None

    def close(self, reason: str, *, is_expected: bool = False) -> None:
        """Ends the session: tickets in flight raise StoreUnavailable, leases end, memory is let go of. Idempotent.

        is_expected: failures of tickets that nobody waits for are not logged. Those of prefetches and other requests that can be
        cancelled never are: this process ends them itself, and nothing is lost by it.
        """
        if this_process.pid == self._process_id:
            try:
                for keeper in self.segments.keepers():
                    keeper.let_go()
                with contextlib.suppress(WaitTimeout):
                    self._send_rest("close", min(self.timeout_s, CLOSE_SENDS_S))
            finally:
                self._fail(StoreUnavailable(reason), is_ours=True, is_expected=is_expected)
                self.segments.clear()

    def close_in_child(self) -> None:
        """In a forked child: lets go of the socket, so that the daemon sees the parent end. Touches no lock."""
        self._sock.close()

    # --- reading ---

    def _become_reader(self, token: Token, ticket: Ticket[Any], deadline_s: float) -> bool:
        """Waits for the reader's role. True: this thread reads now. False: the ticket is settled, or the deadline is over."""
        while not ticket.is_settled:
            if self._try_become_reader(token):
                return True
            self._flush()  # what an interrupt has left: who reads may sleep until an answer comes, and sends nothing
            remaining_s = deadline_s - self.clock.now_s()
            if remaining_s <= 0:
                return False
            self.role.await_change(remaining_s, lambda: ticket.is_settled)
        return False

    def _try_become_reader(self, token: Token) -> bool:
        """Takes the reader's role, if nobody has it, and settles what an interrupted reader has left."""
        is_reader = self.role.try_take(token)
        return is_reader and (not self._inbox.is_behind or self._settle_answers())

    def _leave_reader(self, token: Token) -> None:
        """Has others read, where the thread that has emptied `token` was the reader."""
        if self.role.had(token):
            self.role.tell()
            self._close_if_unused()
            if self._failure is None and self._inbox.is_behind:  # interrupted: loops would wait until more comes
                for loop in list(self._loops):
                    if not loop.is_closed():
                        loop.call_soon_threadsafe(self.drain)

    def _wait_readable(self, deadline_s: float) -> bool:
        """For the reader: waits for something to read, and sends what the socket had no room for. False at the deadline."""
        while True:
            remaining_s = deadline_s - self.clock.now_s()
            poller = self._either if self._outbox else self._readable
            events = poller.poll(max(0, math.ceil(min(remaining_s, POLL_MAX_S) * 1000)))
            if not events:
                return False
            if events[0][1] & select.POLLOUT:
                self._flush()
            if events[0][1] & ~select.POLLOUT:
                return True

    def _read_once(self) -> bool:
        """For the reader: settles what one read brings. False if there was nothing to read, or there will be no more."""
        try:
            if not self._inbox.read():
                return False
        except ParamStoreError as error:
            self._fail(error)
            return False
        return self._settle_answers()

    def _settle_answers(self) -> bool:
        """For the reader: settles what was read. False if the connection has failed by it."""
        try:
            self._tickets.settle_from(self._inbox)
        except ParamStoreError as error:
            self._fail(error)
            return False
        self._acknowledge(self.segments.unmapped())
        self.role.tell()
        return True

    # --- sending ---

    def _flush(self) -> None:
        """Sends the outbox as far as the socket takes it. A caller that finds another sender at work leaves it to that one."""
        while self._outbox and self._send_some():
            pass

    def _send_some(self) -> bool:
        """Sends what the socket takes. False when it is full, or another sender is at work."""
        is_sender: list[bool] = []
        try:
            is_sender.extend(map(self._sending.acquire, (False,)))  # noted by the call that takes it: no interrupt leaves it taken
            return is_sender[0] and self._outbox.send(self._sock.sendmsg)
        finally:
            if is_sender and is_sender[0]:
                self._sending.release()

    def _send_all(self, what: str) -> None:
        self._flush()
        if self._outbox:
            self._send_rest(what, self.timeout_s)

    def _send_rest(self, what: str, timeout_s: float) -> None:
        """Sends the rest where the socket was full, and reads meanwhile, so that the daemon can go on. Raises WaitTimeout."""
        deadline_s = self.clock.now_s() + timeout_s
        while self._outbox and self._failure is None:
            if self.clock.now_s() >= deadline_s:
                raise WaitTimeout(f"{what}: the daemon took nothing off its socket for {timeout_s:g} s")
            token = [True]
            try:
                if is_reader := self._try_become_reader(token):
                    events = self._either.poll(math.ceil(STALL_POLL_S * 1000))
                    if events and events[0][1] & ~select.POLLOUT:
                        self._read_once()
            finally:
                token.clear()
                self._leave_reader(token)
            if not is_reader:
                _poller(self._fd, select.POLLOUT).poll(math.ceil(STALL_POLL_S * 1000))
            self._flush()

    # --- the end ---

    def _fail(self, error: ParamStoreError, *, is_ours: bool = False, is_expected: bool = False) -> None:
        """Settles every ticket with an error of `error`'s class and shuts the socket down. The first error counts; later calls do
        what an interrupted one has left.

        is_ours: this process ends the session.
        """
        with self._lock:
            if self._failure is None:
                self._failure = error
            # The outbox is the sender's: its next send fails and clears it.
            with contextlib.suppress(OSError):
                self._sock.shutdown(socket.SHUT_RDWR)  # wakes the thread that polls
        self._tickets.fail(self._failure, is_ours=is_ours, is_expected=is_expected)
        self.role.tell()
        self._close_if_unused()

    def _close_if_unused(self) -> None:
        """Closes the socket once nobody polls it: another file may get its descriptor's number right after."""
        token = [True]
        try:
            if self._failure is not None and not self._tickets and not self._loops and self.role.try_take(token):
                self._inbox.close()
                self._sock.close()
        finally:
            token.clear()

    def _check_process(self) -> None:
        if this_process.pid != self._process_id:
            raise ForkedClient(
                f"this client belongs to process {self._process_id}, this is its forked child {this_process.pid}: connect again"
            )


def _poller(fd: int, events: int) -> select.poll:
    poller = select.poll()
    poller.register(fd, events)
    return poller


def _close_all_in_child() -> None:
    for connection in list(_connections):
        connection.close_in_child()


os.register_at_fork(after_in_child=_close_all_in_child)
