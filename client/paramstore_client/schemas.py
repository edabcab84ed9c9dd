"""What a namespace's records are made of, as a user says it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from paramstore.core.schema import Schema


def adamw_schema(
    fields: Mapping[str, Sequence[int]], *, param_dtype: object = "bfloat16", gradient_dtype: object = None,
    updates: str = "touched",
) -> Schema:  # fmt: skip
    """A training schema: fp32 master weights and Adam moments on the volume, `param_dtype` weights made from them.

    fields: name -> shape. dtypes: torch's, or their names. gradient_dtype: default `param_dtype`. updates: "touched", an apply
    changes the keys with a gradient alone; "exact", the others get what AdamW does with a gradient of zeros. Raises SchemaMismatch.
    """
    return Schema.adamw(fields, param_dtype=param_dtype, gradient_dtype=gradient_dtype, updates=updates)


def param_schema(fields: Mapping[str, tuple[Sequence[int], object]]) -> Schema:
    """An inference schema: the checkpoint's own bytes. fields: name -> (shape, dtype). Raises SchemaMismatch."""
    return Schema.param(fields)
