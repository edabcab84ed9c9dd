"""The order in which a step visits the layers: what a client declares, so that the service knows what is needed next.

A *visit* is one pass over one layer's experts. A declared order is a cycle: after its last visit comes the first again.
The kind of a visit says what it does with the copies in an arena:

- ROUTED: the gate chooses anew which of the layer's experts are used.
- REPEATED: uses exactly the experts of the layer's last routed visit (a backward after its forward).
- GATHERED: like ROUTED, but in all layers at once, as an apply takes its records, in an order not known beforehand.
- UPDATED: uses nothing; supersedes copies that were used since the last visit of this kind (an update makes new ones).
- REPLACED: uses nothing; supersedes all of the layer's copies (`updates="exact"`: untouched experts change too).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import StrEnum
from typing import NamedTuple

from paramstore.core.arguments import integer, wrong
from paramstore.core.key import LAYERS_MAX
from paramstore.errors import ConfigError

VISITS_MAX = 1 << 14
"""The most visits of one cycle: 64 layers forward and backward for 127 micro-batches. The event loop looks at every visit."""


class VisitKind(StrEnum):
    """The kinds of visits, by what they do with a layer's copies. See the module docstring."""

    ROUTED = "routed"
    REPEATED = "repeated"
    GATHERED = "gathered"
    UPDATED = "updated"
    REPLACED = "replaced"


CHOSEN = frozenset({VisitKind.ROUTED, VisitKind.GATHERED})
"""The kinds that choose anew which experts are used."""
USES = CHOSEN | {VisitKind.REPEATED}
"""The kinds that use copies; the others supersede them."""


class Visit(NamedTuple):
    """One pass over the experts of `layer`."""

    layer: int
    kind: VisitKind


Visits = tuple[Visit, ...]
"""One cycle of visits, in order; empty if none is declared."""


def training_visits(layers: Iterable[int], *, micro_batches: int = 1, is_exact: bool = False) -> Visits:
    """The visits of a training step over `layers` to the arena of `param`: forward and backward for each of `micro_batches`, then
    the update, in backward order. is_exact: the update changes untouched experts too."""
    order = _ordered(layers, micro_batches)
    forward = tuple(Visit(layer, VisitKind.ROUTED) for layer in order)
    backward = tuple(Visit(layer, VisitKind.REPEATED) for layer in reversed(order))
    ending = VisitKind.REPLACED if is_exact else VisitKind.UPDATED
    return (forward + backward) * micro_batches + tuple(Visit(layer, ending) for layer in reversed(order))


def apply_visits(layers: Iterable[int], *, is_exact: bool = False) -> Visits:
    """The visits of a training step to the arena of `optim`: the update, in backward order; is_exact: before it the forward, for
    which records make their missed steps."""
    order = _ordered(layers, 1)
    catching_up = order if is_exact else ()
    return (
        *(Visit(layer, VisitKind.ROUTED) for layer in catching_up),
        *(Visit(layer, VisitKind.GATHERED) for layer in reversed(order)),
    )


def ring_visits(layers: Iterable[int]) -> Visits:
    """The visits of one token's pass over `layers`, in a ring or any other way of generating."""
    return tuple(Visit(layer, VisitKind.ROUTED) for layer in _ordered(layers, 1))


def check_visits(pairs: Sequence[tuple[int, str]], layers: Sequence[int], *, what: str) -> Visits:
    """Makes a cycle of `pairs` of (layer, kind), of some of `layers`. Raises ConfigError naming `what` and the first wrong pair."""
    if isinstance(pairs, str) or not isinstance(pairs, Sequence):
        raise wrong(what, pairs, "a tuple of visits")
    if len(pairs) > VISITS_MAX:
        raise ConfigError(f"{what}: {len(pairs)} visits; a cycle has at most {VISITS_MAX}")
    known, kinds = frozenset(layers), frozenset(VisitKind)
    for index, pair in enumerate(pairs):
        layer, kind = pair if isinstance(pair, tuple) and len(pair) == 2 else (None, None)
        if integer(layer) not in known or not isinstance(kind, str) or kind not in kinds:
            raise wrong(f"{what}[{index}]", pair, f"(layer, kind) of a layer of the namespace and one of {', '.join(VisitKind)}")
    visits = tuple(Visit(int(layer), VisitKind(kind)) for layer, kind in pairs)
    if visits and not any(visit.kind in CHOSEN for visit in visits):
        raise ConfigError(f"{what}: no visit of {len(visits)} is routed or gathered; without one nothing is ever chosen")
    return visits


def _ordered(layers: Iterable[int], micro_batches: int) -> tuple[int, ...]:
    order = tuple(layers)
    if not 1 <= len(order) <= LAYERS_MAX or len(set(order)) != len(order):
        raise ConfigError(f"layers={list(order)[:16]}: give 1 to {LAYERS_MAX} distinct layers, in the order of forward")
    if micro_batches < 1 or (2 * micro_batches + 1) * len(order) > VISITS_MAX:
        raise ConfigError(f"micro_batches={micro_batches}: give at least 1, and a cycle of at most {VISITS_MAX} visits")
    return order
