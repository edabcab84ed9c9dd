"""The daemon's machine in the simulation: disks, catalog, workers and clock that a seed drives, and the daemon that runs on them.

Disks and catalog outlive the daemon; `crash` is a power cut, `stop` a SIGTERM. Within `installed`, what the product takes from
the operating system (threads, clock, random numbers, addresses as hashes) is replaced, and nothing else.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

from paramstore.config import Config, PolicyConfig
from paramstore.core import slices
from paramstore.core.schema import Schema
from paramstore.daemon import assembly, session, volume_places
from paramstore.daemon.server import Server
from paramstore.engine import admission
from paramstore.engine.capacity import budget, prefill, upload_budget
from paramstore.engine.capacity.entitlements import entitled_bytes
from paramstore.engine.records import update
from paramstore.engine.store import Store
from paramstore.engine.tables import arena, requests
from paramstore.engine.transfers import transfers
from paramstore.engine.transfers.runner import BACKGROUND_LANE, CATALOG_LANE, CPU_LANE, Runner
from paramstore.engine.transfers.workers import outcome_of
from paramstore.errors import CatalogError, ParamStoreError, VolumeError
from paramstore.storage.catalog.base import Change
from paramstore.storage.format.structures import Superblock, extents_start_bytes
from paramstore.testing.catalogs import FaultyCatalog, MemoryCatalog
from paramstore.testing.volumes import MemoryVolume
from paramstore_testkit.oracles import plain_arithmetic
from paramstore_testkit.sim.loop import VirtualLoop
from paramstore_testkit.sim.net import Network, SimListener, SimMemory, SimPeer
from paramstore_testkit.sim.plan import Faults, Plan

SEGMENT_ALIGNMENT_BYTES = 4096
"""Alignment of segments in the simulation, which allows budgets of a few slots instead of a few hundred."""
SEGMENT_BYTES = 64 << 10
"""Size of a segment: so small that arenas have several."""
PREFILL_PIECE_BYTES = 256 << 10
SLICE = 3
"""Namespaces of some eight keys are cut, settled and rolled back in several turns, as those of thousands are in a daemon."""


class OrderedSet(dict[Any, None]):
    """A set in order of insertion."""

    def add(self, item: Any) -> None:
        self[item] = None

    def discard(self, item: Any) -> None:
        self.pop(item, None)


class SimVolume(MemoryVolume):
    """A disk that fails at random while `faults` is set. A failed flush has lost some of what it should have made durable."""

    def __init__(self, size_bytes: int, random: Random, fired: Counter[str], *, index: int) -> None:
        super().__init__(size_bytes, index=index)
        self._random = random
        self._fired = fired
        self.faults: Faults | None = None

    def _fails(self, what: str, chance: float) -> bool:
        if not chance or self._random.random() >= chance:
            return False
        self._fired[what] += 1
        return True

    def read(self, offset_bytes: int, into: Sequence[memoryview]) -> None:
        if self.faults is not None and self._fails("read error", self.faults.read):
            for buffer in into:
                buffer.cast("B")[:] = b"\xde" * buffer.nbytes
            raise VolumeError(f"volume {self.index}: a read at {offset_bytes} fails")
        super().read(offset_bytes, into)

    def write(self, offset_bytes: int, data: Sequence[memoryview]) -> None:
        if self.faults is not None and self._fails("write error", self.faults.write):
            whole = b"".join(data)
            torn = bytearray(whole[: len(whole) // 8192 * 4096])
            super().write(offset_bytes, [memoryview(torn)])
            raise VolumeError(f"volume {self.index}: a write at {offset_bytes} fails")
        super().write(offset_bytes, data)

    def flush(self) -> None:
        if self.faults is not None and self._fails("flush error", self.faults.flush):
            self.crash(self.keep_some)
            raise VolumeError(f"volume {self.index}: a flush fails")
        super().flush()

    def keep_some(self, write: int, sectors: int) -> Collection[int]:
        """Keeps any subset of sectors of any subset of writes."""
        share = self._random.choice((0.0, 0.5, 1.0))
        if share in (0.0, 1.0):
            return range(sectors) if share else ()
        return [sector for sector in range(sectors) if self._random.random() < share]


class SimCatalog(FaultyCatalog):
    """Transactions that fail at random, some of which took effect, and a catalog that then cannot be opened again."""

    def __init__(self, inner: MemoryCatalog, random: Random, fired: Counter[str]) -> None:
        super().__init__(inner, fail_at=0, outcome="lost")
        self._random = random
        self._fired = fired
        self.faults: Faults | None = None

    def apply(self, change: Change) -> None:
        if self.faults is not None and self._random.random() < self.faults.transaction:
            outcome: Any = self._random.choice(("lost", "durable"))
            self._fired[f"transaction {outcome}"] += 1
            self.fail_next(outcome)
        super().apply(change)

    def reserve(self, row_count: int, *, kept_rows: int = 0) -> None:
        if self.faults is not None and self._random.random() < self.faults.transaction / 2:
            self._fired["catalog full"] += 1
            raise CatalogError("simulated catalog: no room")
        super().reserve(row_count, kept_rows=kept_rows)

    def reopen(self) -> None:
        if self.faults is not None and self._random.random() < self.faults.catalog_lost:
            self._fired["catalog cannot be read back"] += 1
            raise CatalogError("simulated catalog: it cannot be opened again")
        super().reopen()


class SimWorkers:
    """Workers whose calls take simulated time, by lane. When in that time a call runs is random, so calls overtake each other."""

    def __init__(self, loop: VirtualLoop, random: Random, plan: Plan, fired: Counter[str]) -> None:
        self._loop = loop
        self._random = random
        self._plan = plan
        self._fired = fired
        self.faults: Faults | None = None
        self.is_dead = False
        self.running = 0

    def add_lane(self, lane: Hashable, threads: int, *, prepare: Callable[[], None] | None = None) -> None:
        """Does nothing: there are no threads."""

    def run(
        self, lane: Hashable, function: Callable[[Any], Any], argument: Any, done: Callable[[Any, ParamStoreError | None], None]
    ) -> None:
        if self.is_dead:
            return
        self.running += 1
        seconds = self._seconds(lane)
        if self._random.random() < 0.5:
            self._loop.call_later(seconds, self._end, outcome_of(function, argument), done)
        else:
            self._loop.call_later(seconds, self._run, function, argument, done)

    def _seconds(self, lane: Hashable) -> float:
        if lane in (CPU_LANE, CATALOG_LANE, BACKGROUND_LANE):
            return self._random.random() * 1e-4
        if self.faults is not None and self.faults.stall and self._random.random() < self.faults.stall:
            self._fired["disk stalls"] += 1
            return self._plan.wait_timeout_s * (0.5 + 2 * self._random.random())
        return self._random.expovariate(1.0) * self._plan.io_s

    def _run(self, function: Callable[[Any], Any], argument: Any, done: Callable[[Any, ParamStoreError | None], None]) -> None:
        if not self.is_dead:
            self._end(outcome_of(function, argument), done)

    def _end(self, outcome: tuple[Any, ParamStoreError | None], done: Callable[[Any, ParamStoreError | None], None]) -> None:
        if not self.is_dead:
            self.running -= 1
            done(*outcome)

    def close(self) -> None:
        self.is_dead = True


class SimMachine:
    """Owner of what survives: disks and catalog. `store`, `server`, `listener` and `memory` belong to the daemon that runs now."""

    store: Store
    server: Server
    listener: SimListener
    workers: SimWorkers
    memory: SimMemory

    def __init__(self, loop: VirtualLoop, random: Random, plan: Plan) -> None:
        self.loop = loop
        self.plan = plan
        self.random = random
        self.fired: Counter[str] = Counter()
        self.schema = Schema.adamw(plan.fields, param_dtype="float32")
        self.is_up = False
        self.network = Network(loop)
        size_bytes = self._volume_bytes()
        self.disks = {
            index: SimVolume(size_bytes, random, self.fired, index=index) for index in range(plan.volume_count)
        }  # fmt: skip
        self.durable = MemoryCatalog()
        self.config = Config(
            dir=Path("/nowhere"), host_budget_bytes=plan.namespaces * self.host_bytes(), prefill=plan.prefill,
            policy=PolicyConfig(name=plan.policy), wait_timeout_s=plan.wait_timeout_s, io_workers=plan.io_workers,
            volume_size_bytes=None if plan.spare_records is None else size_bytes,
            retained_steps=plan.retained_steps, held_steps=plan.held_steps, shutdown_timeout_s=30.0,
        )  # fmt: skip

    def key_count(self) -> int:
        return self.plan.layers * self.plan.experts

    def host_bytes(self) -> int:
        """Host memory of one namespace: staging and the slots that the plan names."""
        plan, part = self.plan, self.schema.part("param")
        staging = plan.io_workers * plan.volume_count * self.schema.stored.header_bytes
        return staging + plan.working_slots * self.schema.record_bytes + plan.param_slots * part.image_bytes

    def _volume_bytes(self) -> int:
        start = extents_start_bytes(Superblock(bytes(16), bytes(16), 0))
        if self.plan.spare_records is None:
            return start + (1 << 20)
        entitled = entitled_bytes(self.schema, self.key_count(), self.config_retention())
        records = (self.plan.spare_records + 2 * self.plan.volume_count) * self.schema.record_bytes
        each = -(-(self.plan.namespaces * entitled + records) // self.plan.volume_count)
        return start + -(-each // 4096) * 4096 + self.plan.namespaces * self.schema.record_bytes

    def config_retention(self) -> Any:
        return Config(retained_steps=self.plan.retained_steps, held_steps=self.plan.held_steps).retention

    # --- lives

    def start(self) -> None:
        """Starts a daemon on what lies on disks and in the catalog. Raises what a real one would raise."""
        self.memory = SimMemory()
        self.listener = SimListener(self.network)
        self.catalog = SimCatalog(self.durable, self.random, self.fired)
        self.workers = SimWorkers(self.loop, self.random, self.plan, self.fired)
        runner = Runner(self.workers)
        runner.under_way = OrderedSet()  # type: ignore[assignment]
        assembly.add_lanes(runner, update_workers=self.plan.update_workers)
        assembly.add_volume_lanes(runner, self.disks, io_workers=self.plan.io_workers)
        contents = self.catalog.load()
        volume_places.adopt_new_volumes(self.catalog, contents, self.disks)
        self.service = assembly.connect(
            self.config, runner, self.catalog, contents, self.disks, self.memory, update_workers=self.plan.update_workers
        )
        self.store = self.service.store
        self.store.admission._growing = OrderedSet()  # type: ignore[assignment]
        self.server = Server(self.service, self.listener)  # type: ignore[arg-type]
        self.server._sessions = OrderedSet()  # type: ignore[assignment]
        self.is_up = True

    def arm(self, faults: Faults | None) -> None:
        """Lets faults happen from here on; with None, no more."""
        for disk in self.disks.values():
            disk.faults = faults
        self.catalog.faults = self.workers.faults = faults

    async def crash(self, keep: Callable[[SimVolume], Callable[[int, int], Collection[int]]]) -> None:
        """Cuts the power. keep: decides for each disk which unflushed sectors are there."""
        self.workers.close()
        await self._end()
        for disk in self.disks.values():
            disk.crash(keep(disk))
        self.durable = self.durable.crash()

    async def stop(self) -> None:
        """Stops the daemon as SIGTERM would."""
        self.arm(None)
        self.server.close()
        await self.service.close()
        await self._end()
        self.durable = self.durable.crash()

    async def _end(self) -> None:
        """Ends all tasks and timers of this life."""
        self.is_up = False
        self.arm(None)
        self.network.sockets.clear()  # so that nothing more arrives
        me = asyncio.current_task()
        while tasks := [task for task in self.loop.alive.values() if task is not me]:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        self.workers.close()
        self.loop.forget_timers()


def nothing_kept(_: SimVolume) -> Callable[[int, int], Collection[int]]:
    return lambda write, sectors: ()


@contextmanager
def installed(loop: VirtualLoop, random: Random) -> Iterator[None]:
    """Runs the engine of this process, within the block, on simulated time, memory and arithmetic, in an order that repeats."""
    uuids = SimpleNamespace(uuid4=lambda: SimpleNamespace(bytes=random.randbytes(16)))
    clock = SimpleNamespace(now_s=loop.time)
    functions = {name: getattr(plain_arithmetic, name) for name in ("update", "square_sum", "fill_initial", "materialise", "load")}
    replaced: dict[Any, dict[str, object]] = {
        update: {name: functions[name] for name in ("update", "square_sum", "fill_initial")},
        transfers: {"materialise": functions["materialise"]},
        admission: {"load": functions["load"]},
        assembly: {"load": functions["load"], "MonotonicClock": lambda: clock}, volume_places: {"uuid": uuids},
        session: {"Peer": SimPeer},
        arena: {"SEGMENT_ALIGNMENT_BYTES": SEGMENT_ALIGNMENT_BYTES, "SEGMENT_BYTES": SEGMENT_BYTES},
        budget: {"SEGMENT_ALIGNMENT_BYTES": SEGMENT_ALIGNMENT_BYTES},
        upload_budget: {"SEGMENT_ALIGNMENT_BYTES": SEGMENT_ALIGNMENT_BYTES},
        prefill: {"PIECE_BYTES": PREFILL_PIECE_BYTES}, slices: {"SLICE": SLICE},
        requests.PrefetchRequest: {"__init__": _with_order(requests.PrefetchRequest.__init__, "pending")},
    }
    with ExitStack() as stack:
        for owner, names in replaced.items():
            for name, value in names.items():
                assert hasattr(owner, name), f"{owner} has no {name}"
                stack.callback(setattr, owner, name, vars(owner)[name])
                setattr(owner, name, value)
        yield


def _with_order(init: Callable[..., None], attribute: str) -> Callable[..., None]:
    """Wraps `init` so that the set `attribute` that it makes keeps its order."""

    def make(self: Any, *arguments: Any, **named: Any) -> None:
        init(self, *arguments, **named)
        setattr(self, attribute, OrderedSet())

    return make

