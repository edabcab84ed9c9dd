"""The C function of `adamw.c` as Python calls it: stretches of fields, by addresses."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import cffi

ALIGNMENT_ELEMENTS = 16
"""A call takes a multiple of this, the length of ATen's widest vector: what ATen computes as a rest is left to ATen."""
DTYPES = ("float32", "bfloat16", "float16")
"""Names of dtypes, in the order of the C enum."""

_ffi = cffi.FFI()
_ffi.cdef(  # pointers as numbers: to cast each of them costs more than all else here
    """
    typedef struct {
        float decay, has_decay, weight, starts_at_moment, beta2, square_weight, correction, eps, rate;
    } adamw_step;
    typedef struct {
        uintptr_t master, exp_avg, exp_avg_sq;
        uintptr_t *gradients;
        size_t ranks;
        uintptr_t param;
        size_t count;
        int gradient_dtype, param_dtype;
    } adamw_span;
    int paramstore_adamw_serves(int dtype);
    void paramstore_adamw(
        const adamw_span *spans, size_t span_count, float scale, const adamw_step *steps, size_t step_count);
    """
)


class Options(Protocol):
    """The attributes of `paramstore.core.optimizers.AdamW` that the kernel needs."""

    @property
    def lr(self) -> float: ...
    @property
    def betas(self) -> tuple[float, float]: ...
    @property
    def eps(self) -> float: ...
    @property
    def weight_decay(self) -> float: ...


class Span(NamedTuple):
    """Elements of one field: addresses of the first byte of each of their arrays. The memory stays where it is during a call.

    states: master, exp_avg and exp_avg_sq, fp32. gradients: one per rank, summed in this order in
    `gradient_dtype`; none if there is no gradient. param: 0 for none. elements: a multiple of ALIGNMENT_ELEMENTS.
    """

    states: tuple[int, ...]
    gradients: tuple[int, ...]
    gradient_dtype: str
    param: int
    param_dtype: str
    elements: int


class Kernel:
    """The function of one built library. Any thread may call it; the GIL is released meanwhile."""

    def __init__(self, file: Path) -> None:
        """Raises OSError or AttributeError if `file` is no such library."""
        library: Any = _ffi.dlopen(str(file))  # its functions are known at run time only
        self._library = library
        self._served = frozenset(name for code, name in enumerate(DTYPES) if library.paramstore_adamw_serves(code))

    def serves(self, *dtypes: str) -> bool:
        """Whether gradients and parameters of these dtypes are taken."""
        return self._served.issuperset(dtypes)

    def __call__(self, spans: Sequence[Span], steps: Sequence[Options], *, last_step: int, grad_scale: float) -> None:
        """Makes `steps` in order on each span: the last with its gradient, if it has one, the others with a gradient of zeros.

        last_step: torch's `step` after the last of them. grad_scale: multiplies the summed gradient in its dtype.
        """
        made, gradients = _ffi.new("adamw_span[]", len(spans)), [_ffi.new("uintptr_t[]", span.gradients) for span in spans]
        for place, (span, pushed) in enumerate(zip(spans, gradients, strict=True)):
            assert span.elements % ALIGNMENT_ELEMENTS == 0
            assert self.serves(span.gradient_dtype, span.param_dtype)
            made[place] = (
                *span.states, pushed, len(span.gradients), span.param, span.elements,
                DTYPES.index(span.gradient_dtype), DTYPES.index(span.param_dtype),
            )  # fmt: skip
        packed = _ffi.new("adamw_step[]", len(steps))
        for place, (count, options) in enumerate(enumerate(steps, start=last_step - len(steps) + 1)):
            packed[place] = _scalars(options, count)
        self._library.paramstore_adamw(made, len(spans), grad_scale, packed, len(steps))


def address_of(view: memoryview, *, used_bytes: int, is_written: bool = False) -> int:
    """Memory address of the first byte of `view`; whoever holds it keeps its memory in place. Raises ValueError where it has less
    than `used_bytes`, or is written and may not be."""
    if view.nbytes < used_bytes:
        raise ValueError(f"a view of {view.nbytes} bytes, of which {used_bytes} would be used")
    if is_written and view.readonly:
        raise ValueError("a view that is written, and may not be")
    return int(_ffi.cast("uintptr_t", _ffi.from_buffer(view)))


def _scalars(options: Options, step: int) -> dict[str, float]:
    """The scalars that ATen computes once per call, in double; the struct's fields round them to fp32, as ATen does."""
    beta1, beta2 = options.betas
    weight = _ffi.cast("float", 1 - beta1)
    is_small = float(weight) < 0.5  # ATen's lerp: from the nearer end
    return {
        "decay": 1 - options.lr * options.weight_decay, "has_decay": float(options.weight_decay != 0),
        "weight": float(weight) if is_small else float(weight) - 1, "starts_at_moment": float(is_small),
        "beta2": beta2, "square_weight": 1 - beta2, "correction": math.sqrt(1 - beta2**step), "eps": options.eps,
        "rate": -(options.lr / (1 - beta1**step)),
    }  # fmt: skip
