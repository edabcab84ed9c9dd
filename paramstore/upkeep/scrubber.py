"""The scrubber: reads records where they lie and checks them, beside all other work, so that damage is found before it matters.

It covers the records that every step of a namespace names, and whole records that no step has published yet; also the copies of
superblocks and commit notes (`notes.py`). Guarantees:

- It reads at the lowest urgency, one piece at a time, into a buffer of its own: `buffer_bytes`, in no budget and no arena.
- It reads at most `bytes_per_s`: each piece is paid for with waiting time before it is read.
- An extent is pinned only while a piece of it is read. Before each piece the record is looked up again; one that a commit,
  rollback or newer write-back replaced meanwhile is left out, and is never taken for another record.
- Damage to a record is a finding, named with its place; no other request fails by it, and the scrub goes on.
- At most one scrub that somebody asked for runs at a time, and the patrol's (`patrol.py`) stands still meanwhile: two pieces are
  never under way. Ending a scrub waits for no device; the next scrub waits for a piece that is still under way.
"""

from __future__ import annotations

import asyncio
import logging
import mmap
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any

from paramstore.clock import Clock
from paramstore.core.key import ExpertKey
from paramstore.core.location import Extent, Located
from paramstore.core.schema import CHUNK_BYTES, PAGE_BYTES, Part
from paramstore.engine.tables.namespace import NamespaceState
from paramstore.engine.tables.requests import Urgency
from paramstore.engine.transfers.hashing import Hashing
from paramstore.engine.transfers.routes import Piece, PieceRead, check_pieces, cut_pieces, read_piece
from paramstore.engine.transfers.runner import volume_lane, wake
from paramstore.engine.transfers.scheduler import Transfer
from paramstore.engine.transfers.transfers import Transfers
from paramstore.errors import CapacityError, ConfigError, ParamStoreError, TicketCancelled, UnknownNamespace, VolumeError
from paramstore.storage.format.structures import Header, check_header
from paramstore.storage.volume.base import Volume
from paramstore.upkeep.notes import NoteScrub
from paramstore.upkeep.progress import Finding, Pace, Scrub

logger = logging.getLogger(__name__)

BUFFER_BYTES = 4 << 20
"""Memory that a scrub takes for records of any size up to 383 GiB; see `buffer_bytes`."""
PIECE_BYTES = 2 << 20
"""About how much it reads at a time: a piece ends where a chunk does, so the longest is a chunk and a page longer."""
PLAN_KEYS = 64
"""Keys looked up between two turns of the loop."""

Pause = Callable[[float], Awaitable[object]]
Planned = tuple[NamespaceState, ExpertKey, int]
"""A key, and how many records of it there were when the scrub was planned."""


