"""Options are torch's, bad ones are refused when they are made, and they come back from plain values."""

from __future__ import annotations

import inspect
from math import inf, nan
from typing import Any

import pytest
import torch

from paramstore.core.optimizers import OPTIMIZERS, SGD, Adagrad, AdamW, Options, describe, options_from_description
from paramstore.errors import ConfigError

EXAMPLES: list[Options] = [
    AdamW(), AdamW(lr=0.5, betas=(0.1, 0.2), eps=0.0, weight_decay=0.3), SGD(),
    SGD(lr=0.5, momentum=0.9, dampening=0.0, weight_decay=0.1, nesterov=True), Adagrad(),
    Adagrad(lr=0.5, lr_decay=0.1, weight_decay=0.2, initial_accumulator_value=0.3, eps=0.4),
]  # fmt: skip
NOT_NEGATIVE = [
    (AdamW, ("lr", "eps", "weight_decay")), (SGD, ("lr", "momentum", "weight_decay")),
    (Adagrad, ("lr", "lr_decay", "weight_decay", "initial_accumulator_value", "eps")),
]  # fmt: skip


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_names_and_defaults_are_those_of_torch(kind: str) -> None:
    ours = OPTIMIZERS[kind]
    parameters = inspect.signature(getattr(torch.optim, ours.__name__)).parameters
    described = describe(ours())
    assert described.pop("kind") == kind
    for name, value in described.items():
        default = parameters[name].default
        assert value == (list(default) if isinstance(default, tuple) else default), name


@pytest.mark.parametrize(("options", "name"), [(cls, name) for cls, names in NOT_NEGATIVE for name in names])
@pytest.mark.parametrize("value", [-1e-9, nan, inf, -inf])
def test_a_number_that_is_negative_or_not_finite_is_refused(options: Any, name: str, value: float) -> None:
    with pytest.raises(ConfigError, match=f"{options.__name__} {name}="):
        options(**{name: value})
    if value == -1e-9:
        with pytest.raises(ValueError, match="Invalid"):
            getattr(torch.optim, options.__name__)([torch.zeros(1)], **{name: value})


@pytest.mark.parametrize("betas", [(1.0, 0.9), (0.9, 1.0), (-0.1, 0.9), (0.9, nan)])
def test_betas_outside_of_zero_to_one_are_refused(betas: tuple[float, float]) -> None:
    with pytest.raises(ConfigError, match="AdamW betas="):
        AdamW(betas=betas)


@pytest.mark.parametrize("given", [{"momentum": 0.0}, {"momentum": 0.9, "dampening": 0.1}])
def test_nesterov_needs_momentum_and_no_dampening_as_in_torch(given: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="requires a momentum and zero dampening"):
        SGD(nesterov=True, **given)
    with pytest.raises(ValueError, match="requires a momentum and zero dampening"):
        torch.optim.SGD([torch.zeros(1)], nesterov=True, **given)


@pytest.mark.parametrize("dampening", [nan, inf])
def test_a_dampening_that_is_not_finite_is_refused(dampening: float) -> None:
    with pytest.raises(ConfigError, match="SGD dampening="):
        SGD(momentum=0.9, dampening=dampening)


def test_zeros_are_allowed() -> None:
    AdamW(lr=0.0, betas=(0.0, 0.0), eps=0.0, weight_decay=0.0)
    SGD(lr=0.0)
    Adagrad(lr=0.0, eps=0.0)


# --- descriptions


@pytest.mark.parametrize("options", EXAMPLES)
def test_options_come_back_from_their_description(options: Options) -> None:
    described = describe(options)
    assert options_from_description(described) == options
    assert all(isinstance(value, str | int | float | list) for value in described.values())


def test_an_option_that_is_left_out_has_its_default() -> None:
    assert options_from_description({"kind": "sgd", "lr": 1}) == SGD(lr=1)


@pytest.mark.parametrize("kind", [None, "adam", 3, ["sgd"], {}])
def test_an_unknown_optimizer_is_refused(kind: object) -> None:
    with pytest.raises(ConfigError, match="this version knows adamw, sgd, adagrad"):
        options_from_description({"kind": kind, "lr": 0.1})


@pytest.mark.parametrize(
    "wrong",
    [
        {"kind": "sgd", "betas": [0.9, 0.9]}, {"kind": "sgd", "nesterov": 1}, {"kind": "sgd", "lr": "0.1"},
        {"kind": "sgd", "lr": True}, {"kind": "adamw", "betas": [0.9]}, {"kind": "adamw", "betas": [0.9, None]},
        {"kind": "adamw", "betas": 0.9}, {"kind": "adamw", "lr": [0.1]}, {"kind": "adagrad", "lr": None},
        {"kind": "sgd", "states": 3}, {"kind": "sgd", "x" * 1000: "y" * 1000},
    ],
)  # fmt: skip
def test_what_are_no_options_is_refused_with_a_bounded_message(wrong: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=r"has no option|give ") as refused:
        options_from_description(wrong)
    assert len(str(refused.value)) < 300


def test_values_that_torch_refuses_are_refused_when_they_come_from_a_description() -> None:
    with pytest.raises(ConfigError, match="lr=-1"):
        options_from_description({"kind": "adagrad", "lr": -1})
