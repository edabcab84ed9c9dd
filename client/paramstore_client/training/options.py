"""Reads the experts' options of a step from the optimizer that updates the dense weights.

One parameter group speaks for the experts, the *main* group: the one with the most elements. Groups may differ in weight decay
alone (decay for matrices, none for the rest); where they differ in more, the caller says which one it is.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterable, Iterator
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor, nn

from paramstore.core.arguments import whole_number
from paramstore.core.optimizers import OPTIMIZERS, SGD, Adagrad, AdamW, Options
from paramstore.core.schema import Schema
from paramstore.errors import ConfigError

_SERVED: dict[type[torch.optim.Optimizer], type[Options]] = {
    torch.optim.AdamW: AdamW,
    torch.optim.SGD: SGD,
    torch.optim.Adagrad: Adagrad,
}
"""torch's class -> the options of the same update; they bear torch's names."""
_REFUSED = ("amsgrad", "maximize", "capturable", "differentiable")
"""Flags of a group that change the arithmetic, or want the step on the device."""
_FREE = frozenset({"params", "weight_decay", "foreach", "fused", "name", "param_names", *_REFUSED})
"""Entries in which groups may differ."""


def unwrapped(optimizer: Any) -> torch.optim.Optimizer:
    """The torch optimizer inside the wrappers of accelerate and Lightning, which hold it as `optimizer`."""
    while isinstance(inner := getattr(optimizer, "optimizer", None), torch.optim.Optimizer):
        optimizer = inner
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ConfigError(f"attach: {_name_of(optimizer)} is not a torch.optim.Optimizer; use the explicit experts.step()")
    return optimizer


def refuse_fsdp1(parameters: Iterable[Tensor]) -> None:
    """Raises ConfigError for parameters that FullyShardedDataParallel has flattened."""
    if any(getattr(parameter, "_fsdp_flattened", False) for parameter in parameters):
        raise ConfigError(
            "the model is wrapped by FullyShardedDataParallel (FSDP1): stored experts train under FSDP2 (fully_shard), or DDP"
        )


def trains_adapters(model: nn.Module, optimizer: torch.optim.Optimizer, *, sentinel: Tensor) -> bool:
    """Whether PEFT has put its adapters into `model`, or `optimizer` trains what PEFT has put around it (prompts)."""
    if hasattr(model, "peft_config"):
        return True
    if any(parameter.requires_grad for parameter in model.parameters() if parameter is not sentinel):
        return False  # prompts freeze the whole model; a frozen one alone proves nothing: a head outside may train beside experts
    trained = {id(param) for group in optimizer.param_groups for param in group["params"] if param.requires_grad}
    return any(
        id(parameter) in trained and parameter is not sentinel for owner in _peft_models(model) for parameter in owner.parameters()
    )


def _peft_models(model: nn.Module) -> Iterator[nn.Module]:
    """PEFT's models around `model`. PEFT leaves no mark on one that gets prompts, and no module knows its owner: so all objects
    are looked through."""
    cls = getattr(sys.modules.get("peft"), "PeftModel", None)
    if cls is not None:
        for found in gc.get_objects():
            if issubclass(type(found), cls) and any(part is model for part in found.modules()):
                yield found


def options_class(schema: Schema) -> type[Options]:
    """The class of options with which namespaces of this schema are updated. Raises ConfigError where they never are."""
    if not schema.is_trainable:
        raise ConfigError(f"a namespace of schema {schema.kind!r} has no optimizer states: create it with ps.adamw_schema(...)")
    return OPTIMIZERS[schema.kind]


class MainGroup:
    """The parameter group that gives the experts their options. It is known by its index: loading a state dict replaces groups.

    sentinel: not counted as a parameter. index: None chooses. weight_decay: None takes the group's.
    Raises ConfigError where the optimizer's arithmetic is not the namespace's, or the group is ambiguous.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, schema: Schema, *, sentinel: Tensor, index: int | None, weight_decay: float | None
    ) -> None:
        served_options = _SERVED.get(type(optimizer))
        if served_options is None or served_options.kind != schema.kind:
            served = ", ".join(f"torch.optim.{cls.__name__} (schema {options.kind!r})" for cls, options in _SERVED.items())
            raise ConfigError(
                f"attach: experts of schema {schema.kind!r} cannot follow {_name_of(optimizer)}; served: {served}. "
                "Another class, a subclass too, may compute otherwise: use the explicit experts.step()"
            )
        refuse_fsdp1(param for group in optimizer.param_groups for param in group["params"])
        self._options = served_options
        self._optimizer = optimizer
        self._weight_decay = weight_decay
        self._index = _choose(optimizer, sentinel) if index is None else whole_number("group", index)
        if not 0 <= self._index < len(optimizer.param_groups):
            raise ConfigError(f"attach: group={index}; the optimizer has groups 0 to {len(optimizer.param_groups) - 1}")
        self.options()  # refused now, not at the first step

    def options(self) -> Options:
        """The group's options at this moment, as schedulers have left them. Raises ConfigError."""
        group = self._optimizer.param_groups[self._index]
        for flag in _REFUSED:
            if group.get(flag):
                raise ConfigError(f"attach: group {self._index} has {flag}=True, which the experts' update does not know: drop it")
        values: dict[str, Any] = {field.name: _plain(group[field.name]) for field in fields(self._options)}
        if self._weight_decay is not None:
            values["weight_decay"] = self._weight_decay
        return self._options(**values)


def _choose(optimizer: torch.optim.Optimizer, sentinel: Tensor) -> int:
    sizes = [sum(p.numel() for p in group["params"] if p is not sentinel) for group in optimizer.param_groups]
    main = sizes.index(max(sizes))
    for index, group in enumerate(optimizer.param_groups):
        other = optimizer.param_groups[main]
        unequal = [name for name in other if name not in _FREE and _plain(group.get(name)) != _plain(other[name])]
        if sizes[index] and unequal:
            raise ConfigError(
                f"attach: groups {main} and {index} differ in {', '.join(unequal)}: say with group= whose options the experts take"
            )
    return main


def _name_of(optimizer: object) -> str:
    return f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"


def _plain(value: object) -> Any:
    """`value` with a number for each tensor of one element, in tuples too: a group's lr may be a tensor."""
    if isinstance(value, Tensor):
        return value.item()
    return tuple(map(_plain, value)) if isinstance(value, tuple | list) else value


def holds_any(optimizer: torch.optim.Optimizer, parameters: Iterable[torch.Tensor]) -> bool:
    """Whether a step of `optimizer` changes one of `parameters`."""
    wanted = {id(parameter) for parameter in parameters}
    return any(id(parameter) in wanted for group in optimizer.param_groups for parameter in group["params"])
