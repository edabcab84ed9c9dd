"""Memory with the values of fields, as initial values and gradients come, and as leases and reads give them."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from paramstore.core.schema import Field, Schema
from paramstore.optim.tensors import field_tensor
from paramstore_testkit.disks.machine import PlainSegment
from paramstore_testkit.oracles.experts import Tensors


def random_values(schema: Schema, seed: int) -> dict[str, Tensor]:
    """Makes random fp32 values of every parameter field."""
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape, _ in schema.specs}


def filled_values(schema: Schema, value: float) -> dict[str, Tensor]:
    """Makes values in which every element of every parameter field is `value`."""
    return {name: torch.full(shape, value) for name, shape, _ in schema.specs}


def initial_of(schema: Schema, values: Tensors) -> memoryview:
    return _filled(schema.initial_fields(), values, schema.initial_bytes).view(0, schema.initial_bytes)


def gradient_of(schema: Schema, values: Tensors) -> PlainSegment:
    return _filled(schema.gradient_fields(), values, schema.gradient_bytes)


def split_values(schema: Schema, values: Tensor) -> dict[str, Tensor]:
    """Cuts all elements of a gradient, flat and in order, into its fields."""
    fields = schema.gradient_fields()
    parts = torch.split_with_sizes(values, [field.elements for field in fields])
    return {field.name: part for field, part in zip(fields, parts, strict=True)}


def _filled(fields: Iterable[Field], values: Tensors, length_bytes: int) -> PlainSegment:
    segment = PlainSegment(length_bytes)
    fill(segment.view(0, length_bytes), fields, values)
    return segment


def fill(image: memoryview, fields: Iterable[Field], values: Tensors) -> memoryview:
    """Writes `values` into `image`, and gives that."""
    for field in fields:
        field_tensor(image, field).copy_(values[field.name].flatten())
    return image


def values_in(image: memoryview, fields: Iterable[Field]) -> dict[str, Tensor]:
    """Copies what an image holds now, in the shapes of its fields."""
    return {field.name: field_tensor(image, field).clone().view(field.shape) for field in fields}
