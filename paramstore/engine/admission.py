"""Who may open which namespace: creation, writers and readers, and the memory and volume space that they need.

One lock serialises what takes memory or space, so that two openings at once are never given the same bytes. An opening that is
refused leaves nothing behind.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

from paramstore.config import Retention
from paramstore.core.key import KeySpace, check_name
from paramstore.core.schema import Schema
from paramstore.engine.capacity.host import HostTier
from paramstore.engine.capacity.recall import RECALL_WAIT_S, Recall
from paramstore.engine.capacity.volumes import VolumeSet
from paramstore.engine.planner.permission import check_unclaimed, prepared_error
from paramstore.engine.planner.planner import fresh_namespace
from paramstore.engine.planner.promises import Opening
from paramstore.engine.ranks import Ranks
from paramstore.engine.records.cleaner import Cleaner
from paramstore.engine.steps.history import History
from paramstore.engine.steps.transactions import Transactions
from paramstore.engine.tables.namespace import NamespaceState, View, WriterGroup
from paramstore.engine.transfers.arithmetic import load
from paramstore.engine.transfers.runner import CPU_LANE
from paramstore.engine.transfers.transfers import Transfers
from paramstore.errors import (
    CapacityError,
    ConfigError,
    NamespaceExists,
    StepDropped,
    StepFailed,
    UnknownNamespace,
)
from paramstore.storage.catalog.base import Change, NamespaceContents, NamespaceRow
from paramstore.storage.catalog.ledger import Ledger
from paramstore.storage.format.structures import pack_description

T = TypeVar("T")

UNMAP_TIMEOUT_S = 1.0
"""How long to wait for clients that were asked to unmap memory; one that reads its socket answers in a millisecond."""
IDLE_TIMEOUT_S = 10.0
"""How long to wait for the last transfers of a namespace that nobody has open, before its memory is left alone."""
IDLE_PAUSE_S = 0.002


class Admission:
    """Opens namespaces; owns the table of them."""

    def __init__(
        self, transfers: Transfers, host: HostTier, volumes: VolumeSet, cleaner: Cleaner,
        history: History, transactions: Transactions, ranks: Ranks, namespaces: dict[str, NamespaceState], *, retention: Retention,
        recall_wait_s: float = RECALL_WAIT_S,
    ) -> None:  # fmt: skip
        self._transfers = transfers
        self._host = host
        self._volumes = volumes
        self._cleaner = cleaner
        self._history = history
        self._transactions = transactions
        self._ranks = ranks
        self._namespaces = namespaces
        self._retention = retention
        self._recall_wait_s = recall_wait_s
        self._lock = asyncio.Lock()
        self._snapshot_lock = asyncio.Lock()
        """Serialises snapshots; not `_lock`, since a snapshot waits for a commit under way and must not hold up openings."""
        self._opening: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        """One lock for each namespace, by name; the writer that is opening it holds it."""
        self._growing: set[asyncio.Task[None]] = set()

    def list_namespaces(self) -> list[dict[str, object]]:
        return [
            {
                "name": namespace.name, "schema": namespace.schema.describe(), "layers": list(namespace.keys.layers),
                "experts": namespace.keys.experts, "committed_step": namespace.steps.committed_step,
                "prepared_step": namespace.steps.ledger.prepared_step, "epoch": namespace.epoch,
            }
            for namespace in self._namespaces.values()
        ]  # fmt: skip

    async def create(
        self, name: str, description: dict[str, Any], *, layers: Sequence[int], experts: int, host_bytes: int | None,
        group: WriterGroup | None = None,
    ) -> View:  # fmt: skip
        """Returns a writer's view of a new namespace, or of an existing one with equal schema and no commit yet. group: given where
        several ranks open together. Raises NamespaceExists, SchemaMismatch, CapacityError naming what is missing; nothing is left
        behind then."""
        check_name(name)
        schema = Schema.from_description(description)
        keys, opening = KeySpace.of(tuple(layers), experts), Opening(group or WriterGroup())
        async with self._lock:
            existing = self._namespaces.get(name)
            if existing is None:
                return await self._create(name, schema, keys, host_bytes, opening)
            self._check_reusable(existing, schema, keys)
        with self._recall(existing, opening) as recall:
            return await self._open_writer(existing, host_bytes, recall, at=None)

    async def _create(self, name: str, schema: Schema, keys: KeySpace, host_bytes: int | None, opening: Opening) -> View:
        self._host.check_least(name, schema, len(keys), host_bytes)
        pack_description(schema, keys)  # what does not fit a commit note is refused now, not at the first commit
        row = NamespaceRow(name, schema.describe(), keys.layers, keys.experts, epoch=1, sequence=0)
        retained, held = self._retention.retained_steps, self._retention.held_steps
        namespace = make_namespace(Ledger(NamespaceContents(row), retained_steps=retained, held_steps=held))
        try:
            await self._open_memory(namespace, host_bytes)  # before the volumes: they cannot shrink again
            await self._volumes.make_room(namespace, beside=self._namespaces.values(), give_back=self._history.give_back)
            await self._transactions.apply_change(Change(put_namespaces=(row,)))
        except BaseException:
            self._volumes.give_up(name)
            await self._host.stop_growing(namespace)
            self._host.close_arenas(namespace)
            raise
        self._namespaces[name] = namespace
        return self._open_view(namespace, opening)

    @staticmethod
    def _check_reusable(existing: NamespaceState, schema: Schema, keys: KeySpace) -> None:
        there, asked = _shape(existing.schema, existing.keys), _shape(schema, keys)
        if different := [f"{name}={there[name]!r:.200}, not {asked[name]!r:.200}" for name in asked if there[name] != asked[name]]:
            raise NamespaceExists(f"namespace {existing.name!r} exists with {'; '.join(different)}: give this one another name")
        if existing.steps.committed_step is not None:
            raise NamespaceExists(
                f"namespace {existing.name!r} is committed at step {existing.steps.committed_step}: open_namespace(mode='write') "
                "to go on"
            )

    async def open(
        self, name: str, *, mode: str, at: int | None, host_bytes: int | None, min_lease_slots: int = 0,
        max_lease_slots: int | None = None, group: WriterGroup | None = None,
    ) -> View:  # fmt: skip
        """Returns a view of `name`. Mode "write" fences earlier writers and rolls back to `at`, or to the committed step; a
        prepared step is committed if it is `at`. Mode "read" stands on `at`, or on the committed step. Raises UnknownNamespace,
        StepDropped, StepFailed to a reader before the first commit, StepPrepared to a writer without `at` while a step is prepared,
        CapacityError where `min_lease_slots` are not left, or were lent and have not come back in time. max_lease_slots: of a
        reader."""
        if mode not in ("read", "write"):
            raise ConfigError(f"mode={mode!r}: use 'read' or 'write'")
        namespace = self._namespaces.get(name)
        if namespace is None:
            known = ", ".join(sorted(self._namespaces)) or "none"
            raise UnknownNamespace(f"there is no namespace {name!r}; there are: {known}")
        if mode == "read":
            self.reader_step(namespace, at)  # refused before any memory moves
            opening = Opening(None, min_lease_slots, max_lease_slots)

            def open_reader() -> View:
                step = self.reader_step(namespace, at)  # a commit may have dropped it meanwhile
                return self._open_view(namespace, opening, step)

            with self._recall(namespace, opening) as recall:
                return await self._with_memory(namespace, host_bytes, recall, open_reader)
        with self._recall(namespace, Opening(group or WriterGroup(), min_lease_slots)) as recall:
            await self._check_slots(namespace, host_bytes, recall)
            prepared = namespace.steps.prepared_step  # this includes a step that is still being prepared
            if at is not None and at != prepared:
                namespace.steps.ledger.check_rollback(at)  # refused before anybody is fenced
            elif at is None and prepared is not None:
                raise prepared_error(namespace, what="open_namespace")
            return await self._open_writer(namespace, host_bytes, recall, at=at)

    def _recall(self, namespace: NamespaceState, opening: Opening) -> Recall:
        return Recall(self._transfers, namespace, opening, wait_s=self._recall_wait_s)

    async def _with_memory(
        self, namespace: NamespaceState, host_bytes: int | None, recall: Recall, finish: Callable[[], T]
    ) -> T:
        """Does `finish` once the namespace has its memory, and what readers were lent too much has come back or time is over. While
        it waits for that others may open."""
        while True:
            async with self._lock:
                await self._open_memory(namespace, host_bytes)
                if recall.is_over():
                    return finish()
            await recall.wait()

    @staticmethod
    def reader_step(namespace: NamespaceState, at: int | None) -> int:
        """The step that a reader gets who asks for `at`, or for the newest. Raises StepDropped; StepFailed before the first."""
        newest = namespace.steps.standing_step
        if newest is None:
            raise StepFailed(f"namespace {namespace.name!r} has no committed step yet: only a writer can open it")
        if at is None:
            return newest
        if at in namespace.steps.closing_steps:
            raise StepDropped(f"step {at} of {namespace.name!r} is being dropped")
        return namespace.steps.ledger.step(at).step

    async def _open_writer(self, namespace: NamespaceState, host_bytes: int | None, recall: Recall, *, at: int | None) -> View:
        """Fences the present writer and rolls back. The rollback waits for a commit of this namespace, so it runs outside the lock:
        other namespaces can be opened meanwhile. Writers that come at once open in turn, and each fences the one before."""
        self._fence(namespace)  # at once; the caller has checked just before that the slots asked for are left
        async with self._opening[namespace.name]:
            await self._check_slots(namespace, host_bytes, recall)
            self._fence(namespace)
            await self._history.reopen(namespace, at=at)
            return await self._with_memory(namespace, host_bytes, recall, partial(self._open_view, namespace, recall.opening))

    def _open_view(self, namespace: NamespaceState, opening: Opening, step: int | None = None) -> View:
        with self._transfers.deciding() as planner:
            return planner.views.open(namespace, opening, step=step)

    def _fence(self, namespace: NamespaceState) -> None:
        if namespace.writing.group is not None:
            self._ranks.fence(namespace.writing.group)

    async def _check_slots(self, namespace: NamespaceState, host_bytes: int | None, recall: Recall) -> None:
        """Raises CapacityError where a writer that opens now cannot be promised the slots that it asks for; it fences nobody."""
        if not recall.opening.least:
            return

        def check() -> None:
            with self._transfers.deciding() as planner:
                planner.views.promise(namespace, recall.opening)

        await self._with_memory(namespace, host_bytes, recall, check)

    async def snapshot(self, view: View, step: int) -> None:
        """Makes room for one more step and keeps `step` durably, until it is dropped; nothing to do if it is kept. Raises
        StepDropped, CapacityError, and StepOutOfOrder while an open apply is under way."""
        namespace = view.namespace
        check_unclaimed(namespace, what="snapshot")
        async with self._snapshot_lock:
            if namespace.steps.ledger.step(step).is_snapshot:
                return
            count = len(namespace.steps.ledger.snapshots()) + 1
            async with self._lock:
                await self._volumes.make_room(
                    namespace, beside=self._namespaces.values(), snapshots=count, give_back=self._history.give_back
                )
            try:
                await self._history.snapshot(namespace, step, is_kept=True)
            finally:
                self._volumes.entitle(namespace)  # to what there is now, whatever came of it
            if self._volumes.space.shortage_bytes(namespace.name):
                await self._history.give_back(namespace)  # older steps, of which the snapshot is none any more

    async def drop_snapshot(self, view: View, step: int) -> None:
        """Makes the snapshot `step` an ordinary step, which stays as long as any other would. Raises StepDropped if it is none, and
        StepOutOfOrder while an open apply is under way."""
        namespace = view.namespace
        check_unclaimed(namespace, what="drop_snapshot")
        async with self._snapshot_lock:
            await self._history.snapshot(namespace, step, is_kept=False)
            self._volumes.entitle(namespace)

    async def _open_memory(self, namespace: NamespaceState, host_bytes: int | None) -> None:
        """Opens the namespace's arenas; where memory is short, takes back that of namespaces that nobody has open."""
        try:
            await self._open_arenas(namespace, host_bytes)
        except CapacityError:
            idle = [other for other in self._namespaces.values() if not other.views and other.has_memory]
            idle = [other for other in idle if other is not namespace]
            if not idle:
                raise
            for other in idle:
                await self._give_up_memory(other)
            await self._host.until_unmapped(UNMAP_TIMEOUT_S)
            await self._open_arenas(namespace, host_bytes)

    async def _open_arenas(self, namespace: NamespaceState, host_bytes: int | None) -> None:
        """Opens the arenas and returns when the first segment of each is there; the others follow in the background."""
        await self._host.open_arenas(namespace, host_bytes)
        if namespace.is_trainable():
            await self._transfers.runner.call(CPU_LANE, load)
        task = asyncio.get_running_loop().create_task(self._grow(namespace), name=f"grow-{namespace.name}")
        self._growing.add(task)
        task.add_done_callback(self._growing.discard)

    async def _grow(self, namespace: NamespaceState) -> None:
        for arena in namespace.arenas():
            while await self._host.grow(namespace, arena):
                with self._transfers.deciding() as planner:
                    planner.go_on([namespace])

    async def keep_catalog_room(self) -> None:
        """Makes room in the catalog; to be called once, when the store is open. See `VolumeSet.keep_catalog_room`."""
        await self._volumes.keep_catalog_room(self._namespaces.values())

    async def measure_volumes(self) -> None:
        """Measures how fast the volumes are; to be called once, when the store is open. See `Speeds`."""
        await self._volumes.speeds.measure()

    async def close(self) -> None:
        """Stops the tasks that still add segments to arenas."""
        for task in self._growing:
            task.cancel()
        await asyncio.gather(*self._growing, return_exceptions=True)

    async def _give_up_memory(self, namespace: NamespaceState) -> None:
        """Takes back the memory of a namespace that nobody has open, once no worker reads into it or writes from it. What it held
        uncommitted is lost, as it would be at the next opening anyway."""
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + IDLE_TIMEOUT_S
        await self._history.rollback(namespace)
        await self._cleaner.evict(namespace, None, None)
        while any(arena.slots.free_count < arena.slots.count for arena in namespace.arenas()):
            if loop.time() > deadline_s:
                return  # a device hangs: the memory stays where it is
            await asyncio.sleep(IDLE_PAUSE_S)
            await self._cleaner.evict(namespace, None, None)
        await self._host.stop_growing(namespace)
        for client, segments in self._host.close_arenas(namespace).items():
            client.unmap(segments)  # type: ignore[attr-defined]


def make_namespace(ledger: Ledger) -> NamespaceState:
    """Makes the state of a namespace from its ledger; it has no arenas yet."""
    return fresh_namespace(ledger, turn=asyncio.Lock())


def _shape(schema: Schema, keys: KeySpace) -> dict[str, object]:
    """The properties by which two namespaces are compared, named as the arguments of whoever creates one."""
    return {
        "kind": schema.kind, "fields": schema.specs, "gradient_dtype": schema.gradient_dtype, "updates": schema.updates,
        "state_dtype": schema.state_dtype, "layers": keys.layers, "experts": keys.experts,
    }  # fmt: skip
