"""The power fails at every write, flush and transaction of a run; whatever reached the disks, the promise holds.

Last acknowledged step <= reopened step <= last started; every record whole and of that step; what was acknowledged before
any commit (a namespace) is there; and the reopened store can be trained on.
"""

from __future__ import annotations

import asyncio
import logging
import mmap
from collections.abc import Iterator
from random import Random
from typing import Any

import pytest
import torch

from paramstore.core.key import ExpertKey
from paramstore.core.optimizers import AdamW
from paramstore.core.schema import Schema
from paramstore.engine.store import Store
from paramstore.engine.tables.namespace import View
from paramstore.optim.tensors import field_tensor
from paramstore.testing.volumes import Keep, drop_write, keep_all, keep_none, keep_random, tear_write
from paramstore_testkit.disks.journal import Journal, Replay
from paramstore_testkit.disks.machine import Machine, PlainSegment

MIB = 1 << 20
SCHEMA = Schema.adamw({"w": (8, 8), "v": (5,)}, param_dtype="float32")
KEYS = [(0, expert) for expert in range(4)]
VOLUME_BYTES = 14 * MIB
HOST_BYTES = 16 * MIB
LIMIT_S = 120

Images = dict[ExpertKey, bytes]
Keeps = dict[int, Keep]


def image(seed: int, fields: Any, length_bytes: int) -> PlainSegment:
    segment = PlainSegment(length_bytes)
    generator = torch.Generator().manual_seed(seed)
    for field in fields:
        field_tensor(segment.view(0, length_bytes), field).copy_(torch.randn(field.elements, generator=generator))
    return segment


async def read_all(store: Store, view: View) -> Images:
    """Every record as `view` sees it, without its header, whose epoch and sequence are the store's own business."""
    images = {}
    target = memoryview(mmap.mmap(-1, SCHEMA.record_bytes))
    for key in KEYS:
        await store.reading.read(view, key, target)
        images[key] = bytes(target[SCHEMA.stored.header_bytes :])
    return images


class Run:
    """A trainer's life, once. Everything it was promised, by the number of events that had happened then."""

    def __init__(self, *, volume_count: int) -> None:
        self.journal = Journal()
        self.machine = Machine(
            seed=7, volume_count=volume_count, volume_bytes=VOLUME_BYTES, volume_size_bytes=VOLUME_BYTES,
            host_budget_bytes=HOST_BYTES,
        )  # fmt: skip
        self.images: dict[int, Images] = {}
        self.started: list[tuple[int, int]] = []
        """(events before, step)"""
        self.acknowledged: list[tuple[int, int]] = []
        self.created_at = 0
        self.seed = 0
        self.store: Store
        self.view: View

    async def live(self) -> None:
        self.journal.watch(self.machine)
        self.store = self.machine.start()
        self.view = await self.store.admission.create("moe", SCHEMA.describe(), layers=[0], experts=len(KEYS), host_bytes=None)
        self.created_at = len(self.journal.events)
        await self.store.initializer.begin(self.view)
        for key in KEYS:
            initial = image(key[1], SCHEMA.initial_fields(), SCHEMA.initial_bytes)
            await self.store.initializer.put(self.view, key, initial.view(0, SCHEMA.initial_bytes))
        await self.store.initializer.end(self.view)
        await self.commit(1)
        await self.apply(KEYS[:3])
        await self.store.write_back(self.view, None)
        await self.apply(KEYS[2:])
        await self.commit(2)
        await self.apply(KEYS)
        await self.store.evict(self.view, None, None)
        await self.store.rollback(self.view, 2)
        await self.apply(KEYS[1:])
        await self.commit(5)
        self.view = await self.store.admission.open("moe", mode="write", at=None, host_bytes=None)
        for step in (6, 9, 12):  # by now the first steps are dropped, and their extents written again
            await self.apply(KEYS)
            await self.commit_while_training(step)
        await self.commit(20)

    async def apply(self, keys: list[ExpertKey]) -> None:
        entries = []
        for key in keys:
            self.seed += 1
            entries.append((key, image(self.seed, SCHEMA.gradient_fields(), SCHEMA.gradient_bytes), 0))
        self.store.applies.push(self.view, entries)
        await self.store.applies.apply(self.view, AdamW(lr=0.1), 1.0)

    async def commit(self, step: int) -> None:
        self.images[step] = await read_all(self.store, self.view)
        self.started.append((len(self.journal.events), step))
        await self.store.committer.commit(self.view, step, f"extra {step}".encode())
        self.acknowledged.append((len(self.journal.events), step))

    async def commit_while_training(self, step: int) -> None:
        """The next updates and their write-backs run beside the commit's own writes."""
        commit = asyncio.ensure_future(self.commit(step))
        while self.view.namespace.cut is None:
            await asyncio.sleep(0)
        await self.apply(KEYS[1:])
        await self.store.write_back(self.view, None)
        await self.apply(KEYS[1:3])
        await self.store.write_back(self.view, KEYS[1:2])
        await commit

    # --- the promise

    async def check(self, machine: Machine, events: int, *, goes_on: bool) -> None:
        """After a crash when `events` had happened. goes_on: a trainer takes the store up again, and crashes once more."""
        store = machine.start()
        if events >= self.created_at:
            assert "moe" in store.namespaces, "an acknowledged namespace is gone"
        namespace = store.namespaces.get("moe")
        step = namespace.committed_step if namespace is not None else None
        least = max((step for at, step in self.acknowledged if at <= events), default=None)
        most = max((step for at, step in self.started if at <= events), default=None)
        assert (least is None or (step is not None and least <= step)), f"step {step}, {least} was acknowledged"
        assert step is None or (most is not None and step <= most), f"step {step}, {most} was started last"
        if step is not None:
            view = await store.admission.open("moe", mode="read", at=None, host_bytes=None)
            assert view.namespace.ledger.step(step).extra == f"extra {step}".encode()
            for retained in view.namespace.ledger.steps():
                reader = await store.admission.open("moe", mode="read", at=retained, host_bytes=None)
                assert await read_all(store, reader) == self.images[retained], f"records of step {retained}"
        if step is not None and goes_on:
            await self.go_on(machine, store)

    async def go_on(self, machine: Machine, store: Store) -> None:
        view = await store.admission.open("moe", mode="write", at=None, host_bytes=None)
        entries = [(key, image(99, SCHEMA.gradient_fields(), SCHEMA.gradient_bytes), 0) for key in KEYS[:2]]
        store.applies.push(view, entries)
        await store.applies.apply(view, AdamW(lr=0.1), 1.0)
        await store.committer.commit(view, 100, b"")
        expected = await read_all(store, view)
        await machine.crash()
        again = machine.start()
        reader = await again.admission.open("moe", mode="read", at=100, host_bytes=None)
        assert await read_all(again, reader) == expected


