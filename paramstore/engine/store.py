"""The store: the parts that sessions call, what spans several of them, and their end.

Each writer's calls run in order, and every wait is bounded. Calls that must take effect at the moment they arrive (an apply's
claim on what is pending and a push, in `records/applies.py`; a fence, in `admission.py`) do so in the plain part of their method;
what has to be waited for is returned as an awaitable. Operations of one writer that change records take the namespace's *turn*, a
FIFO lock, so they run in the order they were called even if nobody awaits them. A commit gives the turn back at its cut, so that
later applies run beside its writes.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Coroutine, Sequence
from typing import Any

from paramstore import __version__
from paramstore.clock import Clock
from paramstore.config import Config
from paramstore.core.key import ExpertKey
from paramstore.core.visits import check_visits
from paramstore.engine.admission import Admission
from paramstore.engine.capacity.host import HostTier
from paramstore.engine.capacity.recall import RECALL_WAIT_S
from paramstore.engine.capacity.upload_budget import UploadBudget
from paramstore.engine.capacity.volumes import VolumeSet
from paramstore.engine.planner.permission import check_unclaimed, check_writing
from paramstore.engine.ranks import Ranks
from paramstore.engine.records.access import Access
from paramstore.engine.records.applies import Applies
from paramstore.engine.records.cleaner import Cleaner
from paramstore.engine.records.reading import Reading
from paramstore.engine.records.update import Updater
from paramstore.engine.report import disk_stats, namespace_stats, volume_stats
from paramstore.engine.steps.commit import Committer
from paramstore.engine.steps.followers import Followers, count_changes
from paramstore.engine.steps.history import History
from paramstore.engine.steps.initialization import Initializer
from paramstore.engine.steps.transactions import Transactions
from paramstore.engine.tables.namespace import NamespaceState, View
from paramstore.engine.tables.requests import Urgency
from paramstore.engine.transfers.transfers import Transfers
from paramstore.errors import ConfigError, StepDropped, StoreUnavailable
from paramstore_native.adamw import ADAMW


class Store:
    """Serves all namespaces of one daemon. `paramstore.daemon.assembly` makes it; every method runs on the event loop."""

    def __init__(
        self, config: Config, *, transfers: Transfers, host: HostTier, uploads: UploadBudget, volumes: VolumeSet, access: Access,
        cleaner: Cleaner, updater: Updater, committer: Committer, history: History, transactions: Transactions,
        namespaces: dict[str, NamespaceState], store_uuid: bytes, clock: Clock,
    ) -> None:  # fmt: skip
        self.config = config
        self.transfers = transfers
        self.host = host
        self.uploads = uploads
        self.access = access
        self.committer = committer
        self.history = history
        self.namespaces = namespaces
        self.store_uuid = store_uuid
        self._volumes = volumes
        self._cleaner = cleaner
        self._transactions = transactions
        self.applies = Applies(updater)
        self.ranks = Ranks(transfers, wait_timeout_s=config.wait_timeout_s, on_call=self.applies.note_call)
        self.initializer = Initializer(transfers, history, updater, cleaner, self.ranks)
        self.reading = Reading(transfers, access, transfers.runner)
        self.followers = Followers(transfers)
        self.admission = Admission(
            transfers, host, volumes, cleaner, history, transactions, self.ranks, namespaces, retention=config.retention,
            recall_wait_s=min(RECALL_WAIT_S, config.wait_timeout_s / 2),  # the client that opens hears of it in time
        )  # fmt: skip
        self._clock = clock
        self._started_s = clock.now_s()

    # --- views

    def close_view(self, view: View, *, reason: str = "closed the namespace") -> None:
        """Closes a view: ends its leases and waits, and drops a writer's pending gradients. reason: what other ranks are told."""
        if not view.is_closed:
            self.ranks.leave(view, reason)
            self.applies.leave(view, reason)
            with self.transfers.deciding() as planner:
                planner.views.close(view)

    def end_writing(self, view: View, *, reason: str) -> None:
        """Ends a view's writing only: its session is gone, but its process may still read what it leased."""
        self.ranks.leave(view, reason)
        self.applies.leave(view, reason)
        with self.transfers.deciding() as planner:
            planner.views.end_writing(view)

    def refresh(self, view: View, step: int | None = None) -> int:
        """Moves a reader to `step`, or to the newest committed one that no transaction under way drops, and returns that step.
        Raises StepDropped if it cannot be opened; nothing has changed then."""
        if view.is_writer:
            raise ConfigError("a writer sees its working state; refresh() moves readers")
        step = self.admission.reader_step(view.namespace, step)
        with self.transfers.deciding() as planner:
            planner.views.move(view, step)
        return step

    def refresh_counted(self, view: View, step: int | None = None) -> Coroutine[Any, Any, dict[str, int]]:
        """Does what `refresh` does, at once. Returns a coroutine that counts what has changed; see `count_changes`."""
        # What a rollback has dropped is known no more: nothing can be compared with it.
        before, is_lost = view.step, view.is_dropped and view.epoch != view.namespace.epoch
        step = self.refresh(view, step)
        is_lost |= before is not None and step < before  # a rollback is under way: the epoch grows at its end
        return count_changes(view.namespace, before=None if is_lost else before, step=step)

    def describe_view(self, view: View) -> dict[str, object]:
        """The answer to an open: what the client needs to know of its view."""
        namespace = view.namespace
        return {
            "name": namespace.name, "schema": namespace.schema.describe(), "layers": list(namespace.keys.layers),
            "experts": namespace.keys.experts, "committed_step": namespace.steps.committed_step, "view_step": view.step,
            "epoch": namespace.epoch, "lease_slots": view.lease_slots, "wait_timeout_s": self.config.wait_timeout_s,
            "gradient_share_bytes": self.uploads.share(view),
        }  # fmt: skip

    # --- loans

    def lend(self, view: View, count: int) -> int:
        """Lends a reader slots up to `count` in all beyond its promise, as far as there are any. Returns how many it has then."""
        with self.transfers.deciding() as planner:
            return planner.loans.lend(view, count)

    def take_back(self, view: View, kept: int) -> None:
        """Notes that a reader has given back all but `kept` of what it was lent."""
        with self.transfers.deciding() as planner:
            planner.loans.take_back(view, kept)

    # --- wishes of a client

    def protect(self, view: View, keys: Sequence[ExpertKey], *, is_wanted: bool) -> None:
        view.namespace.keys.check(keys, namespace=view.namespace.name)
        with self.transfers.deciding() as planner:
            planner.views.protect(view, keys, is_wanted=is_wanted)

    def declare_schedule(self, view: View, param: Sequence[tuple[int, str]], optim: Sequence[tuple[int, str]]) -> None:
        """Declares the order in which the view's client visits its layers. Raises ConfigError, and nothing has changed."""
        view.check_open()
        layers = view.namespace.keys.layers
        cycles = check_visits(param, layers, what="param_visits"), check_visits(optim, layers, what="optim_visits")
        with self.transfers.deciding() as planner:
            planner.views.declare(view, param=cycles[0], optim=cycles[1])

    def report_device(self, view: View, resident: Sequence[ExpertKey], touched: Sequence[ExpertKey], bytes_resident: int) -> None:
        """Notes what a client's HBM tier holds. Its uses of these keys (`touched`) count as uses here."""
        namespace = view.namespace
        namespace.keys.check(resident, namespace=namespace.name)
        with self.transfers.deciding() as planner:
            planner.views.report_device(view, resident, touched, bytes_resident=bytes_resident)

    # --- the writer's calls

    async def rollback(self, view: View, step: int) -> int:
        """Rolls back to `step`, dropping everything since. Returns the new epoch."""
        namespace = check_writing(view)
        if namespace.steps.committed_step is None:
            raise StepDropped(f"namespace {namespace.name!r} has no committed step: initialize() starts it over")
        await self.history.rollback(namespace, to_step=step)
        return namespace.epoch

    async def write_back(self, view: View, keys: Sequence[ExpertKey] | None) -> dict[str, int]:
        check_unclaimed(view.namespace, what="write_back")
        async with view.namespace.writing.turn:
            return await self._cleaner.write_back(view.namespace, keys)

    async def evict(self, view: View, keys: Sequence[ExpertKey] | None, part: str | None) -> dict[str, object]:
        if part == "param" and not view.is_writer:  # this changes no record, so it does not wait for the writer's calls
            return await self._cleaner.evict(view.namespace, keys, part)
        check_unclaimed(view.namespace, what="evict")
        async with view.namespace.writing.turn:
            return await self._cleaner.evict(view.namespace, keys, part)

    # --- figures, and the end

    async def stats(self) -> dict[str, object]:
        """Counters and sizes of everything in the store."""
        now_s = self._clock.now_s()
        return {
            "daemon": {
                "pid": os.getpid(), "version": __version__, "uptime_s": self._clock.now_s() - self._started_s,
                "store_uuid": self.store_uuid.hex(), "accepts_writes": self._transactions.stopped is None,
                "adamw": ADAMW.known_state(),
            },
            "tiers": {
                "host": {**await self.host.stats(), "upload_bytes": self.uploads.used_bytes},
                **self._volumes.tier_stats(self.transfers.traffic),
            },
            "volumes": volume_stats(self._volumes, self.transfers.traffic), "catalog": disk_stats(self.config.dir),
            "queues": {
                str(lane): {"queued": stats.queued, "running": stats.running}
                for lane, stats in self.transfers.runner.scheduler.stats().items()
            },
            "namespaces": {
                name: {**namespace_stats(namespace, now_s), **self._volumes.describe_namespace(namespace)}
                for name, namespace in self.namespaces.items()
            },
        }  # fmt: skip

    def stop_applies(self) -> None:
        """Stops every apply at its next record, as the store is about to be closed; none of them was acknowledged."""
        for namespace in self.namespaces.values():
            with self.transfers.deciding() as planner:
                planner.request_stop(namespace)

    async def close(self) -> None:
        """Waits, within `shutdown_timeout_s`, for what is under way after `stop_applies`; then closes volumes, catalog and
        threads."""
        self.transfers.runner.cancel_waiting(Urgency.PREFETCH, StoreUnavailable("the daemon is stopping"))
        deadline_s = self._clock.now_s() + self.config.shutdown_timeout_s
        while not self.transfers.runner.is_idle and self._clock.now_s() < deadline_s:
            await asyncio.sleep(0.01)
        await asyncio.gather(self.ranks.close(), self.admission.close())
        await self._volumes.close()
