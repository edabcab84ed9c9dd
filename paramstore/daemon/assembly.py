"""Puts a store together: lock, volumes, catalog, threads, planner. The one place that knows all the real parts.

Opening is all or nothing: whatever was opened is closed again if a later part refuses. A new directory becomes a new
store; an existing one opens at its last committed steps, or is refused with every reason.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import uuid
from collections.abc import Callable, Hashable, Iterable, Mapping
from functools import partial
from pathlib import Path

from paramstore.clock import MonotonicClock
from paramstore.config import Config
from paramstore.daemon.service import Service
from paramstore.daemon.volume_places import (
    adopt_new_volumes,
    check_adds_nothing,
    check_all_unclaimed,
    check_new_places,
    check_volume_size,
    open_volumes,
)
from paramstore.directories import check_parent, is_missing
from paramstore.engine.admission import make_namespace
from paramstore.engine.capacity.host import HostTier, Memory
from paramstore.engine.capacity.prefill import Prefill
from paramstore.engine.capacity.speeds import MakeMeasure, Probe
from paramstore.engine.capacity.upload_budget import UploadBudget
from paramstore.engine.capacity.volumes import VolumeSet
from paramstore.engine.planner.planner import Planner
from paramstore.engine.records.access import Access
from paramstore.engine.records.cleaner import Cleaner
from paramstore.engine.records.extents import Extents
from paramstore.engine.records.update import LOOKAHEAD_RECORDS, Updater
from paramstore.engine.steps.borrowed import Borrowed
from paramstore.engine.steps.commit import Committer
from paramstore.engine.steps.history import History
from paramstore.engine.steps.proof import Prover
from paramstore.engine.steps.transactions import Transactions
from paramstore.engine.store import Store
from paramstore.engine.tables.namespace import NamespaceState
from paramstore.engine.transfers.advance import ADVANCE_LOOKAHEAD_RECORDS
from paramstore.engine.transfers.arithmetic import load
from paramstore.engine.transfers.buffers import Buffers
from paramstore.engine.transfers.device_sums import DeviceSums
from paramstore.engine.transfers.hashing import Hashing
from paramstore.engine.transfers.log import TransferLog
from paramstore.engine.transfers.runner import BACKGROUND_LANE, CATALOG_LANE, CPU_LANE, Runner, volume_lane
from paramstore.engine.transfers.transfers import Transfers
from paramstore.engine.transfers.workers import ThreadWorkers, Workers
from paramstore.errors import CatalogError, ConfigError
from paramstore.memory.arena import PageReport, Segment, allocate_private, allocate_shared, allocate_upload, probe_pages
from paramstore.policy.make import make_policy
from paramstore.sizes import format_size
from paramstore.storage.catalog.base import Catalog, Contents
from paramstore.storage.catalog.lmdb_catalog import LmdbCatalog
from paramstore.storage.lock import StoreLock
from paramstore.storage.ownership import objection_to_tree
from paramstore.storage.recovery import Recovered, open_store
from paramstore.storage.volume.base import Volume
from paramstore.upkeep.notes import NoteScrub
from paramstore.upkeep.patrol import Patrol, patrol_start
from paramstore.upkeep.scrubber import Scrubber
from paramstore.upkeep.sums_file import SumsFile
from paramstore.upkeep.warmth import Warmth

logger = logging.getLogger(__name__)

CATALOG_NAME = "catalog"
CATALOG_FILES = ("data.mdb", "lock.mdb")


class HostMemory:
    """Segments of the best page kind this machine gives."""

    def __init__(self, pages: PageReport) -> None:
        self.pages = pages

    def shared(self, length_bytes: int) -> Segment:
        return allocate_shared(length_bytes, self.pages)

    def private(self, length_bytes: int) -> Segment:
        return allocate_private(length_bytes, self.pages)

    def upload(self, length_bytes: int) -> Segment:
        return allocate_upload(length_bytes, self.pages)

    def describe(self) -> dict[str, object]:
        return {
            "shared_pages": self.pages.shared.value, "private_pages": self.pages.private.value, "page_advice": self.pages.advice,
        }  # fmt: skip


def take_lock(config: Config) -> StoreLock:
    """Makes the store directory if need be, but not its parent, and locks it. Raises StoreLocked, ConfigError, CatalogError if its
    disk refuses, and VolumeError where a new store cannot have its volumes; then nothing was made."""
    check_volume_size(config)
    check_parent("dir", config.dir)
    if is_missing(config.dir / CATALOG_NAME):
        check_adds_nothing(config)
        check_new_places(config)
    if is_missing(config.dir):
        check_all_unclaimed(config)  # a store has its lock before it looks
    try:
        config.dir.mkdir(exist_ok=True, mode=0o700)
    except (FileExistsError, NotADirectoryError) as error:
        raise ConfigError(f"dir {config.dir}: it is not a directory, or lies in a file: give another --dir") from error
    except OSError as error:
        raise ConfigError(f"dir {config.dir}: {error}") from error
    return StoreLock.take(config.dir)


def core_count() -> int:
    """Number of cores that this process may run on."""
    return len(os.sched_getaffinity(0))


def warn_of_memory(config: Config, *, memory_bytes: int) -> None:
    """Logs a warning if the host budget is more than the machine has; no error, since a budget need not be used up."""
    if config.host_budget_bytes > memory_bytes:
        logger.warning(
            "host_budget_bytes=%d (%s) is above this machine's memory of %s: the kernel may end the daemon before it is used up",
            config.host_budget_bytes, format_size(config.host_budget_bytes), format_size(memory_bytes),
        )  # fmt: skip


async def assemble(config: Config, *, workers: Workers | None = None, make_measure: MakeMeasure = Probe) -> Service:
    """Opens the store in `config.dir`, whose lock the caller holds. make_measure: makes what tells how fast volumes are.

    Raises VolumeError, CatalogError, CapacityError.
    """
    warn_of_memory(config, memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    threads = workers or ThreadWorkers(asyncio.get_running_loop())
    runner = Runner(threads)
    update_workers = config.update_workers or core_count()
    add_lanes(runner, update_workers=update_workers)
    volumes: dict[int, Volume] = {}
    catalog: Catalog | None = None
    try:
        catalog, contents = await runner.call(CATALOG_LANE, lambda: _open_catalog(config))
        volumes = open_volumes(config, contents)
        add_volume_lanes(runner, volumes, io_workers=config.io_workers, prepare=_give_way)
        is_new = not contents.volumes
        await runner.call(CATALOG_LANE, lambda: adopt_new_volumes(catalog, contents, volumes))
        if is_new:
            made = ", ".join(f"volume {index} in {row.place}" for index, row in contents.volumes.items())
            logger.info("made a new store in %s, with %s", config.dir.absolute(), made)
        pages = await runner.call(BACKGROUND_LANE, probe_pages)
        if pages.advice:
            logger.warning("pages: shared %s, private %s; for huge pages: %s", pages.shared, pages.private, pages.advice)
        service = connect(
            config, runner, catalog, contents, volumes, HostMemory(pages), update_workers=update_workers, make_measure=make_measure
        )
        await service.store.admission.keep_catalog_room()
        await service.store.admission.measure_volumes()
        if any(namespace.is_trainable() for namespace in service.store.namespaces.values()):
            await runner.call(CPU_LANE, load)
        await service.warmth.start()
        await service.sums_file.start()
        return service
    except BaseException:
        for volume in volumes.values():
            volume.close()
        if catalog is not None:
            await runner.call(CATALOG_LANE, catalog.close)
        threads.close()
        raise


def add_lanes(runner: Runner, *, update_workers: int) -> None:
    """Adds the lanes that every store has."""
    _add_lane(runner, CATALOG_LANE, 1)
    _add_lane(runner, BACKGROUND_LANE, 1)
    _add_lane(runner, CPU_LANE, update_workers, ahead=update_workers, prepare=_one_thread_each)


def add_volume_lanes(
    runner: Runner, volumes: Iterable[int], *, io_workers: int, prepare: Callable[[], None] | None = None
) -> None:
    """Adds a lane with `io_workers` threads for each volume. prepare: called first in each of these threads."""
    for index in volumes:
        _add_lane(runner, volume_lane(index), io_workers, prepare=prepare)


def _add_lane(
    runner: Runner, lane: Hashable, count: int, *, ahead: int = 0, prepare: Callable[[], None] | None = None
) -> None:
    runner.scheduler.add_lane(lane, count, ahead=ahead)
    runner.workers.add_lane(lane, count, prepare=prepare)


def _give_way() -> None:
    """Keeps a volume's worker from interrupting the event loop when its read is done: it goes on at the next free moment.

    This saves thread switches (750 instead of 1,200 a GB) and forces none on the loop. If a sandbox refuses, nothing changes.
    """
    with contextlib.suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def _one_thread_each() -> None:
    """Keeps torch at one thread a worker, since CPU workers run records side by side. Torch is loaded at the first record."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")


