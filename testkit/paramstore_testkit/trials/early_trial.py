"""A random life of two namespaces with equal gradients: one is updated by plain applies, the other by applies that begin early.

After every step all their records are equal bit for bit. While an apply is open, a lease sees its result for the keys that it
has claimed, and the state before it for all others. Arenas are small; pushes, micro-batches, ranks and workers come in random
order; applies are given up by abort, rollback and a new writer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import torch

from paramstore.core.key import ExpertKey
from paramstore.core.optimizers import AdamW
from paramstore.core.schema import Schema
from paramstore.engine.tables.arena import Arena
from paramstore.engine.tables.namespace import View
from paramstore.errors import CapacityError, LeaseError, StepFailed, StepOutOfOrder
from paramstore.optim.tensors import field_tensor
from paramstore_testkit.disks.machine import Machine, PlainSegment
from paramstore_testkit.oracles.images import gradient_of, random_values, split_values
from paramstore_testkit.stores.small_ranks import call, open_ranks, record
from paramstore_testkit.stores.small_store import create, leased, shrink_arenas, turns, writer
from paramstore_testkit.trial import Trial

SHAPES = {"w": (4, 16), "v": (32,)}
LAYERS, EXPERTS = 3, 4
KEYS: list[ExpertKey] = [(layer, expert) for layer in range(LAYERS) for expert in range(EXPERTS)]
PLAIN, EARLY = "plain", "early"
Gradients = dict[tuple[int, ExpertKey], list[torch.Tensor]]
"""Gradients by rank and key: a list with one flat tensor for each micro-batch that hit the key."""


class EarlyTrial(Trial):
    """One seed's run. Its acts are the ways in which applies end."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.ranks = self.random.choice((1, 1, 2))
        self.updates = self.random.choice(("exact", "touched"))
        self.dtype = getattr(torch, dtype := self.random.choice(("float32", "bfloat16")))
        self.schema = Schema.adamw(SHAPES, param_dtype=dtype, updates=self.updates)
        self.machine = Machine(seed=seed, host_budget_bytes=24 << 20, policy=self.random.choice(("lru", "schedule")))
        self.groups, self.committed = 0, 0
        self.views: dict[str, list[View]] = {}
        self.stolen: dict[Arena, int] = {}
        """Slots of the arenas that nobody may have."""

    async def live(self, steps: int) -> None:
        torch.manual_seed(self.seed)
        await self.begin()
        for _ in range(steps):
            await self.step()
            if self.random.random() < 0.4:
                await self.commit()

    async def begin(self) -> None:
        self.store = self.machine.start()
        for name in (PLAIN, EARLY):
            view = await create(
                self.store, name, schema=self.schema, layers=range(LAYERS), experts=EXPERTS,
                values_of=lambda key: random_values(self.schema, KEYS.index(key)),
            )  # fmt: skip
            self.store.close_view(view)
            await self.open(name)

    async def open(self, name: str) -> None:
        """Opens the namespace anew, as its writer or with its ranks."""
        self.groups += 1
        if self.ranks == 1:
            self.views[name] = [await writer(self.store, name)]
        else:
            self.views[name] = await open_ranks(self.store, self.ranks, group=f"g{self.groups}", name=name)
        shrink_arenas(self.views[name][0].namespace, self.stolen, self.random, working_least=1, most=9)

    def together(self, name: str, what: str, begin: Callable[[View], Any]) -> asyncio.Future[Any]:
        """Makes a call on all ranks; gives the future of the first."""
        views = self.views[name]
        if self.ranks == 1:
            return asyncio.ensure_future(_awaited(begin(views[0])))
        futures = [call(self.store, view, what, begin) for view in views]
        for future in futures[1:]:
            future.add_done_callback(lambda done: done.cancelled() or done.exception())
        return futures[0]

    # --- gradients

    def gradients(self) -> Gradients:
        share, found = self.random.choice((0.3, 0.7, 1.0)), Gradients()
        for key in KEYS:
            for rank in range(self.ranks):
                if self.random.random() < share:
                    count = self.random.choice((1, 1, 2))
                    elements = sum(field.elements for field in self.schema.gradient_fields())
                    found[rank, key] = [torch.randn(elements).to(self.dtype) for _ in range(count)]
        return found

    def push(self, name: str, rank: int, places: dict[ExpertKey, PlainSegment], *, is_last: bool = False) -> None:
        entries = [(key, memory, 0) for key, memory in places.items()]
        self.store.applies.push(self.views[name][rank], entries, is_last=is_last)

    def segment(self, values: torch.Tensor) -> PlainSegment:
        return gradient_of(self.schema, split_values(self.schema, values))

    # --- a step

    async def step(self) -> None:
        gradients, options = self.gradients(), AdamW(lr=self.random.random() / 10, weight_decay=self.random.choice((0.0, 0.1)))
        before = await self.params(PLAIN)
        for (rank, key), batches in gradients.items():
            self.push(PLAIN, rank, {key: self.segment(sum(batches[1:], batches[0]))})
        await self.together(PLAIN, "apply", lambda view: self.store.applies.apply(view, options, 0.5))
        after = await self.params(PLAIN)
        places = {at: self.segment(batches[0]) for at, batches in gradients.items() if len(batches) > 1}
        for (rank, key), memory in places.items():
            self.push(EARLY, rank, {key: memory})
        begun = self.together(EARLY, "begin_apply", lambda view: self.store.applies.begin(view, options, 0.5))
        begun.add_done_callback(lambda done: done.cancelled() or done.exception())
        way = self.random.choice(("end",) * 7 + ("abort", "rollback", "reopen"))
        await self.push_early(gradients, places, before, after, until=len(gradients) if way == "end" else self.random.randint(0, 4))
        self.log(way)
        if way == "end":
            result = await self.together(EARLY, "end_apply", self.store.applies.end)
            assert result == await begun
            assert result["records"] == len({key for _, key in gradients})
        else:
            await self.give_up(way)
        await self.compare()

    async def push_early(
        self, gradients: Gradients, places: dict[tuple[int, ExpertKey], PlainSegment], before: dict[ExpertKey, torch.Tensor],
        after: dict[ExpertKey, torch.Tensor], *, until: int,
    ) -> None:  # fmt: skip
        """Pushes last gradients, layer by layer backwards, with ranks out of step; some keys are left for the end."""
        order = sorted(gradients, key=lambda at: (-at[1][0], self.random.random()))
        for rank, key in order[:until]:
            batches = gradients[rank, key]
            if len(batches) > 1 and self.random.random() < 0.7:  # the last micro-batch hits the key, too
                memory = places[rank, key]
                self.add(memory, batches[1])
                self.push(EARLY, rank, {key: memory}, is_last=True)
            elif len(batches) > 1:
                self.add(places[rank, key], batches[1])  # the key was pushed before, by a micro-batch that is over
            else:
                self.push(EARLY, rank, {key: self.segment(batches[0])}, is_last=True)
            await turns(self.random.choice((0, 0, 1, 8)))
            await self.look(before, after)

    def add(self, memory: PlainSegment, values: torch.Tensor) -> None:
        image, parts = memory.view(0, self.schema.gradient_bytes), split_values(self.schema, values)
        for field in self.schema.gradient_fields():
            field_tensor(image, field).add_(parts[field.name])

    async def look(self, before: dict[ExpertKey, torch.Tensor], after: dict[ExpertKey, torch.Tensor]) -> None:
        """Leases any key and checks what it sees; at times checks that an open apply refuses a write-back."""
        claims = self.views[EARLY][0].namespace.writing.open_apply
        assert claims is not None
        key = self.random.choice(KEYS)
        expected = after[key] if key in claims.gradients else before[key]
        try:
            seen = await self.param(EARLY, key)
        except (CapacityError, LeaseError):
            return
        assert torch.equal(seen, expected), f"{key}, {'claimed' if key in claims.gradients else 'unclaimed'}"
        self.figures["claimed seen" if key in claims.gradients else "unclaimed seen"] += 1
        if claims.gradients and self.random.random() < 0.2:
            try:
                await self.store.write_back(self.views[EARLY][0], None)
            except StepOutOfOrder:
                self.figures["refused"] += 1
            else:
                raise AssertionError("a write-back ran while an apply was under way")

    async def give_up(self, way: str) -> None:
        """Drops the apply of the early namespace; both go back to the committed step."""
        claims = self.views[EARLY][0].namespace.writing.open_apply
        assert claims is not None
        if way == "abort":
            try:
                await self.together(EARLY, "abort", self.store.applies.abort)
            except StepFailed:
                assert claims.gradients
                self.figures["abort refused"] += 1
        if way == "reopen":
            for view in self.views[EARLY]:
                if self.random.random() < 0.5:  # if it stays open, the new writer fences it
                    self.store.close_view(view)
            await self.open(EARLY)
        else:
            await self.together(EARLY, "rollback", lambda view: self.store.rollback(view, self.committed))
        await self.together(PLAIN, "rollback", lambda view: self.store.rollback(view, self.committed))

    async def commit(self) -> None:
        self.committed += 1
        for name in (PLAIN, EARLY):
            await self.together(name, "commit", lambda view: self.store.committer.commit(view, self.committed, b""))

    # --- looking

    async def param(self, name: str, key: ExpertKey) -> torch.Tensor:
        found = await leased(self.store, self.views[name][0], [key], timeout_s=10.0)
        return torch.cat([value.flatten() for value in found[key].values()])

    async def params(self, name: str) -> dict[ExpertKey, torch.Tensor]:
        return {key: await self.param(name, key) for key in KEYS}

    async def compare(self) -> None:
        for key in KEYS:
            plain, early = [await record(self.store, self.views[name][0], key) for name in (PLAIN, EARLY)]
            assert torch.equal(plain, early), key
            self.figures["compared"] += 1


async def _awaited(result: Any) -> Any:
    return await result if asyncio.iscoroutine(result) else result


def run_seed(seed: int, *, steps: int = 8) -> EarlyTrial:
    """Runs one trial; gives it when all checks have passed."""
    trial = EarlyTrial(seed)
    trial.run(trial.live(steps))
    return trial
