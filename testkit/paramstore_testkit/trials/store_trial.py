"""Makes random calls, faults and crashes on a namespace beside the model of what the calls mean. One seed decides everything.

Checked, whatever the interleaving, in small arenas:
- each lease and each record read has the bits that torch's optimizer gives: for the writer those of all applies called before,
  for a reader those of its step;
- after a crash: last acknowledged step <= reopened step <= last started, and every step that exists has its own bits;
- nothing hangs, and no slot, lease, buffer or extent leaks.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Coroutine, Sequence
from random import Random
from typing import Any

import pytest
import torch

from paramstore.core.key import ExpertKey
from paramstore.core.optimizers import AdamW
from paramstore.core.schema import Schema
from paramstore.engine.store import Store
from paramstore.engine.tables.arena import Arena
from paramstore.engine.tables.copies import ParamCopy
from paramstore.engine.tables.namespace import LeaseRequest, View
from paramstore.errors import CapacityError, LeaseError, StepDropped, StepFailed, TicketCancelled, WriterFenced
from paramstore.storage.format.structures import extents_start_bytes
from paramstore_testkit.disks.machine import Machine, PlainSegment
from paramstore_testkit.oracles.experts import Expert, State, Tensors, trained
from paramstore_testkit.oracles.images import gradient_of, initial_of, random_values, values_in
from paramstore_testkit.stores.small_planner import held_extents

NAME = "moe"
SHAPES = ({"w": (4, 16), "v": (32,)}, {"w": (3, 5), "v": (7,)})
KEYS: list[ExpertKey] = [(layer, expert) for layer in range(2) for expert in range(5)]
ACTS = {
    "apply": 9, "apply nothing": 2, "commit": 5, "prepare": 1, "lease": 9, "reader": 2, "read step": 2, "reader lease": 6,
    "reader read": 3, "refresh": 2, "prefetch": 5, "reader prefetch": 2, "evict": 2, "write back": 2, "read": 4, "settle": 3,
    "rollback": 1, "reopen": 1, "close": 1, "snapshot": 1, "drop snapshot": 1,
}  # fmt: skip
"""Weight of each act in the draw."""
ALONE = ("settle", "rollback", "reopen", "prepare", "snapshot")
"""Acts for which everything under way must have ended."""
Gradients = dict[ExpertKey, Tensors]


class StoreTrial:
    """One seed's run."""

    def __init__(self, seed: int, *, updates: str) -> None:
        """updates: the namespace's update rule."""
        self.random = Random(seed)
        dtype = self.random.choice(("float32", "bfloat16"))
        self.schema = Schema.adamw(self.random.choice(SHAPES), param_dtype=dtype, updates=updates)
        self.dtype = getattr(torch, dtype)
        self.machine = Machine(
            seed=seed, host_budget_bytes=self.random.choice((11, 13, 20)) << 20, volume_count=self.random.choice((1, 2)),
            policy=self.random.choice(("lru", "decayed_lfu", "schedule")), prefill=self.random.random() < 0.3,
            retained_steps=self.random.choice((2, 2, 3)), held_steps=self.random.choice((0, 1, 2)),
            reader_slots=4,
        )  # fmt: skip
        self.working: State = {key: Expert.initial(random_values(self.schema, number)) for number, key in enumerate(KEYS)}
        self.history: list[State] = []
        """States after every apply, in the order of the calls."""
        self.steps: dict[int, State] = {}
        self.snapshots: set[int] = set()
        self.acknowledged = self.started = -1
        self.next_step, self.next_lease, self.next_gradient = 0, 1, seed << 20
        self.tasks: list[asyncio.Future[Any]] = []
        self.readers: list[View] = []
        self.calls: list[tuple[View, asyncio.Future[Any]]] = []
        """Reads and prefetches of readers that are under way."""
        self.figures = Counter[str]()
        """Counts of acts by name; `checked`: compared copies and records, leased or read; the others have the store's names."""
        self.store: Store
        self.writer: View

    async def begin(self) -> None:
        self.store = self.machine.start()
        self.writer = await self.open_writer(is_new=True)
        await self.store.initializer.begin(self.writer)
        for key, expert in self.working.items():
            await self.store.initializer.put(self.writer, key, initial_of(self.schema, expert.masters))
        await self.store.initializer.end(self.writer)
        for _ in range(self.random.choice((0, 0, 2))):  # applies before the first commit
            self.apply()
        await self.commit()
        self.shrink_arenas()

    async def open_writer(self, *, is_new: bool = False) -> View:
        """Opens the view that writes from now on."""
        if not is_new:
            return await self.store.admission.open(NAME, mode="write", at=None, host_bytes=None)
        return await self.store.admission.create(NAME, self.schema.describe(), layers=range(2), experts=5, host_bytes=None)

    def shrink_arenas(self) -> None:
        """Takes slots away, so that eviction, waiting and streaming happen at this small size."""
        self.stolen: dict[Arena, int] = {}
        for arena, least in ((self.writer.namespace.working_arena, 2), (self.writer.namespace.param_arena, 3)):
            assert arena is not None
            self.stolen[arena], arena.planned_slots = 0, self.random.randint(least, 8)
            while arena.slots.free_count and arena.slots.count > arena.planned_slots + self.stolen[arena]:
                arena.slots.take()
                self.stolen[arena] += 1

    # --- the writer's calls

    def apply(self, *, share: float | None = None) -> asyncio.Future[Any]:
        """Makes an apply. share: of the keys, those with a gradient; drawn if None."""
        gradients = self.push(self.random.choice((0.2, 0.2, 0.4, 1.0)) if share is None else share)
        options = self.options()
        applying = self.store.applies.apply(self.writer, options, 1.0)
        self.working = trained(self.working, gradients, options, is_exact=self.schema.updates == "exact")
        self.history.append(self.working)
        return self.task(applying)

    def push(self, share: float) -> Gradients:
        """Pushes gradients; gives what the apply sums them to."""
        return self.push_as(self.writer, share)

    def push_as(self, view: View, share: float) -> Gradients:
        gradients = Gradients()
        for key in [key for key in KEYS if self.random.random() < share]:
            self.next_gradient += 1
            values = random_values(self.schema, self.next_gradient)
            gradients[key] = {name: value.to(self.dtype) for name, value in values.items()}
        self.store.applies.push(view, [(key, gradient_of(self.schema, fields), 0) for key, fields in gradients.items()])
        return gradients

    def options(self) -> AdamW:
        """Draws options as a schedule has them: the rate changes often, the rest now and then."""
        if self.random.random() < 0.3:
            return AdamW(lr=1e-2)
        if self.random.random() < 0.7:
            return AdamW(lr=self.random.random() / 10)
        betas = (self.random.choice((0.0, 0.85, 0.9)), self.random.choice((0.95, 0.999)))
        return AdamW(lr=0.05, betas=betas, eps=1e-6, weight_decay=self.random.choice((0.0, 0.1)))

    def take_step(self) -> int:
        """Takes the number of a step that begins now."""
        step = self.next_step
        self.next_step += self.random.randint(1, 3)
        self.steps[step] = self.working
        return step

    def commit(self) -> asyncio.Future[Any]:
        self.started = self.take_step()
        return self.task(self.acknowledge(self.started))

    async def acknowledge(self, step: int) -> None:
        await self.store.committer.commit(self.writer, step, extra_of(step))
        self.acknowledged = max(step, self.acknowledged)

    async def prepare(self) -> None:
        """Makes a step in two halves; leases in between have missed steps all the same."""
        step = self.take_step()
        await self.store.committer.prepare(self.writer, step, extra_of(step))
        for _ in range(3):
            self.lease(self.writer, self.working)
        await self.settle()
        if self.random.random() < 0.5:
            self.started = step
            await self.store.history.finalize(self.writer, step)
            self.acknowledged = step
        else:
            await self.rollback(self.acknowledged)

    async def rollback(self, step: int) -> None:
        """Rolls back, which is refused before a snapshot; readers of later steps have lost them."""
        if any(snapshot > step for snapshot in self.snapshots):
            with pytest.raises(StepFailed, match="is a snapshot"):
                await self.store.rollback(self.writer, step)
            return
        await self.store.rollback(self.writer, step)
        self.working, self.acknowledged, self.started = self.steps[step], step, step

    # --- looking

    def lease(self, view: View, expected: State, keys: Sequence[ExpertKey] = ()) -> None:
        """Leases `keys`, or some; checks their bits twice with others' work in between, then releases them."""
        keys = keys or self.random.sample(KEYS, self.random.randint(1, 3))
        lease_id, self.next_lease = self.next_lease, self.next_lease + 1
        try:
            request = self.store.access.acquire(view, lease_id, keys, "param")
        except (CapacityError, LeaseError, StepDropped):
            return
        self.task(self.use_lease(request, expected, len(self.history)))

    async def use_lease(self, request: LeaseRequest, expected: State, called_at: int) -> None:
        try:
            await self.store.access.wait_lease(request, 10.0)
        except (StepDropped, TicketCancelled, WriterFenced):
            return
        # A writer's lease that had to wait for slots sees the applies that were called until it got them.
        states = [expected] if request.view.step is not None else [expected, *self.history[called_at:]]
        self.check_lease(request, states)
        for _ in range(self.random.randint(0, 30)):
            await asyncio.sleep(0)
        self.check_lease(request, states)
        self.store.access.release(request.view, request.lease_id)

    def check_lease(self, request: LeaseRequest, states: list[State]) -> None:
        """Checks that the lease's bits are those of one of `states`, the same for all keys."""
        assert any(all(self.is_of_expert(copy, state[copy.key]) for copy in request.copies) for state in states), (
            [(copy.key, copy.identity, copy.base, [state[copy.key].updates for state in states]) for copy in request.copies],
            request.view.step,
        )
        self.figures["checked"] += len(request.copies)

    def is_of_expert(self, copy: ParamCopy, expert: Expert) -> bool:
        arena = self.writer.namespace.param_arena
        assert arena is not None
        found = values_in(arena.view(copy.slot), self.schema.part("param").fields)
        return all(torch.equal(found[name], value.to(self.dtype)) for name, value in expert.masters.items())

    async def read(self, view: View, key: ExpertKey, expected: State) -> None:
        target = PlainSegment(self.schema.record_bytes).view(0, self.schema.record_bytes)
        try:
            identity = await self.store.reading.read(view, key, target)
        except StepDropped:
            assert view.is_dropped
            return
        assert identity.version == expected[key].updates
        for name, value in values_in(target, self.schema.stored.fields).items():
            assert torch.equal(value.flatten(), expected[key].fields[name].flatten()), (key, name, identity)
        self.figures["checked"] += 1

    # --- acts

    def task(self, coroutine: Coroutine[Any, Any, Any]) -> asyncio.Future[Any]:
        future = asyncio.ensure_future(coroutine)
        self.tasks.append(future)
        return future

    async def settle(self) -> None:
        tasks, self.tasks = self.tasks, []
        await asyncio.gather(*tasks)

    async def act(self) -> None:
        """Makes one random call."""
        name = self.random.choices(list(ACTS), list(ACTS.values()))[0]
        keys = self.random.sample(KEYS, self.random.randint(1, 6))
        self.figures[name] += 1
        if name in ALONE:
            await self.settle()
            await self.act_alone(name)
        elif name.startswith("reader ") and self.readers:
            self.act_as_reader(name, keys)
        elif name in ("reader", "read step") and len(self.readers) < 3:
            await self.open_reader(self.random.choice(self.writer.namespace.ledger.steps()) if name == "read step" else None)
        elif name in ("refresh", "close") and self.readers:
            self.move_reader(name)
        elif name == "drop snapshot" and self.snapshots:
            step = self.random.choice(sorted(self.snapshots))
            self.snapshots.remove(step)
            await self.store.admission.drop_snapshot(self.writer, step)
        else:
            self.act_as_writer(name, keys)

    def act_as_writer(self, name: str, keys: list[ExpertKey]) -> None:
        match name:
            case "apply":
                self.apply()
            case "apply nothing":
                self.apply(share=0.0)
            case "commit":
                self.commit()
            case "lease":
                self.lease(self.writer, self.working)
            case "prefetch":
                self.prefetch(self.writer, keys, self.random.choice(("param", "param", "optim")))
            case "evict":
                self.task(self.store.evict(self.writer, keys, self.random.choice((None, "param", "optim"))))
            case "write back":
                self.task(self.store.write_back(self.writer, self.random.choice((None, keys))))
            case "read":
                self.task(self.read(self.writer, keys[0], self.working))

    def act_as_reader(self, name: str, keys: list[ExpertKey]) -> None:
        view = self.random.choice(self.readers)
        if view.is_dropped:
            return
        assert view.step is not None
        if name == "reader lease":
            self.lease(view, self.steps[view.step])
        elif name == "reader read":
            self.calls.append((view, self.task(self.read(view, keys[0], self.steps[view.step]))))
        elif name == "reader prefetch":
            self.prefetch(view, keys, "param")

    def prefetch(self, view: View, keys: list[ExpertKey], part: str) -> None:
        request = self.store.access.prefetch(view, keys, part, None)
        if self.random.random() < 0.3:
            self.store.transfers.cancel_prefetch(request)
        else:
            self.calls.append((view, self.task(self.store.access.wait_prefetch(request))))

    async def open_reader(self, step: int | None) -> None:
        try:
            self.readers.append(await self.store.admission.open(NAME, mode="read", at=step, host_bytes=None))
        except StepDropped:
            assert step != self.acknowledged  # a commit under way drops it

    def move_reader(self, name: str) -> None:
        """Moves a reader that has no lease, and of which no call is under way."""
        view = self.random.choice(self.readers)
        if view.leases or any(caller is view and not call.done() for caller, call in self.calls):
            return
        if name == "refresh":
            self.store.refresh(view)
        else:
            self.readers.remove(view)
            self.store.close_view(view)

    async def act_alone(self, name: str) -> None:
        """Does an act beside which nothing else is under way."""
        steps = self.writer.namespace.ledger.steps()
        if name == "rollback":
            await self.rollback(self.random.choice(steps))
        elif name == "prepare":
            await self.prepare()
        elif name == "snapshot":
            step = self.random.choice(steps)
            await self.store.admission.snapshot(self.writer, step)
            self.snapshots.add(step)
        elif name == "reopen":
            old, self.writer = self.writer, await self.open_writer()
            self.store.close_view(old)
            self.working = self.steps[self.acknowledged]

    # --- the ends

    async def crash(self) -> None:
        """Cuts the power; then every step that exists has its own bits, and training goes on from the newest."""
        stats = self.writer.namespace.stats
        for name in ("records_updated", "records_caught_up", "records_advanced", "missed_steps_made", "commits"):
            self.figures[name] += getattr(stats, name)
        for forgotten in (self.tasks, self.readers, self.calls):
            forgotten.clear()
        await self.machine.crash(keeps_random_writes=True)
        self.store = self.machine.start()
        self.writer = await self.open_writer()
        await self.check_reopened()
        self.shrink_arenas()

    async def check_reopened(self) -> None:
        """Checks that a new writer stands at a step that it may stand at, and goes on from there."""
        step = self.writer.namespace.committed_step
        assert step is not None
        assert self.acknowledged <= step <= self.started
        self.acknowledged, self.started, self.working = step, step, self.steps[step]
        assert self.snapshots == set(self.writer.namespace.ledger.snapshots()) <= set(self.writer.namespace.ledger.steps())
        await self.check_all()

    async def check_all(self) -> None:
        """Checks every record, of the writer and of every step."""
        for key in KEYS:
            await self.read(self.writer, key, self.working)
        for step in self.writer.namespace.ledger.steps():
            view = await self.store.admission.open(NAME, mode="read", at=step, host_bytes=None)
            assert view.namespace.ledger.step(step).extra == extra_of(step)
            for key in KEYS:
                await self.read(view, key, self.steps[step])
                if view.lease_slots:  # 0 if other open readers were promised all
                    self.lease(view, self.steps[step], [key])
                await self.settle()
            self.store.close_view(view)

    def check_nothing_leaked(self) -> None:
        """Checks that every slot, buffer and extent is accounted for once nobody uses anything."""
        namespace = self.writer.namespace
        assert namespace.param_arena is not None
        assert namespace.working_arena is not None
        for view in (self.writer, *self.readers):
            assert not view.leased
            assert not view.leases
        if namespace.is_exact:
            transfers = self.store.transfers
            advances, free = transfers.advancer.of(namespace.name), transfers._buffers.of(namespace.name).advance
            assert not advances.waiting
            assert not advances.running
            assert len(free) == len(set(map(id, free))) > 0
        copies = sum(len(found) for found in namespace.copies.values())
        for arena, used in ((namespace.param_arena, copies), (namespace.working_arena, len(namespace.resident))):
            assert arena.slots.count - arena.slots.free_count - self.stolen[arena] == used
        assert all(working.holders == 0 and not working.is_moving for working in namespace.working.values())
        space, used_bytes = self.store.transfers._planner.space, len(set(held_extents(namespace))) * self.schema.record_bytes
        start_bytes = sum(extents_start_bytes(self.store.committer._superblocks[index]) for index in self.machine.disks)
        taken_bytes = sum(volume.size_bytes - volume.free_bytes - volume.prefilling_bytes for volume in space.stats())
        assert taken_bytes - start_bytes == used_bytes == space.held_bytes(NAME)


def extra_of(step: int) -> bytes:
    return b"extra of %d" % step