def _open_catalog(config: Config) -> tuple[Catalog, Contents]:
    _check_catalog_files(config.dir / CATALOG_NAME)
    if not (config.dir / CATALOG_NAME / CATALOG_FILES[0]).exists():
        check_all_unclaimed(config)  # first: a refused start must not leave a new catalog where one was lost
    catalog = LmdbCatalog(config.dir / CATALOG_NAME, store_uuid=uuid.uuid4().bytes)  # an existing one keeps its own
    try:
        return catalog, catalog.load()
    except BaseException:
        catalog.close()
        raise


def _check_catalog_files(directory: Path) -> None:
    """Looks at what LMDB would open, since LMDB follows links and takes whatever it finds. Raises CatalogError."""
    try:
        objection = objection_to_tree(directory, CATALOG_FILES)
    except OSError as error:
        raise CatalogError(f"catalog {directory}: {error}") from error
    if objection:
        raise CatalogError(f"catalog {directory} is not ours: {objection}")


def connect(
    config: Config, runner: Runner, catalog: Catalog, contents: Contents, volumes: Mapping[int, Volume], memory: Memory, *,
    update_workers: int, make_measure: MakeMeasure | None = None,
) -> Service:  # fmt: skip
    """Makes the store's parts and gives each what it needs. make_measure: None tells volumes apart by their kinds alone."""
    if not volumes:
        raise CatalogError("the store has no volume")
    recovered = open_store(contents, volumes, retained_steps=config.retained_steps, held_steps=config.held_steps)
    planner = Planner(recovered.space, config.retention, reader_slots=config.reader_slots)
    buffers, clock, hashing = Buffers(), MonotonicClock(), Hashing(at_once=max(1, core_count() // 2))
    transfers = Transfers(
        planner, runner, volumes, buffers, store_uuid=contents.store_uuid, piece_bytes=config.piece_bytes, hashing=hashing,
        log=TransferLog(clock), sums=DeviceSums(is_kept=config.extent_leases > 0),
    )  # fmt: skip
    access = Access(transfers, wait_timeout_s=config.wait_timeout_s)
    namespaces = {name: make_namespace(ledger) for name, ledger in recovered.ledgers.items()}
    transactions = Transactions(transfers, runner, catalog=catalog, namespaces=namespaces)
    prefill = Prefill(volumes, space=recovered.space, runner=runner, pump=partial(_go_on, transfers, namespaces))
    volume_set = VolumeSet(
        volumes, superblocks=recovered.superblocks, rows=contents.volumes, space=recovered.space, catalog=catalog, runner=runner,
        may_grow=config.volume_size_bytes is None, prefill=prefill,
        retention=config.retention, traffic=transfers.traffic, endurance_bytes=config.volume_endurance_bytes,
        measure=make_measure and make_measure(recovered.space, prefill, runner),
    )  # fmt: skip
    history = _history(transfers, runner, transactions, recovered, namespaces, volume_set, stall_s=config.wait_timeout_s)
    cleaner = Cleaner(transfers, access, find_room=history.find_room)
    updater = Updater(transfers, access, cleaner, update_workers=update_workers)
    prover = Prover(
        transfers, runner, transactions=transactions, volumes=volumes, superblocks=recovered.superblocks,
        note_slots=recovered.note_slots, namespaces=namespaces, flush_timeout_s=config.flush_timeout_s,
    )  # fmt: skip
    committer = Committer(
        transfers, cleaner, runner, history=history, transactions=transactions, prover=prover, clock=clock,
        stall_s=config.wait_timeout_s,
    )  # fmt: skip
    host = _host_tier(config, runner, memory, buffers, volume_count=len(volumes), update_workers=update_workers)
    uploads = UploadBudget(host, budget_bytes=config.gradient_budget_bytes)
    transfers.watch_writes = volume_set.record_written
    for namespace in namespaces.values():
        volume_set.entitle(namespace)
    scrubber = Scrubber(
        transfers, volumes, namespaces, store_uuid=contents.store_uuid, hashing=hashing, clock=clock,
        notes=NoteScrub(volumes, recovered.superblocks),
    )  # fmt: skip
    patrol = Patrol(scrubber, scrub_days=config.scrub_days, start_at=patrol_start(contents.store_uuid, clock.now_s()), clock=clock)
    if config.prefill:
        prefill.start()
    patrol.start()
    store = Store(
        config, transfers=transfers, host=host, uploads=uploads, volumes=volume_set, access=access, cleaner=cleaner,
        updater=updater, committer=committer, history=history, transactions=transactions, namespaces=namespaces,
        store_uuid=contents.store_uuid, clock=clock,
    )  # fmt: skip
    return _service(store, scrubber, patrol, volumes)


def _history(
    transfers: Transfers, runner: Runner, transactions: Transactions, recovered: Recovered, namespaces: dict[str, NamespaceState],
    volume_set: VolumeSet, *, stall_s: float,
) -> History:  # fmt: skip
    borrowed = Borrowed(
        recovered.space, recovered.note_slots, transactions, namespaces,
        kept_rows=partial(volume_set.kept_rows, namespaces.values()),
        slack_bytes=partial(volume_set.slack_bytes, namespaces.values()),
    )  # fmt: skip
    for namespace in namespaces.values():
        borrowed.settle(namespace)
    return History(transfers, runner, transactions, recovered.note_slots, borrowed, stall_s=stall_s)


def _service(store: Store, scrubber: Scrubber, patrol: Patrol, volumes: Mapping[int, Volume]) -> Service:
    config, store_uuid = store.config, store.store_uuid
    return Service(
        store, scrubber, patrol, Warmth(config.dir, store.namespaces, store_uuid=store_uuid),
        Extents(store.transfers, volumes, extent_leases=config.extent_leases, wait_timeout_s=config.wait_timeout_s),
        SumsFile(config.dir, store.transfers.sums, store_uuid=store_uuid),
    )  # fmt: skip


def _host_tier(
    config: Config, runner: Runner, memory: Memory, buffers: Buffers, *, volume_count: int, update_workers: int
) -> HostTier:
    return HostTier(
        runner, memory, buffers, budget_bytes=config.host_budget_bytes, io_threads=config.io_workers * volume_count,
        piece_bytes=config.piece_bytes, pipeline_slots=update_workers + LOOKAHEAD_RECORDS,
        make_policy=lambda capacity: make_policy(config.policy, capacity), dirty_limit_bytes=config.dirty_limit_bytes,
        advance_buffers=update_workers + ADVANCE_LOOKAHEAD_RECORDS,
    )  # fmt: skip


def _go_on(transfers: Transfers, namespaces: Mapping[str, NamespaceState]) -> None:
    """Lets whoever waits for space on the volumes go on, after some came free."""
    with transfers.deciding() as planner:
        planner.go_on(namespaces.values())
