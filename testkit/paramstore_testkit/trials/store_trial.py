"""Makes random calls, faults and crashes on a namespace beside the model of what the calls mean. One seed decides everything.

Checked, whatever the interleaving, in small arenas:
- each lease and each record read has the bits that torch's optimizer gives: for the writer those of all applies called before,
  for a reader those of its step;
- after a crash: last acknowledged step <= reopened step <= last started, and every step that exists has its own bits;
- nothing hangs, and no slot, lease, buffer or extent leaks.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any

import pytest
import torch

from paramstore.core.key import ExpertKey
from paramstore.core.schema import Schema
from paramstore.engine.store import Store
from paramstore.engine.tables.arena import Arena
from paramstore.engine.tables.namespace import LeaseRequest, View
from paramstore.errors import CapacityError, LeaseError, StepDropped, StepFailed, TicketCancelled, WriterFenced
from paramstore.storage.format.structures import extents_start_bytes
from paramstore_testkit.disks.machine import Machine
from paramstore_testkit.oracles.experts import State, Tensors
from paramstore_testkit.oracles.images import gradient_of, random_values
from paramstore_testkit.oracles.trained_model import TrainedModel, drawn_options, extra_of
from paramstore_testkit.stores.small_planner import held_extents
from paramstore_testkit.stores.small_store import initialize, read_record, reader, shrink_arenas, writer
from paramstore_testkit.stores.trained_store import shows
from paramstore_testkit.trial import LIMIT_S, Trial

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


class StoreTrial(Trial):
    """One seed's run. figures: also what was `checked`, copies and records, leased or read; the others have the store's names."""

    def __init__(self, seed: int, *, updates: str) -> None:
        """updates: the namespace's update rule."""
        super().__init__(seed)
        dtype = self.random.choice(("float32", "bfloat16"))
        schema = Schema.adamw(self.random.choice(SHAPES), param_dtype=dtype, updates=updates)
        self.dtype = getattr(torch, dtype)
        self.machine = Machine(
            seed=seed, host_budget_bytes=self.random.choice((11, 13, 20)) << 20, volume_count=self.random.choice((1, 2)),
            policy=self.random.choice(("lru", "decayed_lfu", "schedule")), prefill=self.random.random() < 0.3,
            retained_steps=self.random.choice((2, 2, 3)), held_steps=self.random.choice((0, 1, 2)),
            reader_slots=4,
        )  # fmt: skip
        self.model = TrainedModel(schema, first_value=seed << 20)
        self.model.initialize({key: random_values(schema, number) for number, key in enumerate(KEYS)})
        self.history: list[State] = []
        """States after every apply, in the order of the calls."""
        self.snapshots: set[int] = set()
        self.acknowledged = self.started = -1
        self.next_lease = 1
        self.tasks: list[asyncio.Future[Any]] = []
        self.readers = Readers(self)
        self.stolen: dict[Arena, int] = {}
        """Slots of the arenas that nobody may have."""
        self.store: Store
        self.writer: View

    async def live(self, *, rounds: int, acts: int) -> None:
        """Lives rounds of random acts, each of which ends in a crash."""
        await self.begin()
        for number in range(rounds):
            await self.live_through(self.draw(ACTS) for _ in range(acts))
            if number % 2:
                await self.settle()
                while not self.store.transfers.runner.is_idle:  # a cancelled prefetch may still land
                    await asyncio.sleep(0)
                check_nothing_leaked(self)
                if self.writer.namespace.steps.prepared_step is None:
                    await self.check_all()
            await self.crash()

    async def begin(self) -> None:
        self.store = self.machine.start()
        self.writer = await self.open_writer(is_new=True)
        await initialize(self.store, self.writer, lambda key: self.model.working[key].masters)
        for _ in range(self.random.choice((0, 0, 2))):  # applies before the first commit
            self.apply()
        await self.commit()
        shrink_arenas(self.writer.namespace, self.stolen, self.random, working_least=2, most=8)

    async def open_writer(self, *, is_new: bool = False) -> View:
        """Opens the view that writes from now on."""
        if not is_new:
            return await writer(self.store)
        return await self.store.admission.create(NAME, self.model.schema.describe(), layers=range(2), experts=5, host_bytes=None)

    # --- the writer's calls

    def apply(self, *, share: float | None = None) -> asyncio.Future[Any]:
        """Makes an apply. share: of the keys, those with a gradient; drawn if None."""
        gradients = self.push(self.random.choice((0.2, 0.2, 0.4, 1.0)) if share is None else share)
        options = drawn_options(self.random)
        applying = self.store.applies.apply(self.writer, options, 1.0)
        self.model.train(gradients, options)
        self.history.append(self.model.working)
        return self.task(applying)

    def push(self, share: float) -> Gradients:
        """Pushes gradients; gives what the apply sums them to."""
        return self.push_as(self.writer, share)

    def push_as(self, view: View, share: float) -> Gradients:
        gradients = Gradients()
        for key in [key for key in KEYS if self.random.random() < share]:
            gradients[key] = {name: value.to(self.dtype) for name, value in self.model.next_values().items()}
        self.store.applies.push(view, [(key, gradient_of(self.model.schema, fields), 0) for key, fields in gradients.items()])
        return gradients

    def commit(self) -> asyncio.Future[Any]:
        async def acknowledge(step: int) -> None:
            await self.store.committer.commit(self.writer, step, extra_of(step))
            self.acknowledged = max(step, self.acknowledged)

        self.started = self.model.take_step(self.random)
        return self.task(acknowledge(self.started))

    async def prepare(self) -> None:
        """Makes a step in two halves; leases in between have missed steps all the same."""
        step = self.model.take_step(self.random)
        await self.store.committer.prepare(self.writer, step, extra_of(step))
        for _ in range(3):
            self.lease(self.writer, self.model.working)
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
        self.model.working, self.acknowledged, self.started = self.model.steps[step], step, step

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
        except LeaseError:  # copies that the writer holds became an older step's, and take slots beside the ones it waited for
            if request.view.is_closed:
                return  # its rank was lost
            assert request.view.step is None
            assert len(self.history) > called_at
            assert any(copy.identity.version != self.model.working[copy.key].updates for copy in request.view.leased)
            self.figures["refused for its own leases"] += 1
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
        assert any(shows(self.writer.namespace, request.copies, state) for state in states), (
            [(copy.key, copy.identity, copy.base, [state[copy.key].updates for state in states]) for copy in request.copies],
            request.view.step,
        )
        self.figures["checked"] += len(request.copies)

    async def read(self, view: View, key: ExpertKey, expected: State) -> None:
        try:
            identity, found = await read_record(self.store, view, key)
        except StepDropped:
            assert view.is_dropped
            return
        assert identity.version == expected[key].updates
        for name, value in found.items():
            assert torch.equal(value, expected[key].fields[name]), (key, name, identity)
        self.figures["checked"] += 1

    # --- acts

    def task(self, coroutine: Coroutine[Any, Any, Any]) -> asyncio.Future[Any]:
        future = asyncio.ensure_future(coroutine)
        self.tasks.append(future)
        return future

    async def settle(self, tolerated: tuple[type[BaseException], ...] = ()) -> None:
        """Waits for what is under way. Raises its errors, but those that are `tolerated`."""
        tasks, self.tasks = self.tasks, []
        for outcome in await asyncio.gather(*tasks, return_exceptions=bool(tolerated)):
            if isinstance(outcome, BaseException) and not isinstance(outcome, tolerated):
                raise outcome

    async def act(self, name: str) -> None:
        """Makes one call, on random keys."""
        keys = self.random.sample(KEYS, self.random.randint(1, 6))
        if name in ALONE:
            await self.settle()
            await self.act_alone(name)
        elif name.startswith("reader ") and self.readers.views:
            self.readers.act(name, keys)
        elif name in ("reader", "read step") and len(self.readers.views) < 3:
            await self.readers.open(self.random.choice(self.writer.namespace.steps.ledger.steps()) if name == "read step" else None)
        elif name in ("refresh", "close") and self.readers.views:
            self.readers.move(name)
        elif name == "drop snapshot" and self.snapshots:
            step = self.random.choice(sorted(self.snapshots))
            self.snapshots.remove(step)
            await self.store.admission.drop_snapshot(self.writer, step)
        else:
            self.act_as_writer(name, keys)

    async def after_act(self) -> None:
        if self.random.random() < 0.3:
            await asyncio.sleep(0)

    def act_as_writer(self, name: str, keys: list[ExpertKey]) -> None:
        match name:
            case "apply":
                self.apply()
            case "apply nothing":
                self.apply(share=0.0)
            case "commit":
                self.commit()
            case "lease":
                self.lease(self.writer, self.model.working)
            case "prefetch":
                self.prefetch(self.writer, keys, self.random.choice(("param", "param", "optim")))
            case "evict":
                self.task(self.store.evict(self.writer, keys, self.random.choice((None, "param", "optim"))))
            case "write back":
                self.task(self.store.write_back(self.writer, self.random.choice((None, keys))))
            case "read":
                self.task(self.read(self.writer, keys[0], self.model.working))

    def prefetch(self, view: View, keys: list[ExpertKey], part: str) -> None:
        request = self.store.access.prefetch(view, keys, part, None)
        if self.random.random() < 0.3:
            self.store.transfers.cancel_prefetch(request)
        else:
            self.readers.calls.append((view, self.task(self.store.access.wait_prefetch(request))))

    async def act_alone(self, name: str) -> None:
        """Does an act beside which nothing else is under way."""
        steps = self.writer.namespace.steps.ledger.steps()
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
            self.model.working = self.model.steps[self.acknowledged]

    # --- the ends

    async def crash(self) -> None:
        """Cuts the power; then every step that exists has its own bits, and training goes on from the newest."""
        stats = self.writer.namespace.stats
        for name in ("records_updated", "records_caught_up", "records_advanced", "missed_steps_made", "commits"):
            self.figures[name] += getattr(stats, name)
        for forgotten in (self.tasks, self.readers.views, self.readers.calls):
            forgotten.clear()
        await self.machine.crash(keeps_random_writes=True)
        self.store = self.machine.start()
        self.writer = await self.open_writer()
        await self.check_reopened()
        shrink_arenas(self.writer.namespace, self.stolen, self.random, working_least=2, most=8)

    async def check_reopened(self) -> None:
        """Checks that a new writer stands at a step that it may stand at, and goes on from there."""
        step = self.writer.namespace.steps.committed_step
        assert step is not None
        assert self.acknowledged <= step <= self.started
        self.acknowledged, self.started, self.model.working = step, step, self.model.steps[step]
        assert (
            self.snapshots == set(self.writer.namespace.steps.ledger.snapshots()) <= set(self.writer.namespace.steps.ledger.steps())
        )
        await self.check_all()

    async def check_all(self) -> None:
        """Checks every record, of the writer and of every step."""
        for key in KEYS:
            await self.read(self.writer, key, self.model.working)
        for step in self.writer.namespace.steps.ledger.steps():
            view = await reader(self.store, at=step)
            assert view.namespace.steps.ledger.step(step).extra == extra_of(step)
            for key in KEYS:
                await self.read(view, key, self.model.steps[step])
                if view.lease_slots:  # 0 if other open readers were promised all
                    self.lease(view, self.model.steps[step], [key])
                await self.settle()
            self.store.close_view(view)


