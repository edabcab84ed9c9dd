"""Chooses the kernel of transformers that runs a layer's experts; it sees the module with the active experts' weights alone.

"eager" is the module's own loop; it indexes a field by expert, so its weights are served expert by expert without a copy
(`ExpertIndex`). Without a graph "grouped_mm" multiplies the experts where they lie (`ExpertStack`), and "batched_mm" takes its rows
from there. Else both, and a loop that does more than index, get one tensor per field.
"""

# N rows, n experts, H hidden
# ruff: noqa: N803, N806 - shape suffixes, as the legend says

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor, nn

from paramstore.core.schema import Field
from paramstore.errors import ConfigError
from paramstore_client.hf.compat import modeling

CHOICES = ("auto", *modeling.KERNELS)
GROUPED_MM = tuple(
    function for owner in (torch.nn.functional, torch) for name in ("grouped_mm", "_grouped_mm")
    if (function := getattr(owner, name, None)) is not None
)  # fmt: skip
"""The functions of torch that multiply by groups, under whatever names this torch has them."""


@dataclass(frozen=True, slots=True)
class Kernel:
    """A kernel. function: of transformers. is_streamed: whether it takes weights by expert, or one tensor per field. is_grouped:
    whether it only multiplies by groups, so that on the CPU an `ExpertStack` may stand for the tensor."""

    name: str
    function: modeling.ExpertsFunction
    is_streamed: bool
    is_grouped: bool = False

    @property
    def takes_apart(self) -> bool:
        """Whether it computes on experts that lie apart, where there is no graph."""
        return self.is_streamed or self.is_grouped or self.name == "batched_mm"


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
        return Kernel(name, forward, is_streamed=_only_indexes(forward, fields))
    is_grouped = name == "grouped_mm" and not modeling.asks_for_addresses()
    return Kernel(name, modeling.experts_function(name), is_streamed=False, is_grouped=is_grouped)


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


@dataclass(frozen=True, slots=True)
class StackedField:
    """One field of n experts, that lie apart. shape: of one expert's tensor. in_turn: yields each position once, with its tensor,
    which is valid until the next is asked for; those that are there come first."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    device: torch.device
    in_turn: Callable[[], Iterator[tuple[int, Tensor]]]


class ExpertStack:
    """n experts' tensors of one field, as what `grouped_mm` calls a weight, [n, ...], without a copy.

    On the CPU torch's own grouped_mm multiplies group by group, each by one mm, and so does this: with the same bits, in whatever
    order, as groups do not depend on each other. It knows what the kernel asks of a weight; other operations raise TypeError.
    """

    def __init__(
        self, field: StackedField, *, dtype: torch.dtype | None = None, is_transposed: bool = False,
        ends: Sequence[int] | None = None,
    ) -> None:  # fmt: skip
        """dtype: the one to compute in; default the field's own. Each expert's tensor is cast when it is used. ends: the row behind
        each group, where the host knows it; else it is read from the offsets, or counted."""
        self._field = field
        self._is_transposed = is_transposed
        self._ends = ends
        self.device = field.device
        self.dtype = field.dtype if dtype is None else dtype
        self.itemsize = self.dtype.itemsize

    @classmethod
    def of_fields(
        cls, fields: Iterable[Field], device: torch.device, in_turn: Callable[[str], Iterator[tuple[int, Tensor]]], *,
        ends: Sequence[int] | None = None,
    ) -> dict[str, Self]:  # fmt: skip
        """A stack of each of the fields, by name, whose tensors `in_turn` yields of a name."""
        return {
            field.name: cls(StackedField(getattr(torch, field.dtype), field.shape, device, partial(in_turn, field.name)), ends=ends)
            for field in fields
        }

    def to(self, dtype: torch.dtype) -> ExpertStack:
        """A stack of these experts that computes in another dtype."""
        return type(self)(self._field, dtype=dtype, is_transposed=self._is_transposed, ends=self._ends)

    def transpose(self, first: int, second: int) -> ExpertStack:
        """Each expert's matrix transposed; only the last two dimensions can be exchanged."""
        if {first, second} != {-1, -2}:
            raise TypeError(f"transpose({first}, {second}) of stored experts that lie apart: only -1 and -2 can be exchanged")
        return type(self)(self._field, dtype=self.dtype, is_transposed=not self._is_transposed, ends=self._ends)

    def __getitem__(self, index: Tensor) -> Tensor:
        """Rows by position in the stack, index [N], as biases are taken, and all that `batched_mm` takes: one copy of each. With
        `ends`, of as many rows of each position as they say."""
        rows = torch.empty((len(index), *self._field.shape), dtype=self.dtype, device=self.device)
        order_N = index.argsort(stable=True)
        ends = index.bincount().cumsum(0).tolist() if self._ends is None else self._ends
        for position, tensor in self._field.in_turn():
            if position < len(ends):
                start = ends[position - 1] if position else 0
                rows[order_N[start : ends[position]]] = tensor.to(self.dtype)
        return rows

    def grouped_mm(self, x_NH: Tensor, offsets_n: Tensor) -> Tensor:
        """[N, ...] of x [N, H]: rows from offsets[i - 1] to offsets[i] times expert i. What lies behind the last is not set."""
        y = x_NH.new_empty(len(x_NH), self._field.shape[0 if self._is_transposed else 1])
        ends = offsets_n.tolist() if self._ends is None else self._ends
        for position, tensor in self._field.in_turn():
            start, end = ends[position - 1] if position else 0, ends[position]
            if end > start:
                weight = tensor.to(self.dtype)
                torch.mm(x_NH[start:end], weight.t() if self._is_transposed else weight, out=y[start:end])
        return y

    @classmethod
    def __torch_function__(
        cls, function: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Tensor:
        given = {name: value for name, value in (kwargs or {}).items() if value is not None}
        if function not in GROUPED_MM or set(given) != {"offs"} or len(args) != 2 or not isinstance(args[1], cls):
            raise TypeError(f"{getattr(function, '__name__', function)} of stored experts that lie apart: only grouped_mm is known")
        return args[1].grouped_mm(args[0], given["offs"])


class RecordedStack(ExpertStack):
    """An `ExpertStack` whose products are nodes of the caller's graph, one an expert. The field's tensors come from that graph, in
    their order.

    The backward of torch's grouped_mm multiplies each group by one mm too, so that gradients have the same bits, and each expert's
    comes by itself: nothing is side by side.
    """

    def __getitem__(self, index: Tensor) -> Tensor:
        """Rows by position, as biases are taken. Each is copied in its turn."""
        return torch.stack([tensor.to(self.dtype, copy=True) for _, tensor in self._field.in_turn()])[index]

    def grouped_mm(self, x_NH: Tensor, offsets_n: Tensor) -> Tensor:
        counts = offsets_n.diff(prepend=offsets_n.new_zeros(1)).tolist()
        with torch.autocast(self.device.type, enabled=False):  # it knows nothing of grouped_mm either
            y = []
            for x_tH, (_, tensor) in zip(torch.split(x_NH, counts), self._field.in_turn(), strict=True):
                weight = tensor.to(self.dtype)
                y.append(torch.mm(x_tH, weight.t() if self._is_transposed else weight))
            return torch.cat(y)


def _only_indexes(forward: Callable[..., Any], fields: tuple[str, ...]) -> bool:
    """Whether the code of `forward` uses every field as `self.field[...]` alone."""
    try:
        code = inspect.getsource(forward)
    except (OSError, TypeError):
        return False
    uses = [re.findall(rf"self\.{re.escape(field)}\b(.?)", code) for field in fields]
    return all(found and set(found) == {"["} for found in uses)
