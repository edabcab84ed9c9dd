"""Runs one life of a small store in which something fails, and checks what must hold afterwards.

The store has two namespaces, `moe` and `other`, each committed at steps 0 and 1. A trial makes the script's calls fail during
one scenario, lets everybody else go on, finds the way on, cuts the power and opens the store again. It fails with an
AssertionError where a promise of `docs/durability.md` is broken; else `outcome` says in two words what became of the caller.
"""

from __future__ import annotations

import asyncio
import mmap
from collections.abc import Awaitable
from typing import Any

from paramstore.core.key import ExpertKey
from paramstore.engine.store import Store
from paramstore.engine.tables.namespace import View
from paramstore.errors import ParamStoreError, VolumeError, WaitTimeout
from paramstore.testing.catalogs import MemoryCatalog
from paramstore.testing.volumes import MemoryVolume
from paramstore_testkit.disks.machine import Machine
from paramstore_testkit.stores.small_store import EXPERTS, SCHEMA, create, first_values, initialize, train
from paramstore_testkit.trials.io_faults import REASONS, DiskImage, Script, ScriptedCatalog, ScriptedVolume

LIMIT_S = 10.0
"""Longest time for a call of the store: beyond it, the store counts as hung."""
VOLUME_COUNT = 2
BLANK_BYTES = 12 << 20
HOST_BYTES = 16 << 20
"""Host memory of each namespace: little enough that a third still fits."""
NAMES = ("moe", "other")
KEYS = [(0, expert) for expert in range(EXPERTS)]
READ_SITES = {"read", "preadv"}
COMMIT_SITES = {"write", "flush", "reserve", "apply", "pwritev", "fdatasync"}
"""Sites without which no commit can be made; an apply to resident records can."""
NOT_READ_BACK = {"an earlier transaction failed", "not loaded since it was opened"}
"""Messages of a catalog that could not be opened again after a failure."""
Images = list[dict[ExpertKey, bytes]]
"""Bytes of every record by the number of applies, without its header, which tells epoch and sequence."""


class Disks:
    """A store that nobody has open, from which trials start."""

    def __init__(self, disks: dict[int, MemoryVolume], catalog: MemoryCatalog) -> None:
        self.images = {index: DiskImage(disk) for index, disk in disks.items()}
        self.catalog = catalog

    @classmethod
    def blank(cls) -> Disks:
        return cls({index: MemoryVolume(BLANK_BYTES, index=index) for index in range(VOLUME_COUNT)}, MemoryCatalog())

    @classmethod
    async def prepared(cls) -> Disks:
        """Makes a store with both namespaces, committed at steps 0 (no apply) and 1 (one apply)."""
        blank = cls.blank()
        machine = blank.machine(0, Script())
        store = machine.start()
        for name in NAMES:
            view = await create(store, name, host_bytes=HOST_BYTES, step=None)
            await store.committer.commit(view, 0, b"0")
            await train(store, view)
            await store.committer.commit(view, 1, b"1")
        await machine.crash()
        return cls(dict(machine.disks), machine.durable)

    def machine(self, seed: int, script: Script) -> Machine:
        """Makes a machine on a copy of these disks, whose calls fail as `script` says until its first crash."""
        machine = Machine(seed=seed, volume_count=0, host_budget_bytes=4 * HOST_BYTES, wait_timeout_s=LIMIT_S)
        disks = {index: image.copy() for index, image in self.images.items()}
        machine.disks = dict(disks)
        machine.volumes = {index: ScriptedVolume(disk, script) for index, disk in disks.items()}
        machine.durable = self.catalog.crash()
        self.catalog.reopen()
        machine.catalog = ScriptedCatalog(machine.durable, script)
        return machine


async def images_after(applies: int) -> Images:
    """Gives the bytes of every record after 0 to `applies` applies: equal for every namespace, since all begin alike."""
    machine = Disks.blank().machine(0, Script())
    store = machine.start()
    view = await create(store, "model", host_bytes=HOST_BYTES, step=None)
    images = [await read_all(store, view)]
    for _ in range(applies):
        await train(store, view)
        images.append(await read_all(store, view))
    await machine.crash()
    return images


async def read_all(store: Store, view: View) -> dict[ExpertKey, bytes]:
    images = {}
    target = memoryview(mmap.mmap(-1, SCHEMA.record_bytes))
    for key in KEYS:
        await store.reading.read(view, key, target)
        images[key] = fields_of(target)
    return images


def fields_of(image: memoryview | bytes | bytearray) -> bytes:
    """Joins the bytes that mean something: all fields, one after the other."""
    return b"".join(image[field.offset_bytes : field.offset_bytes + field.length_bytes] for field in SCHEMA.stored.fields)


class Life:
    """One namespace's steps, as its writer was told of them. applies: the number of applies in the working view."""

    def __init__(self, applies: int, committed: dict[int, int]) -> None:
        self.applies = applies
        self.started = dict(committed)
        """Number of applies that each step covers, by step."""
        self.acknowledged = max(committed, default=None)


