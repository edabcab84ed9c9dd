"""Draws what a trainer does in one life from a seed, before it begins: the seed alone tells every byte that it will push.

A plan depends on nothing that happens: `plan_life` with equal arguments gives equal operations.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy
import torch

from paramstore.core.key import ExpertKey
from paramstore.core.schema import Schema
from paramstore.limits import RETAINED_STEPS
from paramstore_testkit.oracles.experts import Tensors

WEIGHTS = {
    "train": 12, "commit": 6, "commit_later": 4, "settle": 2, "abort": 1, "evict": 2, "write_back": 2, "prefetch": 1,
    "lease": 2, "read": 2, "reader": 1, "rollback": 1,
}  # fmt: skip
STEP_GAPS = (1, 1, 1, 3)


@dataclass(frozen=True, slots=True)
class Operation:
    """One thing that a trainer does. seed: of its gradients. step: of a commit or rollback."""

    kind: str
    keys: tuple[ExpertKey, ...] = ()
    seed: int = 0
    step: int = 0

    @property
    def extra(self) -> bytes:
        """Makes the `extra` of the operation's commit."""
        return b"%d of %d" % (self.step, self.seed)


def plan_life(seed: int, keys: Sequence[ExpertKey], *, openable: Sequence[int], count: int) -> Iterator[Operation]:
    """Draws `count` operations of a life that begins at the last of the `openable` steps, and a last `settle`.

    Steps go up from the committed one, with gaps; after a rollback numbers are used again.
    """
    dice = random.Random(seed)
    steps, unsettled = list(openable), False
    for _ in range(count):
        (kind,) = dice.choices([*WEIGHTS], [*WEIGHTS.values()])
        chosen = tuple(dice.sample(keys, dice.randint(1, len(keys))))
        if kind == "rollback" and unsettled:
            yield Operation("settle")
        if kind == "rollback":
            steps = steps[: len(steps) - dice.randrange(min(2, len(steps)))]
        elif kind in ("commit", "commit_later"):
            steps = [*steps, steps[-1] + dice.choice(STEP_GAPS)][-RETAINED_STEPS:]
        unsettled = kind == "commit_later" or (unsettled and kind not in ("commit", "settle", "rollback"))
        yield Operation(kind, chosen, dice.getrandbits(40), steps[-1])
    yield Operation("settle")


def values_of(schema: Schema, seed: int, key: ExpertKey) -> Tensors:
    """Draws random fp32 values for every parameter field of `key`: an initial value, or a gradient."""
    generator = numpy.random.default_rng([seed, *key])
    return {name: torch.from_numpy(generator.standard_normal(shape, dtype=numpy.float32)) for name, shape, _ in schema.specs}
