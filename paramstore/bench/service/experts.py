"""Makes experts to measure with, of content that does not compress and depends on the key alone; fills namespaces with them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

import paramstore as ps
from paramstore.bench.plan import RecordSize
from paramstore.core.schema import UPDATE_RULES, Schema
from paramstore.errors import CapacityError

if TYPE_CHECKING:
    from paramstore_client import Namespace, Store

Key = tuple[int, int]
WAIT_S = 120.0
BF16_BYTES = 2
ADAMW_BYTES_PER_PARAMETER = 12


def keys_of(count: int) -> list[Key]:
    return [(0, expert) for expert in range(count)]


def param_schema(size: RecordSize) -> Schema:
    """Makes an inference schema whose record is about `size`: bf16, opaque to the service."""
    return ps.param_schema({name: (shape, torch.bfloat16) for name, shape in size.fields(BF16_BYTES).items()})


TOUCHED = "touched"
"""Name of the update rule by which an apply changes only experts that have gradients."""


def adamw_schema(size: RecordSize, param_dtype: torch.dtype, rule: str = TOUCHED) -> Schema:
    """Makes a training schema: records (fp32 master and moments) of about `size`. rule: what an apply does to idle records."""
    return ps.adamw_schema(size.fields(ADAMW_BYTES_PER_PARAMETER), param_dtype=param_dtype, updates=rule)


def rule_is_known(rule: str) -> bool:
    """Whether the engine of this version knows that update rule."""
    return rule in UPDATE_RULES


def param_values(schema: Schema, key: Key) -> dict[str, torch.Tensor]:
    """Makes random bytes as bf16; equal for equal keys."""
    return {
        field.name: torch.randint(256, (field.length_bytes,), dtype=torch.uint8, generator=_generator(key))
        .view(torch.bfloat16)
        .view(field.shape)
        for field in schema.stored.fields
    }


def master_values(shapes: Mapping[str, tuple[int, ...]], key: Key) -> dict[str, torch.Tensor]:
    """Makes random weights in fp32; equal for equal keys."""
    return {name: torch.randn(shape, generator=_generator(key)) for name, shape in shapes.items()}


def create_param_namespace(
    store: Store, name: str, schema: Schema, count: int, *, host_bytes: int | None = None
) -> Namespace:
    """Commits a namespace of one layer, `count` experts of random bytes, and opens it with all slots but the reserve promised."""
    with store.create_namespace(name, schema, layers=1, experts=count, host_bytes=host_bytes) as namespace:
        namespace.initialize(lambda key: param_values(schema, key))
        namespace.commit(1).wait(WAIT_S)
    half = namespace.lease_slots  # others may come; so all of them are twice as many, or one more
    try:
        return store.open_namespace(name, "write", min_lease_slots=2 * half + 1)
    except CapacityError:
        return store.open_namespace(name, "write", min_lease_slots=2 * half)


def create_adamw_namespace(store: Store, name: str, schema: Schema, count: int) -> Namespace:
    """Commits a namespace of one layer, `count` experts of random weights and zero moments."""
    shapes = {field: shape for field, shape, _ in schema.specs}
    namespace = store.create_namespace(name, schema, layers=1, experts=count)
    namespace.initialize(lambda key: master_values(shapes, key))
    namespace.commit(1).wait(WAIT_S)
    return namespace


def random_gradients(schema: Schema, *, seed: int) -> dict[str, torch.Tensor]:
    """Makes gradients of one expert; equal for equal seeds."""
    dtype = getattr(torch, schema.gradient_dtype)
    return {name: torch.randn(shape, generator=_generator((seed, 0))).to(dtype) for name, shape, _ in schema.specs}


class Gradients:
    """Random gradients of one expert, pushed to every key so that an `apply` makes all records dirty."""

    def __init__(self, namespace: Namespace, schema: Schema, count: int) -> None:
        self._namespace = namespace
        self._schema = schema
        self._keys = keys_of(count)
        self.parameter_elements = count * schema.parameter_elements

    def push(self, seed: int) -> None:
        """Pushes gradients to every key, equal for equal seeds."""
        self._namespace.push(dict.fromkeys(self._keys, random_gradients(self._schema, seed=seed)))

    def apply(self) -> dict[str, int]:
        """Makes one AdamW step over what was pushed; gives the result of its ticket."""
        return self._namespace.apply(ps.AdamW(lr=1e-4)).wait(WAIT_S)


def check_all(count: int, loaded: int, *, what: str) -> None:
    """Raises CapacityError unless all records took part: a rate over fewer of them would be no rate."""
    if loaded != count:
        raise CapacityError(f"{what}: {loaded} of {count} records took part; the benchmark's host budget is too small")


def _generator(key: Key) -> torch.Generator:
    return torch.Generator().manual_seed(key[0] * 1_000_003 + key[1])
