"""Takes a served model to the newest step of its experts, with the dense weights of that very step, or not at all.

- While the file of the dense weights is read a second handle stands on its step, so that neither goes away. The experts move to
  that very step; where it is gone all the same, the newest is tried again, TRIES_MAX times at most.
- Dense weights are loaded into the model's own tensors: compiled code and captured references stay.
- A move that is cut off after it has begun, by an interrupt or a file that goes bad, leaves a model that refuses to compute until
  one has succeeded.
"""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from torch import nn

from paramstore.errors import CheckpointError, ConfigError, SchemaMismatch, StepDropped, VersionMismatch, WaitTimeout
from paramstore_client.handle.dense_part import DensePart
from paramstore_client.handle.origin import Origin
from paramstore_client.handle.steps import Refreshed
from paramstore_client.hf.model.binding import find_experts
from paramstore_client.namespace import Namespace
from paramstore_client.training.dense_files import opened

_log = logging.getLogger(__name__)

TRIES_MAX = 8
"""Steps that may be dropped in a row while they are looked at, before the model stays where it is."""
MARK = "_paramstore_dense"
"""Attribute of a model that has moved: the view of its experts then, as `view_change_count` has it."""


@dataclass(frozen=True, slots=True)
class Followed:
    """What became of a model. step: the one that its experts are of. has_moved: whether weights were loaded.

    changed_keys, changed_bytes: experts with other bytes, as `refresh` counts them; dense_bytes: of the file that was loaded; all 0
    where nothing has moved. reason: why it stays where it is though that is not the newest step, whole; None if it is."""

    step: int | None
    has_moved: bool = False
    changed_keys: int | None = 0
    changed_bytes: int | None = 0
    dense_bytes: int = 0
    reason: str | None = None


class Mover:
    """Moves one model, whose experts a reader's `namespace` has. Its state is the model's, under MARK. directory: where the files
    of the dense weights are; None: where their trainer has them."""

    def __init__(self, model: nn.Module, namespace: Namespace, directory: Path | None = None) -> None:
        self.model = model
        self.namespace = namespace
        self._directory = directory
        stored = find_experts(model)
        assert stored is not None, "a model whose experts a namespace has"
        self._stored = stored

    def move(self) -> Followed:
        """Does what `ps.hf.follow` does."""
        if self._stored.is_shared:
            raise ConfigError(
                "follow: this model was copied, and the copy shares its experts: moving them would leave dense weights of another "
                "step to one of the two. Load each model that is to follow with from_pretrained"
            )
        namespace, moved_to = self.namespace, self.model.__dict__.get(MARK)
        if moved_to == namespace.view_change_count and not self._stored.is_between_steps and self._is_newest():
            return Followed(namespace.view_step)
        dropped: StepDropped | None = None
        for _ in range(TRIES_MAX):
            try:
                return self._move()
            except StepDropped as error:
                dropped = error
        return self._stay(f"{TRIES_MAX} steps in a row were dropped while they were looked at: {dropped}")

    def _is_newest(self) -> bool:
        try:
            self.namespace.wait_for_step(timeout_s=0)
        except WaitTimeout:
            return True
        return False

    def _move(self) -> Followed:
        """Moves to the newest step, or says why not. Raises StepDropped, and nothing has changed, where that is gone meanwhile."""
        namespace, model, stored = self.namespace, self.model, self._stored
        with namespace.reader(max_lease_slots=0) as ahead:  # it leases nothing
            step = ahead.view_step
            assert step is not None, "a reader stands on a step"
            moved: Refreshed | None = None
            try:
                extra = ahead.extra(step)
                dense = DensePart.from_extra(extra)
                if dense is None:
                    return Followed(step) if self._is_as_imported(extra, step) else self._stay(names_none(step))
                with opened(dense, self._directory) as file:
                    file.check_fits(model)
                    was_cut_off, stored.is_between_steps = stored.is_between_steps, True
                    try:
                        moved = namespace.refresh(step)
                    except StepDropped:
                        stored.is_between_steps = was_cut_off
                        raise
                    file.load(model)
                    model.__dict__[MARK] = namespace.view_change_count
                    stored.is_between_steps = False
            except (CheckpointError, SchemaMismatch) as error:
                if moved is not None:
                    raise
                if step not in namespace.steps():
                    raise StepDropped(f"step {step} was dropped, and its dense weights with it") from error
                return self._stay(f"step {step}: {error}")
            return Followed(step, True, moved.changed_keys, moved.changed_bytes, file.size_bytes)

    def _is_as_imported(self, extra: bytes, step: int) -> bool:
        """Whether the model, not moved yet, has experts and dense weights of one checkpoint: that whose import `step` is."""
        origin, has_moved = Origin.from_extra(extra), MARK in self.model.__dict__ or self._stored.is_between_steps
        return origin is not None and origin.step == step and not has_moved and self._is_newest()

    def _stay(self, reason: str) -> Followed:
        return Followed(self.namespace.view_step, reason=reason)


def names_none(step: int) -> str:
    """What is said of a step that names no file of dense weights."""
    return f"step {step} names no dense weights: its trainer is to give commit(step, dense=directory)"


def take_dense(
    model: nn.Module, namespace: Namespace, path: str | os.PathLike[str], *, is_imported_from: Callable[[], bool]
) -> None:
    """Gives a model whose dense weights were loaded from `path`, a moment ago, those of its experts' step, where that names them.

    Warns where they cannot be had. Warns too where the step names none, and the experts were trained from those of `path`: then the
    dense weights there are of before. is_imported_from: says whether they were. Nothing is done at the step of the import, nor
    where `path` has no such experts: whoever gives the dense part alone knows of which step it is.
    """
    step = namespace.view_step
    assert step is not None, "a reader stands on a step"
    try:
        extra = namespace.extra(step)
        is_named = DensePart.from_extra(extra) is not None
    except (CheckpointError, StepDropped):
        extra, is_named = b"", True  # the move says what is wrong, or finds a newer step
    if is_named:
        try:
            moved = Mover(model, namespace).move()
        except VersionMismatch as error:
            moved = Followed(step, reason=str(error))
        reason = moved.reason
        if reason is None:
            _log.info("%r: experts and dense weights are of step %s, and none of %s", namespace.name, moved.step, path)
    else:
        origin = Origin.from_extra(extra)
        is_older = origin is not None and origin.step not in (None, step) and is_imported_from()
        reason = names_none(step) if is_older else None
    if reason is not None:
        warnings.warn(
            f"namespace {namespace.name!r}: the experts are of step {namespace.view_step}, and the dense weights those of {path}, "
            f"which are of another step: {reason}. Once a step has both, ps.hf.follow(model) takes them together",
            stacklevel=4,
        )
