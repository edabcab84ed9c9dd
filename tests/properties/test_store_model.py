"""Random calls, faults and crashes against a model of what the calls mean. Everything comes from one seed, printed.

Invariants checked, whatever the interleaving:
- a lease of the writer has exactly the bytes that the applies called before it make; a reader's, those of its step;
- after a crash: last acknowledged step <= reopened step <= last started, and every record is whole and of that step;
- nothing hangs, no slot, lease or extent leaks: after all is released the arenas and volumes are accounted for.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from random import Random
from typing import Any

import pytest
import torch

from paramstore.core.key import ExpertKey
from paramstore.core.optimizers import AdamW
from paramstore.core.schema import Schema
from paramstore.engine.namespace import View
from paramstore.engine.requests import LeaseRequest
from paramstore.engine.store import Store
from paramstore.errors import (
    CapacityError,
    LeaseError,
    ParamStoreError,
    StepDropped,
    StepFailed,
    TicketCancelled,
    WriterFenced,
)
from paramstore.optim.tensors import field_tensor
from paramstore.storage.format import extents_start_bytes
from paramstore.testing.machine import Machine, PlainSegment

SCHEMAS = {dtype: Schema.adamw({"w": (3, 5), "v": (7,)}, param_dtype=dtype) for dtype in ("float32", "bfloat16")}
KEYS = [(layer, expert) for layer in range(2) for expert in range(5)]
OPTIONS = AdamW(lr=1e-2)
Tensors = dict[str, torch.Tensor]
"""By field name; never changed in place."""


WEIGHTS = {
    "apply": 6, "commit": 5, "lease": 10, "reader": 1, "read_lease": 5, "refresh": 2, "prefetch": 4, "evict": 2, "write": 2,
    "read": 2, "settle": 3, "rollback": 1, "reopen": 1, "close": 1, "snapshot": 1, "drop_snapshot": 1, "read_step": 1,
}  # fmt: skip
"""How often each call is chosen."""


class Expert:
    """One record's state as torch makes it; immutable."""

    def __init__(self, masters: Tensors, averages: Tensors, squares: Tensors, step: int) -> None:
        self.masters, self.averages, self.squares, self.step = masters, averages, squares, step

    @classmethod
    def initial(cls, key: ExpertKey) -> Expert:
        generator = torch.Generator().manual_seed(key[0] * 100 + key[1])
        masters = {"w": torch.randn(15, generator=generator), "v": torch.randn(7, generator=generator)}
        zeros = {name: torch.zeros_like(value) for name, value in masters.items()}
        return cls(masters, zeros, dict(zeros), 0)

    def after(self, gradients: dict[str, torch.Tensor]) -> Expert:
        parts = (self.masters, self.averages, self.squares)
        masters, averages, squares = ({name: value.clone() for name, value in part.items()} for part in parts)
        for name, gradient in gradients.items():
            torch._fused_adamw_(
                [masters[name]], [gradient.float()], [averages[name]], [squares[name]], [], [torch.tensor(float(self.step + 1))],
                lr=OPTIONS.lr, beta1=OPTIONS.betas[0], beta2=OPTIONS.betas[1], weight_decay=OPTIONS.weight_decay,
                eps=OPTIONS.eps, amsgrad=False, maximize=False,
            )  # fmt: skip
        return Expert(masters, averages, squares, self.step + 1)


State = dict[ExpertKey, Expert]


