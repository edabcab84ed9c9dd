"""Runs cycles on one daemon: a trainer in a process of its own lives its plan and is killed at any moment; the next one begins at
the committed step, and nothing else of the dead one counts.

The trainer says what it begins and what was answered; the rest is known from its seed. `figures` say what happened.
"""

from __future__ import annotations

from collections.abc import Iterable

import paramstore_client as ps
from paramstore_testkit.oracles.step_chain import StepChain
from paramstore_testkit.processes.killable_trainer import KillableTrainers
from paramstore_testkit.processes.life_plan import Operation, plan_life
from paramstore_testkit.processes.trainer import EXPERTS, LAYERS, NAME, Trainer, begin, check_reopened, end, plain_rule
from paramstore_testkit.trial import Trial, telling

LIFE_OPERATIONS = 24
NEXT_LIFE_OPERATIONS = 3


class TrainerKills(Trial):
    """Owner of the model. store: a client of the daemon beside which the trainers live."""

    def __init__(self, trainers: KillableTrainers, store: ps.Store, *, seed: int) -> None:
        super().__init__(seed)
        self._trainers = trainers
        self._store = store
        self._chain = StepChain(plain_rule)

    def repeat(self, cycles: int) -> None:
        """Makes `cycles` kills. Raises AssertionError with the seed and the cycles in its notes."""
        with telling(self.story):
            for number in range(cycles):
                self.acts.append(f"cycle {number}")
                self._next_life()
                self._killed_life()
                self._check()
            self._next_life()

    def _next_life(self) -> None:
        """Lets the next writer begin where it should, and go on from there."""
        trainer = Trainer(self._store, self._chain, self.figures)
        for operation in self._plan(self.random.getrandbits(40), NEXT_LIFE_OPERATIONS):
            trainer.run(operation)
        trainer.namespace.close()

    def _plan(self, seed: int, count: int) -> list[Operation]:
        keys = [(layer, expert) for layer in range(LAYERS) for expert in range(EXPERTS)]
        return list(plan_life(seed, keys, openable=self._chain.openable, count=count))

    def _killed_life(self) -> None:
        seed, operations = self.random.getrandbits(40), LIFE_OPERATIONS
        plan = self._plan(seed, operations)
        request = {"address": self._store.address, "seed": seed, "openable": self._chain.openable, "count": operations}
        self._trainers.fork(request)
        self._chain.reopen(self._chain.acknowledged)  # a life begins there, whatever the one before left uncommitted
        for _ in range(self.random.randint(1, 2 * len(plan))):
            said = self._trainers.heard()
            assert said is not None, "the trainer died before it was killed"
            self._follow(plan, [said])
        self._follow(plan, self._trainers.kill())
        self.figures["trainers killed"] += 1

    def _follow(self, plan: list[Operation], said: Iterable[str]) -> None:
        for line in said:
            word, _, number = line.partition(" ")
            if word == "began":
                begin(self._chain, plan[int(number)])
            elif word == "done":
                end(self._chain, plan[int(number)])
                self.figures[plan[int(number)].kind] += 1

    def _check(self) -> None:
        """Opens as writer, which waits for a commit that the dead one has under way, then checks that the committed step stands."""
        self._store.open_namespace(NAME, mode="write").close()
        check_reopened(self._store, self._chain, self.figures)
