"""Decides on which class of volumes a record's next extent should lie: the hottest records on the fastest ones.

What fits a class is counted in extents: a record that the newest step changed takes as many as steps are retained, and one more, as
it will if it is changed again and again; another takes those that it holds. Until its end an initialization goes by the heat that
came with it, and each record of a trained namespace takes that many; everything later goes by what the policy of the namespace's
`param` arena counts, if it counts uses of what it does not hold too. Where the volumes are of one class nothing is looked at.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from paramstore.config import Retention
from paramstore.core.heat import GivenHeat, Heat, Ranking, rank_records
from paramstore.core.key import ExpertKey
from paramstore.engine.tables.namespace import NamespaceState
from paramstore.storage.space.extents import Space

RANKED_FOR = 64
"""How many extents are chosen by one ranking, so that it takes a tenth of what choosing them does."""


@dataclass(slots=True)
class _Standing:
    """How a namespace's records are ranked now, and for how many extents more."""

    ranking: Ranking
    extents_left: int


@dataclass(slots=True)
class _Given:
    """The heat that an initialization came with, and the keys that have any and were not asked for yet."""

    heat: GivenHeat
    to_come: set[ExpertKey]


class SpeedRanking:
    """Owner of each namespace's ranking, and of the heat that an initialization came with; part of the planner."""

    def __init__(self, space: Space, retention: Retention) -> None:
        self._space = space
        self._retention = retention
        self._standings: dict[str, _Standing] = {}
        self._given: dict[str, _Given] = {}

    def begin_initialization(self, namespace: NamespaceState, heat: GivenHeat) -> None:
        """Notes how much the records are to be used of which values come now; empty if nobody knows."""
        self.end_initialization(namespace)
        working = namespace.residency.working
        self._given[namespace.name] = _Given(heat, {key for key in heat.heats if working[key].identity is None})

    def end_initialization(self, namespace: NamespaceState) -> None:
        """Forgets the heat that it came with."""
        self._given.pop(namespace.name, None)
        self._standings.pop(namespace.name, None)

    def speed_classes(self, namespace: NamespaceState, keys: Sequence[ExpertKey]) -> list[int | None]:
        """The class that the next extent of each key should be of; None for any."""
        given = self._given.get(namespace.name)
        heat = _counted(namespace) if given is None else given.heat.heat
        if heat is None or self._space.preference.class_count == 1:
            return [None] * len(keys)
        standing = self._standings.get(namespace.name)
        if standing is None or standing.extents_left <= 0:
            ranking = self._ranking(namespace, heat, given)
            standing = self._standings[namespace.name] = _Standing(ranking, RANKED_FOR)
        standing.extents_left -= len(keys)
        classes = [standing.ranking.class_of(key, heat(key)) for key in keys]
        return classes if given is None else self._beside(namespace, given, keys, classes)

    def _beside(
        self, namespace: NamespaceState, given: _Given, keys: Sequence[ExpertKey], classes: Sequence[int | None]
    ) -> list[int | None]:
        """Keeps unused records from the room that used ones of the same initialization still need of the faster classes."""
        if not given.heat.ranks:
            return list(classes)
        given.to_come.difference_update(keys)
        free_bytes = sum(map(self._space.free_bytes_of, self._space.preference.faster_volumes))
        spare = free_bytes // namespace.schema.record_bytes - len(given.to_come)
        slowest = self._space.preference.class_count - 1
        found: list[int | None] = []
        for speed_class in classes:
            is_unused = speed_class is None
            found.append(slowest if is_unused and spare <= 0 else speed_class)
            spare -= is_unused
        return found

    def _ranking(self, namespace: NamespaceState, heat: Heat, given: _Given | None) -> Ranking:
        """Ranks the records by what fits the namespace's share of each speed class."""
        most = self._retention.retained_steps + 1 if namespace.is_trainable() else 1
        extents = [share // namespace.schema.record_bytes for share in self._space.share_bytes(namespace.name)]
        if given is not None:
            return given.heat.ranking([count // most for count in extents])
        ledger = namespace.steps.ledger
        newest = ledger.committed_step

        def copies(key: ExpertKey) -> int:
            count, step = ledger.records_of(key)
            return max(count, most if step == newest else 1)

        return rank_records(namespace.keys, heat, extents, copies=copies, standing=namespace.memory.param.planned_slots)


def _counted(namespace: NamespaceState) -> Heat | None:
    """How much the policy has seen each record used; None if it does not know of those that it does not hold."""
    policy = namespace.memory.param.policy if namespace.has_memory else None
    return None if policy is None or not policy.counts_unheld else policy.heat
