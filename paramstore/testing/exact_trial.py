"""Random calls, faults and crashes on an exact namespace beside the dense model of it. Everything comes from one seed.

Whatever the interleaving, in small arenas: each lease and each record read has the bits that torch's dense optimizer gives, for the
writer those of all applies called before, for a reader those of its step; after a crash the same holds of every step there is.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Coroutine, Sequence
from random import Random
from typing import Any

import torch

from paramstore.core.key import ExpertKey
from paramstore.core.optimizers import AdamW
from paramstore.core.schema import Schema
from paramstore.engine.namespace import ParamCopy, View
from paramstore.engine.requests import LeaseRequest
from paramstore.engine.store import Store
from paramstore.errors import CapacityError, LeaseError, StepDropped, TicketCancelled, WriterFenced
from paramstore.optim.tensors import field_tensor
from paramstore.testing.dense_model import DenseState
from paramstore.testing.machine import Machine, PlainSegment

NAME = "moe"
SHAPES = {"w": (4, 16), "v": (32,)}
ELEMENTS = {"w": 64, "v": 32}
KEYS: list[ExpertKey] = [(layer, expert) for layer in range(2) for expert in range(5)]
ACTS = {
    "apply": 9, "apply nothing": 2, "commit": 4, "prepare": 1, "lease": 9, "reader": 2, "read step": 2, "reader lease": 6,
    "reader read": 3, "refresh": 2, "prefetch": 5, "reader prefetch": 2, "evict": 2, "write back": 2, "read": 4, "settle": 3,
    "rollback": 1, "reopen": 1, "close": 1, "snapshot": 1, "drop snapshot": 1,
}  # fmt: skip
"""How often each is chosen."""
Gradients = dict[ExpertKey, dict[str, torch.Tensor]]


class ExactTrial:
    """One seed's run."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        dtype = self.random.choice(("float32", "bfloat16"))
        self.schema = Schema.adamw(SHAPES, param_dtype=dtype, updates="exact")
        self.dtype = getattr(torch, dtype)
        self.machine = Machine(
            seed=seed, host_budget_bytes=self.random.choice((13, 20)) << 20, volume_count=self.random.choice((1, 2)),
            policy=self.random.choice(("lru", "decayed_lfu", "schedule")), retained_steps=self.random.choice((2, 3)),
            held_steps=self.random.choice((0, 1, 2)),
        )  # fmt: skip
        self.working = DenseState.initial(KEYS, ELEMENTS)
        self.history: list[DenseState] = []
        """What every apply made, in call order."""
        self.steps: dict[int, DenseState] = {}
        self.acknowledged = self.started = -1
        self.next_step, self.next_lease, self.next_gradient = 0, 1, seed << 20
        self.tasks: list[asyncio.Future[Any]] = []
        self.readers: list[View] = []
        self.figures = Counter[str]()
        """`checked`: copies leased and records read that were compared; the rest as the store's own figures name them."""
        self.store: Store
        self.writer: View

    async def begin(self) -> None:
        self.store = self.machine.start()
        self.writer = await self.open_writer(is_new=True)
        await self.store.initialize_begin(self.writer)
        for key in KEYS:
            values = {name: self.working.row(key, "master", name) for name in SHAPES}
            initial = self.image(values, self.schema.initial_fields(), self.schema.initial_bytes)
            await self.store.initialize_put(self.writer, key, initial.view(0, self.schema.initial_bytes))
        await self.store.initialize_end(self.writer)
        for _ in range(self.random.choice((0, 0, 2))):  # applies before the first commit
            self.apply()
        await self.commit()
        self.shrink_arenas()

    async def open_writer(self, *, is_new: bool = False) -> View:
        """The view that writes from now on."""
        if not is_new:
            return await self.store.admission.open(NAME, mode="write", at=None, host_bytes=None)
        return await self.store.admission.create(NAME, self.schema.describe(), layers=range(2), experts=5, host_bytes=None)

    def shrink_arenas(self) -> None:
        """Takes slots away, so that eviction, waiting and streaming happen at this small size."""
        namespace = self.writer.namespace
        for arena, least in ((namespace.working_arena, 2), (namespace.param_arena, 3)):
            assert arena is not None
            arena.planned_slots = self.random.randint(least, 8)
            while arena.slots.free_count and arena.slots.count > arena.planned_slots + self.stolen(arena):
                arena.slots.take()
                arena.stolen = self.stolen(arena) + 1  # type: ignore[attr-defined]

    @staticmethod
    def stolen(arena: Any) -> int:
        return getattr(arena, "stolen", 0)

    @staticmethod
    def image(values: dict[str, torch.Tensor], fields: Any, length_bytes: int) -> PlainSegment:
        segment = PlainSegment(length_bytes)
        for field in fields:
            field_tensor(segment.view(0, length_bytes), field).copy_(values[field.name])
        return segment

    # --- the writer's calls

    def apply(self, *, share: float = 0.4) -> asyncio.Future[Any]:
        """share: of the keys, those with a gradient."""
        gradients, options = self.push(share), self.options()
        applying = self.store.apply(self.writer, options, 1.0)
        self.working = self.working.after(gradients, options)
        self.history.append(self.working)
        return self.task(applying)

    def push(self, share: float) -> Gradients:
        """What the apply sums them to."""
        return self.push_as(self.writer, share)

    def push_as(self, view: View, share: float) -> Gradients:
        gradients, entries = Gradients(), []
        for key in [key for key in KEYS if self.random.random() < share]:
            self.next_gradient += 1
            generator = torch.Generator().manual_seed(self.next_gradient)
            fields = {name: torch.randn(count, generator=generator).to(self.dtype) for name, count in ELEMENTS.items()}
            gradients[key] = fields
            entries.append((key, self.image(fields, self.schema.gradient_fields(), self.schema.gradient_bytes), 0))
        self.store.push(view, entries)
        return gradients

    def options(self) -> AdamW:
        """A schedule's: the rate changes often, the rest now and then."""
        if self.random.random() < 0.3:
            return AdamW(lr=1e-2)
        if self.random.random() < 0.7:
            return AdamW(lr=self.random.random() / 10)
        betas = (self.random.choice((0.0, 0.85, 0.9)), self.random.choice((0.95, 0.999)))
        return AdamW(lr=0.05, betas=betas, eps=1e-6, weight_decay=self.random.choice((0.0, 0.1)))

    def commit(self) -> asyncio.Future[Any]:
        step = self.next_step
        self.next_step += self.random.randint(1, 3)
        self.steps[step], self.started = self.working, step
        return self.task(self.acknowledge(step))

    async def acknowledge(self, step: int) -> None:
        await self.store.commit(self.writer, step, b"")
        self.acknowledged = max(step, self.acknowledged)

    async def prepare(self) -> None:
        """A step in two halves; what is leased in between has missed steps all the same."""
        await self.settle()
        step = self.next_step
        self.next_step += 1
        self.steps[step] = self.working
        await self.store.prepare(self.writer, step, b"")
        for _ in range(3):
            self.lease(self.writer, self.working)
        await self.settle()
        if self.random.random() < 0.5:
            self.started = step
            await self.store.finalize(self.writer, step)
            self.acknowledged = step
        else:
            await self.rollback(self.acknowledged)

    async def rollback(self, step: int) -> None:
        snapshots = self.store.snapshots(self.writer)
        if snapshots and snapshots[-1] > step:
            return
        await self.store.rollback(self.writer, step)
        self.working, self.acknowledged, self.started = self.steps[step], step, step

    # --- looking

    def lease(self, view: View, expected: DenseState) -> None:
        """Asks for some keys; their bits are checked twice with others' work in between, then released."""
        keys = self.random.sample(KEYS, self.random.randint(1, 3))
        lease_id, self.next_lease = self.next_lease, self.next_lease + 1
        try:
            request = self.store.acquire(view, lease_id, keys, "param")
        except (CapacityError, LeaseError, StepDropped):
            return
        self.task(self.use_lease(view, lease_id, request, expected, len(self.history)))

    async def use_lease(self, view: View, lease_id: int, request: LeaseRequest, expected: DenseState, called_at: int) -> None:
        try:
            await self.store.wait_lease(request, 10.0)
        except (StepDropped, TicketCancelled, WriterFenced):
            return
        # a writer's lease that had to wait for slots sees what was called until it got them
        states = [expected] if view.step is not None else [expected, *self.history[called_at:]]
        self.check_lease(view, request.copies, states)
        for _ in range(self.random.randint(0, 30)):
            await asyncio.sleep(0)
        self.check_lease(view, request.copies, states)
        self.store.release(view, lease_id)

    def check_lease(self, view: View, copies: Sequence[ParamCopy], states: list[DenseState]) -> None:
        """The lease's bits are those of one of `states`, all of them of the same."""
        assert any(self.is_of_state(view, copies, state) for state in states), (
            [(copy.key, copy.identity, copy.base) for copy in copies], [state.step for state in states], view.step
        )  # fmt: skip
        self.figures["checked"] += len(copies)

    def is_of_state(self, view: View, copies: Sequence[ParamCopy], state: DenseState) -> bool:
        arena = view.namespace.param_arena
        assert arena is not None
        return all(
            torch.equal(field_tensor(arena.view(copy.slot), field), state.row(copy.key, "master", field.name).to(self.dtype))
            for copy in copies
            for field in self.schema.part("param").fields
        )

    async def read(self, view: View, key: ExpertKey, expected: DenseState) -> None:
        target = PlainSegment(self.schema.record_bytes).view(0, self.schema.record_bytes)
        try:
            identity = await self.store.read(view, key, target)
        except StepDropped:
            assert view.is_dropped
            return
        assert identity.version == expected.step
        for field in self.schema.stored.fields:
            prefix, name = field.name.split("/")
            found = field_tensor(target, field)
            assert torch.equal(found, expected.row(key, prefix, name)), (key, field.name, identity, expected.step)
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
        """One random call."""
        name = self.random.choices(list(ACTS), list(ACTS.values()))[0]
        keys = self.random.sample(KEYS, self.random.randint(1, 6))
        if name.startswith("reader ") and self.readers:
            self.act_as_reader(name, keys)
        elif name in ("settle", "rollback", "reopen", "prepare", "snapshot", "drop snapshot"):
            await self.settle()
            await self.act_alone(name)
        elif name in ("reader", "read step") and len(self.readers) < 3:
            await self.open_reader(self.random.choice(self.store.steps(self.writer)) if name == "read step" else None)
        elif name in ("refresh", "close") and self.readers:
            self.move_reader(name)
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
        elif name == "reader read" and not view.leases:
            self.task(self.read(view, keys[0], self.steps[view.step]))
        elif name == "reader prefetch":
            self.prefetch(view, keys, "param")

    def prefetch(self, view: View, keys: list[ExpertKey], part: str) -> None:
        request = self.store.prefetch(view, keys, part, None)
        if self.random.random() < 0.3:
            self.store.cancel_prefetch(request)
        else:
            self.task(self.store.wait_prefetch(request))

    async def open_reader(self, step: int | None) -> None:
        try:
            self.readers.append(await self.store.admission.open(NAME, mode="read", at=step, host_bytes=None))
        except StepDropped:
            assert step != self.acknowledged  # a commit under way drops it

    def move_reader(self, name: str) -> None:
        """One that has no lease, and of which no read is under way."""
        view = self.random.choice(self.readers)
        if view.leases or any(not task.done() for task in self.tasks):
            return
        if name == "refresh":
            self.store.refresh(view)
        else:
            self.readers.remove(view)
            self.store.close_view(view)

    async def act_alone(self, name: str) -> None:
        """Nothing else is under way."""
        steps, snapshots = self.store.steps(self.writer), self.store.snapshots(self.writer)
        if name == "rollback":
            await self.rollback(self.random.choice(steps))
        elif name == "prepare":
            await self.prepare()
        elif name == "snapshot":
            await self.store.snapshot(self.writer, self.random.choice(steps))
        elif name == "drop snapshot" and snapshots:
            await self.store.drop_snapshot(self.writer, self.random.choice(snapshots))
        elif name == "reopen":
            old, self.writer = self.writer, await self.open_writer()
            self.store.close_view(old)
            self.working = self.steps[self.acknowledged]

    # --- the ends

    async def crash(self) -> None:
        """The power fails; then every step there is has its own bits, and training goes on from the newest."""
        stats = self.writer.namespace.stats
        for name in ("records_updated", "records_caught_up", "records_advanced", "missed_steps_made", "commits"):
            self.figures[name] += getattr(stats, name)
        self.tasks.clear()
        self.readers.clear()
        await self.machine.crash(keeps_random_writes=True)
        self.store = self.machine.start()
        self.writer = await self.open_writer()
        step = self.writer.namespace.committed_step
        assert step is not None
        assert self.acknowledged <= step <= self.started
        self.acknowledged, self.working = step, self.steps[step]
        await self.check_all()
        self.shrink_arenas()

    async def check_all(self) -> None:
        """Every record, of the writer and of every step."""
        for key in KEYS:
            await self.read(self.writer, key, self.working)
        for step in self.store.steps(self.writer):
            view = await self.store.admission.open(NAME, mode="read", at=step, host_bytes=None)
            for key in KEYS:
                await self.read(view, key, self.steps[step])
                self.lease_one(view, key, self.steps[step])
                await self.settle()
            self.store.close_view(view)

    def lease_one(self, view: View, key: ExpertKey, expected: DenseState) -> None:
        lease_id, self.next_lease = self.next_lease, self.next_lease + 1
        request = self.store.acquire(view, lease_id, [key], "param")
        self.task(self.use_lease(view, lease_id, request, expected, len(self.history)))

    def check_nothing_leaked(self) -> None:
        """Every slot and buffer is accounted for once nobody uses anything."""
        namespace = self.writer.namespace
        assert namespace.param_arena is not None
        assert namespace.working_arena is not None
        assert namespace.advances is not None
        assert not namespace.advances.waiting
        assert not namespace.advances.running
        assert len(namespace.advances.free) == len(set(map(id, namespace.advances.free))) > 0
        copies = sum(len(found) for found in namespace.copies.values())
        for arena, used in ((namespace.param_arena, copies), (namespace.working_arena, len(namespace.resident))):
            assert arena.slots.count - arena.slots.free_count - self.stolen(arena) == used
        assert all(working.holders == 0 and working.move is None for working in namespace.working.values())
