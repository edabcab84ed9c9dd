"""A namespace as its trainer knows it: every record as torch's own AdamW makes it, now and at each step that was ever started."""

from __future__ import annotations

from collections.abc import Mapping
from random import Random

from paramstore.core.key import ExpertKey
from paramstore.core.optimizers import AdamW
from paramstore.core.schema import Schema
from paramstore_testkit.oracles.experts import Expert, State, Tensors, trained
from paramstore_testkit.oracles.images import random_values


class TrainedModel:
    """Owner of the states. Values are numbered from `first_value` on, so that no two are equal."""

    def __init__(self, schema: Schema, *, first_value: int = 0, first_step: int = 0) -> None:
        self.schema = schema
        self.working: State = {}
        self.steps: dict[int, State] = {}
        """Contents of each step."""
        self.next_step = first_step
        self._values = first_value

    def next_values(self) -> Tensors:
        """Makes a gradient, or an initial value, that nothing else has."""
        self._values += 1
        return random_values(self.schema, self._values)

    def initialize(self, values: Mapping[ExpertKey, Tensors]) -> None:
        self.working = {**self.working, **{key: Expert.initial(value) for key, value in values.items()}}

    def train(self, gradients: Mapping[ExpertKey, Tensors], options: AdamW) -> None:
        """Makes an apply."""
        self.working = trained(self.working, gradients, options, is_exact=self.schema.updates == "exact")

    def take_step(self, random: Random) -> int:
        """Starts a step with what `working` holds now; gives its number, which has gaps."""
        step = self.next_step
        self.next_step += random.randint(1, 3)
        self.steps[step] = self.working
        return step


def extra_of(step: int) -> bytes:
    """Gives what is committed beside a step."""
    return b"extra of %d" % step


def drawn_options(random: Random) -> AdamW:
    """Draws options as a schedule has them: the rate changes often, the rest now and then."""
    if random.random() < 0.3:
        return AdamW(lr=1e-2)
    if random.random() < 0.7:
        return AdamW(lr=random.random() / 10)
    betas = (random.choice((0.0, 0.85, 0.9)), random.choice((0.95, 0.999)))
    return AdamW(lr=0.05, betas=betas, eps=1e-6, weight_decay=random.choice((0.0, 0.1)))
