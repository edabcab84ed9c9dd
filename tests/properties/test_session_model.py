"""Sessions against a model of the conversation: legal and illegal messages in any order, each answered once and as it should be,
and nobody else notices."""

from __future__ import annotations

import asyncio
import os
import socket
from collections import Counter
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any, TypeVar

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from paramstore.core.key import ExpertKey
from paramstore.daemon.assembly import HostMemory
from paramstore.daemon.session import Session
from paramstore.memory.arena import PageKind, PageReport
from paramstore.testing.machine import Machine
from paramstore.testing.raw_client import RawClient
from paramstore.testing.small_store import EXPERTS, SCHEMA, create, turns
from paramstore.testing.state_machines import run_fixed, run_new
from paramstore.wire import messages as m
from paramstore.wire.codec import LENGTH, encode

SMALL_PAGES = PageReport(shared=PageKind.SMALL, private=PageKind.SMALL, advice="")
ADAMW = (1e-3, 0.9, 0.999, 1e-8, 0.01, 1.0)
CLIENTS_MAX = 3
VIEWS_MAX = 4
UPLOADS_MAX = 2
LIMIT_S = 20.0
PICK = st.integers(0, 11)
KEY = st.sampled_from([(0, expert) for expert in range(EXPERTS)])
KEYS = st.lists(KEY, min_size=1, max_size=2, unique=True)
PARTS = st.sampled_from(["param"] * 6 + ["optim", "nope"])
WRONG_KEYS = st.sampled_from([[(0, 99)], [(7, 0)], [(0, 0), (-1, 0)]])
UNKNOWN_ID = 1 << 40
T = TypeVar("T")
Place = tuple[int, int, int, int]


@dataclass(eq=False)
class Party:
    """One client: what it has said, what it was told, what it has. handles: the mode, and how many slots it may lease."""

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


