"""Sessions against a model of the conversation: legal and illegal messages in any order, each answered once and as it should be,
and nobody else notices."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from paramstore.core.key import ExpertKey
from paramstore.wire import messages as m
from paramstore.wire.codec import LENGTH, encode
from paramstore_testkit.stores.small_store import EXPERTS, SCHEMA, turns
from paramstore_testkit.trials.session_talk import UNKNOWN_ID, Party, SessionTalk
from paramstore_testkit.trials.state_machines import run_new

ADAMW = (1e-3, 0.9, 0.999, 1e-8, 0.01, 1.0)
CLIENTS_MAX = 3
VIEWS_MAX = 4
UPLOADS_MAX = 2
PICK = st.integers(0, 11)
KEY = st.sampled_from([(0, expert) for expert in range(EXPERTS)])
KEYS = st.lists(KEY, min_size=1, max_size=2, unique=True)
PARTS = st.sampled_from(["param"] * 6 + ["optim", "nope"])
WRONG_KEYS = st.sampled_from([[(0, 99)], [(7, 0)], [(0, 0), (-1, 0)]])


class SessionMachine(RuleBasedStateMachine, SessionTalk):
    """Who says what next. `good` is asked after every rule, and hears what it should."""

    @initialize()
    def start(self) -> None:
        self.begin()
        for _ in range(2):
            self.connect(1)
        self.open_view(0, "write", 5, 0)
        self.open_upload(0, 8 * SCHEMA.gradient_bytes)

    # --- connections

    @precondition(lambda self: len(self.parties) < CLIENTS_MAX)
    @rule(is_silent=st.integers(0, 5))
    def connect(self, is_silent: int) -> None:
        party = self.connect_one()
        self.parties.append(party)
        if is_silent:
            self.ask(party, m.Hello, m.MAGIC, m.PROTOCOL_MAJOR, m.PROTOCOL_MINOR, os.getpid())
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
            self.heard(party, answer)
        self.left(party)

    @precondition(lambda self: self.parties)
    @rule(pick=PICK)
    def disconnect(self, pick: int) -> None:
        if pick >= 3:
            return
        party = self.parties[pick % len(self.parties)]
        party.raw.close()
        self.left(party)

    @precondition(lambda self: self.ended)
    @rule(pick=PICK)
    def end_the_process(self, pick: int) -> None:
        self.end_process(self.ended.pop(pick % len(self.ended)))

    # --- namespaces

    @precondition(lambda self: self.known() and self.views_open() < VIEWS_MAX)
    @rule(pick=PICK, mode=st.sampled_from(["read", "read", "write", "write", "watch"]), wrong=st.integers(0, 9), at=PICK)
    def open_view(self, pick: int, mode: str, wrong: int, at: int) -> None:
        party = self.one(pick)
        if mode == "watch":
            self.ask(party, m.OpenNamespace, "moe", mode, 0, expected="ConfigError")
        elif wrong == 0:
            self.ask(party, m.OpenNamespace, "nobody", mode, expected="UnknownNamespace")
        elif wrong == 1:
            self.ask(party, m.OpenNamespace, "moe", mode, self.step + 50, expected="StepDropped")
        elif mode == "read":
            if self.prepared is not None and wrong == 2:
                self.ask(party, m.OpenNamespace, "moe", mode, self.prepared, expected="StepPrepared")
            self.opened(party, mode, self.ask(party, m.OpenNamespace, "moe", mode))
        else:
            self.open_writer(party, at)

    open_more = open_view

    def open_writer(self, party: Party, pick: int) -> None:
        """At any step that there is, or where the last one ended; a prepared step is committed, or dropped, if it is named."""
        ways = [None, None, *self.steps(), *([] if self.prepared is None else [self.prepared])]
        at = ways[pick % len(ways)]
        if at is None and self.prepared is not None:
            self.ask(party, m.OpenNamespace, "moe", "write", expected="StepPrepared")
            return
        self.opened(party, "write", self.ask(party, m.OpenNamespace, "moe", "write", at))
        self.writer, self.pending = (party, max(party.handles)), set()
        self.step, self.prepared = self.step if at is None else at, None

    @precondition(lambda self: self.known())
    @rule(pick=PICK, which=PICK)
    def close(self, pick: int, which: int) -> None:
        party = self.one(pick)
        handle = self.handle_of(party, which)
        self.ask(party, m.CloseNamespace, handle, expected="" if handle in party.handles else "LeaseError")
        party.handles.pop(handle, None)
        party.leases = {number: lease for number, lease in party.leases.items() if lease[0] != handle}
        if self.writer == (party, handle):
            self.writer, self.pending = None, set()

    @precondition(lambda self: self.known())
    @rule(pick=PICK, which=PICK)
    def refresh(self, pick: int, which: int) -> None:
        party = self.one(pick)
        handle = self.handle_of(party, which)
        mode = party.handles.get(handle)
        expected = {"read": "", "write": "ConfigError", None: "LeaseError"}[mode]
        found = self.ask(party, m.Refresh, handle, expected=expected)
        assert expected or found == self.step

    # --- leases

    @precondition(lambda self: self.known())
    @rule(pick=PICK, which=PICK, count=st.integers(0, 30))
    def borrow(self, pick: int, which: int, count: int) -> None:
        """Borrows slots, and gives them back: whoever opens next would wait for them."""
        party = self.one(pick)
        handle = self.handle_of(party, which)
        answer = self.run(self.say(party, m.Borrow, handle, count))
        if isinstance(answer, m.Failed):
            assert answer.error == {"read": "StepDropped", "write": "WriterFenced", None: "LeaseError"}[party.handles.get(handle)]
        else:
            assert isinstance(answer, m.Lent)
            assert answer.count <= (count if party.handles[handle] == "read" else 0)
        self.run(party.raw.send(m.GiveBack(handle, 0)))

    @precondition(lambda self: self.known())
    @rule(pick=PICK, which=PICK, keys=KEYS | KEYS | WRONG_KEYS, part=PARTS, again=PICK)
    def acquire(self, pick: int, which: int, keys: list[ExpertKey], part: str, again: int) -> None:
        """Given if the cap allows it; refused, with the reason, if not. `again`: by an id that is in use, or was released."""
        party = self.one(pick)
        handle = self.handle_of(party, which)
        if again == 0 and party.leases:
            used = next(iter(party.leases))
            self.ask(party, m.Acquire, handle, keys, part, 5.0, request_id=used, expected="ProtocolError")
            return
        released = [number for number in party.released if number not in party.leases]
        request_id = released[-1] if released and again <= 2 else None
        answer = self.run(self.say(party, m.Acquire, handle, keys, part, 5.0, request_id=request_id))
        if isinstance(answer, m.Granted):
            self.granted(party, handle, answer, keys, part)
        else:
            self.refused(party, handle, answer, keys, part)

    acquire_more = acquire

    @precondition(lambda self: self.known())
    @rule(pick=PICK, which=PICK, keys=KEYS)
    def cancel_while_it_waits(self, pick: int, which: int, keys: list[ExpertKey]) -> None:
        """A lease of what is not there ends as cancelled; of what somebody leases it may have been given before."""
        party = self.one(pick)
        handle = self.handle_of(party, which)
        (own,) = self.good.handles
        self.run(turns(3))
        self.ask(self.good, m.Evict, own, keys, "param")
        was_leased = self.is_leased(keys)
        answer = self.run(self.cancelled(party, handle, keys))
        if isinstance(answer, m.Granted):
            assert was_leased
            self.granted(party, handle, answer, keys, "param")
        elif not (isinstance(answer, m.Failed) and answer.error == "TicketCancelled"):
            self.refused(party, handle, answer, keys, "param")

    @precondition(lambda self: self.known())
    @rule(pick=PICK, which=PICK)
    def release(self, pick: int, which: int) -> None:
        """Leases of its own, once or again, others' and such as never were; nobody answers."""
        party = self.one(pick)
        own = [sorted(party.leases)[which % len(party.leases)]] if party.leases else []
        others = [number for other in self.parties for number in other.leases if number not in party.leases]
        ended = [number for number in party.released[-2:] if number not in party.leases]  # an id may be used again
        self.run(party.raw.send(m.Release([*own, *own, *ended, *others[:2], UNKNOWN_ID, -1])))
        party.released += own
        for number in own:
            del party.leases[number]

    @precondition(lambda self: self.known())
    @rule(pick=PICK, number=st.sampled_from([0, 1, -1, UNKNOWN_ID]))
    def cancel_nothing(self, pick: int, number: int) -> None:
        party = self.one(pick)
        self.run(party.raw.send(m.Cancel(number)))
        self.run(party.raw.send(m.Unmapped([UNKNOWN_ID])))
        self.run(party.raw.send(m.DeviceReport(UNKNOWN_ID, [], [], 0)))

    @precondition(lambda self: self.known())
    @rule(pick=PICK, which=PICK, keys=KEYS)
    def prefetch_and_cancel(self, pick: int, which: int, keys: list[ExpertKey]) -> None:
        """One answer, be it early enough or not."""
        party = self.one(pick)
        number = party.raw.next_id()
        handle = self.handle_of(party, which)

        async def both() -> m.Message:
            party.sent[number] += 1
            await party.raw.send_bytes(encode(m.Prefetch(number, handle, keys, "param")) + encode(m.Cancel(number)))
            while party.answered[number] == 0:
                self.heard(party, answer := await party.raw.answer())
            return answer

        answer = self.run(both())
        if isinstance(answer, m.Failed):
            wrong = "LeaseError" if handle not in party.handles else "TicketCancelled WriterFenced StepDropped"
            assert answer.error in wrong.split()

    # --- writing

    @precondition(lambda self: self.known())
    @rule(pick=PICK, size=st.sampled_from([1, 8 * SCHEMA.gradient_bytes, 0, -5, 1 << 50]))
    def open_upload(self, pick: int, size: int) -> None:
        party = self.one(pick)
        if len(party.uploads) < UPLOADS_MAX or size <= 0:
            expected = "ProtocolError" if size <= 0 else "CapacityError" if size == 1 << 50 else ""
            if not expected and not party.handles:
                return  # what may be asked for depends on what is open
            answer = self.ask(party, m.OpenUpload, size, expected=expected)
            if not expected:
                party.uploads[answer.segment] = answer.length_bytes

    @precondition(lambda self: self.known())
    @rule(pick=PICK, which=PICK, keys=KEYS | KEYS | WRONG_KEYS, offset=st.sampled_from([0] * 5 + [1, -4096, 1 << 40]), is_own=PICK)
    def push(self, pick: int, which: int, keys: list[ExpertKey], offset: int, is_own: int) -> None:
        """All of it, or nothing and the reason: of places that are not its own, not aligned, or beyond the end too."""
        party = self.one(pick)
        handle = self.handle_of(party, which)
        segment = next((number for number, size in party.uploads.items() if size >= 8 * SCHEMA.gradient_bytes), None)
        others = [number for other in self.parties for number in other.uploads if other is not party]
        if segment is None or is_own == 0:
            segment = others[0] if others else 99999
        entries = [(*key, segment, offset + place * SCHEMA.gradient_bytes) for place, key in enumerate(keys)]
        is_well = segment in party.uploads and offset == 0
        expected = "LeaseError" if handle not in party.handles else "" if is_well else "ProtocolError"
        expected = expected or self.writing_error(party, handle)
        if not expected and any(key not in [(0, expert) for expert in range(EXPERTS)] for key in keys):
            expected = "UnknownKey"
        if not expected and self.pending.intersection(keys):
            expected = "ProtocolError"
        self.ask(party, m.Push, handle, entries, expected=expected)
        if not expected:
            self.pending.update(keys)

    @precondition(lambda self: self.known())
    @rule(pick=PICK, which=PICK, is_aborted=st.integers(0, 2))
    def apply(self, pick: int, which: int, is_aborted: int) -> None:
        party = self.one(pick)
        handle = self.handle_of(party, which)
        expected = self.writing_error(party, handle)
        if is_aborted == 0:
            found = self.ask(party, m.Abort, handle, expected=expected)
            assert expected or found == len(self.pending)
        else:
            expected = expected or ("" if self.prepared is None else "StepPrepared")
            found = self.ask(party, m.Apply, handle, *ADAMW, expected=expected)
            assert expected or found["records"] == len(self.pending)
        if not expected:
            self.pending = set()

    @precondition(lambda self: self.known())
    @rule(pick=PICK, which=PICK, gap=st.sampled_from([1, 1, 2, -1]), is_prepared=st.booleans())
    def commit(self, pick: int, which: int, gap: int, is_prepared: bool) -> None:
        """In one, or the first half of it."""
        party = self.one(pick)
        handle = self.handle_of(party, which)
        expected = self.writing_error(party, handle)
        expected = expected or ("StepPrepared" if self.prepared is not None else "StepOutOfOrder" if gap < 0 else "")
        found = self.ask(party, m.Prepare if is_prepared else m.Commit, handle, self.step + gap, expected=expected)
        if expected:
            return
        assert found["step"] == self.step + gap
        if is_prepared:
            self.prepared = self.step + gap
        else:
            self.step += gap

    @precondition(lambda self: self.known())
    @rule(pick=PICK, which=PICK, wrong=st.integers(0, 3))
    def finalize(self, pick: int, which: int, wrong: int) -> None:
        """The second half; of what is committed already it changes nothing, of any other step it is refused."""
        party = self.one(pick)
        handle = self.handle_of(party, which)
        step = self.step + 70 if wrong == 0 else self.step if self.prepared is None else self.prepared
        expected = self.writing_error(party, handle) or ("StepOutOfOrder" if wrong == 0 else "")
        self.ask(party, m.Finalize, handle, step, expected=expected)
        if not expected:
            self.step, self.prepared = step, None

    @precondition(lambda self: self.known())
    @rule(pick=PICK, which=PICK, keys=KEYS)
    def ask_all_at_once(self, pick: int, which: int, keys: list[ExpertKey]) -> None:
        """Each is answered once, whatever the order of the answers."""
        party = self.one(pick)
        handle, first = self.handle_of(party, which), party.raw.next_id()
        numbers = [first, *(party.raw.next_id() for _ in range(5))]
        requests = [
            m.Steps(numbers[0], handle), m.Namespaces(numbers[1]), m.Residency(numbers[2], handle),
            m.WriteBack(numbers[3], handle, keys), m.Extra(numbers[4], handle, self.step), m.Snapshots(numbers[5], UNKNOWN_ID),
        ]  # fmt: skip

        async def all_of_them() -> None:
            party.sent.update(numbers)
            await party.raw.send_bytes(b"".join(bytes(encode(request)) for request in requests))
            while any(party.answered[number] == 0 for number in numbers):
                self.heard(party, await party.raw.answer())

        self.run(all_of_them())

    # --- what holds after every rule

    @invariant()
    def somebody_else_is_served_as_ever(self) -> None:
        self.check_good_is_served()

    @invariant()
    def every_request_is_answered_once_and_what_a_session_holds_is_counted(self) -> None:
        self.check_counts()

    def teardown(self) -> None:
        if hasattr(self, "good"):
            self.end()


@pytest.mark.slow
def test_whatever_is_said_is_answered_once_and_disturbs_nobody(run_fixed: Callable[..., None]) -> None:
    run_fixed(SessionMachine)


@pytest.mark.slow
def test_the_same_in_lives_that_no_run_had_before(capsys: pytest.CaptureFixture[str]) -> None:
    run_new(SessionMachine, capsys)
