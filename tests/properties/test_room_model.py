"""Ranks with upload memory for two layers' gradients, which push while an apply is open, never wait for each other in a circle.

Random ranks, models, routings, arenas and delays over the real engine, in simulated time: a circle is a wait that ends at its
deadline. Between layers ranks meet as FSDP makes them; a rank that has no tokens of an expert, or of a layer, pushes none.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from random import Random

import pytest
import torch

from paramstore.core.key import ExpertKey
from paramstore.engine.store import Store
from paramstore.engine.tables.namespace import View
from paramstore.errors import WaitTimeout
from paramstore_testkit.disks.machine import Machine, PlainSegment
from paramstore_testkit.sim.loop import VirtualLoop
from paramstore_testkit.stores.small_ranks import NAME, call, open_ranks, record
from paramstore_testkit.stores.small_store import OPTIONS, SCHEMA, initialize, turns
from paramstore_testkit.trial import telling

pytestmark = pytest.mark.slow

WAIT_S = 5.0


class Plan:
    """What a seed makes of one step: which experts of each layer, in backward order, each rank pushes, and in which parts."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.ranks, self.layers, self.experts = self.random.randint(2, 4), self.random.randint(3, 6), self.random.randint(1, 4)
        self.meets_before = {layer for layer in range(self.layers) if self.random.random() < 0.4}
        self.slots = self.random.choice((1, 3, 100))
        share = self.random.choice((0.2, 0.6, 1.0))
        self.pushed = [
            [[expert for expert in range(self.experts) if self.random.random() < share] for _ in range(self.layers)]
            for _ in range(self.ranks)
        ]

    def parts(self, rank: int, layer: int) -> Iterator[list[ExpertKey]]:
        experts = self.pushed[rank][layer]
        while experts:
            count = self.random.randint(1, len(experts))
            yield [(layer, expert) for expert in experts[:count]]
            experts = experts[count:]


class Rank:
    """One rank's backward, as the client makes it. room: how many keys its upload memory holds; what was read is written again."""

    def __init__(self, plan: Plan, store: Store, view: View, meeting: asyncio.Barrier, *, room: int, ends_layers: bool) -> None:
        self.plan, self.store, self.view, self.meeting = plan, store, view, meeting
        self.ends_layers = ends_layers
        self.held: dict[ExpertKey, PlainSegment] = {}
        self.free = [PlainSegment(view.namespace.schema.gradient_bytes) for _ in range(room)]

    async def backward(self) -> None:
        for layer in reversed(range(self.plan.layers)):
            if layer in self.plan.meets_before:
                await self.meeting.wait()
            for part in self.plan.parts(self.view.rank, layer):
                await turns(self.plan.random.choice((0, 0, 1, 9)))
                await self.push(part)
            if self.ends_layers:
                self.store.applies.end_layers(self.view, [layer])

    async def push(self, part: list[ExpertKey]) -> None:
        while len(self.free) < len(part):
            read = await self.store.applies.await_room(self.view, list(self.held), WAIT_S)
            assert read
            self.free += [self.held.pop(key) for key in read]
        entries = [(key, gradient(self.view, key, self.free.pop(0)), 0) for key in part]
        self.held |= {key: memory for key, memory, _ in entries}
        self.store.applies.push(self.view, entries, is_last=True)


def gradient(view: View, key: ExpertKey, memory: PlainSegment) -> PlainSegment:
    """Another for each rank and key, in `memory`."""
    values = torch.frombuffer(memory.view(0, view.namespace.schema.gradient_bytes), dtype=torch.bfloat16)
    values.fill_(1.0 + view.rank + 4 * key[0] + 32 * key[1])
    return memory


async def step(seed: int, *, is_early: bool, room_layers: int = 2, ends_layers: bool = True) -> torch.Tensor:
    """All records after one step, by an apply that is open while the ranks push, or by a plain one."""
    plan = Plan(seed)
    store = Machine(seed=seed, wait_timeout_s=WAIT_S).start()
    view = await store.admission.create(NAME, SCHEMA.describe(), layers=range(plan.layers), experts=plan.experts, host_bytes=None)
    await initialize(store, view)
    await store.committer.commit(view, 0, b"")
    store.close_view(view)
    views = await open_ranks(store, plan.ranks)
    slots = views[0].namespace.memory.working.slots  # type: ignore[union-attr]
    while slots.free_count > plan.slots:
        slots.take()
    meeting = asyncio.Barrier(plan.ranks)
    room = room_layers * plan.experts if is_early else plan.layers * plan.experts
    ranks = [Rank(plan, store, view, meeting, room=room, ends_layers=ends_layers) for view in views]
    if is_early:
        begun = [call(store, view, "begin_apply", lambda one: store.applies.begin(one, OPTIONS, 1.0)) for view in views]
        for future in begun:
            future.add_done_callback(lambda done: done.cancelled() or done.exception())
        async with asyncio.TaskGroup() as group:
            for rank in ranks:
                group.create_task(rank.backward())
        await asyncio.gather(*(call(store, view, "end_apply", store.applies.end) for view in views))
    else:
        for rank in ranks:
            keys = [(layer, expert) for layer in range(plan.layers) for expert in plan.pushed[rank.view.rank][layer]]
            entries = [(key, gradient(rank.view, key, memory), 0) for key, memory in zip(keys, rank.free, strict=False)]
            store.applies.push(rank.view, entries)
        await asyncio.gather(*(call(store, view, "apply", lambda one: store.applies.apply(one, OPTIONS, 1.0)) for view in views))
    return torch.stack([await record(store, views[0], key) for key in views[0].namespace.keys])


def run(seed: int, **how: object) -> torch.Tensor:
    """One step in simulated time; a failure names its seed."""
    loop = VirtualLoop(Random(seed), shuffles=True)
    with telling(lambda: f"seed {seed}"), asyncio.Runner(loop_factory=lambda: loop) as runner:
        return runner.run(step(seed, **how))  # type: ignore[arg-type]


@pytest.mark.parametrize("seed", range(40))
def test_every_schedule_of_ranks_with_room_for_two_layers_ends_with_the_records_of_a_plain_apply(seed: int) -> None:
    assert torch.equal(run(seed, is_early=True), run(seed, is_early=False))


def test_every_schedule_of_ranks_ends_over_many_seeds() -> None:
    for seed in range(1000, 1150):
        run(seed, is_early=True)


def test_ranks_that_do_not_end_their_layers_would_wait_in_a_circle() -> None:
    """The model sees circles: this is what `end_layers` is for."""
    ended: list[bool] = []
    for seed in range(40):
        try:
            run(seed, is_early=True, ends_layers=False)
        except* WaitTimeout:
            ended.append(False)
        else:
            ended.append(True)
    assert {True, False} == set(ended)
