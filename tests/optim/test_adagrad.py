"""One step of a chunk by Adagrad."""

from __future__ import annotations

import torch

from paramstore.core.optimizers import Adagrad
from paramstore.optim.adagrad import step
from paramstore.optim.rule import Step
from paramstore_testkit.oracles.optim_records import TorchOptimizer

OPTIONS = Adagrad(lr=0.1, lr_decay=0.1, weight_decay=0.1, initial_accumulator_value=0.5, eps=1e-6)


def made(count: int) -> Step:
    return Step(OPTIONS, count, torch.tensor(float(count)), is_missed=False)


def test_steps_are_bitwise_those_of_torchs_fused_one() -> None:
    values = {"w": torch.randn(1003)}
    torch_optimizer = TorchOptimizer(values, OPTIONS)
    master, total = values["w"].clone(), torch.zeros(1003)
    for count in range(1, 8):
        gradient = torch.randn(1003)
        torch_optimizer.step({"w": gradient})
        step(master, gradient, (total,), made(count))
    expected = torch_optimizer.state("w")
    assert torch.equal(master, expected["master"])
    assert torch.equal(total, expected["sum"])


def test_the_first_step_alone_starts_the_sum() -> None:
    master, total, gradient = torch.zeros(4), torch.zeros(4), torch.ones(4)
    step(master, gradient, (total,), made(1))
    assert (total == 1.5).all()
    step(torch.zeros(4), gradient, (total,), made(2))
    assert (total == 2.5).all()
