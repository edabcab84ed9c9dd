"""The AdamW update through the native kernel, where there is one: of whole vectors, with the same bits as torch's."""

from __future__ import annotations

from collections.abc import Sequence

from paramstore.core.optimizers import AdamW
from paramstore.core.schema import ITEM_BYTES, MASTER_DTYPE, Field, Schema
from paramstore.optim.rule import Step
from paramstore_native.adamw import ADAMW
from paramstore_native.adamw_kernel import ALIGNMENT_ELEMENTS, Span, address_of


def update_vectors(
    schema: Schema, image: memoryview, gradients: Sequence[memoryview], param: memoryview | None, steps: Sequence[Step],
    spans: Sequence[tuple[int, int, int]], *, grad_scale: float,
) -> list[int]:  # fmt: skip
    """Makes `steps` in place on the first elements of each span (field, start, end) of the schema's fields; returns on how many of
    each. torch has to do the others: all of them (0) where the kernel does not serve the optimizer, the states or the dtypes.

    image, gradients, param: as in `optim.update.update`. The last step has the gradients, if there are any. All is one call, which
    leaves Python's lock to others meanwhile: they want it more than once a field otherwise.
    """
    native = ADAMW.kernel() if schema.kind == AdamW.kind and schema.state_dtype == MASTER_DTYPE else None
    pushed, params = schema.gradient_fields(), schema.part("param").fields
    if native is None or not native.serves(pushed[0].dtype, params[0].dtype):  # all fields are of one dtype
        return [0] * len(spans)
    stored, states = schema.stored.fields, schema.state_fields()
    at_image = address_of(image, used_bytes=_end((*stored, *(state.values for each in states for state in each))), is_written=True)
    at_gradients = [address_of(gradient, used_bytes=_end(pushed)) for gradient in gradients]
    at_param = 0 if param is None else address_of(param, used_bytes=_end(params), is_written=True)
    taken = []
    for number, start, end in spans:
        fields = (stored[number], *(state.values for state in states[number]))
        taken.append(
            Span(
                states=tuple(at_image + _offset(field, start) for field in fields),
                gradients=tuple(address + _offset(pushed[number], start) for address in at_gradients),
                gradient_dtype=pushed[number].dtype, param=at_param and at_param + _offset(params[number], start),
                param_dtype=params[number].dtype, elements=(end - start) // ALIGNMENT_ELEMENTS * ALIGNMENT_ELEMENTS,
            )
        )  # fmt: skip
    native(taken, [_adamw(step) for step in steps], last_step=steps[-1].count if steps else 0, grad_scale=grad_scale)
    return [span.elements for span in taken]


def _end(fields: Sequence[Field]) -> int:
    """Where the last of fields ends in a view of them."""
    return max(_offset(field, field.elements) for field in fields)


def _offset(field: Field, element: int) -> int:
    return field.offset_bytes + element * ITEM_BYTES[field.dtype]


def _adamw(step: Step) -> AdamW:
    assert isinstance(step.options, AdamW)
    return step.options
