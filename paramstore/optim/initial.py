"""Makes a record's first state from its initial value."""

from __future__ import annotations

from torch import Tensor

from paramstore.core.schema import Field, Schema
from paramstore.optim.tensors import configure_threads, flat_tensor


def fill_initial(schema: Schema, initial: memoryview, image: memoryview) -> None:
    """Writes a record's first state into `image`, except for the header: `initial` (laid out by `schema.initial_fields()`) as
    masters with optimizer states of zero, or as it is for a param schema. Every other byte after the header is 0."""
    configure_threads()
    flat_tensor(image[schema.stored.header_bytes :], "uint8").zero_()
    initial_fields = schema.initial_fields()
    for source, target in zip(initial_fields, schema.stored.fields[: len(initial_fields)], strict=True):
        # Copied as bytes, whatever the dtype, because torch would turn a bool of 2 into 1.
        _field_bytes(image, target).copy_(_field_bytes(initial, source))


def _field_bytes(image: memoryview, field: Field) -> Tensor:
    return flat_tensor(image[field.offset_bytes : field.offset_bytes + field.length_bytes], "uint8")
