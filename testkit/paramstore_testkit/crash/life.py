"""Lets a trainer live on a journaled machine, as a seed decides, beside a model of what every committed step must hold.

The model runs the optimizer itself (torch's, on tensors of its own) and never asks the store. A life has: creation,
initial values, commits of some of the records, write-backs in between, commits beside training, readers on old steps,
rollbacks, re-openings as writer, snapshots, steps in two halves, writes and flushes that fail, and transactions that
fail with either outcome.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Literal

import msgspec

from paramstore.core.key import ExpertKey
from paramstore.core.optimizers import AdamW
from paramstore.core.schema import Schema, round_up
from paramstore.engine.store import Store
from paramstore.engine.tables.namespace import View
from paramstore.errors import CatalogError, ParamStoreError, VolumeError
from paramstore.storage.catalog.base import Contents
from paramstore.storage.format.structures import Superblock, extents_start_bytes
from paramstore.testing.catalogs import FaultyCatalog, MemoryCatalog
from paramstore.testing.volumes import MemoryVolume
from paramstore_testkit.disks.crash_disk import copied
from paramstore_testkit.disks.journal import Journal, JournaledVolume, Noted
from paramstore_testkit.disks.machine import MIB, Machine
from paramstore_testkit.oracles.experts import Expert, State
from paramstore_testkit.oracles.images import fill, gradient_of
from paramstore_testkit.oracles.trained_model import TrainedModel, extra_of
from paramstore_testkit.trial import Trial

NAME = "moe"
SCHEMA = Schema.adamw({"w": (32, 32), "v": (900,)}, param_dtype="float32")
"""Schema of the records: one field fills whole sectors, the other ends within one."""
KEYS: list[ExpertKey] = [(0, expert) for expert in range(4)]
OPTIONS = AdamW(lr=1e-2)
VOLUME_BYTES = round_up(extents_start_bytes(Superblock(bytes(16), bytes(16), 0)) + 2 * MIB, MIB)
HOST_BYTES = 16 * MIB
PIECE_BYTES = 8192
"""Size of a piece: a record is written in several, the one with the header last."""
OUTCOMES: tuple[Literal["lost", "durable"], ...] = ("lost", "durable")

ACTS = {
    "train": 6, "train few": 4, "write back": 3, "commit": 6, "commit beside training": 3, "evict": 1, "reader": 2, "refresh": 1,
    "leave": 1, "rollback": 1, "rollback further": 1, "reopen": 1, "failing flush": 1, "failing write": 1,
    "failing transaction": 1, "snapshot": 1, "drop snapshot": 1, "prepare": 1,
}  # fmt: skip
"""Weight of each act in the draw."""
Act = str


@lru_cache(maxsize=1 << 12)
def image_of(expert: Expert) -> bytes:
    """Gives the bytes after the header of the expert's record."""
    part = SCHEMA.stored
    return bytes(fill(memoryview(bytearray(part.image_bytes)), part.fields, expert.fields)[part.header_bytes :])


