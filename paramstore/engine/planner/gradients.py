"""The planner's rules for pushed gradients: what is pending, and of which keys an open apply has all."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from paramstore.core.key import ExpertKey
from paramstore.engine.tables.apply import Claims, GradientRange
from paramstore.engine.tables.namespace import NamespaceState, View


def add_pending(namespace: NamespaceState, pushed: Mapping[ExpertKey, GradientRange]) -> None:
    """Makes these gradients of one rank pending, beside those of other ranks; a place that is pending already stays."""
    pending = namespace.writing.pending
    for key, gradient in pushed.items():
        if gradient not in pending.get(key, ()):
            pending[key] = tuple(sorted((*pending.get(key, ()), gradient), key=_rank_of))


def drop_pending(namespace: NamespaceState) -> int:
    """Drops all pending gradients; returns how many keys had some."""
    count = len(namespace.writing.pending)
    namespace.writing.pending.clear()
    return count


def note_last(view: View, claims: Claims, keys: Iterable[ExpertKey]) -> list[ExpertKey]:
    """Notes that the view's rank has pushed its last gradients of `keys`; returns those for which all ranks have."""
    assert view.group is not None
    complete = []
    for key in keys:
        claims.last_ranks.setdefault(key, set()).add(view.rank)
        if len(claims.done_ranks(key)) == view.group.world_size:
            complete.append(key)
    return complete


def end_layer(view: View, claims: Claims, layer: int) -> list[ExpertKey]:
    """Notes that the view's rank pushes no more gradients of `layer`; returns its pending keys of which all ranks have pushed
    their last."""
    assert view.group is not None
    namespace, world_size = view.namespace, view.group.world_size
    claims.ended_layers.setdefault(layer, set()).add(view.rank)
    pushed = [key for expert in range(namespace.keys.experts) if (key := (layer, expert)) in namespace.writing.pending]
    return [key for key in pushed if len(claims.done_ranks(key)) == world_size]


def _rank_of(gradient: GradientRange) -> int:
    return gradient.rank
