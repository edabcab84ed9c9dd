"""Updates of a model's experts: what an optimizer's step, or whoever acts for one, asks of the namespace that they are in."""

from __future__ import annotations

from typing import Literal

from paramstore.core.arguments import number
from paramstore.core.optimizers import Options
from paramstore_client.connection.answers import Result
from paramstore_client.connection.ticket import Ticket
from paramstore_client.device.visit_order import declare_order
from paramstore_client.namespace import Namespace

Reduce = Literal["mean", "sum"]


class ExpertUpdates:
    """The part of `Experts` that updates. Owner of the update under way.

    reduce: "mean" or "sum", what becomes of the ranks' gradients.
    """

    def __init__(self, namespace: Namespace) -> None:
        self.namespace = namespace
        self.reduce: Reduce = "mean"
        self._apply: Ticket[Result] | None = None
        self._micro_batches = 1
        """Micro-batches of a step in the order of visits that is declared."""

    def gradient_norm(self) -> float:
        """The L2 norm of everything pending, after averaging over the ranks; the same on each."""
        return self.namespace.gradient_norm() * self._share

    def apply(self, options: Options, *, clip_coef: float) -> Ticket[Result]:
        """Makes the optimizer step of `step`, attached or not, with options that are made already.

        The update goes on while the next forward begins; there is one at a time, and the next call here raises its error.
        """
        scale = number("clip_coef", clip_coef) * self._share
        self.settle()
        self._apply = self.namespace.apply(options, grad_scale=scale)
        return self._apply

    def expect_micro_batches(self, count: int) -> None:
        """Notes that a step has had `count` forwards and backwards; declares the order of visits anew where that is a change."""
        if count != self._micro_batches:
            declare_order(self.namespace, micro_batches=count)
            self._micro_batches = count

    def begin_apply(self, options: Options) -> None:
        """Opens the step's apply before its gradients are there: see `Namespace.begin_apply`."""
        self.namespace.begin_apply(options, grad_scale=self._share)

    def end_apply(self) -> Ticket[Result]:
        """Closes the apply that `begin_apply` has opened; the update goes on as after `apply`."""
        self.settle()
        self._apply = self.namespace.end_apply()
        return self._apply

    def settle(self) -> None:
        """Waits for the update under way, and raises its error."""
        ticket, self._apply = self._apply, None
        if ticket is not None:
            ticket.wait()

    def abort(self) -> int:
        """Drops the pending gradients; returns how many experts had some."""
        return self.namespace.abort()

    @property
    def _share(self) -> float:
        return 1.0 / self.namespace.world_size if self.reduce == "mean" else 1.0
