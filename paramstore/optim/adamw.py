"""The AdamW update of one record, in place, in a worker thread.

- The result is bitwise that of `torch.optim.AdamW(fused=True)` on fp32 parameters with the gradient
  `(gradient * grad_scale in its own dtype).float()`.
- The gradient lies in memory that another process can write. An update reads each element once, so whatever happens to
  it meanwhile, the record's new state is one that some gradient gives.
- torch lets go of the GIL in every call.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from itertools import repeat

import torch

from paramstore.core.optimizers import AdamW
from paramstore.core.schema import MASTER_DTYPE, Field, Schema
from paramstore.optim.tensors import configure_threads, field_tensor, flat_tensor, torch_dtype

CHUNK_ELEMENTS = 1 << 19
"""Elements that are cast, updated and cast back before the next ones, so that the casts meet their data in a cache.

Measured on two Zen 5 cores (1 MiB of L2 each, 32 MiB of L3): a tenth to a sixth better than whole records. Smaller chunks
gain nothing: two workers are bound by memory, one loses 8 (fp32) to 13 us (bf16) a chunk to the calls. A multiple of the
widest vector, so that no bit depends on it.
"""


class Scratch:
    """Buffers of one worker thread: an update allocates nothing."""

    def __init__(self) -> None:
        self.step = torch.zeros((), dtype=torch.float32)
        self._scaled = _chunk_buffer(MASTER_DTYPE)
        """Room for a chunk of any gradient dtype: none is wider."""
        self._cast = _chunk_buffer(MASTER_DTYPE)
        self._zeros: torch.Tensor | None = None

    def prepare(self, gradients: Sequence[torch.Tensor], grad_scale: float) -> torch.Tensor:
        """One chunk of the ranks' gradients, summed and scaled in their dtype, as fp32. It is copied only if that changes it."""
        gradient = gradients[0]
        for other in gradients[1:]:
            summed = self._scaled.view(gradient.dtype)[: gradient.numel()]
            gradient = torch.add(gradient, other, out=summed)
        if grad_scale != 1.0:
            scaled = self._scaled.view(gradient.dtype)[: gradient.numel()]
            gradient = torch.mul(gradient, grad_scale, out=scaled)
        if gradient.dtype is not torch.float32:
            gradient = self._cast[: gradient.numel()].copy_(gradient)
        return gradient


    def zeros(self, elements: int) -> torch.Tensor:
        """A gradient of zeros; nobody writes to it."""
        if self._zeros is None:
            self._zeros = torch.zeros(CHUNK_ELEMENTS, dtype=torch.float32)
        return self._zeros[:elements]


_thread = threading.local()


def update(
    schema: Schema,
    image: memoryview,
    gradients: Sequence[memoryview],
    *,
    options: AdamW | None,
    optimizer_step: int,
    grad_scale: float = 1.0,
    param: memoryview | None = None,
    missed: Sequence[AdamW] = (),
    spans: Sequence[tuple[int, int, int]] | None = None,
    scratch: Scratch | None = None,
) -> None:
    """The steps that `missed` names, with a zero gradient each, then one with `options`; the new masters are cast into
    `param` in the same pass.

    image: the stored part of an adamw schema, header untouched. gradients: one per rank, each laid out by
    `schema.gradient_fields()`, summed in this order in their dtype; none where options is None: then only the missed steps
    are made. optimizer_step: torch's `step` after the last step made, 1 for a record's first. param: the
    derived part, or None. spans: which elements, as (field, start, end), each start at a whole vector; None: all. Calls that
    cover every element once give what one call gives. scratch: default is the calling thread's own. On an
    exception `image` and `param` hold garbage.
    """
    configure_threads()
    assert bool(gradients) == (options is not None)
    scratch = _own_scratch() if scratch is None else scratch
    steps = [*missed, options] if options is not None else list(missed)
    optim_fields, gradient_fields, param_fields = _optim_fields(schema), schema.gradient_fields(), schema.part("param").fields
    for number, start, end in _all_of(gradient_fields) if spans is None else spans:
        states = zip(*(_chunks(image, field, start, end) for field in optim_fields[number]), strict=True)
        parts = zip(*(_chunks(gradient, gradient_fields[number], start, end) for gradient in gradients), strict=True)
        params = repeat(None) if param is None else iter(_chunks(param, param_fields[number], start, end))
        for state, target in zip(states, params, strict=False):
            for count, step_options in enumerate(steps, start=optimizer_step - len(steps) + 1):
                is_missed = count < optimizer_step or options is None
                gradient = scratch.zeros(state[0].numel()) if is_missed else scratch.prepare(next(parts), grad_scale)
                _step(state, gradient, scratch.step.fill_(count), step_options)
            if target is not None:
                target.copy_(state[0])


def _step(state: tuple[torch.Tensor, ...], gradient: torch.Tensor, step: torch.Tensor, options: AdamW) -> None:
    master, exp_avg, exp_avg_sq = state
    torch._fused_adamw_(
        [master], [gradient], [exp_avg], [exp_avg_sq], [], [step], lr=options.lr, beta1=options.betas[0],
        beta2=options.betas[1], eps=options.eps, weight_decay=options.weight_decay, amsgrad=False, maximize=False,
    )  # fmt: skip


def square_sum(schema: Schema, gradient: memoryview) -> float:
    """The sum of the squares of a record's gradient, accumulated in float64: equal bytes give equal bits."""
    configure_threads()
    wide = _chunk_buffer("float64")
    total = 0.0
    for field in schema.gradient_fields():
        for chunk in _chunks(gradient, field, 0, field.elements):
            total += wide[: chunk.numel()].copy_(chunk).square_().sum().item()
    return total


def fill_initial(schema: Schema, initial: memoryview, image: memoryview) -> None:
    """Writes a record's first state into `image`, header excepted: `initial` (laid out by
    `schema.initial_fields()`) as masters with zero moments, or as it is for a param schema. Every other byte
    after the header is 0."""
    configure_threads()
    flat_tensor(image[schema.stored.header_bytes :], "uint8").zero_()
    initial_fields = schema.initial_fields()
    for source, target in zip(initial_fields, schema.stored.fields[: len(initial_fields)], strict=True):
        # As bytes, whatever the dtype: torch would make a bool of 2 a 1.
        _field_bytes(image, target).copy_(_field_bytes(initial, source))


def _optim_fields(schema: Schema) -> list[tuple[Field, Field, Field]]:
    """(master, exp_avg, exp_avg_sq) of each field, by the order that `OPTIM_PREFIXES` fixes."""
    assert schema.is_trainable
    fields, count = schema.stored.fields, len(schema.specs)
    return list(zip(fields[:count], fields[count : 2 * count], fields[2 * count :], strict=True))


def _all_of(fields: Sequence[Field]) -> list[tuple[int, int, int]]:
    return [(number, 0, field.elements) for number, field in enumerate(fields)]


def _chunks(image: memoryview, field: Field, start: int, end: int) -> tuple[torch.Tensor, ...]:
    return torch.split(field_tensor(image, field)[start:end], CHUNK_ELEMENTS)


def _field_bytes(image: memoryview, field: Field) -> torch.Tensor:
    return flat_tensor(image[field.offset_bytes : field.offset_bytes + field.length_bytes], "uint8")


def _chunk_buffer(dtype: str) -> torch.Tensor:
    return torch.empty(CHUNK_ELEMENTS, dtype=torch_dtype(dtype))


def _own_scratch() -> Scratch:
    scratch: Scratch | None = getattr(_thread, "scratch", None)
    if scratch is None:
        scratch = _thread.scratch = Scratch()
    return scratch
