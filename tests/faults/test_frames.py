"""Frames that no correct peer sends: a decoder gives messages or ProtocolError, holds no more than its limit, and a live daemon
serves everybody else as if nothing had come.
"""

from __future__ import annotations

import asyncio
import logging
import mmap
import os
import resource
import socket
import tempfile
import time
import tracemalloc
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import pytest

from paramstore.daemon.assembly import HostMemory
from paramstore.daemon.server import Server, listen
from paramstore.errors import ParamStoreError, ProtocolError
from paramstore.memory.arena import PageKind, PageReport
from paramstore.wire import messages as m
from paramstore.wire.codec import (
    FIRST_FRAME_BYTES_MAX,
    FRAME_BYTES_MAX,
    LENGTH,
    FrameDecoder,
    broken_request,
    decode_answer,
    decode_request,
    encode,
)
from paramstore_testkit.disks.machine import Machine
from paramstore_testkit.stores.small_store import SCHEMA, create
from paramstore_testkit.trial import telling
from paramstore_testkit.wire.frame_mutator import HEADS, FrameMaker, Mutator, cut
from paramstore_testkit.wire.raw_client import ConnectionEnded, RawClient

SEED = 30
FRAMES = 1_000_000
"""Three quarters of them requests, the others answers."""
LIVE_FRAMES = 50_000
SAMPLES = 20
"""Correct frames of each class, to be broken."""
GROWTH_BYTES_MAX = 64 << 20
"""What the process may grow by while it decodes: twice the largest unfinished frame and its copies."""
DECODE_BYTES_MAX = 64 << 10
"""What a body of a few bytes may take to decode, whatever it promises."""
SMALL_PAGES = PageReport(shared=PageKind.SMALL, private=PageKind.SMALL, advice="")
Decode = Callable[[bytes], object]


def samples(random: Random, union: Any) -> list[bytes]:
    """Correct frames of every class of messages."""
    maker = FrameMaker(random, union)
    frames = []
    for cls in maker.classes:
        for _ in range(SAMPLES):
            try:
                frames.append(bytes(encode(maker.message(cls))))
            except ProtocolError:
                continue  # a number that msgpack does not have
    assert {decode_any(frame) for frame in frames} == set(maker.classes)
    return frames


def decode_any(frame: bytes) -> type[object]:
    for decode in (decode_request, decode_answer):
        try:
            return type(decode(frame[LENGTH.size :]))
        except ProtocolError:
            continue
    raise AssertionError(f"nobody decodes {frame!r}")


def resident_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


def fuzz(count: int, random: Random, mutator: Mutator, decode: Decode) -> Counter[str]:
    """Feeds `count` broken frames, in a stream of pieces or one by one; what came of them."""
    outcomes: Counter[str] = Counter()
    while outcomes["frames"] < count:
        limit_bytes = random.choice((FIRST_FRAME_BYTES_MAX, FRAME_BYTES_MAX))
        decoder = FrameDecoder(limit_bytes)
        frames = [mutator.mutated() for _ in range(min(16, count - outcomes["frames"]))]
        outcomes["frames"] += len(frames)
        pieces = frames if random.random() < 0.7 else list(cut(b"".join(frames), random, 256))
        for piece in pieces:
            try:
                for body in decoder.feed(piece):
                    decode_one(body, decode, outcomes)
            except ProtocolError:
                outcomes["refused lengths"] += 1
                decoder = FrameDecoder(limit_bytes)
            pending_bytes = decoder.pending_bytes
            assert pending_bytes <= limit_bytes + LENGTH.size + len(piece), f"{pending_bytes} bytes wait, limit {limit_bytes}"
            if pending_bytes and pieces is frames and random.random() < 0.5:
                decoder = FrameDecoder(limit_bytes)  # a length that lied swallows what follows: often enough it does
    return outcomes


