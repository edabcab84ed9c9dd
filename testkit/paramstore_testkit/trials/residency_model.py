"""A model of what a planner's callers may expect, kept apart from the planner: who sees which identity of a key, who may lease
how much, which steps stay. `tests/properties/test_residency_model.py` tests the real planner against it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from paramstore.core.key import ExpertKey
from paramstore.core.location import Identity
from paramstore.engine.tables.copies import ParamCopy
from paramstore.engine.tables.namespace import LeaseRequest, View
from paramstore.errors import CapacityError, LeaseError, ParamStoreError, StepDropped, StepFailed, WriterFenced
from paramstore.limits import RETAINED_STEPS
from paramstore_testkit.stores.small_planner import HELD_STEPS


@dataclass(eq=False)
class ModelView:
    """A view as its owner knows it."""

    view: View
    step: int | None
    """Step that the view stands on; None: it is the writer's."""
    is_fenced: bool = False
    is_dropped: bool = False
    is_closed: bool = False


@dataclass(eq=False)
class ModelLease:
    """One lease request. held: the copies it was given, with what must not change of them while it has them."""

    request: LeaseRequest
    owner: ModelView
    keys: tuple[ExpertKey, ...]
    is_ended: bool = False
    held: list[tuple[ParamCopy, Identity, int, tuple[int, ...]]] = field(default_factory=list)

    @property
    def is_waiting(self) -> bool:
        return not self.is_ended and not self.held


class ResidencyModel:
    """One namespace's identities, steps, views and leases."""

    def __init__(self, keys: Iterable[ExpertKey], first: Identity) -> None:
        self.keys = list(keys)
        self.epoch = first.epoch
        self.newest = dict.fromkeys(self.keys, first)
        """Identity of each key's existing bytes."""
        self.target = dict(self.newest)
        """Identity of each key's bytes once every apply called so far has run."""
        self.steps = {0: dict(self.newest)}
        self.cut: dict[ExpertKey, Identity] | None = None
        self.is_broken = False
        self.views: list[ModelView] = []
        self.leases: list[ModelLease] = []

    # --- views and steps

    def open_views(self) -> list[ModelView]:
        return [view for view in self.views if not view.is_closed]

    def writer(self) -> ModelView | None:
        return next((view for view in self.open_views() if view.step is None and not view.is_fenced), None)

    def seen_by(self, view: ModelView, key: ExpertKey) -> Identity | None:
        if view.step is None:
            return self.target[key]
        return self.steps.get(view.step, {}).get(key)

    def is_seen(self, key: ExpertKey, identity: Identity) -> bool:
        """Whether the writer, or a reader, may ask for exactly these bytes."""
        readers = [view for view in self.open_views() if view.step is not None]
        return self.target[key] == identity or any(self.seen_by(view, key) == identity for view in readers)

    def changed(self) -> dict[ExpertKey, Identity]:
        """Identities that no step has, and that no cut under way will give to one."""
        known = {**self.steps[max(self.steps)], **(self.cut or {})}
        return {key: identity for key, identity in self.newest.items() if known[key] != identity}

    def publish(self, step: int) -> None:
        assert self.cut is not None
        self.steps[step] = {**self.steps[max(self.steps)], **self.cut}
        self.cut = None
        retained = set(sorted(self.steps)[-RETAINED_STEPS:])
        old = sorted({view.step for view in self.open_views() if not view.is_dropped and view.step is not None} - retained)
        kept = retained.union(old[max(0, len(old) - HELD_STEPS) :])
        self._keep(kept)

    def roll_back(self, step: int) -> None:
        self._keep({kept for kept in self.steps if kept <= step})
        self.epoch += 1
        self.newest = dict(self.steps[step])
        self.target = dict(self.newest)
        self.is_broken = False

    def _keep(self, kept: set[int]) -> None:
        self.steps = {step: content for step, content in self.steps.items() if step in kept}
        for view in self.open_views():
            if view.step is not None and view.step not in kept:
                view.is_dropped = True

    # --- leases

    def leased(self, owner: ModelView) -> set[ParamCopy]:
        return {held[0] for lease in self.leases if lease.owner is owner and not lease.is_ended for held in lease.held}

    def is_never_made(self, owner: ModelView, keys: Iterable[ExpertKey], found: list[ParamCopy | None]) -> bool:
        """Whether the owner sees bytes of `keys` that an apply was to make, and that apply failed."""
        return owner.step is None and self.is_broken and any(
            copy is None and self.newest[key] != self.target[key] for key, copy in zip(keys, found, strict=True)
        )  # fmt: skip

    def refusal(
        self, owner: ModelView, keys: Iterable[ExpertKey], found: list[ParamCopy | None], awaited: set[ExpertKey]
    ) -> type[ParamStoreError] | None:
        """Gives the error that a lease request of `keys` ends with at once; None if it is given, or waits.

        found: the existing copies. awaited: keys that the owner waits for and has no lease of.
        """
        if owner.is_closed:
            return LeaseError
        if owner.is_fenced:
            return WriterFenced
        if owner.is_dropped:
            return StepDropped
        if self.is_never_made(owner, keys, found):
            return StepFailed
        leased, promised = self.leased(owner), owner.view.lease_slots
        new = {key for key, copy in zip(keys, found, strict=True) if copy not in leased} - awaited
        if not new or len(new | awaited) + len(leased) <= promised:
            return None
        return CapacityError if len(set(keys)) > promised else LeaseError  # LeaseError where releasing helps
