"""Sessions over socket pairs, and what each client must hear: `tests/properties/test_session_model.py` chooses who says what."""

from __future__ import annotations

import asyncio
import os
import socket
from collections import Counter
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from paramstore.core.key import ExpertKey
from paramstore.daemon.assembly import HostMemory
from paramstore.daemon.session import Session
from paramstore.memory.arena import PageKind, PageReport
from paramstore.wire import messages as m
from paramstore.wire.codec import encode
from paramstore_testkit.disks.machine import Machine
from paramstore_testkit.stores.small_store import EXPERTS, create, turns
from paramstore_testkit.wire.raw_client import RawClient

SMALL_PAGES = PageReport(shared=PageKind.SMALL, private=PageKind.SMALL, advice="")
LIMIT_S = 20.0
UNKNOWN_ID = 1 << 40
T = TypeVar("T")
Place = tuple[int, int, int, int]


@dataclass(eq=False)
class Party:
    """One client: what it has said, what it was told, what it has. handles: the mode of each; caps: slots that each may lease."""

    raw: RawClient
    session: Session
    is_known: bool = False
    is_ended: bool = False
    sent: Counter[int] = field(default_factory=Counter)
    answered: Counter[int] = field(default_factory=Counter)
    handles: dict[int, str] = field(default_factory=dict)
    caps: dict[int, int] = field(default_factory=dict)
    leases: dict[int, tuple[int, list[Place]]] = field(default_factory=dict)
    uploads: dict[int, int] = field(default_factory=dict)
    released: list[int] = field(default_factory=list)

    def held(self, handle: int) -> set[Place]:
        return {place for of, places in self.leases.values() if of == handle for place in places}


