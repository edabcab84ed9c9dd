"""A store trained with random gradients, beside the model of what its calls mean."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from paramstore.core.key import ExpertKey
from paramstore.core.optimizers import AdamW
from paramstore.core.schema import Schema
from paramstore.engine.store import Store
from paramstore.engine.tables.copies import ParamCopy
from paramstore.engine.tables.namespace import NamespaceState, View
from paramstore_testkit.oracles.experts import State, Tensors
from paramstore_testkit.oracles.images import gradient_of, random_values, values_in
from paramstore_testkit.oracles.trained_model import TrainedModel
from paramstore_testkit.stores.small_store import SCHEMA, Values, create

LAYERS, EXPERTS = 2, 4
KEYS = [(layer, expert) for layer in range(LAYERS) for expert in range(EXPERTS)]
OPTIONS = AdamW(lr=1e-2)


def value_of(key: ExpertKey) -> Tensors:
    return random_values(SCHEMA, key[0] * 100 + key[1])


def gradients_of(keys: list[ExpertKey], seed: int) -> dict[ExpertKey, Tensors]:
    return {key: random_values(SCHEMA, seed * 10_000 + key[0] * 100 + key[1]) for key in keys}


async def make_writer(store: Store, schema: Schema = SCHEMA, *, commit: bool = True) -> View:
    return await create(store, schema=schema, layers=range(LAYERS), values_of=value_of, step=0 if commit else None)


def shows(namespace: NamespaceState, copies: Sequence[ParamCopy], state: State) -> bool:
    """Whether the bits of all these copies are those of `state`."""
    fields = namespace.schema.part("param").fields
    for copy in copies:
        found = values_in(namespace.memory.param.view(copy.slot), fields)
        if not all(torch.equal(found[name], value.to(found[name].dtype)) for name, value in state[copy.key].masters.items()):
            return False
    return True


def push(store: Store, view: View, keys: list[ExpertKey], seed: int) -> None:
    store.applies.push(view, [(key, gradient_of(SCHEMA, values), 0) for key, values in gradients_of(keys, seed).items()])


class Model(TrainedModel):
    """Model of what the calls mean."""

    def __init__(self) -> None:
        super().__init__(SCHEMA)
        self.initialize({key: value_of(key) for key in KEYS})

    def apply(self, keys: list[ExpertKey], seed: int) -> None:
        self.train(gradients_of(keys, seed), OPTIONS)

    def check(self, values: Values) -> None:
        for key, fields in values.items():
            for name, value in fields.items():
                assert torch.equal(value, self.working[key].masters[name]), (key, name)
