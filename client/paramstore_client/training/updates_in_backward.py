"""Updates that begin in backward: opens the step's apply at its first forward and closes it at `optimizer.step()`.

Gradients that are applied during backward can no longer be scaled or dropped when it ends, nor is their norm known. So the
sentinel's gradient is a mark, too small to count in any norm: if anybody scales it, the step finds out and raises StepFailed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch

from paramstore.core.optimizers import Options
from paramstore.errors import StepFailed, StepMismatch
from paramstore_client.training.options import MainGroup
from paramstore_client.training.updates import ExpertUpdates

MARK = 2.0**-62
"""The sentinel's gradient: its square is no denormal in fp32, and vanishes in the sum with any other square."""
WITHOUT = "attach(updates_in_backward=False)"


class UpdatesInBackward:
    """Owner of the open apply of one attachment. main: the group whose options it takes."""

    def __init__(self, experts: ExpertUpdates, main: MainGroup) -> None:
        self._experts = experts
        self._main = main
        self._options: Options | None = None
        """Options of the apply that was opened last."""
        self._is_held_back = False
        self._is_complete = False
        """Whether the backward that pushes the last gradients of the open apply is over."""

    @contextmanager
    def held_back(self) -> Iterator[None]:
        """Within it forwards open no apply, and gradients add up."""
        was_held_back, self._is_held_back = self._is_held_back, True
        try:
            yield
        finally:
            self._is_held_back = was_held_back

    def before_forward(self) -> None:
        """Opens the apply, once for a step; not at the first push, since every rank must open it, and some may push nothing."""
        if self._is_held_back:
            return
        options = self._main.options()
        if self._experts.namespace.is_applying:
            if options == self._options or self._is_complete:
                return
            self._forget("the learning rate or another option changed between a forward and the next")  # it saw no backward
        self._experts.begin_apply(options)
        self._options, self._is_complete = options, False

    def before_push(self) -> None:
        """Raises StepMismatch for a backward that the open apply cannot take."""
        if not self._experts.namespace.is_applying:
            return
        if self._is_held_back:
            raise StepMismatch("backward in experts.accumulate() of a forward outside of it: put both into it")
        if self._is_complete:
            raise StepMismatch(
                "a second backward before optimizer.step(): the experts' updates of the first have begun. Put forward and backward "
                f"of every micro-batch but the last into experts.accumulate(), or use {WITHOUT}"
            )

    def after_layers(self, layers: Iterable[int]) -> None:
        """Tells that this rank has pushed its last gradients of `layers`: those of other ranks need not wait for the step."""
        namespace = self._experts.namespace
        if namespace.world_size > 1 and namespace.is_applying and not self._is_held_back:
            namespace.end_layers(layers)

    def after_backward(self) -> float:
        """Notes the end of a backward; returns what the sentinel gets in place of a norm."""
        self.after_layers(self._experts.namespace.layers)  # also of those that this backward left out
        self._is_complete = self._experts.namespace.is_applying
        return MARK

    def step(self, optimizer: torch.optim.Optimizer, *, is_scaled: bool) -> None:
        """Closes the apply; where none is open, since all backwards were held back, makes a plain one. Raises StepFailed where
        the gradients are not those that were applied."""
        is_applying = self._experts.namespace.is_applying
        if is_scaled or getattr(optimizer, "found_inf", None) is not None:
            self._refuse("the gradients were clipped or unscaled after backward", f"clip or scale with {WITHOUT}")
        options = self._main.options()
        if not is_applying:
            self._experts.apply(options, clip_coef=1.0)
            return
        if options != self._options:
            self._refuse("the optimizer's options changed between forward and step", "change them after optimizer.step()")
        self._is_complete = False
        self._experts.end_apply()

    def remove(self) -> None:
        """Ends an apply that was opened and saw no backward. Raises StepMismatch where there are pending gradients."""
        if self._experts.namespace.is_applying:
            self._forget("detach between a forward and its optimizer.step()")

    def _forget(self, why: str) -> None:
        count = self._experts.namespace.pending_count
        if count:
            raise StepMismatch(f"{why}: {count} experts have pending gradients: optimizer.step(), or experts.abort(), comes before")
        self._experts.abort()

    @staticmethod
    def _refuse(why: str, advice: str) -> None:
        raise StepFailed(
            f"{why}, but the experts' updates had begun in backward: experts and dense weights are spoilt. Go back with "
            f"experts.rollback() and the dense checkpoint; {advice}"
        )
