"""Runs cycles on one store: a daemon is started, its store checked, a trainer lives beside it, and the daemon is killed.

Half of the kills come at a named point, half at a random time. After each the model says at which step the store may come
back and what every record must hold. One seed decides everything that is random; `figures` say what happened.
"""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import paramstore_client as ps
from paramstore_testkit.oracles.step_chain import Rule, StepChain
from paramstore_testkit.processes.kill_points import NAMES
from paramstore_testkit.processes.killable_serve import KillableDaemons
from paramstore_testkit.processes.life_plan import plan_life
from paramstore_testkit.processes.trainer import Trainer, check_reopened
from paramstore_testkit.trial import Trial, telling

LIFE_OPERATIONS = 24
LIFE_S = 0.1
"""Assumed length of a life until one was seen: random kills come before its end."""
VISITS = 3.0
"""Mean number of visits that a named point lets pass before it kills."""
ONCE = ("load", "loaded", "recover", "format", "plan_rollback", "rollback")
"""Points that a life reaches once or twice."""
FRESH_CYCLES = 25
"""Number of cycles after which a new store takes the place of the old."""
ONLY_IN_NEW_STORES = ("format", "fill")
CONNECT_S = 10.0


@dataclass(frozen=True, slots=True)
class Kill:
    """Time of a kill: at the `visit`-th visit of `point`; without a point, `delay_s` after the start."""

    point: str = ""
    visit: int = 0
    delay_s: float = 0.0


class KillCycles(Trial):
    """Owner of the store and its model. Its acts are the kills."""

    def __init__(
        self, daemons: KillableDaemons, directory: Path, rule: Rule, *, seed: int, names: Sequence[str] = NAMES,
        flags: Mapping[str, Any] | None = None, bugs: Sequence[str] = (),
    ) -> None:  # fmt: skip
        super().__init__(seed)
        self._daemons = daemons
        self._directory = directory
        self._rule = rule
        self._names = names
        self._flags = flags or {}
        self._bugs = bugs
        self._chain = StepChain(rule)
        self._life_s = LIFE_S

    def repeat(self, cycles: int) -> None:
        """Makes `cycles` kills, and then one life without. Raises AssertionError with the seed and the kills in its notes."""
        with telling(self.story):
            for number in range(cycles):
                name = self._names[number // 2 % len(self._names)]
                kind = name.partition(".")[0]
                kill = Kill(name, 1 if kind in ONCE else 1 + int(self.random.expovariate(1 / VISITS)))
                if number % 2:
                    kill = Kill(delay_s=self.random.uniform(0.0, self._life_s))
                is_fresh = number % FRESH_CYCLES == 0 or (bool(kill.point) and kind in ONLY_IN_NEW_STORES)
                self._cycle(kill, is_fresh=is_fresh)
            self._cycle(Kill(), is_fresh=False)

    def _cycle(self, kill: Kill, *, is_fresh: bool) -> None:
        self.acts.append(str(kill))
        self.figures["cycles"] += 1
        if is_fresh:
            shutil.rmtree(self._directory, ignore_errors=True)
            self._chain = StepChain(self._rule)
        self._daemons.launch(self._directory, kill_at=kill.visit, point=kill.point, flags=self._flags, bugs=self._bugs)
        killer, started_s = None, time.monotonic()
        if kill.delay_s:
            killer = threading.Thread(target=self._daemons.kill_within, args=(kill.delay_s,))
            killer.start()
        try:
            how = self._live()
        finally:
            if killer is not None:
                killer.join()
        if how == OUTLIVED:
            self._life_s = time.monotonic() - started_s
        elif kill.point:
            how = f"killed at {kill.point}"
        self.figures[how] += 1
        self._daemons.kill()

    def _live(self) -> str:
        """Lives until the daemon ends or the plan is over; says which it was."""
        address = self._daemons.address()
        if address is None:
            return "killed before it served"
        try:
            with ps.connect(address, timeout_s=CONNECT_S) as store:
                check_reopened(store, self._chain, self.figures)
                self._train(store)
        except ps.StoreUnavailable:
            self._daemons.wait_ended()
            return "killed while it served"
        return OUTLIVED

    def _train(self, store: ps.Store) -> None:
        before = self._chain.acknowledged
        trainer = Trainer(store, self._chain, self.figures)
        try:
            keys = trainer.namespace.keys()
            seed = self.random.getrandbits(40)
            for operation in plan_life(seed, keys, openable=self._chain.openable, count=LIFE_OPERATIONS):
                trainer.run(operation)
        finally:
            trainer.close()
            self.figures["lives resumed and committed"] += before is not None and self._chain.acknowledged != before


OUTLIVED = "outlived the plan"
