"""The optimizer's functions as jobs for workers. Importing them costs torch, two seconds in which Python runs little else:
so they are imported where they run, in a worker, and never on the loop's thread.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from paramstore.core.optimizers import AdamW
    from paramstore.core.schema import Schema


def load() -> None:
    """Imports what the others need, ahead of use."""
    import paramstore.optim.adamw
    import paramstore.optim.cast  # noqa: F401


def update(
    schema: Schema, image: memoryview, gradient: memoryview, *, options: AdamW, optimizer_step: int, grad_scale: float,
    param: memoryview | None,
) -> None:  # fmt: skip
    """See `paramstore.optim.adamw.update`."""
    from paramstore.optim import adamw

    adamw.update(
        schema, image, gradient, options=options, optimizer_step=optimizer_step, grad_scale=grad_scale, param=param
    )


def square_sum(schema: Schema, gradient: memoryview) -> float:
    """See `paramstore.optim.adamw.square_sum`."""
    from paramstore.optim import adamw

    return adamw.square_sum(schema, gradient)


def fill_initial(schema: Schema, initial: memoryview, image: memoryview) -> None:
    """See `paramstore.optim.adamw.fill_initial`."""
    from paramstore.optim import adamw

    adamw.fill_initial(schema, initial, image)


def materialise(schema: Schema, image: memoryview, param: memoryview) -> None:
    """See `paramstore.optim.cast.materialise`."""
    from paramstore.optim import cast

    cast.materialise(schema, image, param)