class Life(Trial):
    """One run. Crash states are checked against its `journal` and the steps of its `model`, in which draft n is step -n."""

    def __init__(self, machine: Machine, *, seed: int, steps: Mapping[int, State] | None = None, updates: str = "touched") -> None:
        super().__init__(seed)
        self.journal = Journal()
        self.machine = machine
        self.model = TrainedModel(replace(SCHEMA, updates=updates), first_value=seed << 20, first_step=max((0, *(steps or ()))) + 1)
        self.model.steps |= steps or {}
        self.volumes: list[JournaledVolume] = []
        self.readers: list[View] = []
        self.store: Store
        self.view: View

    async def start(self) -> None:
        """Starts the daemon."""
        self.journal.watch(self.machine)
        self.volumes = [volume for volume in self.machine.volumes.values() if isinstance(volume, JournaledVolume)]
        self.catalog = FaultyCatalog(self.machine.catalog, fail_at=0, outcome="lost")
        self.machine.catalog = self.catalog
        self.store = self.machine.start()

    async def resume(self) -> None:
        """Starts the daemon after a crash, and opens as writer what it finds."""
        await self.start()
        if NAME not in self.store.namespaces or self.store.namespaces[NAME].steps.committed_step is None:
            return
        self.model.next_step = max(self.committed or 0, self.prepared or 0) + 1
        await self.open()

    async def open(self) -> None:
        """Opens as writer; a prepared step is committed, or given up."""
        prepared, at = self.prepared, None
        if prepared is not None:
            at = self.random.choice((prepared, self.committed_now()))
            self.note("finalizing" if at == prepared else "rolling back", at)
        self.view = await self.store.admission.open(NAME, mode="write", at=at, host_bytes=None)
        if at is not None:
            self.note("acknowledged" if at == prepared else "rolled back", at)
        self.model.working = self.model.steps[self.committed_now()]

    @property
    def prepared(self) -> int | None:
        return self.store.namespaces[NAME].steps.prepared_step

    @property
    def committed(self) -> int | None:
        return self.store.namespaces[NAME].steps.committed_step

    def committed_now(self) -> int:
        step = self.committed
        assert step is not None
        return step

    @property
    def can_train(self) -> bool:
        return NAME in self.store.namespaces and self.committed is not None

    def note(self, what: str, step: int = 0) -> None:
        self.journal.events.append(Noted(what, step))

    # --- acts

    async def act(self, name: Act) -> None:
        match name:
            case "train":
                await self.train(KEYS)
            case "train few":
                await self.train(self.some_keys())
            case "write back":
                await self.store.write_back(self.view, self.random.choice((None, self.some_keys())))
            case "commit":
                await self.commit()
            case "commit beside training":
                await self.commit_beside_training()
            case "evict":
                await self.store.evict(self.view, None, None)
            case "reader" if len(self.readers) < 3:
                self.readers.append(await self.store.admission.open(NAME, mode="read", at=None, host_bytes=None))
            case "refresh" if self.readers:
                self.store.refresh(self.random.choice(self.readers))
            case "leave" if self.readers:
                self.store.close_view(self.readers.pop(0))
            case "rollback":
                await self.rollback(self.committed_now())
            case "rollback further":
                least = max(self.view.namespace.steps.ledger.snapshots(), default=0)
                await self.rollback(
                    self.random.choice([step for step in self.view.namespace.steps.ledger.steps() if step >= least])
                )
            case "snapshot":
                step = self.random.choice(self.view.namespace.steps.ledger.steps())
                await self.store.admission.snapshot(self.view, step)
                self.note("kept", step)
            case "drop snapshot" if self.view.namespace.steps.ledger.snapshots():
                step = self.view.namespace.steps.ledger.snapshots()[0]
                self.note("dropping", step)
                await self.store.admission.drop_snapshot(self.view, step)
            case "prepare":
                await self.prepare(self.random.choice(("finalize", "finalize", "go back", "reopen", "restart")))
            case "reopen":
                old = self.view
                await self.open()
                self.store.close_view(old)
            case "failing flush":
                await self.fail("flush")
            case "failing write":
                await self.fail("write")
            case "failing transaction":
                await self.fail_transaction(self.random.choice(OUTCOMES))
            case "lost transaction":
                await self.fail_transaction("lost")

    def some_keys(self) -> list[ExpertKey]:
        return self.random.sample(KEYS, self.random.randint(1, len(KEYS) - 1))

    async def train(self, keys: list[ExpertKey]) -> None:
        gradients = {key: self.model.next_values() for key in keys}
        self.model.train(gradients, OPTIONS)
        self.store.applies.push(self.view, [(key, gradient_of(SCHEMA, values), 0) for key, values in gradients.items()])
        await self.store.applies.apply(self.view, OPTIONS, 1.0)

    async def commit(self) -> None:
        step = self.model.take_step(self.random)
        self.note("started", step)
        await self.store.committer.commit(self.view, step, extra_of(step))
        self.note("acknowledged", step)

    async def prepare(self, ending: str) -> None:
        """Commits in two halves, or makes only the first of them. A transaction of either may fail."""
        await self.train(self.some_keys())
        if self.random.random() < 0.3:
            self.catalog.fail_next(self.random.choice(OUTCOMES))
        step = self.model.take_step(self.random)
        self.note("preparing", step)
        try:
            await self.store.committer.prepare(self.view, step, extra_of(step))
        except CatalogError:
            await self.commit()
            return
        self.note("prepared", step)
        if ending == "restart":
            await self.restart()
        elif ending == "reopen":
            old = self.view
            await self.open()
            self.store.close_view(old)
        elif ending == "go back":
            await self.rollback(self.committed_now())
        else:
            await self.finalize(step)

    async def finalize(self, step: int) -> None:
        if self.random.random() < 0.3:
            self.catalog.fail_next(self.random.choice(OUTCOMES))
        self.note("finalizing", step)
        try:
            await self.store.history.finalize(self.view, step)
        except CatalogError:
            await self.store.history.finalize(self.view, step)
        self.note("acknowledged", step)

    async def commit_beside_training(self) -> None:
        """Commits, while the next updates and their write-backs run beside the commit's own writes."""
        await self.train(self.some_keys())
        commit = asyncio.ensure_future(self.commit())
        while self.view.namespace.steps.cut is None and not commit.done():
            await asyncio.sleep(0)
        await self.train(self.some_keys())
        await self.store.write_back(self.view, None)
        await self.train(self.some_keys())
        await commit

    async def rollback(self, step: int) -> None:
        self.note("rolling back", step)
        await self.store.rollback(self.view, step)
        self.note("rolled back", step)
        self.model.working = self.model.steps[step]

    async def fail(self, operation: str) -> None:
        """Lets a write or a flush of a commit fail. A commit that does not survive this is rolled back and tried once more, by a
        new daemon where a fence stands in the way."""
        await self.train(self.some_keys())
        volume = self.random.choice(self.volumes)
        volume.failing.append(operation)
        try:
            await self.commit()
        except ParamStoreError:
            if self.must_restart():
                await self.restart()
                await self.train(self.some_keys())
            elif self.view.namespace.writing.broken is not None:
                await self.rollback(self.committed_now())
                await self.train(self.some_keys())
            await self.commit()
        volume.failing.clear()  # otherwise still set on a volume to which nothing was written
        if self.must_restart():
            await self.restart()

    def must_restart(self) -> bool:
        """Whether no step can be proven any more, or no volume takes a record."""
        fences = self.store.transfers._planner.space.fences
        try:
            fences.check_provable()
        except VolumeError:
            return True
        return all(fences.is_fenced(volume.index) for volume in self.volumes)

    async def restart(self) -> None:
        """Ends the daemon and starts it again without a power cut; the writer opens what it finds."""
        await self.machine.kill()
        self.readers.clear()
        self.store = self.machine.start()
        await self.open()

    async def fail_transaction(self, outcome: Literal["lost", "durable"]) -> None:
        await self.train(self.some_keys())
        self.catalog.fail_next(outcome)
        try:
            await self.commit()
        except CatalogError:
            await self.commit()