def crash_states(replay: Replay, source: Random) -> Iterator[tuple[str, Keeps]]:
    """Which of the unflushed writes may be there: none, all, all but one, one torn, one volume's only, any."""
    volumes = list(replay.disks)
    yield "none", dict.fromkeys(volumes, keep_none)
    unflushed = replay.unflushed
    if not unflushed:
        return
    everything: Keeps = dict.fromkeys(volumes, keep_all)
    yield "all", everything
    for volume in volumes[1:]:
        yield f"all but volume {volume}", {**everything, volume: keep_none}
    for volume, number, sectors in unflushed:
        yield f"write {number} of volume {volume} lost", {**everything, volume: drop_write(number)}
        kept = source.randrange(1, sectors)
        others = source.choice((keep_all, keep_none))
        torn = {**dict.fromkeys(volumes, others), volume: tear_write(number, kept)}
        yield f"write {number} of volume {volume} torn after {kept} sectors, {others.__name__} elsewhere", torn
    for _ in range(2):
        seed = source.randrange(1 << 30)
        yield f"random {seed}", {volume: keep_random(seed + volume) for volume in volumes}


async def try_all(run: Run, *, seed: int, share: float, volume_count: int) -> int:
    """Crashes in a `share` of all states, every point of the run in at least one; gives how many."""
    source = Random(seed)
    replay = Replay(volume_count=volume_count, volume_bytes=VOLUME_BYTES)
    tried = 0
    for events in range(len(run.journal.events) + 1):
        if events:
            replay.advance(run.journal.events[events - 1])
        states = list(crash_states(replay, source))
        chosen = states[:2] + [state for state in states[2:] if source.random() < share]
        for name, keeps in chosen:
            tried += 1
            try:
                machine = replay.machine(keeps, host_budget_bytes=HOST_BYTES)
                await run.check(machine, events, goes_on=tried % 16 == 0)
            except BaseException as error:
                before = run.journal.events[events - 1] if events else "nothing"
                error.add_note(f"crash after event {events} ({str(before)[:80]}), writes kept: {name}; seed {seed}")
                raise
    return tried


def crash_everywhere(*, seed: int, share: float, volume_count: int) -> int:
    async def scenario() -> int:
        run = Run(volume_count=volume_count)
        await run.live()
        return await try_all(run, seed=seed, share=share, volume_count=volume_count)

    return asyncio.run(asyncio.wait_for(scenario(), LIMIT_S))


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> None:
    """Thousands of crashes log nothing: the note on a failure names its seed."""
    caplog.set_level(logging.ERROR, logger="paramstore.testing.volumes")
    caplog.set_level(logging.ERROR, logger="paramstore.storage")


@pytest.mark.slow
@pytest.mark.parametrize(("volume_count", "share"), [(1, 1.0), (2, 0.5)])
def test_a_crash_at_any_point_leaves_a_whole_committed_step(volume_count: int, share: float) -> None:
    tried = crash_everywhere(seed=volume_count, share=share, volume_count=volume_count)
    assert tried > 300
