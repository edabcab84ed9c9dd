"""Gradients of ranks and their norm."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from paramstore.core.schema import Schema
from paramstore.optim.gradients import GradientBuffers, buffers_of_thread, square_sum
from paramstore.optim.tensors import torch_dtype
from paramstore_testkit.oracles.optim_records import gradient_image

SHAPES = {"gate_up": (7, 13), "down": (1041,), "one": (1,), "whole": (2, 1024)}
DTYPES = ["float32", "bfloat16", "float16"]


def test_a_gradient_that_nothing_changes_is_not_copied() -> None:
    gradient = torch.randn(100)
    assert GradientBuffers().prepare([gradient], 1.0) is gradient


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_sum_is_made_in_rank_order_and_scaled_in_the_gradients_dtype(dtype: str) -> None:
    ranks = [torch.randn(100).to(torch_dtype(dtype)) for _ in range(3)]
    before = [rank.clone() for rank in ranks]
    found = GradientBuffers().prepare(ranks, 0.37)
    assert torch.equal(found, (((ranks[0] + ranks[1]) + ranks[2]) * 0.37).float())
    assert all(torch.equal(rank, kept) for rank, kept in zip(ranks, before, strict=True))


@pytest.mark.parametrize("gradient_dtype", DTYPES)
def test_the_square_sum_is_exact_to_float64_and_repeats_bitwise(gradient_dtype: str) -> None:
    schema = Schema.adamw(SHAPES, gradient_dtype=gradient_dtype)
    gradients = {name: torch.randn(shape).to(torch_dtype(gradient_dtype)) for name, shape in SHAPES.items()}
    image = gradient_image(schema, gradients)
    expected = sum(value.double().square().sum().item() for value in gradients.values())
    assert square_sum(schema, [image]) == pytest.approx(expected, rel=1e-13)
    assert square_sum(schema, [image]) == square_sum(schema, [image])


@pytest.mark.parametrize("gradient_dtype", DTYPES)
def test_the_square_sum_of_several_ranks_is_that_of_their_sum(gradient_dtype: str) -> None:
    schema = Schema.adamw(SHAPES, gradient_dtype=gradient_dtype)
    ranks = [{name: torch.randn(shape).to(torch_dtype(gradient_dtype)) for name, shape in SHAPES.items()} for _ in range(3)]
    summed = {name: (ranks[0][name] + ranks[1][name]) + ranks[2][name] for name in SHAPES}
    found = square_sum(schema, [gradient_image(schema, rank) for rank in ranks])
    assert found == square_sum(schema, [gradient_image(schema, summed)])


def test_each_thread_keeps_buffers_of_its_own() -> None:
    with ThreadPoolExecutor(1) as pool:
        others = [pool.submit(buffers_of_thread).result() for _ in range(2)]
    assert others[0] is others[1]
    assert buffers_of_thread() is buffers_of_thread() is not others[0]


def test_the_square_sum_does_not_overflow_in_half_precision() -> None:
    schema = Schema.adamw({"w": (1000,)}, param_dtype="float16")
    image = gradient_image(schema, {"w": torch.full((1000,), 60000.0)})
    assert square_sum(schema, [image]) == 1000 * 60000.0**2