class SessionTalk:
    """Owner of store, loop and sessions. `good` is a reader that makes no mistakes; `parties` are all other clients."""

    def begin(self) -> None:
        """Makes a store with one namespace, which `good` reads."""
        self.loop = asyncio.new_event_loop()
        self.unseen: list[dict[str, Any]] = []
        self.loop.set_exception_handler(lambda _, context: self.unseen.append(context))
        self.parties: list[Party] = []
        self.ended: list[Party] = []
        self.gone: list[Session] = []
        self.step = 0
        self.prepared: int | None = None
        """Step that is durable and not committed, if any."""
        self.pending: set[ExpertKey] = set()
        self.writer: tuple[Party, int] | None = None
        self.run(self._open())
        self.good = self.connect_one()
        self.run(self.say(self.good, m.Hello, m.MAGIC, m.PROTOCOL_MAJOR, m.PROTOCOL_MINOR, os.getpid()))
        self.opened(self.good, "read", self.run(self.say(self.good, m.OpenNamespace, "moe", "read")))

    async def _open(self) -> None:
        self.machine = Machine(seed=1, volume_size_bytes=14 << 20)
        self.store = self.machine.start()
        self.store.host.memory = HostMemory(SMALL_PAGES)  # a client can map only memfds
        self.store.close_view(await create(self.store))

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        result = self.loop.run_until_complete(asyncio.wait_for(coroutine, LIMIT_S))
        assert not self.unseen, self.unseen
        return result

    # --- saying and hearing

    def connect_one(self) -> Party:
        async def connect() -> Party:
            ours, theirs = socket.socketpair()
            return Party(RawClient(ours), Session(self.machine.service, theirs, on_gone=self.gone.append))

        return self.run(connect())

    async def say(self, party: Party, make: Any, *arguments: Any, request_id: int | None = None) -> m.Message:
        """Sends a request and gives its answer. Whatever else comes meanwhile is noted."""
        message = make(party.raw.next_id() if request_id is None else request_id, *arguments)
        party.sent[message.id] += 1
        await party.raw.send(message)
        while True:
            answer = await party.raw.answer()
            self.heard(party, answer)
            if getattr(answer, "id", None) == message.id:
                return answer

    @staticmethod
    def heard(party: Party, answer: m.Message) -> None:
        while party.raw.fds:
            os.close(party.raw.fds.pop())
        if isinstance(answer, m.Done | m.Granted | m.Lent | m.Uploaded | m.Failed):
            party.answered[answer.id] += 1
            assert party.answered[answer.id] <= party.sent[answer.id], f"{answer} answers nothing"

    def ask(self, party: Party, make: Any, *arguments: Any, expected: str = "", request_id: int | None = None) -> Any:
        """Sends a request. Its answer must be the error `expected` (several: any of them), or no error if that is empty."""
        answer = self.run(self.say(party, make, *arguments, request_id=request_id))
        if expected:
            assert isinstance(answer, m.Failed), answer
            assert answer.error in expected.split(), answer
        else:
            assert not isinstance(answer, m.Failed), answer
        return answer.result if isinstance(answer, m.Done) else answer

    def known(self) -> list[Party]:
        return [party for party in self.parties if party.is_known]

    def one(self, pick: int) -> Party:
        return self.known()[pick % len(self.known())]

    def handle_of(self, party: Party, pick: int) -> int:
        """Gives one of its own handles; at times one that it does not have."""
        return sorted(party.handles)[pick % len(party.handles)] if party.handles and pick else UNKNOWN_ID

    def writing_error(self, party: Party, handle: int) -> str:
        """Gives the error that this handle must get when it writes; empty if it may write."""
        if handle not in party.handles:
            return "LeaseError"
        if self.writer == (party, handle):
            return ""
        return "WriterFenced" if party.handles[handle] == "write" else "SchemaMismatch StepDropped"

    # --- what an answer means

    def opened(self, party: Party, mode: str, answer: Any) -> None:
        result = answer.result if isinstance(answer, m.Done) else answer
        assert result["handle"] not in party.handles, "a handle is given once"
        party.handles[result["handle"]] = mode
        party.caps[result["handle"]] = result["lease_slots"]

    def views_open(self) -> int:
        return sum(len(party.handles) for party in (*self.parties, *self.ended))

    def steps(self) -> list[int]:
        """Lists the steps that can be opened, as `good` is told."""
        (handle,) = self.good.handles
        found: list[int] = self.ask(self.good, m.Steps, handle)
        assert found[-1] == self.step
        assert self.prepared not in found
        return found

    def granted(self, party: Party, handle: int, answer: m.Granted, keys: Sequence[ExpertKey], part: str) -> None:
        """Checks that a granted lease need not have been refused, and is within the cap."""
        assert handle in party.handles
        assert part == "param"
        assert is_known_keys(keys)
        assert len(answer.slots) == len(keys)
        assert self.writer == (party, handle) or party.handles[handle] == "read"
        held = party.held(handle)
        party.leases[answer.id] = handle, answer.slots
        assert held.issuperset(answer.slots) or len(party.held(handle)) <= party.caps.get(handle, 0)

    def refused(self, party: Party, handle: int, answer: m.Message, keys: Sequence[ExpertKey], part: str) -> None:
        """Checks that a lease was refused for a reason that exists."""
        held, cap = party.held(handle), party.caps.get(handle, 0)
        assert isinstance(answer, m.Failed)
        if handle not in party.handles:
            assert answer.error == "LeaseError"
        elif part != "param":
            assert answer.error == "SchemaMismatch"
        elif answer.error == "WriterFenced":
            assert party.handles[handle] == "write"
            assert self.writer != (party, handle)
        elif answer.error == "StepDropped":
            assert party.handles[handle] == "read"
        elif not is_known_keys(keys):
            assert answer.error == "UnknownKey"
        else:
            assert answer.error == ("CapacityError" if len(set(keys)) > cap else "LeaseError")
            assert len(set(keys)) + len(held) > cap

    def is_leased(self, keys: Sequence[ExpertKey]) -> bool:
        """Whether anybody leases a copy of one of `keys`, of whatever version."""
        copies = self.store.namespaces["moe"].residency.copies
        return any(copy.leases for key in keys for copy in copies.get(key, ()))

    async def cancelled(self, party: Party, handle: int, keys: Sequence[ExpertKey]) -> m.Message:
        """Asks for a lease and cancels it at once, while nothing that it lacks can come; gives the answer."""
        number = party.raw.next_id()
        party.sent[number] += 1
        assert self.machine.workers is not None
        self.machine.workers.pause()
        frames = [m.Acquire(number, handle, list(keys), "param", 5.0), m.Cancel(number)]
        await party.raw.send_bytes(b"".join(bytes(encode(frame)) for frame in frames))
        while party.answered[number] == 0:
            self.heard(party, answer := await party.raw.answer())
        self.machine.workers.resume()
        return answer

    # --- the end of connections and processes

    def left(self, party: Party) -> None:
        """Ends a client's connection: its pending gradients are gone; its leases stay until its process ends."""
        self.parties.remove(party)
        party.is_ended = True
        party.raw.close()
        self.run(self.until(lambda: party.session.is_ended and not party.session._tasks))
        if self.writer is not None and self.writer[0] is party:
            self.writer, self.pending = None, set()
        party.handles = {handle: mode for handle, mode in party.handles.items() if party.held(handle)}
        assert self.store.uploads.bytes_of(party.session) == 0
        assert (party.session in self.gone) == (not party.handles)
        if party.handles:
            self.ended.append(party)

    @staticmethod
    async def until(condition: Any) -> None:
        while not condition():
            await asyncio.sleep(0)

    def end_process(self, party: Party) -> None:
        party.session._process._ended()
        party.handles, party.leases = {}, {}
        assert party.session in self.gone

    # --- what holds

    def check_good_is_served(self) -> None:
        (handle,) = self.good.handles
        assert self.ask(self.good, m.Refresh, handle) == self.step
        granted = self.ask(self.good, m.Acquire, handle, [(0, self.step % EXPERTS)], "param", 1.0)
        assert len(granted.slots) == 1
        self.run(self.good.raw.send(m.Release([granted.id])))
        assert self.steps()
        (row,) = self.ask(self.good, m.Namespaces)
        assert (row["committed_step"], row["prepared_step"]) == (self.step, self.prepared)

    def check_counts(self) -> None:
        """Checks that every request is answered once, and that all that a session holds is counted."""
        namespace = self.store.namespaces["moe"]
        for party in (self.good, *self.parties):
            assert party.answered == party.sent
            assert self.store.uploads.bytes_of(party.session) == sum(party.uploads.values())
        self.run(turns(3))  # one-way messages arrive meanwhile
        assert len(namespace.views) == 1 + self.views_open()
        assert namespace.writing.pending.keys() == self.pending
        held = sum(len(party.held(handle)) for party in (*self.parties, *self.ended) for handle in party.handles)
        assert sum(len(view.leased) for view in namespace.views) == held
        for party in (self.good, *self.parties):
            assert party.session._leases.granted.keys() == party.leases.keys()

    def end(self) -> None:
        """Lets all clients go; checks that nothing is left of any of them."""
        for party in [*self.parties]:
            party.raw.close()
            self.left(party)
        while self.ended:
            self.end_process(self.ended.pop())
        self.check_good_is_served()
        self.check_counts()
        self.good.raw.close()
        self.run(self.until(lambda: self.good.session.is_ended))
        assert self.store.uploads.used_bytes == 0
        self.loop.run_until_complete(self._crash())
        self.loop.close()

    async def _crash(self) -> None:
        crashing = asyncio.current_task()
        assert crashing is not None
        self.machine._bystanders.add(crashing)
        await self.machine.crash()


def is_known_keys(keys: Sequence[ExpertKey]) -> bool:
    return all(0 <= expert < EXPERTS and layer == 0 for layer, expert in keys)
