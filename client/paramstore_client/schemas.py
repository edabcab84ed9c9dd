"""The schemas of a namespace's records, under the names that users call.

Arguments of the training schemas: fields, name -> shape. dtypes, torch's or their names; gradient_dtype is `param_dtype` unless
given. updates: "touched", an apply changes only the keys with a gradient, or "exact", the others get what the optimizer does with a
gradient of zeros. state_dtype, how the optimizer's states are kept: "float32", bitwise torch's; "bfloat16", rounded stochastically;
"int8_blockwise", 8 bits with a scale for each 256. `schema.bytes_per_parameter` says what that takes.
"""

from __future__ import annotations

from paramstore.core.schema import Schema

adamw_schema = Schema.adamw
sgd_schema = Schema.sgd
adagrad_schema = Schema.adagrad
param_schema = Schema.param
