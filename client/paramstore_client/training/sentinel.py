"""The two tensors by which a model's stored experts take part in autograd and in an optimizer's step.

- `anchor`, an unregistered leaf, goes into the graph of every stored layer, so that its backward runs even where neither its
  input nor its routing weights need a gradient, and so that the end of a backward is seen.
- `sentinel`, a registered scalar parameter that stays 0, stands for all experts in whatever looks at parameters: its gradient is
  the experts' norm, so that a clipping by the global norm counts them. It is in no state dict, and `fully_shard` does not see it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

from paramstore_client.training.backward import BackwardEnd

if TYPE_CHECKING:
    from paramstore_client.training.experts import Experts

CHILD_NAME = "paramstore"
"""The name under which a model holds its sentinel: a child, as DDP ignores parameters by "module.param" only."""


class Listener(Protocol):
    """Who wants to know of forwards and backwards of the stored layers."""

    def before_forward(self) -> None:
        """A stored layer is about to compute with gradients; not while a checkpoint recomputes."""

    def after_backward(self) -> None:
        """A backward through stored layers is over: all of them have pushed. What it raises, the backward raises."""


class ExpertSentinel(nn.Module):
    """The child module `paramstore` of a model whose experts are stored. Owner of both tensors; `training.bind` makes it.

    The sentinel is fp32 whatever the model is cast to, and never on the meta device. It needs a gradient only from the first
    backward on: DDP, which is made before, would wait for one that autograd never gives.
    """

    def __init__(self) -> None:
        super().__init__()
        self.sentinel = nn.Parameter(torch.zeros(()), requires_grad=False)
        self.listener: Listener | None = None
        self.is_left_alone = False
        """The experts get no gradients."""
        self._experts: list[Experts] = []  # in a list: a handle that refers to this module is no child of it
        self._end = BackwardEnd(self._tell_of_backward)
        anchor = torch.zeros((), requires_grad=True)
        # Weakly: Python's collector sees no cycle through a hook that torch holds.
        after = weakref.WeakMethod(self._after_anchor)
        anchor.register_post_accumulate_grad_hook(lambda leaf: (known := after()) and known(leaf))  # type: ignore[no-untyped-call]
        self._anchor = [anchor]  # in a list: a tensor attribute would be moved and counted

    @property
    def anchor(self) -> Tensor | None:
        """The scalar leaf for one forward of one layer, which asks for it each time; its value means nothing. None where the
        experts are left alone.

        While a checkpoint recomputes it is a throw-away: that forward may get a backward of its own, inside the one under way,
        whose end is no end.
        """
        if self.is_left_alone:
            return None
        if self._end.watch():
            return torch.zeros((), requires_grad=True)
        if self.listener is not None:
            self.listener.before_forward()
        return self._anchor[0]

    @property
    def experts(self) -> Experts:
        """The handle of the experts. Raises IndexError before `training.bind` has made it."""
        return self._experts[0]

    @experts.setter
    def experts(self, experts: Experts) -> None:
        self._experts = [experts]

    def __deepcopy__(self, memo: dict[int, Any]) -> ExpertSentinel:
        """Itself: a copy of a model shares the experts, and what stands for them."""
        return self

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """As of any module; but without `recurse` none, which is how `fully_shard` collects what it shards: a scalar cannot be."""
        if recurse:
            yield from super().named_parameters(prefix, recurse, remove_duplicate)

    def named_buffers(self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True) -> Iterator[tuple[str, Tensor]]:
        """Without `recurse` the sentinel: `fully_shard` moves buffers and leaves them whole, and torch's distributed checkpoint,
        which looks at both, finds the parameter that the optimizer has."""
        if not recurse:
            yield f"{prefix}.sentinel" if prefix else "sentinel", self.sentinel

    def _after_anchor(self, anchor: Tensor) -> None:
        anchor.grad = None
        self._end.watch()

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
        """Nothing: a checkpoint of the model is that of its dense part."""

    def _load_from_state_dict(self, *arguments: Any) -> None:
        """Nothing is expected, and nothing missing."""