class Readers:
    """Readers of a trial's namespace, three at most, on whatever steps."""

    def __init__(self, trial: StoreTrial) -> None:
        self.trial = trial
        self.views: list[View] = []
        self.calls: list[tuple[View, asyncio.Future[Any]]] = []
        """Reads and prefetches that are under way."""

    async def open(self, step: int | None) -> None:
        try:
            self.views.append(await reader(self.trial.store, at=step))
        except StepDropped:
            assert step != self.trial.acknowledged  # a commit under way drops it

    def act(self, name: str, keys: list[ExpertKey]) -> None:
        view = self.trial.random.choice(self.views)
        if view.is_dropped:
            return
        assert view.step is not None
        expected = self.trial.model.steps[view.step]
        if name == "reader lease":
            self.trial.lease(view, expected)
        elif name == "reader read":
            self.calls.append((view, self.trial.task(self.trial.read(view, keys[0], expected))))
        elif name == "reader prefetch":
            self.trial.prefetch(view, keys, "param")

    def move(self, name: str) -> None:
        """Moves a reader that has no lease, and of which no call is under way."""
        view = self.trial.random.choice(self.views)
        if view.leases or any(caller is view and not call.done() for caller, call in self.calls):
            return
        if name == "refresh":
            self.trial.store.refresh(view)
        else:
            self.views.remove(view)
            self.trial.store.close_view(view)


