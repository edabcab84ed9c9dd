"""`python -m paramstore_testkit.processes.killable_trainer`: trainers that are killed at any moment, one after the other.

Each request, a mapping {address, seed, openable, count}, makes a child that connects, opens the namespace as its writer and
lives the plan of that seed. It says `began N` before its N-th operation and `done N` after it, so that a listener knows what
the store may hold when the child is dead. `KillableTrainers` is the other end.
"""

from __future__ import annotations

import signal
from collections import Counter
from pathlib import Path
from typing import Any

import paramstore_client as ps
from paramstore_testkit.oracles.step_chain import StepChain
from paramstore_testkit.processes.fork_server import ForkServer, say, serve_forks
from paramstore_testkit.processes.life_plan import plan_life
from paramstore_testkit.processes.trainer import Trainer, adopt, plain_rule

MODULE = "paramstore_testkit.processes.killable_trainer"


class KillableTrainers(ForkServer):
    """Real trainers of a store; at most one of them lives at a time."""

    def __init__(self, log: Path) -> None:
        super().__init__(MODULE, log=log)


def _live(request: dict[str, Any]) -> None:
    chain = StepChain(plain_rule)
    with ps.connect(request["address"]) as store:
        adopt(store, chain)
        trainer = Trainer(store, chain, Counter())
        for number, operation in enumerate(
            plan_life(request["seed"], trainer.namespace.keys(), openable=request["openable"], count=request["count"])
        ):
            say(f"began {number}")
            trainer.run(operation)
            say(f"done {number}")
        say("over")
        signal.pause()  # holding what it has, until it is killed


if __name__ == "__main__":
    serve_forks(_live)
