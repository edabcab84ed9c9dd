"""The update of one record, in place, in a worker thread: any optimizer, any way to store its states.

- With fp32 states the result is bitwise that of torch's fused optimizer on fp32 parameters with the gradient
  `(gradient * grad_scale in its own dtype).float()`; with others it is bitwise repeatable.
- The gradient lies in memory that another process can write. An update reads each element once, so whatever happens to
  it meanwhile, the record's new state is one that some gradient gives.
- AdamW on fp32 states takes whole vectors through the native kernel where there is one: the bits are the same.
- torch and the kernel let go of the GIL in every call, and nothing is allocated per chunk.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from functools import lru_cache

import torch

from paramstore.core.key import ExpertKey
from paramstore.core.optimizers import Options
from paramstore.core.schema import MASTER_DTYPE, Schema
from paramstore.optim import adagrad, adamw, chunks, sgd
from paramstore.optim.gradients import GradientBuffers, buffers_of_thread
from paramstore.optim.native_adamw import update_vectors
from paramstore.optim.rule import Rule, Step
from paramstore.optim.states import StateBuffers, chunk_elements, open_states
from paramstore.optim.tensors import configure_threads, torch_dtype

RULES: Mapping[str, Rule] = {"adamw": adamw.step, "sgd": sgd.step, "adagrad": adagrad.step}
"""The optimizers' steps, by the schema's kind."""
Spans = Sequence[tuple[int, int, int]]


class Scratch:
    """Buffers of one worker thread, so that an update allocates nothing."""

    def __init__(self, gradients: GradientBuffers | None = None) -> None:
        self.gradients = gradients or GradientBuffers()
        self._states: StateBuffers | None = None

    def states(self) -> StateBuffers:
        """The buffers for states, which are made when first asked for, since fp32 states need none."""
        if self._states is None:
            self._states = StateBuffers()
        return self._states


_thread = threading.local()


def update(
    schema: Schema,
    image: memoryview,
    gradients: Sequence[memoryview],
    *,
    options: Options | None,
    optimizer_step: int,
    grad_scale: float = 1.0,
    param: memoryview | None = None,
    missed: Sequence[Options] = (),
    spans: Spans | None = None,
    key: ExpertKey = (0, 0),
    scratch: Scratch | None = None,
) -> None:
    """Updates a record in place: makes the steps `missed`, each with a gradient of zeros, then one with `options`, and casts the
    new masters into `param` in the same pass.

    image: the stored part of a training schema; its header is left alone. gradients: one per rank, each laid out by
    `schema.gradient_fields()`, summed in this order in their dtype; none where options is None: then only the missed steps
    are made. optimizer_step: torch's `step` after the last step made, 1 for a record's first. param: the
    derived part, or None. spans: the elements to update, as (field, start, end), each start at a multiple of
    `SPAN_ALIGNMENT_ELEMENTS`; None: all. Several calls that cover every element once give the result of one call. key: the
    record's, on which the rounding of bf16 states depends. scratch: default is the calling thread's own. On an
    exception `image` and `param` hold garbage.
    """
    configure_threads()
    assert bool(gradients) == (options is not None)
    scratch = _own_scratch() if scratch is None else scratch
    steps, rule = _steps(missed, options, optimizer_step), RULES[schema.kind]
    fields, params = schema.gradient_fields(), schema.part("param").fields
    if spans is None:
        spans = [(number, 0, field.elements) for number, field in enumerate(fields)]
    by_kernel = update_vectors(schema, image, gradients, param, steps, spans, grad_scale=grad_scale)
    for (number, start, end), made_count in zip(spans, by_kernel, strict=True):
        start += made_count
        if start == end:
            continue
        sizes = chunks.chunk_sizes(start, end, chunk_elements(schema))
        masters = chunks.cut(image, schema.stored.fields[number], start, sizes)
        states = open_states(schema, image, number, start, sizes, key=key, buffers=scratch.states)
        pushed = list(zip(*(chunks.cut(gradient, fields[number], start, sizes) for gradient in gradients), strict=True))
        targets = None if param is None else chunks.cut(param, params[number], start, sizes)
        for index, master in enumerate(masters):
            for made in steps:
                if made.is_missed:
                    gradient = scratch.gradients.zeros(sizes[index])
                else:
                    gradient = scratch.gradients.prepare(pushed[index], grad_scale)
                rule(master, gradient, states.load(index), made)
                states.store(index, made.count)
            if targets is not None:
                targets[index].copy_(master)


def _steps(missed: Sequence[Options], options: Options | None, optimizer_step: int) -> list[Step]:
    """The steps to make on every element, in order."""
    made = list(missed) if options is None else [*missed, options]
    counts = range(optimizer_step - len(made) + 1, optimizer_step + 1)
    return [
        Step(each, count, _count_tensor(count), is_missed=options is None or count < optimizer_step)
        for each, count in zip(made, counts, strict=True)
    ]


@lru_cache(maxsize=1024)
def _count_tensor(count: int) -> torch.Tensor:
    """Made once for all records of an apply: nobody writes to it."""
    return torch.tensor(count, dtype=torch_dtype(MASTER_DTYPE))


def _own_scratch() -> Scratch:
    scratch: Scratch | None = getattr(_thread, "scratch", None)
    if scratch is None:
        scratch = _thread.scratch = Scratch(buffers_of_thread())
    return scratch
