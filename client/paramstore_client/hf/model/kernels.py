"""Chooses the kernel of transformers that runs a layer's experts; it sees the module with the active experts' weights alone.

"eager" is the module's own loop; it indexes a field by expert, so its weights are served expert by expert without a copy
(`ExpertIndex`). "grouped_mm", "batched_mm", and a loop that does more than index, get one tensor per field.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from paramstore.errors import ConfigError
from paramstore_client.hf.compat import modeling

CHOICES = ("auto", *modeling.KERNELS)


@dataclass(frozen=True, slots=True)
class Kernel:
    """A kernel. function: of transformers. is_streamed: whether it takes weights by expert, or one tensor per field."""

    function: modeling.ExpertsFunction
    is_streamed: bool


def choose_kernel(model: nn.Module, choice: str, requested: str | None) -> str:
    """The kernel's name. choice: one of CHOICES. requested: the `experts_implementation` that the user asked for, if any.

    "auto" is what the model itself would run: grouped_mm where it can, else eager; never batched_mm unless it was asked for, as
    that copies the weights once per token. Raises ConfigError.
    """
    if not isinstance(choice, str) or choice not in CHOICES:
        raise ConfigError(f"experts_kernel={choice!r}; use one of {', '.join(CHOICES)}")
    if choice != "auto":
        return choice
    if requested is not None and requested not in modeling.KERNELS:
        raise ConfigError(
            f"experts_implementation={requested!r} cannot run on stored experts; use one of {', '.join(modeling.KERNELS)}"
        )
    return modeling.preferred_kernel(model, requested)


def make_kernel(name: str, module: nn.Module, fields: tuple[str, ...]) -> Kernel:
    """The kernel `name` for an experts module whose expert tensors are `fields`."""
    if name == "eager":
        forward = modeling.eager_forward(module)
        return Kernel(forward, is_streamed=_only_indexes(forward, fields))
    return Kernel(modeling.experts_function(name), is_streamed=False)


class ModuleView:
    """The experts module as a kernel sees it: `count` experts with these weights, all else the module's own."""

    def __init__(self, module: nn.Module, weights: Mapping[str, Any], *, count: int) -> None:
        self._module = module
        self.num_experts = count
        self.__dict__.update(weights)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


class ExpertIndex:
    """A field for a kernel that takes one expert after the other: `field[i]` is the i-th active expert's tensor."""

    def __init__(self, field: str, weights_of: Callable[[int], Mapping[str, Tensor]]) -> None:
        self._field = field
        self._weights_of = weights_of

    def __getitem__(self, index: Tensor | int) -> Tensor:
        return self._weights_of(int(index))[self._field]


def _only_indexes(forward: Callable[..., Any], fields: tuple[str, ...]) -> bool:
    """Whether the code of `forward` uses every field as `self.field[...]` alone."""
    try:
        code = inspect.getsource(forward)
    except (OSError, TypeError):
        return False
    uses = [re.findall(rf"self\.{re.escape(field)}\b(.?)", code) for field in fields]
    return all(found and set(found) == {"["} for found in uses)
