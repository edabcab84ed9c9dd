"""The trial of `store_trial` with two ranks that write together, in an order of visits that they declare, and that get lost.

The bits of torch's optimizer hold whichever rank pushes, leases or calls. After a rank is lost, every step that is left has
them once all ranks have opened the namespace again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping
from typing import Any

from paramstore.core.key import ExpertKey
from paramstore.core.visits import apply_visits, training_visits
from paramstore.engine.ranks import Arrival
from paramstore.engine.tables.collective import Call
from paramstore.engine.tables.namespace import View, WriterGroup
from paramstore.errors import LeaseError, RankLost, StepFailed, TicketCancelled, WriterFenced
from paramstore_testkit.oracles.experts import State
from paramstore_testkit.trials.store_trial import NAME, Gradients, StoreTrial

RANKS = 2
LOSES = 0.04
"""Chance that an act is the loss of a rank."""
LOSS = "lost"
LOST = (RankLost, WriterFenced, StepFailed, LeaseError, TicketCancelled, asyncio.CancelledError)
"""Errors with which calls under way may end when a rank is lost."""


class RanksTrial(StoreTrial):
    """One seed's run. writers: by rank; `writer` is the one that calls next."""

    def __init__(self, seed: int, *, updates: str) -> None:
        super().__init__(seed, updates=updates)
        self.writers: dict[int, View] = {}
        self.group = 0

    async def open_writer(self, *, is_new: bool = False) -> View:
        admission, description = self.store.admission, self.model.schema.describe()
        self.group += 1

        def open_first(group: WriterGroup) -> Coroutine[Any, Any, View]:
            if is_new:
                return admission.create(NAME, description, layers=range(2), experts=5, host_bytes=None, group=group)
            return admission.open(NAME, mode="write", at=None, host_bytes=None, group=group)

        old = list(self.writers.values())
        arrivals = [Arrival(NAME, f"run/{self.group}", rank, RANKS) for rank in self.random.sample(range(RANKS), RANKS)]
        waits = [self.store.ranks.open(arrival, Call("open_namespace"), open_first) for arrival in arrivals]
        self.writers = (await asyncio.gather(*waits))[0]
        for view in old:
            self.store.close_view(view)
        if self.random.random() < 0.7:
            for view in self.writers.values():
                self.store.declare_schedule(view, training_visits(range(2), is_exact=True), apply_visits(range(2)))
        return self.writers[self.random.randrange(RANKS)]

    def push(self, share: float) -> Gradients:
        """Lets ranks push in any order; sums them in rank order, in the gradient dtype."""
        order = self.random.sample(range(RANKS), RANKS)
        pushed = {rank: self.push_as(self.writers[rank], share / RANKS) for rank in order}
        total = Gradients()
        for rank in range(RANKS):
            for key, fields in pushed[rank].items():
                total[key] = {name: total[key][name] + value for name, value in fields.items()} if key in total else fields
        return total

    async def read(self, view: View, key: ExpertKey, expected: State) -> None:
        """Reads a record and checks its bits. Where an apply was given up these may be those before it, as its identity says."""
        try:
            await super().read(view, key, expected)
        except AssertionError:
            if view.step is not None or (view.namespace.writing.broken is None and not view.is_fenced and not view.is_closed):
                raise

    def draw(self, weights: Mapping[str, float]) -> str:
        self.writer = self.writers[self.random.randrange(RANKS)]
        if self.random.random() < LOSES and self.writer.namespace.steps.committed_step is not None:
            return LOSS
        return super().draw(weights)

    async def act(self, name: str) -> None:
        if name == LOSS:
            await self.lose_a_rank()
        else:
            await super().act(name)

    async def lose_a_rank(self) -> None:
        """Loses a rank in the middle of whatever is under way; then all ranks open the namespace again."""
        for _ in range(self.random.choice((0, 0, 1, 5, 20))):
            await asyncio.sleep(0)
        gone = self.writers.pop(self.random.randrange(RANKS))
        if self.random.random() < 0.5:
            self.store.close_view(gone)
        else:  # the rank's process lives on, and may read what it leased
            self.store.end_writing(gone, reason="is gone")
        if self.random.random() < 0.5:
            await self.settle(LOST)
        self.writer = await self.open_writer()
        self.store.close_view(gone)
        await self.settle(LOST)
        await self.check_reopened()
