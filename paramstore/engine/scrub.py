"""The scrubber: reads records where they lie and checks them, beside everything else, so that damage is found before it matters.

It covers what every step of a namespace names, and the whole records that no step has published yet. Guarantees:

- It takes the lowest class and one piece at a time through one buffer of its own: BUFFER_BYTES, in no budget and no arena.
- It reads at most `bytes_per_s`: each piece is paid for before it is read.
- An extent is pinned only while a piece of it is read. Before each piece the record is looked up again; one that a commit,
  rollback or newer write-back replaced meanwhile is left out, and was never read as another.
- What is wrong with one record is a finding, named with its place; it reaches nobody else and the scrub goes on.
- There is one scrub at a time. Ending it waits for no device: the next one waits for the piece under way.
"""

from __future__ import annotations

import asyncio
import logging
import mmap
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial

from paramstore.clock import Clock
from paramstore.core.key import ExpertKey
from paramstore.core.place import Extent, Located
from paramstore.engine.hashing import Hashing
from paramstore.engine.namespace import NamespaceState
from paramstore.engine.requests import Urgency
from paramstore.engine.routes import Piece, PieceRead, check_pieces, cut_pieces
from paramstore.engine.runner import volume_lane, wake
from paramstore.engine.scheduler import Transfer
from paramstore.engine.transfers import Transfers
from paramstore.errors import CapacityError, ConfigError, ParamStoreError, TicketCancelled, UnknownNamespace, VolumeError
from paramstore.storage.format import Header, check_header
from paramstore.storage.volume import Volume

logger = logging.getLogger(__name__)

BUFFER_BYTES = 4 << 20
"""All the memory a scrub has for records, whatever their size."""
PIECE_BYTES = 2 << 20
"""What it reads at a time, about: a piece ends where a chunk does, so the longest is a chunk and a page longer."""
FINDINGS_MAX = 1000
"""Findings that are described; those beyond are counted."""
PLAN_KEYS = 64
"""Keys looked up between two turns of the loop."""

Pause = Callable[[float], Awaitable[object]]
Planned = tuple[NamespaceState, ExpertKey, int]
"""A key, and how many records of it there were when the scrub was planned."""


@dataclass(frozen=True, slots=True)
class Finding:
    """A record that could not be read, or is not what it must be. steps: the committed ones that need it; none if none does yet."""

    namespace: str
    key: ExpertKey
    steps: tuple[int, ...]
    epoch: int
    version: int
    volume: int
    offset_bytes: int
    reason: str


@dataclass(slots=True, eq=False)
class Scrub:
    """One run: what was asked, how far it came, what it found. The scrubber writes it."""

    chosen: Sequence[NamespaceState]
    keys: Sequence[ExpertKey] | None
    bytes_per_s: int | None
    started_s: float
    due_s: float
    """When the next piece may be read that costs nothing."""
    state: str = "running"
    """Then "done", "cancelled" or "failed"."""
    ended_s: float | None = None
    records: int = 0
    records_total: int = 0
    bytes_read: int = 0
    bytes_total: int = 0
    superseded: int = 0
    """Records that were gone when their turn came."""
    found: int = 0
    findings: list[Finding] = field(default_factory=list)
    error: ParamStoreError | None = None
    task: asyncio.Task[None] | None = None

    def describe(self, now_s: float) -> dict[str, object]:
        """Progress, and in the end the result: plain values that travel."""
        return {
            "namespaces": [namespace.name for namespace in self.chosen], "bytes_per_s": self.bytes_per_s, "state": self.state,
            "records": self.records, "records_total": self.records_total, "bytes_read": self.bytes_read,
            "bytes_total": self.bytes_total, "superseded": self.superseded, "found": self.found,
            "findings": [asdict(finding) for finding in self.findings],
            "seconds": (now_s if self.ended_s is None else self.ended_s) - self.started_s,
        }  # fmt: skip