class Trial:
    """One run, with all it holds. refusals: (what was asked, the error) of every call that was refused."""

    def __init__(self, machine: Machine, script: Script, images: Images) -> None:
        self.machine = machine
        self.script = script
        self.images = images
        self.lives: dict[str, Life] = {}
        self.writers: dict[str, View] = {}
        self.refusals: list[tuple[str, ParamStoreError]] = []
        self.was_fenced = False
        """Whether a failed flush had ended all commits when the scenario was over."""
        self.store: Store

    # --- calls

    async def ask(self, what: str, call: Awaitable[Any]) -> Any:
        """Awaits the answer for at most LIMIT_S. A refusal is noted and raised; it must be typed, and say where and why."""
        try:
            return await asyncio.wait_for(asyncio.ensure_future(call), LIMIT_S)
        except ParamStoreError as error:
            self.check_message(what, error)
            self.refusals.append((what, error))
            raise
        except TimeoutError:
            raise AssertionError(f"{what} hung for {LIMIT_S} s") from None

    async def tries(self, what: str, call: Awaitable[Any]) -> bool:
        """Whether `call` was answered."""
        try:
            await self.ask(what, call)
        except ParamStoreError:
            return False
        return True

    def check_message(self, what: str, error: ParamStoreError) -> None:
        message = str(error)
        assert not isinstance(error, WaitTimeout), f"{what} hung: {error}"
        assert any(place in message for place in ("volume ", "catalog")), f"{what}: no place in {error!r}"
        reasons = {REASONS[strike.kind] for strike in self.script.strikes} | NOT_READ_BACK
        assert any(reason in message for reason in reasons), f"{what}: none of {reasons} in {error!r}"

    async def open_store(self) -> None:
        async def start() -> Store:
            return self.machine.start()

        self.store = await self.ask("start", start())

    async def open_writer(self, name: str) -> View:
        opening = self.store.admission.open(name, mode="write", at=None, host_bytes=HOST_BYTES)
        view: View = await self.ask(f"open {name}", opening)
        self.writers[name] = view
        self.roll_back_life(name)
        return view

    async def open_reader(self, name: str, at: int | None = None) -> View:
        opening = self.store.admission.open(name, mode="read", at=at, host_bytes=HOST_BYTES)
        view: View = await self.ask(f"read {name}", opening)
        return view

    def roll_back_life(self, name: str) -> None:
        step = self.writers[name].namespace.steps.committed_step
        assert step is not None
        self.lives[name].applies = self.lives[name].started[step]

    async def train(self, name: str) -> None:
        await self.ask(f"train {name}", train(self.store, self.writers[name]))
        self.lives[name].applies += 1

    async def commit(self, name: str) -> None:
        life = self.lives[name]
        step = max(life.started, default=-1) + 1
        life.started[step] = life.applies
        await self.ask(f"commit {name}", self.store.committer.commit(self.writers[name], step, str(step).encode()))
        life.acknowledged = step

    async def roll_back(self, name: str) -> None:
        view = self.writers[name]
        step = view.namespace.steps.committed_step
        assert step is not None
        await self.ask(f"roll back {name}", self.store.rollback(view, step))
        self.roll_back_life(name)

    async def check_records(self, name: str, view: View, applies: int) -> None:
        """Checks that every record, as `view` sees it, is whole and has had that many applies."""
        found = await self.ask(f"records of {name}", read_all(self.store, view))
        assert found == self.images[applies], f"records of {name} are not those of {applies} applies"

    async def check_params(self, name: str, view: View, applies: int) -> None:
        """Checks through leases that every `param` has had that many applies."""
        values = await self.ask(f"leases of {name}", first_values(self.store, view))
        assert values == self.first_params(applies), f"leases of {name} are not those of {applies} applies"

    def first_params(self, applies: int) -> list[float]:
        return [memoryview(self.images[applies][key])[:4].cast("f")[0] for key in KEYS]

    async def create_new(self) -> None:
        """Makes the namespace `new`, committed at step 0."""
        self.lives.setdefault("new", Life(0, {}))
        opening = self.store.admission.create("new", SCHEMA.describe(), layers=[0], experts=EXPERTS, host_bytes=HOST_BYTES)
        self.writers["new"] = await self.ask("create new", opening)
        await self.ask("initialize new", initialize(self.store, self.writers["new"]))
        self.lives["new"].applies = 0
        await self.commit("new")

    # --- before and after

    async def begin(self) -> None:
        """Opens everything; `other` has an apply in memory and its records on the volume, `moe` has nothing in memory."""
        await self.open_store()
        for name in NAMES:
            self.lives[name] = Life(1, {0: 0, 1: 1})
            await self.open_writer(name)
        self.reader = await self.open_reader("moe", at=1)
        await self.train("other")

    @property
    def is_stopped(self) -> bool:
        return self.store._transactions.stopped is not None

    async def others_go_on(self) -> None:
        """Checks that others go on: while a fault lasts, with whatever does not need what fails; after it, with everything."""
        sites = self.script.lasting_sites
        self.was_fenced = self.is_fenced
        if not sites & READ_SITES:
            await self.check_records("moe", self.reader, 1)
            await self.check_params("moe", self.reader, 1)
            step = (await self._steps("other"))[-1 if self.is_stopped else 0]
            await self.check_records("other", await self.open_reader("other", at=step), self.lives["other"].started[step])
        if not await self._is_sound("other"):
            assert self.is_stopped or "apply" in sites, "a broken namespace could not be rolled back"
            return
        await self.check_params("other", self.writers["other"], self.lives["other"].applies)
        if self.is_fenced and not self.is_stopped:
            await self.check_fence()
        elif not sites & COMMIT_SITES and not self.is_stopped:
            if not await self.tries("commit other", self.commit("other")):
                assert len(self.script.strikes) > 1, "a fault that is over reached another namespace"
                assert sites or await self.tries("commit other again", self.commit("other"))
            if not sites:
                await self.train("other")

    @property
    def is_fenced(self) -> bool:
        """Whether a flush has failed, so that no step can be proven before the daemon is started anew."""
        try:
            self.store.transfers._planner.space.fences.check_provable()
        except VolumeError:
            return True
        return False

    @property
    def was_told_of_a_flush(self) -> bool:
        """Whether the store knew that a flush had failed: somebody was refused for it."""
        return any("flush failed" in str(error) for _, error in self.refusals)

    async def check_fence(self) -> None:
        """Checks that no commit succeeds, whoever asks, and no new extent is on the volume whose flush failed."""
        fences = self.store.transfers._planner.space.fences
        step = self.writers["other"].namespace.steps.committed_step
        assert not await self.tries("commit other", self.commit("other")), "a step was committed after a failed flush"
        assert self.writers["other"].namespace.steps.committed_step == step
        if all(map(fences.is_fenced, self.machine.volumes)):
            return
        await self.train("other")
        await self.ask("write back other", self.store.write_back(self.writers["other"], None))
        for copy in self.writers["other"].namespace.residency.working.values():
            assert copy.uncommitted is not None
            assert not fences.is_fenced(copy.uncommitted.extent.volume), "a record was written to a fenced volume"

    async def restart(self) -> None:
        """Ends the daemon without a power cut, and starts a new one, which may use again what failed before."""
        await self.machine.kill()
        self.script.failed.clear()
        await self.open_store()
        for name in self.writers:
            if self.store.namespaces.get(name) is not None and self.store.namespaces[name].steps.committed_step is not None:
                await self.open_writer(name)

    async def _is_sound(self, name: str) -> bool:
        """Whether the namespace can be trained on, after a rollback if it was broken."""
        if self.writers[name].namespace.writing.broken is None:
            return True
        return not self.is_stopped and await self.tries(f"roll back {name}", self.roll_back(name))

    async def find_way_on(self, *, rolls_back: bool) -> None:
        """Makes `moe` and a new namespace work by the documented calls alone, once the fault is over."""
        if self.is_stopped:
            return
        if self.is_fenced:
            await self.restart()
        if "moe" in self.writers:
            if rolls_back or self.writers["moe"].namespace.writing.broken is not None:
                await self.roll_back("moe")
            await self.train("moe")
            await self.commit("moe")
            await self.check_records("moe", self.writers["moe"], self.lives["moe"].applies)
        if "new" in self.lives and self.lives["new"].acknowledged is None:
            await self.create_new()
            await self.check_records("new", self.writers["new"], 0)

    async def crash_and_check(self, *, keeps_random_writes: bool, goes_on: bool) -> None:
        """Cuts the power; checks that all that was acknowledged is there, and all that is there is whole. goes_on: trains on it."""
        self.script.disarm()
        await self.machine.crash(keeps_random_writes=keeps_random_writes)
        await self.open_store()
        for name, life in self.lives.items():
            namespace = self.store.namespaces.get(name)
            step = namespace.steps.committed_step if namespace is not None else None
            least = -1 if life.acknowledged is None else life.acknowledged
            most = max(life.started, default=-1)
            assert least <= (-1 if step is None else step) <= most, f"{name} is at {step}; acknowledged {least}, started {most}"
            if step is None:
                continue
            for retained in await self._steps(name):
                reader = await self.open_reader(name, at=retained)
                await self.check_records(name, reader, life.started[retained])
                assert reader.namespace.steps.ledger.step(retained).extra == str(retained).encode()
            if goes_on:
                view = await self.open_writer(name)
                await self.train(name)
                await self.commit(name)
                await self.check_records(name, view, life.applies)

    async def _steps(self, name: str) -> list[int]:
        return (await self.open_reader(name)).namespace.steps.ledger.steps()
