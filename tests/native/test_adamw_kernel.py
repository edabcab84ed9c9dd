"""The native kernel gives torch's bits: millions of random values of every kind, every dtype, ranks, missed steps, options."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
import torch

from paramstore_native import adamw_check
from paramstore_native.adamw import ADAMW
from paramstore_native.adamw_check import Trial, by_kernel, by_torch, count_different
from paramstore_native.adamw_kernel import ALIGNMENT_ELEMENTS, Kernel, Span

DTYPES = ("float32", "bfloat16", "float16")


@pytest.fixture
def native() -> Kernel:
    found = ADAMW.kernel()
    if found is None:
        pytest.skip(ADAMW.known_state())
    return found


def random_trial(chance: random.Random, dtype: str) -> Trial:
    """Options as people choose them, and as nobody does."""
    ranks = chance.choice((0, 1, 1, 2, 3))
    missed = chance.choice((0, 0, 1, 4)) if ranks else chance.choice((1, 5))
    return Trial(
        lr=10 ** chance.uniform(-7, 0),
        betas=(chance.choice((0.0, 0.5, chance.random(), 0.9)), chance.choice((0.0, 0.999, chance.random()))),
        eps=chance.choice((0.0, 1e-8, 1e-6, 0.1)), weight_decay=chance.choice((0.0, 0.01, chance.random() * 3)),
        last_step=missed + chance.choice((1, 2, 10, 1000, 100_000)), ranks=ranks, missed=missed,
        grad_scale=chance.choice((1.0, 0.37, 1 / 65536, 3.0)), dtype=dtype,
    )  # fmt: skip


def differences(native: Kernel, trial: Trial, generator: torch.Generator, *, is_plain: bool) -> dict[str, int]:
    states, gradients = adamw_check._values(trial, generator, is_plain=is_plain)
    pairs = zip(by_kernel(native, trial, states, gradients), by_torch(trial, states, gradients), strict=True)
    return {name: count_different(*pair) for name, pair in zip(("master", "exp_avg", "exp_avg_sq", "param"), pairs, strict=True)}


@pytest.mark.slow
@pytest.mark.parametrize("is_plain", [True, False], ids=["plain", "random-bits"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_random_calls_give_what_torch_gives(native: Kernel, dtype: str, is_plain: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    seed = 41
    monkeypatch.setattr(adamw_check, "ELEMENTS", 16400)
    chance, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    for number in range(60):
        trial = random_trial(chance, dtype)
        assert not any(differences(native, trial, generator, is_plain=is_plain).values()), (seed, number, trial)


@pytest.mark.parametrize("elements", [0, 16, 32, 1008, 1024, 1040, 3072])
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_length_of_whole_vectors_is_served(
    native: Kernel, dtype: str, elements: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adamw_check, "ELEMENTS", elements)
    trial = Trial(1e-2, (0.9, 0.99), 1e-8, 0.1, last_step=5, ranks=2, missed=1, grad_scale=0.5, dtype=dtype)
    assert not any(differences(native, trial, torch.Generator().manual_seed(3), is_plain=True).values())


@pytest.mark.parametrize("dtype", DTYPES)
def test_nothing_outside_the_span_is_touched(native: Kernel, dtype: str) -> None:
    elements, kind = 1040, getattr(torch, dtype)
    arrays = [torch.full((elements + 32,), 7.0) for _ in range(3)]
    gradient, param = torch.ones(elements + 32, dtype=kind), torch.full((elements + 32,), 3.0, dtype=kind)
    span = Span(
        states=tuple(array[16:].data_ptr() for array in arrays), gradients=(gradient[16:].data_ptr(),), gradient_dtype=dtype,
        param=param[16:].data_ptr(), param_dtype=dtype, elements=elements,
    )  # fmt: skip
    native([span], [adamw_check.TRIALS[0]], last_step=1, grad_scale=1.0)
    for array, before in zip((*arrays, param), (7, 7, 7, 3), strict=True):
        assert (array[:16] == before).all()
        assert (array[-16:] == before).all()
        assert (array[16:-16] != before).all()
    assert (gradient == 1).all()


def test_several_spans_in_one_call_come_out_as_in_one_each(native: Kernel) -> None:
    drawn, made = torch.Generator().manual_seed(4), []
    states, gradient = torch.rand(3, 96, generator=drawn), torch.rand(96, generator=drawn)
    for borders in ((0, 96), (0, 16, 64, 96)):
        found, param = states.clone(), torch.zeros(96)
        spans = [
            Span(
                states=tuple(state[start:].data_ptr() for state in found), gradients=(gradient[start:].data_ptr(),),
                gradient_dtype="float32", param=param[start:].data_ptr(), param_dtype="float32", elements=end - start,
            ) for start, end in pairwise(borders)
        ]  # fmt: skip
        native(spans, [adamw_check.TRIALS[0]], last_step=1, grad_scale=1.0)
        made.append(torch.cat([found.flatten(), param]))
    assert torch.equal(*made)
    assert not torch.equal(made[0][:96], states[0])


def test_without_a_param_the_states_come_out_alike(native: Kernel) -> None:
    states = [torch.full((64,), 0.5) for _ in range(3)]
    gradient = torch.ones(64, dtype=torch.bfloat16)
    span = Span(
        states=tuple(state.data_ptr() for state in states), gradients=(gradient.data_ptr(),), gradient_dtype="bfloat16", param=0,
        param_dtype="float32", elements=64,
    )  # fmt: skip
    trial = adamw_check.TRIALS[0]
    native([span], [trial], last_step=1, grad_scale=1.0)
    expected = [torch.full((64,), 0.5) for _ in range(3)]
    torch._fused_adamw_(
        [expected[0]], [gradient.float()], [expected[1]], [expected[2]], [], [torch.tensor(1.0)], lr=trial.lr, beta1=trial.betas[0],
        beta2=trial.betas[1], eps=trial.eps, weight_decay=trial.weight_decay, amsgrad=False, maximize=False,
    )  # fmt: skip
    assert all(torch.equal(*pair) for pair in zip(states, expected, strict=True))


def test_a_rest_is_not_taken(native: Kernel) -> None:
    span = Span((0, 0, 0), (), "float32", 0, "float32", ALIGNMENT_ELEMENTS + 1)
    with pytest.raises(AssertionError):
        native([span], [], last_step=1, grad_scale=1.0)


def test_other_dtypes_are_not_served(native: Kernel) -> None:
    assert native.serves("float32", "bfloat16")
    assert not native.serves("float32", "float8_e4m3fn")
