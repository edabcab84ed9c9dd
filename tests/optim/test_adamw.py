"""One step of a chunk by AdamW."""

from __future__ import annotations

import pytest
import torch

from paramstore.core.optimizers import SGD, AdamW
from paramstore.optim.adamw import step
from paramstore.optim.rule import Step
from paramstore_testkit.oracles.optim_records import TorchOptimizer


def test_a_step_far_on_is_corrected_for_its_bias_as_torch_does() -> None:
    """The count is what a record keeps: the moments alone would not tell."""
    values, options = {"w": torch.randn(100)}, AdamW(lr=0.1)
    torch_optimizer = TorchOptimizer(values, options)
    master, states = values["w"].clone(), (torch.zeros(100), torch.zeros(100))
    for count in range(1, 30):
        gradient = torch.randn(100)
        torch_optimizer.step({"w": gradient})
        step(master, gradient, states, Step(options, count, torch.tensor(float(count)), is_missed=False))
    assert torch.equal(master, torch_optimizer.state("w")["master"])
    step(master, gradient, states, Step(options, 1, torch.tensor(1.0), is_missed=False))
    torch_optimizer.step({"w": gradient})
    assert not torch.equal(master, torch_optimizer.state("w")["master"])


def test_options_of_another_optimizer_are_a_bug() -> None:
    tensor = torch.zeros(1)
    with pytest.raises(AssertionError):
        step(tensor, tensor, (tensor, tensor), Step(SGD(), 1, torch.ones(()), is_missed=False))
