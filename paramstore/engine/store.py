"""The store: everything a session may ask. Each writer's calls run in order, and every wait is bounded.

Calls that must take effect at the moment they arrive (an apply's claim on what is pending, a fence, a push) do so in the
plain part of their method; what has to be waited for is returned as an awaitable. Operations of one writer that change records
take the namespace's *turn*, a FIFO lock, so they run in the order they were called even if nobody awaits them. A commit
gives the turn back at its cut, so that later applies run beside its writes.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Coroutine, Sequence
from functools import partial
from typing import Any

from paramstore import __version__
from paramstore.clock import Clock
from paramstore.config import Config
from paramstore.core.key import ExpertKey
from paramstore.core.location import Identity
from paramstore.core.optimizers import Options
from paramstore.core.visits import check_visits
from paramstore.engine.admission import Admission
from paramstore.engine.capacity.host import HostTier
from paramstore.engine.capacity.volumes import VolumeSet
from paramstore.engine.patrol import Patrol
from paramstore.engine.planner.permission import check_changing, check_unclaimed, check_view, check_writer, check_writing
from paramstore.engine.planner.planner import Planner
from paramstore.engine.planner.schedules import declare_schedule
from paramstore.engine.ranks import Ranks
from paramstore.engine.records.access import Loader
from paramstore.engine.records.applies import Applies
from paramstore.engine.records.cleaner import Cleaner
from paramstore.engine.records.reading import Reading
from paramstore.engine.records.update import Updater
from paramstore.engine.report import disk_stats, namespace_stats, residency, volume_stats
from paramstore.engine.scrub import Scrub, Scrubber
from paramstore.engine.steps.commit import Committer
from paramstore.engine.steps.history import Chain
from paramstore.engine.steps.initialization import Initializer
from paramstore.engine.steps.transactions import Transactions
from paramstore.engine.tables.apply import UploadMemory
from paramstore.engine.tables.namespace import LeaseRequest, NamespaceState, View
from paramstore.engine.tables.requests import PrefetchRequest, Urgency
from paramstore.engine.transfers.runner import Runner
from paramstore.engine.transfers.transfers import Transfers
from paramstore.errors import (
    ConfigError,
    ParamStoreError,
    ProtocolError,
    StepDropped,
    StepFailed,
    StoreUnavailable,
)
from paramstore_native.adamw import known_state


class Store:
    """Serves all namespaces of one daemon. `paramstore.daemon.assembly` makes it; every method runs on the event loop."""

    def __init__(
        self, config: Config, *, planner: Planner, runner: Runner, transfers: Transfers, host: HostTier, volumes: VolumeSet,
        loader: Loader, cleaner: Cleaner, updater: Updater, committer: Committer, chain: Chain, transactions: Transactions,
        scrubber: Scrubber, patrol: Patrol, namespaces: dict[str, NamespaceState], store_uuid: bytes, clock: Clock,
    ) -> None:  # fmt: skip
        self.config = config
        self.host = host
        self.namespaces = namespaces
        self.store_uuid = store_uuid
        self._runner = runner
        self._transfers = transfers
        self.transfer_log = transfers.log
        self._volumes = volumes
        self._loader = loader
        self._cleaner = cleaner
        self._updater = updater
        self._committer = committer
        self._chain = chain
        self._transactions = transactions
        self.applies = Applies(updater)
        self.ranks = Ranks(planner.views, wait_timeout_s=config.wait_timeout_s, on_call=self.applies.note_call)
        self._initializer = Initializer(transfers, chain, updater, cleaner, committer)
        self.scrubber = scrubber
        self.patrol = patrol
        self.admission = Admission(
            transfers, host, volumes, cleaner, chain, transactions, self.ranks, namespaces,
            retained_steps=config.retained_steps,
        )  # fmt: skip
        self._reading = Reading(transfers, loader, runner)
        self._clock = clock
        self._started_s = clock.now_s()

    # --- views

    def close_view(self, view: View, *, reason: str = "closed the namespace") -> None:
        """Closes a view: ends its leases and waits, and drops a writer's pending gradients. reason: what other ranks are told."""
        if not view.is_closed:
            self.ranks.leave(view, reason)
            self.applies.leave(view, reason)
            with self._transfers.deciding() as planner:
                planner.views.close(view)

    def end_writing(self, view: View, *, reason: str) -> None:
        """Ends a view's writing only: its session is gone, but its process may still read what it leased."""
        self.ranks.leave(view, reason)
        self.applies.leave(view, reason)
        with self._transfers.deciding() as planner:
            planner.views.end_writing(view)

    def refresh(self, view: View) -> int:
        """Moves a reader to the newest committed step that no transaction under way drops, and returns that step."""
        if view.is_writer:
            raise ConfigError("a writer sees its working state; refresh() moves readers")
        step = view.namespace.standing_step
        assert step is not None
        with self._transfers.deciding() as planner:
            planner.views.move(view, step)
        return step

    def describe_view(self, view: View) -> dict[str, object]:
        """The answer to an open: what the client needs to know of its view."""
        namespace = view.namespace
        return {
            "name": namespace.name, "schema": namespace.schema.describe(), "layers": list(namespace.keys.layers),
            "experts": namespace.keys.experts, "committed_step": namespace.committed_step, "view_step": view.step,
            "epoch": namespace.epoch, "lease_slots": view.lease_slots, "wait_timeout_s": self.config.wait_timeout_s,
            "gradient_share_bytes": self._gradient_share(view),
        }  # fmt: skip

    # --- leases and prefetch

    def acquire(self, view: View, lease_id: int, keys: Sequence[ExpertKey], part: str) -> LeaseRequest:
        return self._loader.acquire(view, lease_id, keys, part)

    async def wait_lease(self, request: LeaseRequest, timeout_s: float) -> None:
        await self._loader.wait_lease(request, timeout_s)

    def cancel_lease(self, request: LeaseRequest, error: ParamStoreError) -> None:
        self._loader.cancel_lease(request, error)

    def release(self, view: View, lease_id: int) -> None:
        with self._transfers.deciding() as planner:
            planner.leases.release(view, lease_id)

    def lease_places(self, request: LeaseRequest) -> list[tuple[int, int, int, int]]:
        """Returns (segment, offset, epoch, version) of each key of a granted lease."""
        return [copy.place for copy in request.copies]

    def prefetch(self, view: View, keys: Sequence[ExpertKey], part: str, deadline_s: float | None) -> PrefetchRequest:
        return self._loader.prefetch(view, keys, part, deadline_s)

    async def wait_prefetch(self, request: PrefetchRequest) -> dict[str, int]:
        return await self._loader.wait_prefetch(request)

    def cancel_prefetch(self, request: PrefetchRequest) -> None:
        self._transfers.cancel_prefetch(request)

    def protect(self, view: View, keys: Sequence[ExpertKey], *, is_wanted: bool) -> None:
        view.namespace.keys.check(keys, namespace=view.namespace.name)
        view.protected = view.protected.union(keys) if is_wanted else view.protected.difference(keys)

    def declare_schedule(self, view: View, param: Sequence[tuple[int, str]], optim: Sequence[tuple[int, str]]) -> None:
        """Declares the order in which the view's client visits its layers. Raises ConfigError, and nothing has changed."""
        check_view(view)
        layers = view.namespace.keys.layers
        cycles = check_visits(param, layers, what="param_visits"), check_visits(optim, layers, what="optim_visits")
        declare_schedule(view, param=cycles[0], optim=cycles[1])

    def report_device(self, view: View, resident: Sequence[ExpertKey], touched: Sequence[ExpertKey], bytes_resident: int) -> None:
        """Notes what a client's HBM tier holds. Its uses of these keys (`touched`) count as uses here."""
        namespace = view.namespace
        namespace.keys.check(resident, namespace=namespace.name)
        view.device_resident, view.device_bytes = frozenset(resident), bytes_resident
        if namespace.param_arena is not None:
            for key in touched:
                if key in namespace.copies:
                    namespace.param_arena.policy.record(key)

    # --- the writer's calls

    def push(self, view: View, entries: Sequence[tuple[ExpertKey, UploadMemory, int]], *, is_last: bool = False) -> None:
        """Makes the gradients at these places pending. See `Applies.push`."""
        self.applies.push(view, entries, is_last=is_last)

    def gradient_norm(self, view: View) -> Coroutine[Any, Any, float]:
        return self.applies.norm(view)

    def apply(self, view: View, options: Options, grad_scale: float) -> Coroutine[Any, Any, dict[str, int]]:
        """Claims what is pending now; the coroutine then updates it in the namespace's turn. Raises StepPrepared, SchemaMismatch;
        then all is still pending."""
        return self.applies.apply(view, options, grad_scale)

    def begin_apply(self, view: View, options: Options, grad_scale: float) -> Coroutine[Any, Any, dict[str, int]]:
        """Opens an apply before its gradients are there. See `Applies.begin`."""
        return self.applies.begin(view, options, grad_scale)

    def end_apply(self, view: View) -> Coroutine[Any, Any, dict[str, int]]:
        """Closes the open apply, which claims what is pending now; returns a coroutine of the apply's result."""
        return self.applies.end(view)

    def abort(self, view: View) -> int:
        """Drops pending gradients and gives up an open apply. See `Applies.abort`."""
        return self.applies.abort(view)

    def commit(self, view: View, step: int, extra: bytes) -> Coroutine[Any, Any, dict[str, object]]:
        """Commits `step`: durable on return. See `Committer.commit`. Raises StepOutOfOrder while an apply is open and under way."""
        check_unclaimed(view.namespace, what=f"commit({step})")
        return self._committer.commit(view.namespace, step, extra, check=partial(check_writer, view))

    def prepare(self, view: View, step: int, extra: bytes) -> Coroutine[Any, Any, dict[str, object]]:
        """Prepares `step`: durable on return, committed by `finalize`. No record changes from now on. Raises StepPrepared."""
        namespace = check_changing(view)
        namespace.preparing, epoch = step, namespace.epoch

        def check() -> None:
            check_writer(view)
            if namespace.epoch != epoch:
                raise StepFailed(f"prepare({step}) on {namespace.name!r}: it was rolled back meanwhile")

        async def run() -> dict[str, object]:
            try:
                return await self._committer.commit(namespace, step, extra, check=check, is_prepared=True)
            finally:
                if namespace.epoch == epoch:  # else a rollback has cleared it, and another may prepare by now
                    namespace.preparing = None

        return run()

    async def finalize(self, view: View, step: int) -> None:
        """Commits the prepared `step`, on a broken namespace too. See `Chain.finalize`."""
        await self._chain.finalize(view.namespace, step, check=partial(check_writing, view))

    async def rollback(self, view: View, step: int) -> int:
        """Rolls back to `step`, dropping everything since. Returns the new epoch."""
        namespace = check_writing(view)
        if namespace.committed_step is None:
            raise StepDropped(f"namespace {namespace.name!r} has no committed step: initialize() starts it over")
        await self._chain.rollback(namespace, to_step=step)
        return namespace.epoch

    async def write_back(self, view: View, keys: Sequence[ExpertKey] | None) -> dict[str, int]:
        check_unclaimed(view.namespace, what="write_back")
        async with view.namespace.turn:
            return await self._cleaner.write_back(view.namespace, keys)

    async def evict(self, view: View, keys: Sequence[ExpertKey] | None, part: str | None) -> dict[str, object]:
        if part == "param" and not view.is_writer:  # this changes no record, so it does not wait for the writer's calls
            return await self._cleaner.evict(view.namespace, keys, part)
        check_unclaimed(view.namespace, what="evict")
        async with view.namespace.turn:
            return await self._cleaner.evict(view.namespace, keys, part)

    # --- initial values and reading back

    async def initialize_begin(self, view: View, *, is_resumed: bool = False) -> dict[str, object]:
        """Starts over, or goes on from the draft (is_resumed). Raises StepOutOfOrder once there is a committed step."""
        return await self._initializer.begin(check_writing(view), is_resumed=is_resumed)

    async def initialize_put(self, view: View, key: ExpertKey, initial: memoryview) -> None:
        self.ranks.note_progress(view)
        await self._initializer.put(check_writer(view), key, initial)

    async def initialize_save(self, view: View, extra: bytes) -> dict[str, object]:
        """Makes the values put so far durable, for an initialization that resumes."""
        return await self._initializer.save(view.namespace, extra, check=partial(check_writer, view))

    async def initialize_end(self, view: View) -> None:
        """Ends the initialization: on return every key has a whole record on a volume."""
        await self._initializer.end(check_writer(view))

    async def read(self, view: View, key: ExpertKey, target: memoryview) -> Identity:
        """Copies the stored part's image, as `view` sees it, to `target` (record_bytes, page-aligned). Raises CorruptRecord;
        StepOutOfOrder for a writer whose open apply is under way."""
        if view.is_writer:
            check_unclaimed(view.namespace, what="read")
        return await self._reading.read(view, key, target)

    def open_upload(self, client: object, length_bytes: int, views: Sequence[View]) -> tuple[int, Any]:
        """Makes a writable segment of at least `length_bytes` for `client`. Raises CapacityError."""
        if length_bytes <= 0:
            raise ProtocolError(f"an upload segment of {length_bytes} bytes")
        return self.host.open_upload(client, length_bytes, limit_bytes=self._gradient_budget(client, views))

    def _gradient_budget(self, client: object, views: Sequence[View]) -> int:
        """The limit on the bytes of all upload areas: the setting; without it, every expert's gradient once per writer, and room
        for a few whole records per view."""
        if self.config.gradient_budget_bytes is not None:
            return self.config.gradient_budget_bytes
        limit = self.host.upload_bytes - self.host.upload_bytes_of(client)
        for view in views:
            schema = view.namespace.schema
            limit += 16 * max(schema.record_bytes, schema.initial_bytes) + (4 << 20)
            if view.is_writer and schema.is_trainable:
                limit += len(view.namespace.keys) * schema.gradient_bytes
        return limit

    def _gradient_share(self, view: View) -> int | None:
        """The part of the gradient budget that a rank may count on; None without that setting, and for a reader."""
        budget = self.config.gradient_budget_bytes
        return None if budget is None or view.group is None else budget // view.group.world_size

    def verify(self, namespace: str | None, keys: Sequence[ExpertKey] | None, bytes_per_s: int | None) -> Scrub:
        """Begins a scrub, which `scrubber` waits for and cancels. Raises as `Scrubber.start`."""
        return self.scrubber.start(namespace, keys, bytes_per_s)

    def steps(self, view: View) -> list[int]:
        return view.namespace.ledger.steps()

    def snapshots(self, view: View) -> list[int]:
        return view.namespace.ledger.snapshots()

    async def snapshot(self, view: View, step: int) -> None:
        """Makes `step` a snapshot, which stays until it is dropped. Raises StepDropped, CapacityError."""
        check_unclaimed(view.namespace, what="snapshot")
        await self.admission.snapshot(view.namespace, step)

    async def drop_snapshot(self, view: View, step: int) -> None:
        check_unclaimed(view.namespace, what="drop_snapshot")
        await self.admission.drop_snapshot(view.namespace, step)

    def extra(self, view: View, step: int) -> bytes:
        return view.namespace.ledger.step(step).extra

    def residency(self, view: View) -> dict[str, object]:
        return residency(view.namespace)

    async def stats(self) -> dict[str, object]:
        """Counters and sizes of everything, as `status` and the demo show them."""
        now_s = self._clock.now_s()
        return {
            "daemon": {
                "pid": os.getpid(), "version": __version__, "uptime_s": self._clock.now_s() - self._started_s,
                "store_uuid": self.store_uuid.hex(), "accepts_writes": self._transactions.stopped is None,
                "adamw": known_state(),
            },
            "tiers": {"host": await self.host.stats(), **self._volumes.tier_stats(self._transfers.traffic)},
            "volumes": volume_stats(self._volumes, self._transfers.traffic), "catalog": disk_stats(self.config.dir),
            "queues": {
                str(lane): {"queued": stats.queued, "running": stats.running}
                for lane, stats in self._runner.scheduler.stats().items()
            },
            "namespaces": {name: namespace_stats(namespace, now_s) for name, namespace in self.namespaces.items()},
            "verify": self.scrubber.stats(), "patrol": self.patrol.stats(),
        }  # fmt: skip

    async def close(self) -> None:
        """Waits, within `shutdown_timeout_s`, for what is under way; then closes volumes, catalog and threads."""
        for namespace in self.namespaces.values():
            with self._transfers.deciding() as planner:
                planner.request_stop(namespace)  # an apply stops at its next record; it was never acknowledged
        stopping = StoreUnavailable("the daemon is stopping")
        await asyncio.gather(self.scrubber.close(stopping), self.patrol.close())
        self._runner.cancel_waiting(Urgency.PREFETCH, stopping)
        deadline_s = self._clock.now_s() + self.config.shutdown_timeout_s
        while not self._runner.is_idle and self._clock.now_s() < deadline_s:
            await asyncio.sleep(0.01)
        await asyncio.gather(self.ranks.close(), self.admission.close())
        await self._volumes.close()