def decode_one(body: bytes, decode: Decode, outcomes: Counter[str]) -> None:
    try:
        decode(body)
        outcomes["messages"] += 1
    except ProtocolError:
        outcomes["refused bodies"] += 1
        outcomes["told by their ids"] += broken_request(body) is not None


def fuzz_codec(count: int, seed: int) -> Counter[str]:
    """Requests as the daemon decodes them, and answers as the client does."""
    random = Random(seed)
    total: Counter[str] = Counter()
    for share, union, decode in ((0.75, m.Request, decode_request), (0.25, m.Answer, decode_answer)):
        mutator = Mutator(random, samples(random, union))
        total += fuzz(int(count * share), random, mutator, decode)
    return total


@pytest.mark.slow
def test_a_million_broken_frames_are_messages_or_protocol_errors() -> None:
    before_bytes, start_s = resident_bytes(), time.process_time()
    outcomes = fuzz_codec(FRAMES, SEED)
    grown_bytes, seconds = resident_bytes() - before_bytes, time.process_time() - start_s
    print(f"\nseed {SEED}: {dict(outcomes)}, {FRAMES / seconds:.0f} frames/s, grown by {grown_bytes} bytes")  # noqa: T201
    assert outcomes["frames"] == FRAMES
    decoded = outcomes["messages"] + outcomes["refused bodies"]
    assert decoded > FRAMES // 2
    assert outcomes["messages"] > FRAMES // 100
    assert outcomes["refused lengths"] > FRAMES // 1000
    assert outcomes["told by their ids"] > FRAMES // 200
    assert grown_bytes < GROWTH_BYTES_MAX


def test_a_body_takes_no_memory_for_what_it_only_promises() -> None:
    messages = m.Release([1]), m.Cancel(1), m.Prefetch(1, 1, [(0, 0)], "param")
    bodies = [bytes(encode(message))[LENGTH.size :] for message in messages]
    mutants = [body[:at] + head for body in bodies for at in range(1, len(body) + 1) for head in HEADS]
    decoders = decode_request, decode_answer, broken_request
    for decode, mutant in [(decode, mutant) for decode in decoders for mutant in mutants]:
        tracemalloc.start()
        try:
            decode(mutant)
        except ProtocolError:
            pass
        finally:
            _, peak_bytes = tracemalloc.get_traced_memory()
            tracemalloc.stop()
        assert peak_bytes < DECODE_BYTES_MAX, f"{peak_bytes} bytes for {mutant!r}"


# --- a live daemon