class Trial:
    """One seed's run."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        dtype = self.random.choice(list(SCHEMAS))
        self.schema = SCHEMAS[dtype]
        self.dtype = getattr(torch, dtype)
        budget = self.random.choice((11, 13, 20)) << 20
        self.machine = Machine(
            seed=seed, host_budget_bytes=budget, volume_count=self.random.choice((1, 2)),
            policy=self.random.choice(("lru", "decayed_lfu")), prefill=self.random.random() < 0.3,
            retained_steps=self.random.choice((2, 2, 3)), held_steps=self.random.choice((0, 1, 2)),
        )  # fmt: skip
        self.working: State = {}
        self.history: list[State] = []
        """What every apply made, in call order."""
        self.steps: dict[int, State] = {}
        self.snapshots: set[int] = set()
        self.acknowledged: int | None = None
        self.started: int | None = None
        self.next_step = 0
        self.next_lease = 1
        self.next_seed = 1
        self.tasks: list[asyncio.Future[Any]] = []
        self.readers: list[View] = []
        self.store: Store
        self.writer: View

    # --- set-up

    async def begin(self) -> None:
        self.store = self.machine.start()
        self.writer = await self.store.admission.create("moe", self.schema.describe(), layers=range(2), experts=5, host_bytes=None)
        await self.store.initialize_begin(self.writer)
        for key in KEYS:
            self.working[key] = Expert.initial(key)
            initial = self.image(self.working[key].masters, self.schema.initial_fields(), self.schema.initial_bytes)
            await self.store.initialize_put(self.writer, key, initial.view(0, self.schema.initial_bytes))
        await self.store.initialize_end(self.writer)
        await self.commit()
        self.shrink_arenas()

    def shrink_arenas(self) -> None:
        """Takes slots away, so that eviction, waiting and streaming happen at this small size."""
        namespace = self.writer.namespace
        for arena, least in ((namespace.working_arena, 2), (namespace.param_arena, 3)):
            assert arena is not None
            keep = self.random.randint(least, 8)
            arena.planned_slots = keep
            while arena.slots.free_count and arena.slots.count - self.stolen(arena) > keep:
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

    # --- calls

    def apply(self) -> asyncio.Future[Any]:
        keys = self.random.sample(KEYS, self.random.randint(1, len(KEYS)))
        entries = []
        for key in keys:
            generator = torch.Generator().manual_seed(self.next_seed)
            self.next_seed += 1
            gradients = {
                "w": torch.randn(15, generator=generator).to(self.dtype), "v": torch.randn(7, generator=generator).to(self.dtype),
            }  # fmt: skip
            self.working = {**self.working, key: self.working[key].after(gradients)}
            entries.append((key, self.image(gradients, self.schema.gradient_fields(), self.schema.gradient_bytes), 0))
        self.history.append(self.working)
        self.store.push(self.writer, entries)
        return self.task(self.store.apply(self.writer, OPTIONS, 1.0))

    def commit(self) -> asyncio.Future[Any]:
        step = self.next_step
        self.next_step += self.random.randint(1, 3)
        self.steps[step] = self.working
        self.started = step
        return self.task(self.acknowledge(step))

    async def acknowledge(self, step: int) -> None:
        await self.store.commit(self.writer, step, str(step).encode())
        self.acknowledged = max(step, -1 if self.acknowledged is None else self.acknowledged)

    def lease(self, view: View, expected: State) -> None:
        """Asks for some keys; their bytes are checked twice with others' work in between, then released."""
        keys = self.random.sample(KEYS, self.random.randint(1, 3))
        lease_id, self.next_lease = self.next_lease, self.next_lease + 1
        try:
            request = self.store.acquire(view, lease_id, keys, "param")
        except (CapacityError, LeaseError, StepDropped):
            return
        self.task(self.use_lease(view, lease_id, request, expected, len(self.history)))

    async def use_lease(self, view: View, lease_id: int, request: LeaseRequest, expected: State, called_at: int) -> None:
        try:
            await self.store.wait_lease(request, 10.0)
        except (StepDropped, TicketCancelled, WriterFenced):
            return
        # a writer's lease that had to wait for slots sees what was called until it got them
        states = [expected] if view.step is not None else [expected, *self.history[called_at:]]
        self.check_lease(view, request.copies, states)
        for _ in range(self.random.randint(0, 30)):
            await asyncio.sleep(0)
        if request.copies:
            self.check_lease(view, request.copies, states)
        self.store.release(view, lease_id)

    def check_lease(self, view: View, copies: Any, states: list[State]) -> None:
        """The lease's bytes are those of one of `states`, all of them of the same."""
        assert any(self.is_of_state(view, copies, state) for state in states), [(copy.key, copy.identity) for copy in copies]

    def is_of_state(self, view: View, copies: Any, state: State) -> bool:
        arena = view.namespace.param_arena
        assert arena is not None
        return all(
            torch.equal(field_tensor(arena.view(copy.slot), field), state[copy.key].masters[field.name].to(self.dtype))
            for copy in copies
            for field in self.schema.part("param").fields
        )

    def task(self, coroutine: Coroutine[Any, Any, Any]) -> asyncio.Future[Any]:
        future = asyncio.ensure_future(coroutine)
        self.tasks.append(future)
        return future

    async def settle(self) -> None:
        tasks, self.tasks = self.tasks, []
        await asyncio.gather(*tasks)

    async def act(self) -> None:
        """One random call."""
        choice = self.random.choices(list(WEIGHTS), list(WEIGHTS.values()))[0]
        keys = self.random.sample(KEYS, self.random.randint(1, 6))
        if choice == "apply":
            self.apply()
        elif choice == "commit":
            self.commit()
        elif choice == "lease":
            self.lease(self.writer, self.working)
        elif choice == "reader" and len(self.readers) < 3:
            self.readers.append(await self.store.admission.open("moe", mode="read", at=None, host_bytes=None))
        elif choice == "read_lease" and self.readers:
            view = self.random.choice(self.readers)
            self.lease(view, self.steps[view.step])  # type: ignore[index]
        elif choice == "refresh" and self.readers:
            view = self.random.choice(self.readers)
            if not view.leases:
                self.store.refresh(view)
        elif choice == "close" and self.readers:
            view = self.random.choice(self.readers)
            if not view.leases:
                self.readers.remove(view)
                self.store.close_view(view)
        elif choice == "prefetch":
            request = self.store.prefetch(self.writer, keys, self.random.choice(("param", "optim")), None)
            if self.random.random() < 0.3:
                self.store.cancel_prefetch(request)
            else:
                self.task(self.store.wait_prefetch(request))
        elif choice == "evict":
            self.task(self.store.evict(self.writer, keys, self.random.choice((None, "param", "optim"))))
        elif choice == "write":
            self.task(self.store.write_back(self.writer, self.random.choice((None, keys))))
        elif choice == "read":
            self.task(self.read(keys[0], self.working))
        elif choice == "settle":
            await self.settle()
        elif choice == "rollback":
            await self.settle()
            await self.rollback(self.random.choice(self.store.steps(self.writer)))
        elif choice == "snapshot":
            await self.settle()
            step = self.random.choice(self.store.steps(self.writer))
            await self.store.snapshot(self.writer, step)
            self.snapshots.add(step)
        elif choice == "drop_snapshot" and self.snapshots:
            step = self.random.choice(sorted(self.snapshots))
            self.snapshots.remove(step)
            await self.store.drop_snapshot(self.writer, step)
        elif choice == "read_step" and len(self.readers) < 3:
            step = self.random.choice(self.store.steps(self.writer))
            try:
                self.readers.append(await self.store.admission.open("moe", mode="read", at=step, host_bytes=None))
            except StepDropped:
                assert step != self.acknowledged  # a commit under way drops it
        elif choice == "reopen":
            await self.settle()
            old, self.writer = self.writer, await self.store.admission.open("moe", mode="write", at=None, host_bytes=None)
            self.store.close_view(old)
            self.working = self.steps[self.acknowledged]  # type: ignore[index]

    async def rollback(self, step: int) -> None:
        """All is settled. Refused before a snapshot; readers of later steps have lost them."""
        if any(snapshot > step for snapshot in self.snapshots):
            with pytest.raises(StepFailed, match="is a snapshot"):
                await self.store.rollback(self.writer, step)
            return
        await self.store.rollback(self.writer, step)
        self.working, self.acknowledged, self.started = self.steps[step], step, step

    async def read(self, key: ExpertKey, expected: State) -> None:
        target = PlainSegment(self.schema.record_bytes)
        await self.store.read(self.writer, key, target.view(0, self.schema.record_bytes))
        expert = expected[key]
        for prefix, part in (("master", expert.masters), ("exp_avg", expert.averages), ("exp_avg_sq", expert.squares)):
            for name, value in part.items():
                found = field_tensor(target.view(0, self.schema.record_bytes), self.schema.stored.field(f"{prefix}/{name}"))
                assert torch.equal(found, value), (key, prefix, name)

    # --- crash

    async def crash(self) -> None:
        self.tasks.clear()
        self.readers.clear()
        await self.machine.crash(keeps_random_writes=True)
        self.store = self.machine.start()
        self.writer = await self.store.admission.open("moe", mode="write", at=None, host_bytes=None)
        step = self.writer.namespace.committed_step
        assert step is not None
        assert self.acknowledged is not None
        assert self.started is not None
        assert self.acknowledged <= step <= self.started
        self.acknowledged = step
        self.working = self.steps[step]
        assert self.store.extra(self.writer, step) == str(step).encode()
        for key in KEYS:
            await self.read(key, self.working)
        assert self.snapshots == set(self.store.snapshots(self.writer))
        assert self.snapshots <= set(self.store.steps(self.writer))
        for older in self.store.steps(self.writer)[:-1]:
            await self.check_step(older)
        self.shrink_arenas()

    async def check_step(self, step: int) -> None:
        """A step that can be opened is whole, and of its own bytes."""
        view = await self.store.admission.open("moe", mode="read", at=step, host_bytes=None)
        writer, self.writer = self.writer, view
        for key in KEYS:
            await self.read(key, self.steps[step])
        self.writer = writer
        self.store.close_view(view)

    async def check_nothing_leaked(self) -> None:
        """Every slot and extent is accounted for once nobody uses anything."""
        namespace = self.writer.namespace
        for view in (self.writer, *self.readers):
            assert not view.leased
            assert not view.leases
        assert namespace.working_arena is not None
        assert namespace.param_arena is not None
        copies = sum(len(found) for found in namespace.copies.values())
        slots = namespace.param_arena.slots
        assert slots.count - slots.free_count - self.stolen(namespace.param_arena) == copies
        slots = namespace.working_arena.slots
        assert slots.count - slots.free_count - self.stolen(namespace.working_arena) == len(namespace.resident)
        assert all(working.holders == 0 and working.move is None for working in namespace.working.values())
        used = {located.extent for rows in namespace.ledger._contents.rows.values() for _, located in rows}
        for working in namespace.working.values():
            used |= {working.uncommitted.extent} if working.uncommitted is not None else set()
            used |= {working.reserved} if working.reserved is not None else set()
        stats = (await self.store.stats())["tiers"]["nvme"]  # type: ignore[index]
        start = sum(extents_start_bytes(self.store._committer._superblocks[index]) for index in self.machine.disks)
        used_bytes, space = len(used) * self.schema.record_bytes, self.store._planner.space
        filling_bytes = sum(volume.prefilling_bytes for volume in space.stats())
        assert stats["size_bytes"] - stats["free_bytes"] - start - filling_bytes == used_bytes
        assert space.held_bytes("moe") == used_bytes


async def run_trial(seed: int, *, rounds: int, acts: int) -> None:
    trial = Trial(seed)
    await trial.begin()
    for number in range(rounds):
        for _ in range(acts):
            await trial.act()
            if trial.random.random() < 0.3:
                await asyncio.sleep(0)
        if number % 2:
            await trial.settle()
            while not trial.store._runner.is_idle:  # a cancelled prefetch may still land
                await asyncio.sleep(0)
            await trial.check_nothing_leaked()
        await trial.crash()


def run_seed(seed: int, *, rounds: int = 4, acts: int = 40) -> None:
    try:
        asyncio.run(asyncio.wait_for(run_trial(seed, rounds=rounds, acts=acts), 30))
    except ParamStoreError as error:
        raise AssertionError(f"seed {seed}: {error!r}") from error
    except BaseException as error:
        error.add_note(f"seed {seed}")
        raise


@pytest.mark.parametrize("seed", range(3))
def test_the_store_means_what_its_calls_mean(seed: int) -> None:
    run_seed(seed, rounds=2, acts=25)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 140))
def test_the_store_means_what_its_calls_mean_over_many_seeds(seed: int) -> None:
    run_seed(seed)
