"""AdamW's options are torch's, and bad ones are refused when they are made."""

from __future__ import annotations

from math import inf, nan

import pytest

from paramstore.core.optimizers import AdamW
from paramstore.errors import ConfigError


def test_defaults_are_those_of_torch() -> None:
    assert AdamW() == AdamW(lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=1e-2)


@pytest.mark.parametrize("name", ["lr", "eps", "weight_decay"])
@pytest.mark.parametrize("value", [-1e-9, nan, inf, -inf])
def test_a_number_that_is_negative_or_not_finite_is_refused(name: str, value: float) -> None:
    with pytest.raises(ConfigError, match=f"AdamW {name}="):
        AdamW(**{name: value})  # type: ignore[arg-type]


@pytest.mark.parametrize("betas", [(1.0, 0.9), (0.9, 1.0), (-0.1, 0.9), (0.9, nan)])
def test_betas_outside_of_zero_to_one_are_refused(betas: tuple[float, float]) -> None:
    with pytest.raises(ConfigError, match="AdamW betas="):
        AdamW(betas=betas)


def test_zeros_are_allowed() -> None:
    AdamW(lr=0.0, betas=(0.0, 0.0), eps=0.0, weight_decay=0.0)
