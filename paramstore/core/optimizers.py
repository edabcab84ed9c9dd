"""The optimizers that the daemon runs: their options, as torch names them, and the states that each keeps of a parameter.

The update itself is in `paramstore.optim`. `describe` turns options into plain values, to be sent or kept, and
`options_from_description` turns these back.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar

from paramstore.core.arguments import flag, number, wrong
from paramstore.errors import ConfigError


@dataclass(frozen=True, slots=True)
class State:
    """A tensor of the parameter's shape that an optimizer keeps, under torch's name. is_signed: whether it may be below 0."""

    name: str
    is_signed: bool


@dataclass(frozen=True, slots=True)
class AdamW:
    """Decoupled weight decay Adam; names, defaults and arithmetic of `torch.optim.AdamW(fused=True)`.

    Raises ConfigError on a value that torch refuses too.
    """

    kind: ClassVar[str] = "adamw"
    states: ClassVar[tuple[State, ...]] = (State("exp_avg", is_signed=True), State("exp_avg_sq", is_signed=False))

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 1e-2

    def __post_init__(self) -> None:
        _keep_numbers(self, "lr", "eps", "weight_decay")
        is_pair = isinstance(self.betas, tuple | list) and len(self.betas) == 2
        betas = tuple(number("AdamW betas", beta) for beta in self.betas) if is_pair else (-1.0,)
        if not all(0.0 <= beta < 1.0 for beta in betas):
            raise wrong("AdamW betas", self.betas, "two numbers, each of [0, 1)")
        object.__setattr__(self, "betas", betas)


@dataclass(frozen=True, slots=True)
class SGD:
    """Stochastic gradient descent with momentum; names, defaults and arithmetic of `torch.optim.SGD(fused=True)`.

    As in torch, the first step sets `momentum_buffer` to the gradient itself, whatever `dampening` says. Where the first steps had
    no momentum, torch does so at the first step that has some; here the buffer starts from 0 then, which is the same without
    dampening. Raises ConfigError on a value that torch refuses too.
    """

    kind: ClassVar[str] = "sgd"
    states: ClassVar[tuple[State, ...]] = (State("momentum_buffer", is_signed=True),)

    lr: float = 1e-3
    momentum: float = 0.0
    dampening: float = 0.0
    weight_decay: float = 0.0
    nesterov: bool = False

    def __post_init__(self) -> None:
        _keep_numbers(self, "lr", "momentum", "weight_decay")
        object.__setattr__(self, "dampening", number("SGD dampening", self.dampening))
        if flag("SGD nesterov", self.nesterov) and (self.momentum <= 0 or self.dampening != 0):
            raise ConfigError(
                f"SGD nesterov=True with momentum={self.momentum}, dampening={self.dampening}: it requires a momentum and zero "
                "dampening"
            )


@dataclass(frozen=True, slots=True)
class Adagrad:
    """Adagrad; names, defaults and arithmetic of `torch.optim.Adagrad(fused=True)`.

    A record's first step starts its `sum` from `initial_accumulator_value`; later steps do not use that option. Raises ConfigError
    on a value that torch refuses too.
    """

    kind: ClassVar[str] = "adagrad"
    states: ClassVar[tuple[State, ...]] = (State("sum", is_signed=False),)

    lr: float = 1e-2
    lr_decay: float = 0.0
    weight_decay: float = 0.0
    initial_accumulator_value: float = 0.0
    eps: float = 1e-10

    def __post_init__(self) -> None:
        _keep_numbers(self, "lr", "lr_decay", "weight_decay", "initial_accumulator_value", "eps")


Options = AdamW | SGD | Adagrad
"""The options of one step of a trainable namespace."""

OPTIMIZERS: Mapping[str, type[Options]] = {options.kind: options for options in (AdamW, SGD, Adagrad)}
"""The options' classes, by the kind of schema that each updates."""


def describe(options: Options) -> dict[str, object]:
    """Returns `kind` and every option, as plain values that msgpack and JSON know."""
    values = {field.name: getattr(options, field.name) for field in fields(options)}
    return {"kind": options.kind, **{name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}}


def options_from_description(description: Mapping[str, object]) -> Options:
    """Returns the options that `describe` described, with defaults for those left out. Raises ConfigError if they are none."""
    values: dict[str, Any] = dict(description)
    kind = values.pop("kind", None)
    if not isinstance(kind, str) or kind not in OPTIMIZERS:
        raise ConfigError(f"optimizer {kind!r:.64} is unknown; this version knows {', '.join(OPTIMIZERS)}")
    known = [field.name for field in fields(OPTIMIZERS[kind])]
    for name, value in values.items():
        if name not in known:
            raise ConfigError(f"{OPTIMIZERS[kind].__name__} has no option {name:.64}={value!r:.64}; it has {', '.join(known)}")
    return OPTIMIZERS[kind](**values)


def _keep_numbers(options: Options, *names: str) -> None:
    """Turns the options of these names into plain numbers. Raises ConfigError on one that is no number, or negative."""
    for name in names:
        value = number(f"{type(options).__name__} {name}", getattr(options, name), least=0)
        object.__setattr__(options, name, value)
