"""Stochastic rounding: to a neighbour, right on average, repeatable, and independent from step to step."""

from __future__ import annotations

import pytest
import torch

from paramstore.optim.noise import NOISE_BLOCK_ELEMENTS, StochasticRounding, mix

ELEMENTS = 1 << 14
SEED = 11


def rounded(values: torch.Tensor, *, stream: int, start: int = 0) -> torch.Tensor:
    target = torch.empty(values.numel(), dtype=torch.bfloat16)
    StochasticRounding(ELEMENTS).round_into(target, values.clone(), stream=stream, start=start)
    return target


def test_every_value_becomes_one_of_its_two_neighbours() -> None:
    torch.manual_seed(SEED)
    values = torch.randn(ELEMENTS) * torch.logspace(-20, 20, ELEMENTS)
    found = rounded(values, stream=1).float()
    lower = (values.view(torch.int32) & -0x10000).view(torch.float32)
    upper = ((values.view(torch.int32) & -0x10000) + 0x10000).view(torch.float32)
    assert ((found == lower) | (found == upper)).all()
    assert (found == lower).any()
    assert (found == upper).any()


def test_what_bf16_holds_exactly_stays() -> None:
    values = torch.tensor([0.0, -0.0, 1.0, -2.5, torch.inf, -torch.inf, 2.0**-130, 3.3895313892515355e38])
    for stream in range(50):
        assert torch.equal(rounded(values, stream=stream).float(), values)
    assert rounded(torch.tensor([torch.nan]), stream=3).isnan().all()


@pytest.mark.parametrize("fraction", [0.01, 0.25, 0.5, 0.9])
def test_it_is_right_on_average_over_steps_and_over_elements(fraction: float) -> None:
    """Each mean of n values of variance p(1-p) is within five of its own standard deviations."""
    values = torch.full((ELEMENTS,), 1.0 + fraction / 128)
    steps = 64
    ups = torch.stack([rounded(values, stream=mix(5, step)) != 1.0 for step in range(steps)]).double()
    deviation = (fraction * (1 - fraction)) ** 0.5
    assert abs(ups.mean().item() - fraction) < 5 * deviation / (steps * ELEMENTS) ** 0.5
    assert (ups.mean(dim=0) - fraction).abs().max() < 6 * deviation / steps**0.5  # of every element
    assert (ups.mean(dim=1) - fraction).abs().max() < 5 * deviation / ELEMENTS**0.5  # of every step


def test_steps_blocks_and_keys_have_noise_of_their_own() -> None:
    values = torch.full((ELEMENTS,), 1.0 + 0.5 / 128)
    first = (rounded(values, stream=mix(1, 2, 3)) != 1.0).double() - 0.5
    for other in (
        rounded(values, stream=mix(1, 2, 4)), rounded(values, stream=mix(2, 1, 3)),
        rounded(values, stream=mix(1, 2, 3), start=NOISE_BLOCK_ELEMENTS),
    ):  # fmt: skip
        correlation = 4 * (first * ((other != 1.0).double() - 0.5)).mean().item()
        assert abs(correlation) < 5 / ELEMENTS**0.5


def test_the_noise_of_an_element_does_not_depend_on_what_is_rounded_with_it() -> None:
    torch.manual_seed(SEED)
    values = torch.randn(ELEMENTS)
    whole = rounded(values, stream=9, start=4096)
    assert torch.equal(rounded(values[1000:5000], stream=9, start=5096), whole[1000:5000])


def test_the_noise_is_the_same_on_every_machine_and_in_every_version() -> None:
    """What was committed with other noise could not be made again from its gradients."""
    found = rounded(torch.linspace(0.001, 1.0, 64), stream=mix(1, 2, 3), start=NOISE_BLOCK_ELEMENTS + 128)
    assert mix(1, 2, 3) == 7702586659592502839
    assert found.view(torch.int16).sum().item() == 1027625
