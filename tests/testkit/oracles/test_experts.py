"""The model of records: torch's dense optimizer over all of them, and what it takes for another record."""

from __future__ import annotations

from dataclasses import asdict

import pytest
import torch

from paramstore.core.optimizers import AdamW
from paramstore_testkit.oracles.experts import Expert, State, check_expert, trained

KEYS = [(0, expert) for expert in range(5)]
SHAPES = {"w": (4, 16), "v": (32,)}
"""Whole vectors of the processor: in what is left of one the kernel rounds otherwise, and where that lies a stack decides."""
OPTIONS = [AdamW(lr=0.1), AdamW(lr=0.01, betas=(0.0, 0.95), weight_decay=0.1), AdamW(lr=0.5, eps=1e-6, weight_decay=0.0)]


def values(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


@pytest.mark.slow  # torch imports much for its first optimizer
def test_steps_of_all_experts_are_those_of_torchs_optimizer_over_one_stacked_parameter() -> None:
    state: State = {key: Expert.initial(values(key[1])) for key in KEYS}
    stacked = {name: torch.stack([state[key].masters[name] for key in KEYS]).requires_grad_() for name in SHAPES}
    optimizer = torch.optim.AdamW(list(stacked.values()), fused=True)
    for step, options in enumerate(OPTIONS * 3):
        gradients = {key: values(100 * step + key[1]) for key in KEYS[step % 3 :: 2]}
        state = trained(state, gradients, options, is_exact=True)
        for name, parameter in stacked.items():
            parameter.grad = torch.stack([gradients[key][name] if key in gradients else torch.zeros(SHAPES[name]) for key in KEYS])
        optimizer.param_groups[0].update(asdict(options))
        optimizer.step()
        for number, key in enumerate(KEYS):
            assert state[key].updates == step + 1
            for name, parameter in stacked.items():
                assert torch.equal(state[key].fields[f"master/{name}"], parameter[number].detach())
                for part in ("exp_avg", "exp_avg_sq"):
                    assert torch.equal(state[key].fields[f"{part}/{name}"], optimizer.state[parameter][part][number])


def test_experts_without_a_gradient_stay_as_they_are_and_nothing_is_changed_in_place() -> None:
    before: State = {key: Expert.initial(values(key[1])) for key in KEYS}
    after = trained(before, {KEYS[1]: values(9)}, OPTIONS[0])
    assert [key for key in KEYS if after[key] is not before[key]] == [KEYS[1]]
    assert (before[KEYS[1]].updates, after[KEYS[1]].updates) == (0, 1)
    assert all(torch.equal(before[KEYS[1]].masters[name], value) for name, value in values(1).items())
    assert all(not torch.equal(after[KEYS[1]].masters[name], value) for name, value in values(1).items())


def test_one_flipped_bit_is_noticed() -> None:
    expert = Expert.initial(values(1))
    fields = {name: value.clone() for name, value in expert.fields.items()}
    check_expert(fields, expert, key=KEYS[0], step=3)
    fields["exp_avg/v"].view(torch.int32)[2] ^= 1
    with pytest.raises(AssertionError, match=r"step 3, key \(0, 0\), exp_avg/v: 1 of 32 elements differ"):
        check_expert(fields, expert, key=KEYS[0], step=3)