def check_nothing_leaked(trial: StoreTrial) -> None:
    """Checks that every slot, buffer and extent is accounted for once nobody uses anything."""
    namespace = trial.writer.namespace
    for view in (trial.writer, *trial.readers.views):
        assert not view.leased
        assert not view.leases
    if namespace.is_exact:
        transfers = trial.store.transfers
        advances, free = transfers.advancer.of(namespace.name), transfers._buffers.of(namespace.name).advance
        assert not advances.waiting
        assert not advances.running
        assert len(free) == len(set(map(id, free))) > 0
    copies = sum(len(found) for found in namespace.residency.copies.values())
    for arena, used in ((namespace.memory.param, copies), (namespace.memory.working, len(namespace.residency.resident))):
        assert arena.slots.count - arena.slots.free_count - trial.stolen[arena] == used
    assert all(working.holders == 0 and not working.is_moving for working in namespace.residency.working.values())
    space, used_bytes = trial.store.transfers._planner.space, len(set(held_extents(namespace))) * namespace.schema.record_bytes
    start_bytes = sum(extents_start_bytes(trial.store.committer._prover._superblocks[index]) for index in trial.machine.disks)
    taken_bytes = sum(volume.size_bytes - volume.free_bytes - volume.prefilling_bytes for volume in space.stats())
    assert taken_bytes - start_bytes == used_bytes == space.held_bytes(NAME)


def run_seed(
    seed: int, *, updates: str, rounds: int = 4, acts: int = 40, limit_s: float = LIMIT_S, kind: type[StoreTrial] = StoreTrial
) -> StoreTrial:
    """Runs the trial of `seed`; gives it when all checks have passed."""
    trial = kind(seed, updates=updates)
    trial.run(trial.live(rounds=rounds, acts=acts), limit_s=limit_s)
    return trial
