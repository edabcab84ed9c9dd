"""Decides on which class of volumes a record's next extent should lie: the hottest records on the fastest ones.

A record of which older steps are retained takes as many extents as there are steps, and one more; so many count for each when it
is asked how many fit a class. Until its end an initialization goes by the heat that came with it, everything later by what the
policy of the namespace's `param` arena says. Where the volumes are of one class nothing is looked at.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from paramstore.config import Retention
from paramstore.core.heat import Heat, Ranking, rank_records
from paramstore.core.key import ExpertKey
from paramstore.engine.tables.namespace import NamespaceState
from paramstore.storage.space.extents import Space

RANKED_FOR = 64
"""How many extents are chosen by one ranking, so that it takes a tenth of what choosing them does."""


@dataclass(slots=True)
class _Standing:
    """How a namespace's records are ranked now, and for how many extents more."""

    is_initializing: bool
    ranking: Ranking | None
    extents_left: int


class Placement:
    """Owner of each namespace's ranking, and of the heat that an initialization came with; part of the planner."""

    def __init__(self, space: Space, retention: Retention) -> None:
        self._space = space
        self._retention = retention
        self._standings: dict[str, _Standing] = {}
        self._given: dict[str, dict[ExpertKey, float]] = {}

    def begin_initialization(self, namespace: NamespaceState, heat: dict[ExpertKey, float]) -> None:
        """Notes how much the records are to be used of which values come now; empty if nobody knows."""
        self._given[namespace.name] = heat
        self._standings.pop(namespace.name, None)

    def speed_classes(self, namespace: NamespaceState, keys: Sequence[ExpertKey]) -> list[int | None]:
        """The class that the next extent of each key should be of; None while nobody knows how much the records are used."""
        heat = self._heat(namespace)
        if heat is None or self._space.preference.class_count == 1:
            return [None] * len(keys)
        standing, is_initializing = self._standings.get(namespace.name), namespace.writing.is_initializing
        if standing is None or standing.extents_left <= 0 or standing.is_initializing != is_initializing:
            ranking = rank_records(namespace.keys, heat, self._fitting(namespace))
            standing = self._standings[namespace.name] = _Standing(is_initializing, ranking, RANKED_FOR)
        standing.extents_left -= len(keys)
        ranking = standing.ranking
        return [None if ranking is None else ranking.class_of(key, heat(key)) for key in keys]

    def _heat(self, namespace: NamespaceState) -> Heat | None:
        if namespace.writing.is_initializing:
            given = self._given.get(namespace.name, {})
            return lambda key: given.get(key, 0.0)
        self._given.pop(namespace.name, None)
        return namespace.memory.param.policy.heat if namespace.has_memory else None

    def _fitting(self, namespace: NamespaceState) -> list[int]:
        """How many of the namespace's records fit its share of each speed class."""
        copies = self._retention.retained_steps + 1 if namespace.is_trainable() else 1
        return [share // (copies * namespace.schema.record_bytes) for share in self._space.share_bytes(namespace.name)]
