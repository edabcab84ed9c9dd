"""The two tensors by which a model's stored experts take part in autograd and in an optimizer's step.

- An `anchor`, an unregistered leaf, goes into the graph of each stored layer, so that its backward runs even where neither its
  input nor its routing weights need a gradient, and so that its end is seen, and that of the whole backward.
- `sentinel`, a registered scalar parameter that stays 0, stands for all experts in whatever looks at parameters: its gradient is
  the experts' norm, so that a clipping by the global norm counts them. It is in no state dict, and `fully_shard` does not see it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from paramstore_client.nn.sharded import UncollectedModule
from paramstore_client.training.backward import BackwardEnd

CHILD_NAME = "paramstore"
"""The name under which a model holds its sentinel: a child, as DDP ignores parameters by "module.param" only."""


class Listener(Protocol):
    """Somebody who is told of forwards and backwards of the stored layers."""

    def before_forward(self) -> None:
        """Called when a stored layer is about to compute with gradients; not while a checkpoint recomputes."""

    def after_layer(self, layer: int) -> None:
        """Called when a backward has come through a stored layer, which has pushed all its gradients."""

    def after_backward(self) -> None:
        """Called when a backward through stored layers is over: all of them have pushed. What it raises, the backward raises."""


class ExpertSentinel(UncollectedModule):
    """The child module `paramstore` of a model whose experts are stored. Owner of both tensors; `training.bind` makes it.

    The sentinel is fp32 whatever the model is cast to, and never on the meta device. It needs a gradient only from the first
    backward on: DDP, which is made before, would wait for one that autograd never gives.
    """

    def __init__(self) -> None:
        super().__init__()
        self.sentinel = nn.Parameter(torch.zeros(()), requires_grad=False)
        self.listener: Listener | None = None
        self.is_left_alone = False
        """Whether the experts get no gradients."""
        self._experts: list[object] = []  # in a list: a handle that refers to this module is no child of it
        self._end = BackwardEnd(self._tell_of_backward)
        self._anchors: dict[int, Tensor] = {}  # by layer, in a dict: a tensor attribute would be moved and counted

    def anchor(self, layer: int) -> Tensor | None:
        """The scalar leaf for one forward of `layer`, which asks for it each time; its value means nothing. None where the experts
        are left alone.

        While a checkpoint recomputes, the leaf serves once: that forward may get a backward of its own, inside the one under way,
        whose end tells of the layer and not of the whole backward.
        """
        if self.is_left_alone:
            return None
        if self._end.watch():
            return _leaf(self._tell_of_layer, layer)
        if self.listener is not None:
            self.listener.before_forward()
        if layer not in self._anchors:
            self._anchors[layer] = _leaf(self._after_anchor, layer)
        return self._anchors[layer]

    @property
    def experts(self) -> object:
        """The experts' handle, as `bind` has set it; an object, as its class lies above this one. Raises IndexError before that."""
        return self._experts[0]

    @experts.setter
    def experts(self, experts: object) -> None:
        self._experts = [experts]

    def __deepcopy__(self, memo: dict[int, Any]) -> ExpertSentinel:
        """Returns itself: a copy of a model shares the experts, and what stands for them."""
        return self

    def _after_anchor(self, layer: int, anchor: Tensor) -> None:
        anchor.grad = None
        self._end.watch()
        self._tell_of_layer(layer, anchor)

    def _tell_of_layer(self, layer: int, _: Tensor) -> None:
        if self.listener is not None:
            with torch.no_grad():
                self.listener.after_layer(layer)

    def _tell_of_backward(self) -> None:
        if self.listener is not None:
            self.listener.after_backward()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> ExpertSentinel:
        """Follows the model to its device, to no other dtype and not to meta."""
        device = fn(torch.zeros((), device=self.sentinel.device)).device
        if device.type != "meta" and device != self.sentinel.device:
            super()._apply(lambda tensor: tensor.to(device), recurse)  # type: ignore[no-untyped-call]  # as above
        return self

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        """Saves nothing: a checkpoint of the model is that of its dense part."""

    def _load_from_state_dict(self, *arguments: Any) -> None:
        """Loads nothing, and reports nothing as missing."""


def _leaf(after: Callable[[int, Tensor], None], layer: int) -> Tensor:
    """A scalar leaf; once a backward has given it its gradient, `after`, a method, is called with `layer` and the leaf."""
    leaf = torch.zeros((), requires_grad=True)
    known = weakref.WeakMethod(after)  # weakly: Python's collector sees no cycle through a hook that torch holds

    def hook(leaf: Tensor) -> None:
        if (method := known()) is not None:
            method(layer, leaf)

    leaf.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]  # torch has no types for it
    return leaf
