"""Predicts which experts the next layer will want: hints that a model's `StoredExperts` give each other.

Forward visits layers upwards, backward downwards, and activation checkpointing repeats a forward just before its
backward. The hints are only hints: a wrong one costs a transfer, never a result.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence

from paramstore.core.arguments import number, whole_number
from paramstore.core.key import ExpertKey
from paramstore_client.activity import Activity


class ExpertSchedule:
    """The hints that the `StoredExperts` of one model share (argument `group`). From several threads at once they are worse hints,
    and nothing else.

    Owner of the layer order, of the counts of use, and of what each layer's last forward used.
    beta: the fraction of a count that survives a visit.
    """

    def __init__(self, *, beta: float = 0.5) -> None:
        self._layers: list[int] = []
        self._activity = Activity(beta=number("beta", beta, least=0))
        self._last_used: dict[int, tuple[int, ...]] = {}
        self._last_visit: tuple[str, int] | None = None
        self.expected: int | None = None
        """Layer of which the hints of the last `begin_forward` are."""

    def join(self, layer: int) -> None:
        """Adds a layer to the order; one that is in it already stays."""
        if (layer := whole_number("layer", layer)) not in self._layers:
            bisect.insort(self._layers, layer)

    def begin_forward(self, layer: int, experts: Sequence[int], *, room: int, is_cyclic: bool = False) -> list[ExpertKey]:
        """Notes that `layer` is about to compute with `experts`; returns up to `room` keys worth prefetching, likeliest first.

        is_cyclic: no backward follows; after the last layer comes the first one, for the next token.
        """
        is_repeated = not is_cyclic and self._last_visit in (("forward", layer), ("backward", self._neighbour(layer, 1)))
        self._last_visit = ("forward", layer)
        if is_repeated:  # a checkpoint's recomputation: what follows is backward, downwards
            self.expected = self._neighbour(layer, -1)
            return self._last_keys(self.expected, room)
        self._activity.record(layer, experts)
        self._last_used[layer] = tuple(experts)
        above = self._neighbour(layer, 1)
        if above is None and is_cyclic:
            above = self._layers[0]
        self.expected = above
        return [] if above is None else [(above, expert) for expert in self._activity.likely(above, room)]

    def begin_backward(self, layer: int, *, room: int) -> list[ExpertKey]:
        """Notes that `layer` is about to differentiate; returns up to `room` keys of the layer below, the last experts first."""
        self._last_visit = ("backward", layer)
        return self._last_keys(self._neighbour(layer, -1), room)

    def following(self, layer: int) -> int | None:
        """The layer that is visited after `layer` in the same forward, if there is one."""
        return self._neighbour(layer, 1)

    def _last_keys(self, layer: int | None, room: int) -> list[ExpertKey]:
        if layer is None or room < 1:
            return []
        return [(layer, expert) for expert in reversed(self._last_used.get(layer, ())[-room:])]

    def _neighbour(self, layer: int, distance: int) -> int | None:
        position = self._layers.index(layer) + distance
        return self._layers[position] if 0 <= position < len(self._layers) else None