class Scrubber:
    """Runs scrubs; owns the one under way, its task and its buffer."""

    def __init__(
        self, transfers: Transfers, volumes: Mapping[int, Volume], namespaces: Mapping[str, NamespaceState], *,
        store_uuid: bytes, hashing: Hashing, clock: Clock, pause: Pause = asyncio.sleep, notes: NoteScrub | None = None,
    ) -> None:  # fmt: skip
        """pause: lets this many seconds of `clock` go by. notes: None for records alone."""
        self._transfers = transfers
        self._space = transfers.space
        self._volumes = volumes
        self._namespaces = namespaces
        self._store_uuid = store_uuid
        self._hashing = hashing
        self._clock = clock
        self._pause = pause
        self._notes = notes
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
        scrub = Scrub(chosen, None if keys is None else list(dict.fromkeys(keys)), Pace(bytes_per_s, now_s), now_s)
        self._running = scrub
        scrub.task = asyncio.get_running_loop().create_task(self._run(scrub), name="scrub")
        scrub.task.add_done_callback(lambda _: self._finish(scrub))
        return scrub

    def prepare(self, pace: Pace) -> Scrub:
        """Makes a scrub of everything there is now, for the patrol, which goes through `plan` itself and gives way to `start`."""
        return Scrub(list(self._namespaces.values()), None, pace, self._clock.now_s())

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
        """Waits until the scrub is over and returns its result. Raises TicketCancelled, or the error that ended it. Cancelling this
        call does not end the scrub."""
        assert scrub.task is not None
        await asyncio.wait([scrub.task])
        if scrub.error is not None:
            raise scrub.error
        scrub.task.result()  # a bug in it reaches whoever asked
        return scrub.describe(self._clock.now_s())

    def cancel(self, scrub: Scrub, error: ParamStoreError) -> None:
        """Ends the scrub now, with `error` for those who wait for it; one that is over stays as it is."""
        assert scrub.task is not None
        if not scrub.task.done() and scrub.error is None:
            scrub.error = error
            scrub.task.cancel()

    async def close(self, error: ParamStoreError) -> None:
        """Ends the running scrub; on return nothing more is read, except for a piece that a worker may have under way."""
        scrub = self._running
        if scrub is not None and scrub.task is not None:
            self.cancel(scrub, error)
            await asyncio.wait([scrub.task])

    def stats(self) -> dict[str, object]:
        """Progress of the scrub under way, and how the one before it ended. Of findings it has the newest few: `wait` has all."""
        now_s = self._clock.now_s()
        return {
            "running": self._running.summarise(now_s) if self._running is not None else None,
            "last": self._last.summarise(now_s) if self._last is not None else None,
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
            found = scrub.findings.count
            log = logger.error if found else logger.info
            what = "scrub: %d findings in %d records and %d copies of superblocks and commit notes"
            log(what, found, scrub.records, scrub.copies)

    async def _run(self, scrub: Scrub) -> None:
        for planned in await self.plan(scrub):
            await self.check_key(scrub, planned)
        if scrub.keys is None:
            await self.check_copies(scrub)

    async def plan(self, scrub: Scrub) -> list[Planned]:
        """Lists every key to check, and adds up the scrub's totals, which are corrected at each key's turn."""
        plan: list[Planned] = []
        for namespace in scrub.chosen:
            if len(scrub.buffer) < (need_bytes := buffer_bytes(namespace.schema.stored)):
                scrub.buffer = memoryview(mmap.mmap(-1, need_bytes))
            for key in list(namespace.keys) if scrub.keys is None else scrub.keys:
                count = len(_records_of(namespace, key))
                plan.append((namespace, key, count))
                self._expect(scrub, namespace, count)
                if len(plan) % PLAN_KEYS == 0:
                    await asyncio.sleep(0)
        return plan

    async def check_key(self, scrub: Scrub, planned: Planned) -> None:
        """Checks every record of one key of the plan; damage is a finding of `scrub`."""
        namespace, key, count = planned
        records = _records_of(namespace, key)
        self._expect(scrub, namespace, len(records) - count)
        for located in records:
            await self._check_record(scrub, namespace, key, located)
        await asyncio.sleep(0)

    async def check_copies(self, scrub: Scrub) -> None:
        """Checks every copy of the volumes' superblocks, and of the commit notes of the chosen namespaces; damage is a finding."""
        for check in self._notes.checks(scrub.chosen) if self._notes is not None else ():
            length_bytes = len(check.offsets) * check.length_bytes
            await self._pay(scrub, length_bytes)
            outcomes = await self._in_worker(scrub, check.volume.index, lambda check: check.run(), check)
            traffic = self._transfers.traffic[check.volume.index]
            traffic.bytes_read += length_bytes
            if not check.is_current():
                continue  # the step went while its note was read: the slot may have been another's already
            scrub.copies += len(outcomes)
            for finding in check.findings(outcomes):
                traffic.failures += 1
                scrub.findings.add_copy(finding)

    @staticmethod
    def _expect(scrub: Scrub, namespace: NamespaceState, count: int) -> None:
        scrub.records_total += count
        scrub.bytes_total += count * namespace.schema.record_bytes

    async def _check_record(self, scrub: Scrub, namespace: NamespaceState, key: ExpertKey, located: Located) -> None:
        """Checks one record and counts it as checked, damaged or superseded; takes what was not read of it off the total."""
        read_bytes, traffic = scrub.bytes_read, self._transfers.traffic[located.extent.volume]
        try:
            is_whole = await self._check_pieces(scrub, namespace, key, located)
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

    async def _check_pieces(self, scrub: Scrub, namespace: NamespaceState, key: ExpertKey, located: Located) -> bool:
        """Checks a record: True if every piece matches, False if it was replaced meanwhile. Raises VolumeError, CorruptRecord."""
        part = namespace.schema.stored
        place = f"volume {located.extent.volume}, offset {located.extent.offset_bytes}"
        header: Header | None = None
        for piece in cut_pieces(part, PIECE_BYTES, len(part.fields)):
            await self._pay(scrub, piece.end - piece.start)
            if located not in _records_of(namespace, key):
                return False
            read = await self._read(scrub, located.extent, piece, part.header_bytes)
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
        """Waits until `length_bytes` more may be read, at the scrub's rate. Idle time is not saved up for later. A scrub that
        somebody asked for goes first."""
        pace = scrub.pace
        pace.charge_bytes(length_bytes)
        while True:
            if self._running is not None and self._running is not scrub:
                assert self._running.task is not None
                await asyncio.wait([self._running.task])
            elif self._reading is not None and not self._reading.done():
                await asyncio.shield(self._reading)  # a piece of the patrol's, or of a scrub that was cancelled
            elif wait_s := pace.wait_s(self._clock.now_s()):
                await self._pause(wait_s)
            else:
                break
        pace.due_s = max(pace.due_s, self._clock.now_s())

    async def _read(self, scrub: Scrub, extent: Extent, piece: Piece, header_bytes: int) -> PieceRead:
        """Reads and hashes one piece in a worker of its volume. Raises what the volume raised. The caller has looked the record up
        in this same turn of the loop, so that the extent pinned here is still the record's."""
        run = partial(read_piece, self._volumes[extent.volume], extent.offset_bytes, scrub.buffer, header_bytes, self._hashing)
        self._space.pin(extent)
        result: PieceRead = await self._in_worker(scrub, extent.volume, run, piece, pinned=extent)
        return result

    async def _in_worker(
        self, scrub: Scrub, volume: int, run: Callable[[Any], Any], piece: object, *, pinned: Extent | None = None
    ) -> Any:
        """Calls `run(piece)` in a worker of the volume, and returns its result or raises its error. `pinned` is unpinned then."""
        reading = self._reading = asyncio.get_running_loop().create_future()
        transfer = Transfer(
            lane=volume_lane(volume), urgency=Urgency.WRITE_BACK, run=partial(self._timed, run), pieces=deque([piece]),
            settle=partial(self._settle, pinned, reading), is_progress=False,
        )  # fmt: skip
        self._transfers.runner.submit(transfer)
        try:
            await asyncio.shield(reading)
        except asyncio.CancelledError:  # what no worker has begun is given up now
            self._transfers.runner.cancel(transfer, TicketCancelled("the scrub was cancelled"))
            raise
        if transfer.error is not None:
            raise transfer.error
        result, seconds = transfer.results[0]
        scrub.pace.charge_seconds(seconds)
        return result

    def _timed(self, run: Callable[[Any], Any], piece: object) -> tuple[Any, float]:
        """Calls `run` and returns its result and the seconds it took, without the time in the queue. Runs in a worker."""
        started_s = self._clock.now_s()
        return run(piece), self._clock.now_s() - started_s

    def _settle(self, pinned: Extent | None, reading: asyncio.Future[None], transfer: Transfer) -> None:
        if pinned is not None:
            free_bytes = self._space.free_bytes
            self._space.unpin(pinned)
            if self._space.free_bytes != free_bytes:  # it was released meanwhile: somebody may wait for the room
                with self._transfers.deciding() as planner:
                    planner.go_on(self._namespaces.values())
        wake(reading)

    @staticmethod
    def _report(scrub: Scrub, namespace: NamespaceState, key: ExpertKey, located: Located, reason: str) -> None:
        ledger, extent = namespace.steps.ledger, located.extent
        steps = tuple(step for step in ledger.steps() if ledger.at(key, step) == located)
        scrub.findings.add_record(
            Finding(namespace.name, key, steps, *located.identity, extent.volume, extent.offset_bytes, reason)
        )


def buffer_bytes(part: Part) -> int:
    """Size of the buffer that holds the longest piece of a record. The first piece is the header, with a checksum for each MiB of
    the record, and a chunk: from records of 384 GiB on it is longer than any other piece."""
    return max(BUFFER_BYTES, part.header_bytes + CHUNK_BYTES + PAGE_BYTES)


def _records_of(namespace: NamespaceState, key: ExpertKey) -> list[Located]:
    """Lists every whole record of `key` that a step (committed, prepared or a draft) names, that the commit under way will publish,
    or that is the newest one written; each once, oldest first."""
    ledger, working = namespace.steps.ledger, namespace.residency.working[key]
    named = [ledger.at(key, step) for step in ledger.steps()]
    newest = ledger.newest  # a prepared step or a draft may be above or below all of them
    named.append(ledger.at(key, newest.step) if newest is not None else None)
    named += [working.cut_record, working.uncommitted]
    return list(dict.fromkeys(located for located in named if located is not None))
