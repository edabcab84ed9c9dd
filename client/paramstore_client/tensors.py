"""Tensors over mapped memory, and the checks of what callers hand in. The one file of this layer that needs torch.

A tensor made here keeps its mapping alive, so it can never point at memory that is gone; whether the bytes are still
its own is what the lease says.
"""

from __future__ import annotations

from collections.abc import Mapping as FieldMapping
from collections.abc import Sequence

import torch
from torch import Tensor

from paramstore.core.key import ExpertKey
from paramstore.core.schema import ITEM_BYTES, MASTER_DTYPE, Field, Schema
from paramstore.errors import SchemaMismatch
from paramstore.memory.shared import Mapping

DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in ITEM_BYTES}
NAMES = {dtype: name for name, dtype in DTYPES.items()}


def field_view(mapping: Mapping, field: Field, start_bytes: int) -> Tensor:
    """`field` of the image that starts at `start_bytes` of `mapping`, without a copy."""
    flat = torch.frombuffer(
        mapping.buffer, dtype=DTYPES[field.dtype], count=field.elements, offset=start_bytes + field.offset_bytes
    )
    return flat.view(field.shape)


def image_view(mapping: Mapping, start_bytes: int, length_bytes: int) -> Tensor:
    """The bytes of a whole image, uint8, without a copy."""
    return torch.frombuffer(mapping.buffer, dtype=torch.uint8, count=length_bytes, offset=start_bytes)


def make_unusable(tensor: Tensor) -> None:
    """Leaves `tensor` without elements, so that every further use of it fails; the bytes it viewed are not touched."""
    with torch.no_grad():
        tensor.set_()  # type: ignore[call-overload]  # torch takes no argument as "an empty storage"


def check_values(key: ExpertKey, values: FieldMapping[str, Tensor], fields: Sequence[Field], *, schema: Schema) -> None:
    """Returns if `values` has exactly `fields`, each of its shape and of a dtype that converts without loss.

    Raises SchemaMismatch naming key and field.
    """
    if values.keys() != {field.name for field in fields}:
        wanted = ", ".join(field.name for field in fields)
        raise SchemaMismatch(f"key {key}: fields {', '.join(map(str, values)) or '(none)'} given; the schema has {wanted}")
    for field in fields:
        tensor = values[field.name]
        if not isinstance(tensor, Tensor):
            raise SchemaMismatch(f"key {key}, field {field.name!r}: a {type(tensor).__name__} is no tensor")
        if tuple(tensor.shape) != field.shape:
            raise SchemaMismatch(f"key {key}, field {field.name!r}: shape {tuple(tensor.shape)}, the schema has {field.shape}")
        if NAMES.get(tensor.dtype) not in _accepted_dtypes(field.dtype, schema=schema):
            raise SchemaMismatch(f"key {key}, field {field.name!r}: dtype {tensor.dtype}, the schema takes {field.dtype}")


def copy_into(values: FieldMapping[str, Tensor], fields: Sequence[Field], mapping: Mapping, start_bytes: int) -> None:
    """Writes checked `values` to their places; from whichever device they are on."""
    for field in fields:
        field_view(mapping, field, start_bytes).copy_(values[field.name].detach())


def add_into(values: FieldMapping[str, Tensor], fields: Sequence[Field], mapping: Mapping, start_bytes: int) -> None:
    """Adds checked `values` to what is there, in the dtype that is there."""
    for field in fields:
        target = field_view(mapping, field, start_bytes)
        target.add_(values[field.name].detach().to(device="cpu", dtype=target.dtype))


def stored_copies(schema: Schema, mapping: Mapping, start_bytes: int) -> dict[str, Tensor]:
    """Copies of every stored field of the record image at `start_bytes`, and of its param fields by name."""
    copies = {field.name: field_view(mapping, field, start_bytes).clone() for field in schema.stored.fields}
    if schema.is_trainable:
        for field in schema.part("param").fields:
            # `to` returns `master` itself where the dtypes are equal: the caller gets two tensors, never one twice.
            copies[field.name] = copies[f"master/{field.name}"].to(DTYPES[field.dtype], copy=True)
    return copies


def _accepted_dtypes(dtype: str, *, schema: Schema) -> tuple[str, ...]:
    """What may be written where `dtype` is kept: itself and, for training, the shorter floats that fp32 holds exactly."""
    if schema.is_trainable and dtype == MASTER_DTYPE:
        return ("float32", "bfloat16", "float16")
    return (dtype,)