class SessionMachine(RuleBasedStateMachine):
    """`good` is a reader who does only what is right, after every rule; `parties` are everybody else."""

    @initialize()
    def start(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.unseen: list[dict[str, Any]] = []
        self.loop.set_exception_handler(lambda _, context: self.unseen.append(context))
        self.parties: list[Party] = []
        self.ended: list[Party] = []
        self.gone: list[Session] = []
        self.step = 0
        self.pending: set[ExpertKey] = set()
        self.writer: tuple[Party, int] | None = None
        self.run(self._open())
        self.good = self._connect()
        self.run(self._say(self.good, m.Hello, m.MAGIC, m.PROTOCOL_MAJOR, m.PROTOCOL_MINOR, os.getpid()))
        opened = self.run(self._say(self.good, m.OpenNamespace, "moe", "read"))
        self._opened(self.good, "read", opened)
        for _ in range(2):
            self.connect(1)
        self.open_view(0, "write", 5)
        self.open_upload(0, 8 * SCHEMA.gradient_bytes)

    async def _open(self) -> None:
        self.machine = Machine(seed=1, volume_size_bytes=14 << 20)
        self.store = self.machine.start()
        self.store.host.memory = HostMemory(SMALL_PAGES)  # what a client maps must be a memfd
        self.store.close_view(await create(self.store))

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        result = self.loop.run_until_complete(asyncio.wait_for(coroutine, LIMIT_S))
        assert not self.unseen, self.unseen
        return result

    # --- saying and hearing

    def _connect(self) -> Party:
        async def connect() -> Party:
            ours, theirs = socket.socketpair()
            return Party(RawClient(ours), Session(self.store, theirs, on_gone=self.gone.append))

        return self.run(connect())

    async def _say(self, party: Party, make: Any, *arguments: Any, request_id: int | None = None) -> m.Message:
        """Sends a request; its answer. Whatever else comes meanwhile is noted."""
        message = make(party.raw.next_id() if request_id is None else request_id, *arguments)
        party.sent[message.id] += 1
        await party.raw.send(message)
        while True:
            answer = await party.raw.answer()
            self._heard(party, answer)
            if getattr(answer, "id", None) == message.id:
                return answer

    @staticmethod
    def _heard(party: Party, answer: m.Message) -> None:
        while party.raw.fds:
            os.close(party.raw.fds.pop())
        if isinstance(answer, m.LeaseSlots):
            party.caps[answer.handle] = answer.slots
        elif isinstance(answer, m.Done | m.Granted | m.Uploaded | m.Failed):
            party.answered[answer.id] += 1
            assert party.answered[answer.id] <= party.sent[answer.id], f"{answer} answers nothing"

    def _ask(self, party: Party, make: Any, *arguments: Any, expected: str = "", request_id: int | None = None) -> Any:
        """The answer, which must be the error `expected` (several: any of them), or, if that is empty, none."""
        answer = self.run(self._say(party, make, *arguments, request_id=request_id))
        if expected:
            assert isinstance(answer, m.Failed), answer
            assert answer.error in expected.split(), answer
        else:
            assert not isinstance(answer, m.Failed), answer
        return answer.result if isinstance(answer, m.Done) else answer

    def _known(self) -> list[Party]:
        return [party for party in self.parties if party.is_known]

    def _one(self, pick: int) -> Party:
        return self._known()[pick % len(self._known())]

    def _handle(self, party: Party, pick: int) -> int:
        """One of its own; at times one that it has not."""
        return sorted(party.handles)[pick % len(party.handles)] if party.handles and pick else UNKNOWN_ID

    def _writing_error(self, party: Party, handle: int) -> str:
        """Why this handle may not write."""
        if handle not in party.handles:
            return "LeaseError"
        if self.writer == (party, handle):
            return ""
        return "WriterFenced" if party.handles[handle] == "write" else "SchemaMismatch StepDropped"

    # --- connections

    @precondition(lambda self: len(self.parties) < CLIENTS_MAX)
    @rule(is_silent=st.integers(0, 5))
    def connect(self, is_silent: int) -> None:
        party = self._connect()
        self.parties.append(party)
        if is_silent:
            self._ask(party, m.Hello, m.MAGIC, m.PROTOCOL_MAJOR, m.PROTOCOL_MINOR, os.getpid())
            party.is_known = True

    @precondition(lambda self: self.parties)
    @rule(pick=PICK, words=st.sampled_from(["hello", "garbage", "empty", "nothing known"]))
    def break_the_protocol(self, pick: int, words: str) -> None:
        """A second hello, a first frame that is none, bytes that mean nothing: the session ends, and says why."""
        if pick >= 2:
            return
        party = self.parties[pick % len(self.parties)]
        hello = bytes(encode(m.Hello(1, m.MAGIC if party.is_known else "other", m.PROTOCOL_MAJOR, 0, 1)))
        body = {"garbage": b"\x93\xff\x00", "empty": b"", "nothing known": b"\x91\xa4nope"}.get(words)
        self.run(party.raw.send_bytes(hello if body is None else LENGTH.pack(len(body)) + body))
        answers = self.run(party.raw.end())
        last = answers.pop()
        assert isinstance(last, m.Failed)
        assert (last.id, last.error) == (0, "ProtocolError")
        for answer in answers:
            self._heard(party, answer)
        self._left(party)

    @precondition(lambda self: self.parties)
    @rule(pick=PICK)
    def disconnect(self, pick: int) -> None:
        if pick >= 3:
            return
        party = self.parties[pick % len(self.parties)]
        party.raw.close()
        self._left(party)

    def _left(self, party: Party) -> None:
        """Its pending gradients are gone; its leases stay until its process ends."""
        self.parties.remove(party)
        party.is_ended = True
        party.raw.close()
        self.run(self._until(lambda: party.session.is_ended and not party.session._tasks))
        if self.writer is not None and self.writer[0] is party:
            self.writer, self.pending = None, set()
        party.handles = {handle: mode for handle, mode in party.handles.items() if party.held(handle)}
        assert self.store.host.upload_bytes_of(party.session) == 0
        assert (party.session in self.gone) == (not party.handles)
        if party.handles:
            self.ended.append(party)

    @staticmethod
    async def _until(condition: Any) -> None:
        while not condition():
            await asyncio.sleep(0)

    @precondition(lambda self: self.ended)
    @rule(pick=PICK)
    def end_the_process(self, pick: int) -> None:
        party = self.ended.pop(pick % len(self.ended))
        party.session._process._ended()
        party.handles = {}
        assert party.session in self.gone

    # --- namespaces

    def _views(self) -> int:
        return sum(len(party.handles) for party in (*self.parties, *self.ended))

    def _opened(self, party: Party, mode: str, answer: Any) -> None:
        result = answer.result if isinstance(answer, m.Done) else answer
        assert result["handle"] not in party.handles, "a handle is given once"
        party.handles[result["handle"]] = mode
        party.caps[result["handle"]] = result["lease_slots"]

    @precondition(lambda self: self._known() and self._views() < VIEWS_MAX)
    @rule(pick=PICK, mode=st.sampled_from(["read", "read", "write", "write", "watch"]), wrong=st.integers(0, 9))
    def open_view(self, pick: int, mode: str, wrong: int) -> None:
        party = self._one(pick)
        if mode == "watch":
            self._ask(party, m.OpenNamespace, "moe", mode, 0, expected="ConfigError")
        elif wrong == 0:
            self._ask(party, m.OpenNamespace, "nobody", mode, expected="UnknownNamespace")
        elif mode == "read" and wrong == 1:
            self._ask(party, m.OpenNamespace, "moe", mode, self.step + 5, expected="StepDropped")
        else:
            self._opened(party, mode, self._ask(party, m.OpenNamespace, "moe", mode))
            if mode == "write":
                self.writer, self.pending = (party, max(party.handles)), set()

    open_more = open_view

    @precondition(lambda self: self._known())
    @rule(pick=PICK, which=PICK)
    def close(self, pick: int, which: int) -> None:
        party = self._one(pick)
        handle = self._handle(party, which)
        self._ask(party, m.CloseNamespace, handle, expected="" if handle in party.handles else "LeaseError")
        party.handles.pop(handle, None)
        party.leases = {number: lease for number, lease in party.leases.items() if lease[0] != handle}
        if self.writer == (party, handle):
            self.writer, self.pending = None, set()

    @precondition(lambda self: self._known())
    @rule(pick=PICK, which=PICK)
    def refresh(self, pick: int, which: int) -> None:
        party = self._one(pick)
        handle = self._handle(party, which)
        mode = party.handles.get(handle)
        expected = {"read": "", "write": "ConfigError", None: "LeaseError"}[mode]
        found = self._ask(party, m.Refresh, handle, expected=expected)
        assert expected or found == self.step

    # --- leases

    @precondition(lambda self: self._known())
    @rule(pick=PICK, which=PICK, keys=KEYS | KEYS | WRONG_KEYS, part=PARTS, again=PICK)
    def acquire(self, pick: int, which: int, keys: list[ExpertKey], part: str, again: int) -> None:
        """Given if the cap allows it; refused, with the reason, if not. `again`: by an id that is in use."""
        party = self._one(pick)
        handle = self._handle(party, which)
        if again == 0 and party.leases:
            used = next(iter(party.leases))
            self._ask(party, m.Acquire, handle, keys, part, 5.0, request_id=used, expected="ProtocolError")
            return
        answer = self.run(self._say(party, m.Acquire, handle, keys, part, 5.0))
        held, cap = party.held(handle), party.caps.get(handle, 0)
        if isinstance(answer, m.Granted):
            assert handle in party.handles
            assert part == "param"
            assert all(0 <= expert < EXPERTS and layer == 0 for layer, expert in keys)
            assert len(answer.slots) == len(keys)
            assert self.writer == (party, handle) or party.handles[handle] == "read"
            party.leases[answer.id] = handle, answer.slots
            assert held.issuperset(answer.slots) or len(party.held(handle)) <= cap
            return
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
        elif not all(0 <= expert < EXPERTS and layer == 0 for layer, expert in keys):
            assert answer.error == "UnknownKey"
        else:
            assert answer.error == ("CapacityError" if len(keys) > cap else "LeaseError")
            assert len(keys) + len(held) > cap

    acquire_more = acquire

    @precondition(lambda self: self._known())
    @rule(pick=PICK, which=PICK)
    def release(self, pick: int, which: int) -> None:
        """Leases of its own, once or again, others' and such as never were; nobody answers."""
        party = self._one(pick)
        own = [sorted(party.leases)[which % len(party.leases)]] if party.leases else []
        others = [number for other in self.parties for number in other.leases if number not in party.leases]
        self.run(party.raw.send(m.Release([*own, *own, *party.released[-2:], *others[:2], UNKNOWN_ID, -1])))
        party.released += own
        for number in own:
            del party.leases[number]

    @precondition(lambda self: self._known())
    @rule(pick=PICK, number=st.sampled_from([0, 1, -1, UNKNOWN_ID]))
    def cancel_nothing(self, pick: int, number: int) -> None:
        party = self._one(pick)
        self.run(party.raw.send(m.Cancel(number)))
        self.run(party.raw.send(m.Unmapped([UNKNOWN_ID])))
        self.run(party.raw.send(m.DeviceReport(UNKNOWN_ID, [], [], 0)))

    @precondition(lambda self: self._known())
    @rule(pick=PICK, which=PICK, keys=KEYS)
    def prefetch_and_cancel(self, pick: int, which: int, keys: list[ExpertKey]) -> None:
        """One answer, be it early enough or not."""
        party = self._one(pick)
        number = party.raw.next_id()
        handle = self._handle(party, which)

        async def both() -> m.Message:
            party.sent[number] += 1
            await party.raw.send_bytes(encode(m.Prefetch(number, handle, keys, "param")) + encode(m.Cancel(number)))
            while party.answered[number] == 0:
                self._heard(party, answer := await party.raw.answer())
            return answer

        answer = self.run(both())
        if isinstance(answer, m.Failed):
            wrong = "LeaseError" if handle not in party.handles else "TicketCancelled WriterFenced StepDropped"
            assert answer.error in wrong.split()

    # --- writing

    @precondition(lambda self: self._known())
    @rule(pick=PICK, size=st.sampled_from([1, 8 * SCHEMA.gradient_bytes, 0, -5, 1 << 50]))
    def open_upload(self, pick: int, size: int) -> None:
        party = self._one(pick)
        if len(party.uploads) < UPLOADS_MAX or size <= 0:
            expected = "ProtocolError" if size <= 0 else "CapacityError" if size == 1 << 50 else ""
            if not expected and not party.handles:
                return  # what may be asked for depends on what is open
            answer = self._ask(party, m.OpenUpload, size, expected=expected)
            if not expected:
                party.uploads[answer.segment] = answer.length_bytes

    @precondition(lambda self: self._known())
    @rule(pick=PICK, which=PICK, keys=KEYS | KEYS | WRONG_KEYS, offset=st.sampled_from([0] * 5 + [1, -4096, 1 << 40]), is_own=PICK)
    def push(self, pick: int, which: int, keys: list[ExpertKey], offset: int, is_own: int) -> None:
        """All of it, or nothing and the reason: of places that are not its own, not aligned, or beyond the end too."""
        party = self._one(pick)
        handle = self._handle(party, which)
        segment = next((number for number, size in party.uploads.items() if size >= 8 * SCHEMA.gradient_bytes), None)
        others = [number for other in self.parties for number in other.uploads if other is not party]
        if segment is None or is_own == 0:
            segment = others[0] if others else 99999
        entries = [(*key, segment, offset + place * SCHEMA.gradient_bytes) for place, key in enumerate(keys)]
        is_well = segment in party.uploads and offset == 0
        expected = "LeaseError" if handle not in party.handles else "" if is_well else "ProtocolError"
        expected = expected or self._writing_error(party, handle)
        if not expected and any(key not in [(0, expert) for expert in range(EXPERTS)] for key in keys):
            expected = "UnknownKey"
        if not expected and self.pending.intersection(keys):
            expected = "ProtocolError"
        self._ask(party, m.Push, handle, entries, expected=expected)
        if not expected:
            self.pending.update(keys)

    @precondition(lambda self: self._known())
    @rule(pick=PICK, which=PICK, is_aborted=st.integers(0, 2))
    def apply(self, pick: int, which: int, is_aborted: int) -> None:
        party = self._one(pick)
        handle = self._handle(party, which)
        expected = self._writing_error(party, handle)
        if is_aborted == 0:
            found = self._ask(party, m.Abort, handle, expected=expected)
            assert expected or found == len(self.pending)
        else:
            found = self._ask(party, m.Apply, handle, *ADAMW, expected=expected)
            assert expected or found["records"] == len(self.pending)
        if not expected:
            self.pending = set()

    @precondition(lambda self: self._known())
    @rule(pick=PICK, which=PICK, gap=st.sampled_from([1, 1, 2, -1]))
    def commit(self, pick: int, which: int, gap: int) -> None:
        party = self._one(pick)
        handle = self._handle(party, which)
        expected = self._writing_error(party, handle) or ("StepOutOfOrder" if gap < 0 else "")
        found = self._ask(party, m.Commit, handle, self.step + gap, expected=expected)
        if not expected:
            self.step += gap
            assert found["step"] == self.step

    @precondition(lambda self: self._known())
    @rule(pick=PICK, which=PICK, keys=KEYS)
    def ask_all_at_once(self, pick: int, which: int, keys: list[ExpertKey]) -> None:
        """Each is answered once, whatever the order of the answers."""
        party = self._one(pick)
        handle, first = self._handle(party, which), party.raw.next_id()
        numbers = [first, *(party.raw.next_id() for _ in range(5))]
        requests = [
            m.Steps(numbers[0], handle), m.Namespaces(numbers[1]), m.Residency(numbers[2], handle),
            m.WriteBack(numbers[3], handle, keys), m.Extra(numbers[4], handle, self.step), m.Snapshots(numbers[5], UNKNOWN_ID),
        ]  # fmt: skip

        async def all_of_them() -> None:
            party.sent.update(numbers)
            await party.raw.send_bytes(b"".join(bytes(encode(request)) for request in requests))
            while any(party.answered[number] == 0 for number in numbers):
                self._heard(party, await party.raw.answer())

        self.run(all_of_them())

    # --- what holds after every rule

    @invariant()
    def somebody_else_is_served_as_ever(self) -> None:
        (handle,) = self.good.handles
        assert self._ask(self.good, m.Refresh, handle) == self.step
        granted = self._ask(self.good, m.Acquire, handle, [(0, self.step % EXPERTS)], "param", 1.0)
        assert len(granted.slots) == 1
        self.run(self.good.raw.send(m.Release([granted.id])))
        assert self._ask(self.good, m.Steps, handle)[-1] == self.step

    @invariant()
    def every_request_is_answered_once_and_what_a_session_holds_is_counted(self) -> None:
        namespace = self.store.namespaces["moe"]
        for party in (self.good, *self.parties):
            assert party.answered == party.sent
            assert self.store.host.upload_bytes_of(party.session) == sum(party.uploads.values())
        self.run(turns(3))  # one-way messages arrive
        assert len(namespace.views) == 1 + self._views()
        assert namespace.pending.keys() == self.pending
        held = sum(len(party.held(handle)) for party in (*self.parties, *self.ended) for handle in party.handles)
        assert sum(len(view.leased) for view in namespace.views) == held

    def teardown(self) -> None:
        """All go: nothing is left of any of them."""
        if not hasattr(self, "good"):
            return
        for party in [*self.parties]:
            party.raw.close()
            self._left(party)
        while self.ended:
            self.end_the_process(0)
        self.somebody_else_is_served_as_ever()
        self.every_request_is_answered_once_and_what_a_session_holds_is_counted()
        self.good.raw.close()
        self.run(self._until(lambda: self.good.session.is_ended))
        assert self.store.host.upload_bytes == 0
        self.loop.run_until_complete(self._crash())
        self.loop.close()

    async def _crash(self) -> None:
        crashing = asyncio.current_task()
        assert crashing is not None
        self.machine._bystanders.add(crashing)
        await self.machine.crash()


@pytest.mark.slow
def test_whatever_is_said_is_answered_once_and_disturbs_nobody() -> None:
    run_fixed(SessionMachine)


@pytest.mark.slow
def test_the_same_in_lives_that_no_run_had_before(capsys: pytest.CaptureFixture[str]) -> None:
    run_new(SessionMachine, capsys)
