"""A scrub beside random training, commits, rollbacks and crashes: it finds nothing, and nothing is other than without it.

Everything comes from one seed, printed on failure.
"""

from __future__ import annotations

import asyncio
from random import Random
from typing import Any

import pytest

from paramstore.engine.store import Store
from paramstore.engine.tables.namespace import View
from paramstore.errors import StoreUnavailable, TicketCancelled
from paramstore.upkeep import scrubber
from paramstore_testkit.disks.machine import Machine, PlainSegment
from paramstore_testkit.stores import small_store
from paramstore_testkit.stores.small_store import EXPERTS, SCHEMA, create, keys_of, run, train, turns
from paramstore_testkit.trial import Trial, telling

RECORD_BYTES = SCHEMA.record_bytes
ACTS = {"train": 6, "commit": 5, "write": 2, "evict": 2, "rollback": 1, "reader": 1, "read": 2}
Result = dict[str, Any]


async def verify(machine: Machine) -> Result:
    return await machine.service.scrubber.wait(machine.service.scrubber.start(None, None, None))


async def until_idle(store: Store) -> None:
    while not store.transfers.runner.is_idle:
        await asyncio.sleep(0)


class Work(Trial):
    """A writer's calls in an order that the seed decides, with or without a scrub beside them."""

    def __init__(self, seed: int, *, is_scrubbed: bool) -> None:
        super().__init__(seed)
        self.is_scrubbed = is_scrubbed
        self.machine = Machine(
            seed=seed, volume_count=1 + seed % 2, volume_bytes=12 << 20, volume_size_bytes=12 << 20 if seed % 3 else None
        )
        self.step = 0
        self.results: list[Result] = []
        self.scrubbing: asyncio.Task[None] | None = None
        self.store: Store
        self.view: View
        self.readers: list[View] = []

    async def begin(self) -> None:
        self.store = self.machine.start()
        self.view = await create(self.store)
        self.scrub_on()

    def scrub_on(self) -> None:
        if self.is_scrubbed:
            self.scrubbing = asyncio.ensure_future(self.scrub())

    async def scrub(self) -> None:
        """One after the other; some in the middle are cancelled."""
        random = Random(self.step)
        while True:
            scrub = self.machine.service.scrubber.start(None, None, None)
            if random.random() < 0.2:
                await turns(random.randrange(10))
                self.machine.service.scrubber.cancel(scrub, TicketCancelled("enough"))
            try:
                self.results.append(await self.machine.service.scrubber.wait(scrub))
            except TicketCancelled:
                continue

    async def scrub_off(self) -> None:
        if self.scrubbing is not None:
            self.scrubbing.cancel()
            await asyncio.wait([self.scrubbing])
            await self.machine.service.scrubber.close(StoreUnavailable("the test is over"))
            await until_idle(self.store)

    async def work(self, acts: int) -> None:
        await self.live_through(self.draw(ACTS) for _ in range(acts))

    async def act(self, name: str) -> None:
        keys = self.random.sample(keys_of(self.view), self.random.randint(1, EXPERTS))
        if name == "train":
            await train(self.store, self.view, keys)
        elif name == "commit":
            self.step += 1
            await self.store.committer.commit(self.view, self.step, b"")
        elif name == "write":
            await self.store.write_back(self.view, keys)
        elif name == "evict":
            await self.store.evict(self.view, keys, None)
        elif name == "rollback":
            committed = self.view.namespace.steps.committed_step
            assert committed is not None
            await self.store.rollback(self.view, committed)
        elif name == "reader" and len(self.readers) < 2:
            self.readers.append(await self.store.admission.open("moe", mode="read", at=None, host_bytes=None))
        elif name == "read":
            await small_store.first_values(self.store, self.view, keys)

    async def state(self) -> list[object]:
        """All that a scrub could have changed: every record's bytes at every step and now, and the volumes' free bytes."""
        space, images = self.store.transfers._planner.space, []
        target = PlainSegment(RECORD_BYTES).view(0, RECORD_BYTES)
        for key in keys_of(self.view):
            await self.store.reading.read(self.view, key, target)
            fields = [bytes(target[field.offset_bytes :][: field.length_bytes]) for field in SCHEMA.stored.fields]
            images.append((key, self.view.namespace.residency.working[key].identity, fields))
        return [self.view.namespace.steps.ledger.steps(), images, space.held_bytes("moe"), space.free_bytes, dict(space.pins._pins)]


async def worked(seed: int, *, is_scrubbed: bool, acts: int) -> tuple[list[object], Work]:
    work = Work(seed, is_scrubbed=is_scrubbed)
    await work.begin()
    await work.work(acts)
    while is_scrubbed and not work.results:
        await asyncio.sleep(0)
    await work.scrub_off()
    return await work.state(), work


def check_beside_training(seed: int, acts: int) -> None:
    async def scenario() -> None:
        alone, _ = await worked(seed, is_scrubbed=False, acts=acts)
        beside, work = await worked(seed, is_scrubbed=True, acts=acts)
        assert work.results
        assert [result["findings"] + result["copy_findings"] for result in work.results] == [[]] * len(work.results)
        assert all(result["copies"] for result in work.results)
        assert all(result["bytes_read"] == result["bytes_total"] for result in work.results)
        assert all(result["records"] == result["records_total"] for result in work.results)
        assert beside == alone

    with telling(lambda: f"seed {seed}"):
        run(scenario())


def check_crash(seed: int, acts: int) -> None:
    """The power fails in the middle of a scrub: what reopens is whole, and the next scrub says so."""
    work = Work(seed, is_scrubbed=True)

    async def scenario() -> None:
        await work.begin()
        for _ in range(3):
            await work.work(work.random.randrange(acts))
            doing = asyncio.ensure_future(work.work(1))
            await turns(work.random.randrange(30))
            await work.machine.crash(keeps_random_writes=True)
            await asyncio.wait([doing])
            assert not [result for result in work.results if result["found"]]
            work.readers.clear()
            work.store = work.machine.start()
            assert (await verify(work.machine))["found"] == 0
            work.view = await work.store.admission.open("moe", mode="write", at=None, host_bytes=None)
            work.step = max(work.step, work.view.namespace.steps.committed_step or 0)
            work.scrub_on()
        await work.scrub_off()
        assert not work.store.transfers._planner.space.pins

    with telling(work.story):
        run(scenario())


@pytest.mark.slow
@pytest.mark.parametrize("piece_bytes", [scrubber.PIECE_BYTES, 4096])
@pytest.mark.parametrize("seed", range(40))
def test_beside_training_it_finds_nothing_and_changes_nothing(
    seed: int, piece_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scrubber, "PIECE_BYTES", piece_bytes)  # the smaller one: records of several pieces
    check_beside_training(seed, acts=25)


@pytest.mark.slow
@pytest.mark.parametrize("piece_bytes", [scrubber.PIECE_BYTES, 4096])
@pytest.mark.parametrize("seed", range(40))
def test_a_crash_in_the_middle_of_it_loses_nothing(seed: int, piece_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scrubber, "PIECE_BYTES", piece_bytes)
    check_crash(seed, acts=12)


def test_training_and_a_crash_beside_it_once() -> None:
    check_beside_training(1, acts=8)
    check_crash(2, acts=4)
