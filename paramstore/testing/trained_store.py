"""A store trained with random gradients beside a model in plain tensors, which torch's own optimizer updates."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import torch

from paramstore.core.key import ExpertKey
from paramstore.core.schema import Schema
from paramstore.engine.namespace import View
from paramstore.engine.store import Store
from paramstore.optim.tensors import field_tensor
from paramstore.testing.machine import PlainSegment

SCHEMA = Schema.adamw({"w": (3, 5), "v": (7,)}, param_dtype="float32")
LAYERS, EXPERTS = 2, 4
KEYS = [(layer, expert) for layer in range(LAYERS) for expert in range(EXPERTS)]


def run(coroutine: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(coroutine, 20))


def value_of(key: ExpertKey) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(key[0] * 100 + key[1])
    return {name: torch.randn(shape, generator=generator) for name, shape, _ in SCHEMA.specs}


def image_of(value: dict[str, torch.Tensor], fields: Any, length_bytes: int) -> PlainSegment:
    segment = PlainSegment(-(-length_bytes // 4096) * 4096)
    for field in fields:
        field_tensor(segment.view(0, length_bytes), field).copy_(value[field.name].flatten())
    return segment


async def make_writer(store: Store, schema: Schema = SCHEMA, *, commit: bool = True) -> View:
    view = await store.admission.create("moe", schema.describe(), layers=range(LAYERS), experts=EXPERTS, host_bytes=None)
    await store.initialize_begin(view)
    for key in KEYS:
        initial = image_of(value_of(key), schema.initial_fields(), schema.initial_bytes)
        await store.initialize_put(view, key, initial.view(0, schema.initial_bytes))
    await store.initialize_end(view)
    if commit:
        await store.commit(view, 0, b"first")
    return view


lease_ids = iter(range(1, 1 << 30))
Values = dict[ExpertKey, dict[str, torch.Tensor]]


async def leased(store: Store, view: View, keys: list[ExpertKey], *, timeout_s: float = 5.0) -> Values:
    """The `param` values of `keys` as `view` sees them."""
    lease_id = next(lease_ids)
    request = store.acquire(view, lease_id, keys, "param")
    await store.wait_lease(request, timeout_s)
    arena = view.namespace.param_arena
    assert arena is not None
    part = view.namespace.schema.part("param")
    values = {
        key: {field.name: field_tensor(arena.view(copy.slot), field).clone() for field in part.fields}
        for key, copy in zip(keys, request.copies, strict=True)
    }
    store.release(view, lease_id)
    return values


def gradient_of(key: ExpertKey, seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed * 10_000 + key[0] * 100 + key[1])
    return {name: torch.randn(shape, generator=generator) for name, shape, _ in SCHEMA.specs}


def push(store: Store, view: View, keys: list[ExpertKey], seed: int) -> None:
    store.push(
        view,
        [(key, image_of(gradient_of(key, seed), SCHEMA.gradient_fields(), SCHEMA.gradient_bytes), 0) for key in keys],
    )


class Model:
    """What the calls mean, in plain tensors with torch's own optimizer."""

    def __init__(self) -> None:
        self.params = {key: {name: value.clone() for name, value in value_of(key).items()} for key in KEYS}
        self.optimizers = {
            key: torch.optim.AdamW([value.requires_grad_() for value in fields.values()], lr=1e-2, fused=True)
            for key, fields in self.params.items()
        }

    def apply(self, keys: list[ExpertKey], seed: int) -> None:
        for key in keys:
            for name, value in gradient_of(key, seed).items():
                self.params[key][name].grad = value
            self.optimizers[key].step()

    def check(self, values: dict[ExpertKey, dict[str, torch.Tensor]]) -> None:
        for key, fields in values.items():
            for name, value in fields.items():
                assert torch.equal(value.view_as(self.params[key][name]), self.params[key][name]), (key, name)