class Scrubber:
    """Owner of the scrub under way, of its task and of its buffer."""

    def __init__(
        self, transfers: Transfers, volumes: Mapping[int, Volume], namespaces: Mapping[str, NamespaceState], *,
        store_uuid: bytes, hashing: Hashing, clock: Clock, pause: Pause = asyncio.sleep,
    ) -> None:  # fmt: skip
        """pause: lets this many seconds of `clock` go by."""
        self._transfers = transfers
        self._space = transfers.planner.space
        self._volumes = volumes
        self._namespaces = namespaces
        self._store_uuid = store_uuid
        self._hashing = hashing
        self._clock = clock
        self._pause = pause
        self._running: Scrub | None = None
        self._last: Scrub | None = None
        self._reading: asyncio.Future[None] | None = None
        """Done when the newest piece has left its worker."""

    # --- what a session may ask

    def start(self, namespace: str | None, keys: Sequence[ExpertKey] | None, bytes_per_s: int | None) -> Scrub:
        """Begins a scrub of `keys` of `namespace` (None: all keys; all namespaces), to be awaited by `wait`.

        Raises UnknownNamespace, UnknownKey, ConfigError, and CapacityError while another runs; nothing has begun then.
        """
        chosen = self._choose(namespace, keys)
        if bytes_per_s is not None and bytes_per_s <= 0:
            raise ConfigError(f"verify: bytes_per_s={bytes_per_s}: give a rate above 0, or none for no limit")
        if self._running is not None:
            raise CapacityError("verify: a scrub is under way, and there is one at a time: wait for it or cancel it")
        now_s = self._clock.now_s()
        scrub = Scrub(chosen, None if keys is None else list(dict.fromkeys(keys)), bytes_per_s, started_s=now_s, due_s=now_s)
        self._running = scrub
        scrub.task = asyncio.get_running_loop().create_task(self._run(scrub), name="scrub")
        scrub.task.add_done_callback(lambda _: self._finish(scrub))
        return scrub

    def _choose(self, namespace: str | None, keys: Sequence[ExpertKey] | None) -> list[NamespaceState]:
        if namespace is None:
            if keys is not None:
                raise ConfigError("verify: keys are those of one namespace: give its name too")
            return list(self._namespaces.values())
        found = self._namespaces.get(namespace)
        if found is None:
            known = ", ".join(sorted(self._namespaces)) or "none"
            raise UnknownNamespace(f"there is no namespace {namespace!r}; there are: {known}")
        if keys is not None:
            found.keys.check(keys, namespace=namespace)
        return [found]

    async def wait(self, scrub: Scrub) -> dict[str, object]:
        """The result, when the scrub is over. Raises TicketCancelled, or what ended it otherwise. Who stops waiting ends
        nothing."""
        assert scrub.task is not None
        await asyncio.wait([scrub.task])
        if scrub.error is not None:
            raise scrub.error
        scrub.task.result()  # a bug in it reaches whoever asked
        return scrub.describe(self._clock.now_s())

    def cancel(self, scrub: Scrub, error: ParamStoreError) -> None:
        """Ends the scrub now, with `error` for who waits; one that is over stays as it is."""
        assert scrub.task is not None
        if not scrub.task.done() and scrub.error is None:
            scrub.error = error
            scrub.task.cancel()

    async def close(self, error: ParamStoreError) -> None:
        """Ends what runs; on return nothing more is read, a piece apart that a worker may have."""
        scrub = self._running
        if scrub is not None and scrub.task is not None:
            self.cancel(scrub, error)
            await asyncio.wait([scrub.task])

    def stats(self) -> dict[str, object]:
        """Progress of the scrub under way, and how the one before it ended."""
        now_s = self._clock.now_s()
        return {
            "running": self._running.describe(now_s) if self._running is not None else None,
            "last": self._last.describe(now_s) if self._last is not None else None,
        }

    # --- the run

    def _finish(self, scrub: Scrub) -> None:
        task = scrub.task
        assert task is not None
        scrub.ended_s = self._clock.now_s()
        self._running, self._last = None, scrub
        if task.cancelled():
            scrub.state = "cancelled"
        elif (bug := task.exception()) is not None:
            scrub.state = "failed"
            logger.error("the scrub failed", exc_info=bug)
        else:
            scrub.state = "done"
            log = logger.error if scrub.found else logger.info
            log("scrub: %d of %d records are damaged or cannot be read", scrub.found, scrub.records)

    async def _run(self, scrub: Scrub) -> None:
        if self._reading is not None:
            await asyncio.shield(self._reading)  # of a scrub that was cancelled: there are never two buffers
        buffer = memoryview(mmap.mmap(-1, BUFFER_BYTES))
        for namespace, key, planned in await self._plan(scrub):
            records = _records_of(namespace, key)
            self._expect(scrub, namespace, len(records) - planned)
            for located in records:
                await self._check_record(scrub, namespace, key, located, buffer)
            await asyncio.sleep(0)

    async def _plan(self, scrub: Scrub) -> list[Planned]:
        """Every key to look at. The totals are those of now, and are corrected at each key's turn."""
        plan: list[Planned] = []
        for namespace in scrub.chosen:
            for key in list(namespace.keys) if scrub.keys is None else scrub.keys:
                count = len(_records_of(namespace, key))
                plan.append((namespace, key, count))
                self._expect(scrub, namespace, count)
                if len(plan) % PLAN_KEYS == 0:
                    await asyncio.sleep(0)
        return plan

    @staticmethod
    def _expect(scrub: Scrub, namespace: NamespaceState, count: int) -> None:
        scrub.records_total += count
        scrub.bytes_total += count * namespace.schema.record_bytes

    async def _check_record(
        self, scrub: Scrub, namespace: NamespaceState, key: ExpertKey, located: Located, buffer: memoryview
    ) -> None:
        """The record is counted as checked, found or superseded; what was not read of it is expected no more."""
        read_bytes, traffic = scrub.bytes_read, self._transfers.traffic[located.extent.volume]
        try:
            is_whole = await self._check_pieces(scrub, namespace, key, located, buffer)
        except VolumeError as error:
            traffic.failures += 1
            scrub.records += 1
            self._report(scrub, namespace, key, located, str(error))
        else:
            if is_whole:
                traffic.reads += 1
                scrub.records += 1
            else:
                scrub.superseded += 1
                scrub.records_total -= 1
        scrub.bytes_total -= namespace.schema.record_bytes - (scrub.bytes_read - read_bytes)

    async def _check_pieces(
        self, scrub: Scrub, namespace: NamespaceState, key: ExpertKey, located: Located, buffer: memoryview
    ) -> bool:
        """True if every piece matches; False if the record was replaced meanwhile. Raises VolumeError, CorruptRecord."""
        part = namespace.schema.stored
        place = f"volume {located.extent.volume}, offset {located.extent.offset_bytes}"
        header: Header | None = None
        for piece in cut_pieces(part, PIECE_BYTES, len(part.fields)):
            await self._pay(scrub, piece.end - piece.start)
            if located not in _records_of(namespace, key):
                return False
            read = await self._read(located.extent, piece, buffer, part.header_bytes)
            scrub.bytes_read += piece.end - piece.start
            self._transfers.traffic[located.extent.volume].bytes_read += piece.end - piece.start
            if header is None:
                assert read.header is not None
                header = check_header(
                    read.header, part=part, root=located.root, store_uuid=self._store_uuid, namespace=namespace.name, key=key,
                    identity=located.identity, place=place,
                )  # fmt: skip
            check_pieces(header, part, [read], place=place)
        return True

    async def _pay(self, scrub: Scrub, length_bytes: int) -> None:
        """Returns when `length_bytes` more may be read. Time in which nothing was read earns nothing."""
        if scrub.bytes_per_s is None:
            return
        scrub.due_s += length_bytes / scrub.bytes_per_s
        while (wait_s := scrub.due_s - self._clock.now_s()) > 0:
            await self._pause(wait_s)
        scrub.due_s = max(scrub.due_s, self._clock.now_s())

    async def _read(self, extent: Extent, piece: Piece, buffer: memoryview, header_bytes: int) -> PieceRead:
        """One piece, hashed, in a worker of its volume. Raises what the volume raised. The caller has looked the record up in
        this very turn of the loop."""
        length_bytes = piece.end - piece.start
        assert length_bytes <= BUFFER_BYTES, f"a piece of {length_bytes} bytes"  # a header that long is of a 256 GiB record
        run = partial(
            _read_piece, self._volumes[extent.volume], extent.offset_bytes, buffer[:length_bytes], header_bytes, self._hashing
        )
        reading = self._reading = asyncio.get_running_loop().create_future()
        transfer = Transfer(
            lane=volume_lane(extent.volume), urgency=Urgency.WRITE_BACK, run=run, pieces=deque([piece]),
            settle=partial(self._settle, extent, reading),
        )  # fmt: skip
        self._space.pin(extent)
        self._transfers.runner.submit(transfer)
        try:
            await asyncio.shield(reading)
        except asyncio.CancelledError:  # what no worker has begun is given up now
            self._transfers.runner.cancel(transfer, TicketCancelled("the scrub was cancelled"))
            raise
        if transfer.error is not None:
            raise transfer.error
        result: PieceRead = transfer.results[0]
        return result

    def _settle(self, extent: Extent, reading: asyncio.Future[None], transfer: Transfer) -> None:
        free_bytes = self._space.free_bytes
        self._space.unpin(extent)
        if self._space.free_bytes != free_bytes:  # it was released meanwhile: somebody may wait for the room
            self._transfers.pump(self._namespaces.values())
        wake(reading)

    @staticmethod
    def _report(scrub: Scrub, namespace: NamespaceState, key: ExpertKey, located: Located, reason: str) -> None:
        scrub.found += 1
        if len(scrub.findings) < FINDINGS_MAX:
            ledger, extent = namespace.ledger, located.extent
            steps = tuple(step for step in ledger.steps() if ledger.at(key, step) == located)
            scrub.findings.append(
                Finding(namespace.name, key, steps, *located.identity, extent.volume, extent.offset_bytes, reason)
            )


def _read_piece(
    volume: Volume, offset_bytes: int, target: memoryview, header_bytes: int, hashing: Hashing, piece: Piece
) -> PieceRead:
    """In a worker."""
    volume.read(offset_bytes + piece.start, (target,))
    header = bytes(target[:header_bytes]) if piece.start == 0 else None
    return PieceRead(piece.first_chunk, hashing.checksums(target, piece.chunks, piece.start), header)


def _records_of(namespace: NamespaceState, key: ExpertKey) -> list[Located]:
    """Every whole record of `key` that a step names, committed or prepared, that the commit under way will publish, or that is
    the newest written one; each once, oldest first."""
    ledger, cut = namespace.ledger, namespace.cut
    named = [ledger.at(key, step) for step in ledger.steps()]
    named.append(ledger.at(key, ledger.prepared_step) if ledger.prepared_step is not None else None)
    named.append(cut.located.get(key) if cut is not None else None)
    named.append(namespace.working[key].uncommitted)
    return list(dict.fromkeys(located for located in named if located is not None))
