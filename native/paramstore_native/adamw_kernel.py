"""The C function of `adamw.c` as Python calls it: one stretch of one field, by addresses."""

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
_ffi.cdef(
    """
    typedef struct {
        float decay, has_decay, weight, starts_at_moment, beta2, square_weight, correction, eps, rate;
    } adamw_step;
    int paramstore_adamw_serves(int dtype);
    void paramstore_adamw(
        float *master, float *exp_avg, float *exp_avg_sq, const char *const *gradients, size_t ranks, int gradient_dtype,
        float scale, char *param, int param_dtype, const adamw_step *steps, size_t step_count, size_t count);
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

    def __call__(self, span: Span, steps: Sequence[Options], *, last_step: int, grad_scale: float) -> None:
        """Makes `steps` in order: the last with the gradient, if the span has one, the others with a gradient of zeros.

        last_step: torch's `step` after the last of them. grad_scale: multiplies the summed gradient in its dtype.
        """
        assert span.elements % ALIGNMENT_ELEMENTS == 0
        assert self.serves(span.gradient_dtype, span.param_dtype)
        packed = _ffi.new("adamw_step[]", len(steps))
        for place, (count, options) in enumerate(enumerate(steps, start=last_step - len(steps) + 1)):
            packed[place] = _scalars(options, count)
        gradients = _ffi.new("char *[]", [_ffi.cast("char *", address) for address in span.gradients])
        states = (_ffi.cast("float *", address) for address in span.states)
        self._library.paramstore_adamw(
            *states, gradients, len(span.gradients), DTYPES.index(span.gradient_dtype), grad_scale,
            _ffi.cast("char *", span.param), DTYPES.index(span.param_dtype), packed, len(steps), span.elements,
        )  # fmt: skip


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
