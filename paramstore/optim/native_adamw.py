"""The AdamW update through the native kernel, where there is one: of whole vectors, with the same bits as torch's."""

from __future__ import annotations

from collections.abc import Sequence

from paramstore.core.optimizers import AdamW
from paramstore.core.schema import MASTER_DTYPE, Field, Schema
from paramstore.optim.rule import Step
from paramstore.optim.tensors import field_tensor
from paramstore_native.adamw import ADAMW
from paramstore_native.adamw_kernel import ALIGNMENT_ELEMENTS, Span


def update_vectors(
    schema: Schema, image: memoryview, gradients: Sequence[memoryview], param: memoryview | None, steps: Sequence[Step],
    *, number: int, start: int, end: int, grad_scale: float,
) -> int:  # fmt: skip
    """Makes `steps` in place on the first elements of [start, end) of the schema's field `number`; returns on how many. torch has
    to do the others: all of them (0) where the kernel does not serve the optimizer, the states or the dtypes.

    image, gradients, param: as in `optim.update.update`. The last step has the gradients, if there are any.
    """
    native = ADAMW.kernel() if schema.kind == AdamW.kind and schema.state_dtype == MASTER_DTYPE else None
    gradient_field, param_field = schema.gradient_fields()[number], schema.part("param").fields[number]
    if native is None or not native.serves(gradient_field.dtype, param_field.dtype):
        return 0
    elements = (end - start) // ALIGNMENT_ELEMENTS * ALIGNMENT_ELEMENTS
    states = (schema.stored.fields[number], *(state.values for state in schema.state_fields()[number]))
    span = Span(
        states=tuple(_address(image, field, start) for field in states),
        gradients=tuple(_address(gradient, gradient_field, start) for gradient in gradients),
        gradient_dtype=gradient_field.dtype, param=0 if param is None else _address(param, param_field, start),
        param_dtype=param_field.dtype, elements=elements,
    )  # fmt: skip
    native(span, [_adamw(step) for step in steps], last_step=steps[-1].count if steps else 0, grad_scale=grad_scale)
    return elements


def _address(view: memoryview, field: Field, element: int) -> int:
    """Memory address of the element; the view, which the caller holds, keeps its memory in place."""
    tensor = field_tensor(view, field)
    return tensor.data_ptr() + element * tensor.element_size()


def _adamw(step: Step) -> AdamW:
    assert isinstance(step.options, AdamW)
    return step.options
