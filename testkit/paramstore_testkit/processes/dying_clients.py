"""`python -m paramstore_testkit.processes.dying_clients`: clients that come to a state of their work and die, one by one.

Each request, a mapping {address, state, death}, makes a child that comes to the state and says `ready` and a digest of what it
leased. At the next SIGUSR1 it ends without closing anything (`exit`), or it hangs up (`shutdown`) and says so; then the next
SIGUSR1 makes it say the digest anew, and the third ends it. Where a request must be held up in the daemon, the child says `gate`
before it asks, and waits for a SIGUSR1 there, too. It imports no torch. `DyingClients` is the other end.
"""

from __future__ import annotations

import hashlib
import os
import signal
import socket
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import paramstore_client as ps
from paramstore.core.key import ExpertKey
from paramstore.wire import messages as m
from paramstore.wire.codec import encode
from paramstore_client.connection import answers
from paramstore_client.gradients.upload_area import Range
from paramstore_testkit.processes.fork_server import ForkServer, say, serve_forks

MODULE = "paramstore_testkit.processes.dying_clients"
NAME = "moe"
LEASED: tuple[ExpertKey, ...] = ((0, 0), (0, 1))
AWAITED: ExpertKey = (1, 2)
PUSHED: ExpertKey = (1, 0)


class DyingClients(ForkServer):
    """Clients of a daemon; at most one of them lives at a time."""

    statuses = (0, -signal.SIGKILL)

    def __init__(self, log: Path) -> None:
        super().__init__(MODULE, log=log)


class DyingClient:
    """One client. Everything it has is kept here, so that nothing is given back before it dies."""

    def __init__(self, address: str) -> None:
        self.store = ps.connect(address)
        self.connection = self.store._connection
        self.namespace: ps.Namespace
        self.lease: ps.Lease | None = None
        self.tickets: list[ps.Ticket[Any]] = []

    def idle(self) -> None:
        self.namespace = self.store.open_namespace(NAME, min_lease_slots=len(LEASED) + 1)

    def leased(self) -> None:
        self.idle()
        self.lease = self.namespace.acquire(LEASED)

    def forked(self) -> None:
        self.leased()
        child = os.fork()
        if child == 0:
            while True:
                signal.pause()
        say(f"child {child}")

    def waiting(self) -> None:
        """Asks for a lease whose load does not come to its end."""
        self.leased()
        until_told("gate")
        self.tickets.append(self.namespace.begin_acquire([AWAITED]))

    def writing(self) -> list[Range]:
        """Opens as writer, takes a lease, puts gradients of three keys into the upload area, and pushes one of them."""
        self.namespace = self.store.open_namespace(NAME, mode="write")
        self.lease = self.namespace.acquire(LEASED)
        length_bytes = self.namespace.schema.gradient_bytes
        places = self.store._area.take(3, length_bytes, most_bytes=3 * length_bytes)
        for place in places:
            memory = memoryview(self.store._area.mapping(place.segment).buffer).cast("B")  # type: ignore[arg-type]
            memory[place.offset_bytes : place.offset_bytes + length_bytes] = bytes(length_bytes)
        self._request(self._push(places[0], PUSHED)).wait()
        return places

    def mid_push(self) -> None:
        self.writing()

    def half_frame(self) -> None:
        frame = encode(self._push(self.writing()[1], (1, 1)))
        sent = self.connection._sock.send(frame[: len(frame) // 2])
        assert 0 < sent < len(frame)

    def applying(self) -> None:
        """Asks for an apply that reads the upload area and does not come to its end."""
        self.writing()
        until_told("gate")
        self.tickets.append(self.namespace.apply(ps.AdamW(lr=0.5)))

    def hang_up(self) -> None:
        self.connection._sock.shutdown(socket.SHUT_RDWR)

    def digest(self) -> str:
        """Digest of the leased bytes, as this process reads them now."""
        found = hashlib.sha256()
        for segment, offset_bytes, *_ in self.lease._slots if self.lease is not None else ():
            memory = memoryview(self.connection.segments.leased(segment).buffer).cast("B")  # type: ignore[arg-type]
            found.update(memory[offset_bytes : offset_bytes + self.namespace.schema.part("param").image_bytes])
        return found.hexdigest()

    def _push(self, place: Range, key: ExpertKey) -> m.Push:
        return m.Push(self.connection.next_id(), self.namespace._handle, [(*key, place.segment, place.offset_bytes)])

    def _request(self, message: m.Push) -> ps.Ticket[None]:
        return self.connection.request(message, what="push", convert=answers.nothing)


STATES: Mapping[str, Callable[[DyingClient], None]] = {
    state.__name__: state
    for state in (
        DyingClient.idle, DyingClient.leased, DyingClient.waiting, DyingClient.mid_push, DyingClient.half_frame,
        DyingClient.applying, DyingClient.forked,
    )
}  # fmt: skip


def _live(request: dict[str, Any]) -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
    client = DyingClient(request["address"])
    STATES[request["state"]](client)
    until_told(f"ready {client.digest()}")
    if request["death"] == "shutdown":
        client.hang_up()
        until_told("hung up")
        until_told(client.digest())
    os._exit(0)


def until_told(said: str) -> None:
    """Says it, and waits for the next SIGUSR1."""
    say(said)
    signal.sigwait([signal.SIGUSR1])


if __name__ == "__main__":
    serve_forks(_live)