class Scene:
    """A server on a socket, a client that behaves, and one that does not; all on this loop."""

    def __init__(self, path: Path, seed: int) -> None:
        self.random = Random(seed)
        self.path = path
        self.machine = Machine(seed=seed, volume_size_bytes=14 << 20, host_budget_bytes=96 << 20, wait_timeout_s=2.0)
        self.store = self.machine.start()
        self.store.host.memory = HostMemory(SMALL_PAGES)
        self.answers: Counter[str] = Counter()
        self.sent = 0
        self.maker = FrameMaker(self.random, m.Request)
        self.mutator = Mutator(self.random, samples(self.random, m.Request))

    async def begin(self) -> None:
        view = await create(self.store, "good", host_bytes=12 << 20)
        self.store.close_view(view)
        self.store.close_view(await create(self.store, "evil", host_bytes=12 << 20))
        self.server = Server(self.machine.service, listen(self.path))
        self.good = RawClient.connect(self.path)
        await self.good.hello()
        self.good_sessions = set(self.server._sessions)
        opened = await self.good.request(m.OpenNamespace, "good", "read", min_lease_slots=2)
        self.handle = opened["handle"]
        granted = await self.good.request(m.Acquire, self.handle, [(0, 1)], "param", 1.0)
        assert isinstance(granted, m.Granted)
        ((_, self.offset_bytes, *_),) = granted.slots
        ((_, length_bytes),) = granted.segments
        self.mapping = mmap.mmap(self.good.fds[0], length_bytes, prot=mmap.PROT_READ)
        self.leased = self.lease_bytes()
        assert any(self.leased)

    def lease_bytes(self) -> bytes:
        return self.mapping[self.offset_bytes : self.offset_bytes + SCHEMA.part("param").image_bytes]

    async def behave(self) -> None:
        """What a good client does: every answer is right, its leased bytes stay."""
        granted = await self.good.request(m.Acquire, self.handle, [(0, 0)], "param", 5.0)
        await self.good.send(m.Release([granted.id]))
        names = [found["name"] for found in await self.good.request(m.Namespaces)]
        assert "good" in names
        assert await self.good.request(m.Steps, self.handle) == [0]
        assert self.lease_bytes() == self.leased, "leased bytes changed"
        self.answers["good"] += 3

    async def misbehave(self, count: int) -> None:
        """One connection: strange but well-formed requests, then one broken frame; or no hello at all."""
        client = RawClient.connect(self.path)
        self.sent += count
        try:
            if self.random.random() < 0.9:
                await client.hello()
                await self._open_evil(client)
            stream = b"".join(self._strange() for _ in range(count - 1)) + self.mutator.mutated()
            for piece in cut(stream, self.random, 1 + len(stream)):
                await client.send_bytes(piece)
            client.sock.shutdown(socket.SHUT_WR)
            answers = client.unasked + await client.end()
        except (ConnectionEnded, OSError):
            answers = []
        finally:
            client.close()
        for answer in answers:
            self._count(answer)
        for session in self.server._sessions - self.good_sessions:
            session._process_ended()  # it is this process, which lives on: its leases would stay

    async def _open_evil(self, client: RawClient) -> None:
        """Handle 1 is the evil namespace, if that can be had."""
        mode = self.random.choice(("read", "write", ""))
        if mode:
            try:
                await client.request(m.OpenNamespace, "evil", mode)
            except ParamStoreError as error:
                self.answers[f"open: {type(error).__name__}"] += 1

    def _strange(self) -> bytes:
        while True:
            try:
                message = self.maker.message()
                if isinstance(message, m.Hello) and self.random.random() < 0.9:
                    continue  # a second hello ends the session: others first
                if self.random.random() < 0.7:
                    message = self._addressed(message)
                return bytes(encode(message))
            except ProtocolError:
                continue

    def _addressed(self, message: m.Message) -> m.Message:
        """The same, with an id of its own and to the namespace that this connection opened, if it did: so that more is refused
        than a wrong address."""
        wanted = {"id": self.random.randrange(10, 1 << 40), "handle": 1, "key": (0, 0), "keys": [(0, 1)], "part": "param"}
        fields = message.__struct_fields__
        return msgspec.structs.replace(message, **{name: value for name, value in wanted.items() if name in fields})

    def _count(self, answer: m.Message) -> None:
        name = type(answer).__name__
        if isinstance(answer, m.Failed):
            assert "internal error" not in answer.message, answer.message
            name = answer.error
        self.answers[name] += 1

    async def end(self) -> None:
        self.mapping.close()
        self.good.close()
        self.server.close()
        await asyncio.sleep(0)


def play(frames: int, seed: int) -> Scene:
    """The whole scene. Whatever nobody saw but the loop fails it too."""
    unseen: list[dict[str, Any]] = []

    async def main(path: Path) -> Scene:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: unseen.append(context))
        scene = Scene(path, seed)
        await scene.begin()
        try:
            while scene.sent < frames:
                await scene.misbehave(min(5, frames - scene.sent))
                if scene.random.random() < 0.1:
                    await scene.behave()
            await scene.behave()
        finally:
            await scene.end()
        return scene

    with tempfile.TemporaryDirectory() as directory, telling(lambda: f"seed {seed}"):
        scene = asyncio.run(asyncio.wait_for(main(Path(directory) / "run" / "daemon.sock"), 300))
    assert not unseen, unseen
    return scene


