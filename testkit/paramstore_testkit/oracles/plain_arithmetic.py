"""The optimizer's functions without torch, for daemons that are started hundreds of times: plain steps down the gradient.

One update: `master -= lr * (gradient * grad_scale)`, `exp_avg += gradient * grad_scale`, `exp_avg_sq = number of updates`,
in fp32, element by element, so that the bytes are known in advance. Gradients and `param` must be fp32. `exp_avg_sq` tells
an update that was lost or made twice, `exp_avg` a gradient that was.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy
from numpy.typing import NDArray

from paramstore.core.key import ExpertKey
from paramstore.core.optimizers import AdamW, Options
from paramstore.core.schema import MASTER_DTYPE, Field, Schema
from paramstore.daemon import assembly
from paramstore.engine import admission
from paramstore.engine.records import update as updater
from paramstore.engine.transfers import transfers

Array = NDArray[numpy.float32]


def install() -> None:
    """Makes the engine of this process run these functions from here on, for good."""
    replaced: dict[Any, dict[str, object]] = {
        updater: {"update": update, "square_sum": square_sum, "fill_initial": fill_initial},
        transfers: {"materialise": materialise},
        admission: {"load": load},
        assembly: {"load": load},
    }
    for module, functions in replaced.items():
        for name in functions:
            assert hasattr(module, name), f"{module.__name__} has no {name}"
        vars(module).update(functions)


def load() -> None:
    """Does nothing: there is nothing to load."""


def update(
    schema: Schema, image: memoryview, gradients: Sequence[memoryview], *, options: Options | None, optimizer_step: int,
    grad_scale: float, param: memoryview | None, missed: Sequence[Options] = (),
    spans: Sequence[tuple[int, int, int]] | None = None, key: ExpertKey = (0, 0),
) -> None:  # fmt: skip
    """Updates a record by this module's rule; a missed step only counts. Arguments as in `paramstore.optim.update.update`."""
    assert schema.kind == AdamW.kind
    stored, fields, params = schema.stored.fields, schema.gradient_fields(), schema.part("param").fields
    count = len(fields)
    everything = [(number, 0, field.elements) for number, field in enumerate(fields)]
    for number, start, end in everything if spans is None else spans:
        scaled = numpy.zeros(end - start, numpy.float32)
        for gradient in gradients:
            scaled += _array(gradient, fields[number])[start:end]
        scaled *= numpy.float32(grad_scale)
        master, exp_avg, exp_avg_sq = (_array(image, stored[number + part * count])[start:end] for part in range(3))
        if options is not None:
            master -= numpy.float32(options.lr) * scaled
        exp_avg += scaled
        exp_avg_sq[:] = optimizer_step
        if param is not None:
            _array(param, params[number])[start:end] = master


def square_sum(schema: Schema, gradients: Sequence[memoryview]) -> float:
    """Sums the squares of a record's gradient, after summing the ranks' gradients."""
    total = 0.0
    for field in schema.gradient_fields():
        summed = numpy.zeros(field.elements, numpy.float32)
        for gradient in gradients:
            summed += _array(gradient, field)
        total += float(numpy.square(summed.astype(numpy.float64)).sum())
    return total


def fill_initial(schema: Schema, initial: memoryview, image: memoryview) -> None:
    """Writes initial masters and zero moments; every other byte after the header is 0."""
    numpy.frombuffer(image, dtype=numpy.uint8)[schema.stored.header_bytes :] = 0
    for source, target in zip(schema.initial_fields(), schema.stored.fields, strict=False):
        _array(image, target)[:] = _array(initial, source)


def materialise(schema: Schema, image: memoryview, param: memoryview) -> None:
    """Copies the masters as they are."""
    for source, target in zip(schema.stored.fields, schema.part("param").fields, strict=False):
        _array(param, target)[:] = _array(image, source)


def _array(image: memoryview, field: Field) -> Array:
    """Gives a field's elements where they lie."""
    assert field.dtype == MASTER_DTYPE, f"{field.name}: {field.dtype}; plain arithmetic is for fp32"
    return numpy.frombuffer(image, dtype=numpy.float32, count=field.elements, offset=field.offset_bytes)
