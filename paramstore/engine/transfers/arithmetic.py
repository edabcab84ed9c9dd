"""The optimizer's functions as jobs for workers. They need torch, whose import takes two seconds in which Python runs little else:
so they are imported where they run, in a worker, and never on the loop's thread.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from paramstore.core.key import ExpertKey
    from paramstore.core.optimizers import Options
    from paramstore.core.schema import Schema


UPDATE_PIECE_ELEMENTS = 1 << 21
"""Elements in one piece of an update: 2 ms of a core. The last records of an apply go in pieces, so that no worker is left idle."""
SPAN_ALIGNMENT_ELEMENTS = 1 << 12
"""A field is cut at multiples of this only, so that pieces have whole vectors and whole pages, whatever the dtype."""


class Span(NamedTuple):
    """Elements [start, end) of the `field`-th of a schema's fields."""

    field: int
    start: int
    end: int


@lru_cache(maxsize=256)
def cut_update(schema: Schema, piece_elements: int = UPDATE_PIECE_ELEMENTS) -> tuple[tuple[Span, ...], ...]:
    """Cuts all elements of a record into about equal pieces of at most about `piece_elements`; at least one piece."""
    total = sum(field.elements for field in schema.gradient_fields())
    target = -(-total // max(1, -(-total // piece_elements)))
    pieces: list[tuple[Span, ...]] = []
    piece: list[Span] = []
    room = target
    for number, field in enumerate(schema.gradient_fields()):
        start = 0
        while start < field.elements:
            length = min(field.elements - start, -(-room // SPAN_ALIGNMENT_ELEMENTS) * SPAN_ALIGNMENT_ELEMENTS)
            piece.append(Span(number, start, start + length))
            start, room = start + length, room - length
            if room <= 0:
                pieces.append(tuple(piece))
                piece, room = [], target
    return (*pieces, tuple(piece)) if piece else tuple(pieces)


def load() -> None:
    """Imports what the other functions need, ahead of use.

    The first call freezes torch's half a million objects, so that the garbage collector leaves them alone: looking at them all held
    the loop for 0.1 s in one of eight commits of 1,000 records. Only the first: garbage that is frozen is never freed.
    """
    is_first = "torch" not in sys.modules
    import paramstore.optim.cast
    import paramstore.optim.initial
    import paramstore.optim.update  # noqa: F401
    from paramstore_native.adamw import ADAMW

    ADAMW.kernel()
    if is_first:
        gc.collect()
        gc.freeze()


def update(
    schema: Schema, image: memoryview, gradients: Sequence[memoryview], *, options: Options | None, optimizer_step: int,
    grad_scale: float, param: memoryview | None, missed: Sequence[Options] = (), spans: Sequence[Span] | None = None,
    key: ExpertKey = (0, 0),
) -> None:  # fmt: skip
    """See `paramstore.optim.update.update`."""
    from paramstore.optim import update as optim

    optim.update(
        schema, image, gradients, options=options, optimizer_step=optimizer_step, grad_scale=grad_scale, param=param,
        missed=missed, spans=spans, key=key,
    )  # fmt: skip


def square_sum(schema: Schema, gradients: Sequence[memoryview]) -> float:
    """See `paramstore.optim.gradients.square_sum`."""
    from paramstore.optim import gradients as optim

    return optim.square_sum(schema, gradients)


def fill_initial(schema: Schema, initial: memoryview, image: memoryview) -> None:
    """See `paramstore.optim.initial.fill_initial`."""
    from paramstore.optim import initial as optim

    optim.fill_initial(schema, initial, image)


def materialise(schema: Schema, image: memoryview, param: memoryview) -> None:
    """See `paramstore.optim.cast.materialise`."""
    from paramstore.optim import cast

    cast.materialise(schema, image, param)
