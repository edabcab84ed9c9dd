"""Casts fp32 masters to the bytes of `param`, the derived part of a training schema. Called in worker threads.

A cast rounds to nearest, as `tensor.to(dtype)` does; between equal dtypes it is a copy.
"""

from __future__ import annotations

from paramstore.core.schema import ITEM_BYTES, MASTER_DTYPE, Schema
from paramstore.optim.tensors import configure_threads, field_tensor, flat_tensor


def materialise(schema: Schema, image: memoryview, param: memoryview) -> None:
    """Makes the part `param` from the masters in `image`, a record's image of a training schema, which nobody may
    update meanwhile. On return every field of `param` is written."""
    configure_threads()
    fields = schema.part("param").fields
    for source, target in zip(schema.stored.fields[: len(fields)], fields, strict=True):
        field_tensor(param, target).copy_(field_tensor(image, source))


def cast_range(source: memoryview, target: memoryview, dtype: str) -> None:
    """Casts fp32 values piece by piece, as they come off a volume.

    source: writable, whole fp32 elements. target: writable, as many elements of `dtype`.
    """
    configure_threads()
    assert source.nbytes // ITEM_BYTES[MASTER_DTYPE] == target.nbytes // ITEM_BYTES[dtype]
    flat_tensor(target, dtype).copy_(flat_tensor(source, MASTER_DTYPE))
