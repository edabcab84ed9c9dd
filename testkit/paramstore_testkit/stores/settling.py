"""What a service does in slices, done at once: for tests of what comes of it."""

from __future__ import annotations

from collections.abc import Iterable

from paramstore.core.location import Extent
from paramstore.engine.planner.planner import Planner
from paramstore.engine.tables.copies import Cut
from paramstore.engine.tables.namespace import NamespaceState
from paramstore.storage.catalog.ledger import Ledger
from paramstore.storage.catalog.publication import Publication
from paramstore.storage.space.extents import Space


def settle(ledger: Ledger, publication: Publication) -> None:
    for _ in ledger.settling(publication):
        pass


def free(space: Space, extents: Iterable[Extent]) -> None:
    for extent in extents:
        space.release(extent)


def cut_of(planner: Planner, namespace: NamespaceState) -> Cut:
    """Fixes what a commit of the namespace publishes."""
    cut = planner.cuts.begin(namespace)
    planner.cuts.take(namespace, cut.records)
    return cut


def settle_cut(planner: Planner, namespace: NamespaceState, *, is_published: bool) -> None:
    """Ends the namespace's cut."""
    assert namespace.steps.cut is not None
    planner.cuts.settle(namespace, namespace.steps.cut.records, is_published=is_published)
    planner.copies.retire_unseen(namespace, list(namespace.residency.copies))
    planner.cuts.end(namespace)


def begin_epoch(planner: Planner, namespace: NamespaceState, freed: Iterable[Extent] = ()) -> None:
    """Takes the tables to the epoch in which the ledger stands, as a rollback does, and gives `freed` back."""
    planner.begin_rollback(namespace)
    planner.roll_back(namespace, list(namespace.keys))
    free(planner.space, freed)
    planner.end_rollback(namespace)