def new_machine(seed: int, *, volume_count: int) -> Machine:
    return _adapted(
        Machine(
            seed=seed, volume_count=volume_count, volume_bytes=VOLUME_BYTES, volume_size_bytes=VOLUME_BYTES,
            host_budget_bytes=HOST_BYTES,
        ),
        seed,
    )  # fmt: skip


def machine_of(images: Mapping[int, memoryview], contents: Contents, *, seed: int) -> Machine:
    """Makes the machine with disks and catalog as a crash left them."""
    machine = Machine(seed=seed, volume_count=0, volume_size_bytes=VOLUME_BYTES, host_budget_bytes=HOST_BYTES)
    machine.disks = {index: MemoryVolume.of(copied(image), index=index) for index, image in images.items()}
    machine.volumes = dict(machine.disks)
    machine.durable = MemoryCatalog(contents)
    machine.catalog = machine.durable
    return _adapted(machine, seed)


def _adapted(machine: Machine, seed: int) -> Machine:
    """Cuts transfers small. With an odd seed each volume is faster than the one before it."""
    if seed % 2:
        machine.speed_classes = {index: len(machine.disks) - 1 - index for index in machine.disks}
    machine.config = msgspec.structs.replace(machine.config, piece_bytes=PIECE_BYTES)
    return machine