@pytest.fixture
def _quiet() -> Iterator[None]:
    logging.disable(logging.WARNING)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.slow
@pytest.mark.usefixtures("_quiet")
def test_a_good_client_is_served_beside_one_that_sends_anything() -> None:
    play(50, SEED)  # everything is imported and open that stays so
    before_bytes, fds, start_s = resident_bytes(), len(os.listdir("/proc/self/fd")), time.monotonic()
    scene = play(LIVE_FRAMES, SEED)
    seconds, grown_bytes = time.monotonic() - start_s, resident_bytes() - before_bytes
    print(f"\nseed {SEED}: {scene.sent} frames in {seconds:.1f} s, grown by {grown_bytes} bytes")  # noqa: T201
    print(f"  answers: {dict(scene.answers.most_common())}")  # noqa: T201
    assert scene.sent == LIVE_FRAMES
    assert scene.answers["good"] > LIVE_FRAMES // 100
    assert scene.answers["ProtocolError"] > LIVE_FRAMES // 20
    assert scene.answers["LeaseError"] > LIVE_FRAMES // 20
    assert len(os.listdir("/proc/self/fd")) <= fds + 4
    assert grown_bytes < 2 * GROWTH_BYTES_MAX


# --- that the suites fail where they should


class TestTheFuzzerFinds:
    def test_an_exception_that_is_no_protocol_error(self) -> None:
        def leaky(body: bytes) -> object:
            try:
                return decode_request(body)
            except ProtocolError as error:
                raise ValueError(str(error)) from error

        random = Random(SEED)
        with pytest.raises(ValueError, match="not a request"):
            fuzz(1000, random, Mutator(random, [bytes(encode(m.Stats(1)))]), leaky)

    def test_a_splitter_that_keeps_what_it_should_refuse(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def greedy(decoder: FrameDecoder, data: bytes) -> Iterator[bytes]:
            decoder._buffer += data * 64
            return iter(())

        monkeypatch.setattr(FrameDecoder, "feed", greedy)
        random = Random(SEED)
        with pytest.raises(AssertionError, match="bytes wait, limit"):
            fuzz(1000, random, Mutator(random, [bytes(encode(m.Stats(1)))]), decode_request)

    @pytest.mark.slow
    @pytest.mark.usefixtures("_quiet")
    def test_a_handler_that_trips_over_a_request(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("paramstore.engine.store.Store.stats", lambda _: {}["nothing"])
        with pytest.raises(AssertionError, match="internal error"):
            play(5000, SEED)

    @pytest.mark.slow
    @pytest.mark.usefixtures("_quiet")
    def test_a_slot_that_is_written_while_it_is_leased(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from paramstore.daemon.session import Session

        on_frame = Session._on_frame

        def scribbling(session: Session, body: bytes) -> None:
            for namespace in session._store.namespaces.values():
                arena = namespace.memory.param
                for copies in namespace.residency.copies.values() if arena is not None else ():
                    for copy in copies:
                        arena.view(copy.slot)[0] ^= 1  # type: ignore[union-attr]
            on_frame(session, body)

        monkeypatch.setattr(Session, "_on_frame", scribbling)
        with pytest.raises(AssertionError, match="leased bytes changed"):
            play(500, SEED)

    @pytest.mark.slow
    @pytest.mark.usefixtures("_quiet")
    def test_a_daemon_that_fails_everybody_for_one_bad_frame(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from paramstore.daemon.session import Session

        refuse = Session._hello

        def hang_up(session: Session, request: m.Message) -> None:
            refuse(session, request)
            for other in list(session._store.namespaces["good"].views):
                if other.client not in (None, session):
                    other.client.close(None)  # type: ignore[union-attr]

        monkeypatch.setattr(Session, "_hello", hang_up)
        with pytest.raises((ConnectionEnded, ParamStoreError, OSError)):
            play(500, SEED)
