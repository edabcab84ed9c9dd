"""Warns of training loops that forget their experts: nothing else would say that these do not train."""

from __future__ import annotations

import warnings
import weakref

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from paramstore_client.namespace import Namespace
from paramstore_client.training.options import holds_any


class Unattached:
    """Listens to a model's stored layers until an optimizer is attached, or the experts are stepped by hand. Warns once.

    Only optimizers that hold a parameter of the model count; steps of others, such as a discriminator's, may come between its
    micro-batches.
    """

    def __init__(self, namespace: Namespace, model: nn.Module) -> None:
        self._namespace = namespace
        self._model = weakref.ref(model)
        self._apply_count = namespace.apply_count
        self._has_stepped = False
        """Whether an optimizer of the model made a step since the last forward."""
        self._has_warned = False
        noted = weakref.WeakMethod(self._note_step)
        hook = register_optimizer_step_post_hook(lambda optimizer, *_: (note := noted()) and note(optimizer))
        weakref.finalize(self, hook.remove)

    def before_forward(self) -> None:
        """Warns where gradients of stored layers outlived an optimizer's step."""
        if self._has_stepped:
            self._has_stepped = False
            self._warn("an optimizer of the model has made a step")

    def after_layer(self, layer: int) -> None:
        """Does nothing: no apply is open that could wait for the layer."""

    def after_backward(self) -> None:
        """Does nothing: gradients stay pending, for `Experts.step`."""

    def before_commit(self, step: int) -> None:
        """Warns where the commit would store nothing of what is pending."""
        if not self._namespace.uncommitted_applies:
            self._warn(f"commit({step}) stores no update")

    def _note_step(self, optimizer: torch.optim.Optimizer) -> None:
        if not self._has_stepped and (model := self._model()) is not None:
            self._has_stepped = holds_any(optimizer, model.parameters())

    def _warn(self, what: str) -> None:
        count = self._namespace.pending_count
        if count == 0 or self._has_warned or self._namespace.apply_count != self._apply_count:
            return  # whoever has applied by hand has forgotten nothing
        self._has_warned = True
        warnings.warn(
            f"namespace {self._namespace.name!r}: {what}, and the gradients of {count} experts are still pending, as no optimizer "
            "is attached: the experts do not train. Call ps.hf.experts(model).attach(optimizer), or attach of what "
            "ps.training.bind gave, before the loop; attach(optimizer, experts=False) if they are to stay as they are",
            stacklevel=2,
        )
