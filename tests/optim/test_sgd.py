"""One step of a chunk by SGD: torch's implementations agree on whole vectors bitwise, and so does ours."""

from __future__ import annotations

import pytest
import torch

from paramstore.core.optimizers import SGD
from paramstore.optim.rule import Step
from paramstore.optim.sgd import step
from paramstore_testkit.oracles.optim_records import TorchOptimizer

OPTIONS = [
    SGD(lr=0.1), SGD(lr=0.1, weight_decay=0.1), SGD(lr=0.1, momentum=0.9, dampening=0.3, weight_decay=0.1),
    SGD(lr=0.1, momentum=0.9, weight_decay=0.1, nesterov=True),
]  # fmt: skip


def made(options: SGD, count: int) -> Step:
    return Step(options, count, torch.tensor(float(count)), is_missed=False)


@pytest.mark.parametrize("how", ["fused", "foreach", "loop"])
@pytest.mark.parametrize("options", OPTIONS)
def test_steps_are_bitwise_those_of_each_of_torchs_implementations(options: SGD, how: str) -> None:
    """Of whole vectors: in the last elements of a tensor torch's own implementations differ in whether they fuse a multiplication
    with an addition; we are the fused one there too (`test_update.py`)."""
    values = {"w": torch.randn(1008)}
    torch_optimizer = TorchOptimizer(values, options, **({"foreach": False} if how == "loop" else {how: True}))
    master, buffer = values["w"].clone(), torch.zeros(1008)
    for count in range(1, 8):
        gradient = torch.randn(1008)
        torch_optimizer.step({"w": gradient})
        step(master, gradient, (buffer,), made(options, count))
    expected = torch_optimizer.state("w")
    assert torch.equal(master, expected["master"])
    assert torch.equal(buffer, expected.get("momentum_buffer", torch.zeros(1008)))


def test_the_first_step_takes_the_gradient_itself_whatever_the_dampening() -> None:
    master, buffer, gradient = torch.zeros(5), torch.full((5,), 7.0), torch.randn(5)
    step(master, gradient, (buffer,), made(SGD(lr=1.0, momentum=0.5, dampening=0.5), 1))
    assert torch.equal(buffer, gradient)


def test_momentum_that_comes_later_starts_from_nothing_as_in_torch() -> None:
    values = {"w": torch.randn(64)}
    torch_optimizer = TorchOptimizer(values, SGD(lr=0.1))
    master, buffer = values["w"].clone(), torch.zeros(64)
    for count, options in enumerate((SGD(lr=0.1), SGD(lr=0.1), SGD(lr=0.1, momentum=0.9), SGD(lr=0.1, momentum=0.9)), start=1):
        gradient = torch.randn(64)
        torch_optimizer.optimizer.param_groups[0]["momentum"] = options.momentum
        torch_optimizer.step({"w": gradient})
        step(master, gradient, (buffer,), made(options, count))
    assert torch.equal(master, torch_optimizer.state("w")["master"])
