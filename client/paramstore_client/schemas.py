"""What a namespace's records are made of, as a user says it.

What the training schemas take: fields, name -> shape. dtypes, torch's or their names; gradient_dtype is `param_dtype` unless given.
updates: "touched", an apply changes the keys with a gradient alone, or "exact", the others get what the optimizer does with a
gradient of zeros. state_dtype, how the optimizer's states are kept: "float32", bitwise torch's; "bfloat16", rounded stochastically;
"int8_blockwise", 8 bits with a scale for each 256. `schema.bytes_per_parameter` says what that takes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from paramstore.core.schema import Schema


def adamw_schema(
    fields: Mapping[str, Sequence[int]], *, param_dtype: object = "bfloat16", gradient_dtype: object = None,
    updates: str = "touched", state_dtype: object = "float32",
) -> Schema:  # fmt: skip
    """For `AdamW`: fp32 master weights, `exp_avg` and `exp_avg_sq` on the volume (12 bytes a parameter, 8 with bf16 states, 6 with
    8-bit ones), `param_dtype` weights made from them. Arguments: see this module. Raises SchemaMismatch.
    """
    return Schema.adamw(
        fields, param_dtype=param_dtype, gradient_dtype=gradient_dtype, updates=updates, state_dtype=state_dtype
    )


def sgd_schema(
    fields: Mapping[str, Sequence[int]], *, param_dtype: object = "bfloat16", gradient_dtype: object = None,
    updates: str = "touched", state_dtype: object = "float32",
) -> Schema:  # fmt: skip
    """For `SGD`: fp32 master weights and `momentum_buffer` (8 bytes a parameter, 6 with bf16 states, 5 with 8-bit ones).
    Arguments: see this module. Raises SchemaMismatch.
    """
    return Schema.sgd(fields, param_dtype=param_dtype, gradient_dtype=gradient_dtype, updates=updates, state_dtype=state_dtype)


def adagrad_schema(
    fields: Mapping[str, Sequence[int]], *, param_dtype: object = "bfloat16", gradient_dtype: object = None,
    updates: str = "touched", state_dtype: object = "float32",
) -> Schema:  # fmt: skip
    """For `Adagrad`: fp32 master weights and `sum` (8 bytes a parameter, 6 with bf16 states, 5 with 8-bit ones).
    Arguments: see this module. Raises SchemaMismatch.
    """
    return Schema.adagrad(
        fields, param_dtype=param_dtype, gradient_dtype=gradient_dtype, updates=updates, state_dtype=state_dtype
    )


def param_schema(fields: Mapping[str, tuple[Sequence[int], object]]) -> Schema:
    """An inference schema: the checkpoint's own bytes. fields: name -> (shape, dtype). Raises SchemaMismatch."""
    return Schema.param(fields)
