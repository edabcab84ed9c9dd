"""Stored states: what each dtype keeps of a value."""

from __future__ import annotations

import pytest
import torch

from paramstore.core.optimizers import OPTIMIZERS
from paramstore.core.schema import STATE_BLOCK_ELEMENTS, Schema
from paramstore.optim import chunks
from paramstore.optim.states import STATES_MAX, StateBuffers, decode, encode, open_states
from paramstore_testkit.oracles.optim_records import filled_record

SEED = 5


def through(values: torch.Tensor, *, is_signed: bool) -> torch.Tensor:
    """What is left of values after they were stored as codes and scales."""
    blocks = chunks.block_count(values.numel())
    padded = torch.zeros(blocks * STATE_BLOCK_ELEMENTS)
    padded[: values.numel()] = values
    codes, scales = torch.empty(values.numel(), dtype=torch.int8), torch.empty(blocks)
    encode(padded, codes, scales, torch.empty(blocks), torch.empty_like(padded), is_signed=is_signed)
    padded.zero_()
    decode(codes, scales, padded, torch.empty_like(padded), is_signed=is_signed)
    return padded[: values.numel()]


def test_no_optimizer_keeps_more_states_than_there_is_room_for() -> None:
    assert max(len(options.states) for options in OPTIMIZERS.values()) == STATES_MAX


@pytest.mark.parametrize("is_signed", [True, False])
@pytest.mark.parametrize("elements", [1, 255, 256, 1000])
def test_a_blocks_largest_value_is_kept_exactly(elements: int, is_signed: bool) -> None:
    torch.manual_seed(SEED)
    values = torch.rand(elements) * 3e-7
    found = through(values, is_signed=is_signed)
    for before, after in zip(values.split(STATE_BLOCK_ELEMENTS), found.split(STATE_BLOCK_ELEMENTS), strict=True):
        assert after.max() == before.max()


@pytest.mark.parametrize(("is_signed", "levels"), [(True, 127), (False, 255)])
def test_the_error_is_half_a_step_of_the_fourth_root(is_signed: bool, levels: int) -> None:
    torch.manual_seed(SEED)
    values = torch.logspace(-8, 0, 256)[torch.randperm(256)]
    found = through(values, is_signed=is_signed)
    kept = values > (1.0 / levels) ** 4
    assert ((found[kept] ** 0.25 - values[kept] ** 0.25).abs() <= 0.5 / levels + 1e-6).all()
    top = values > 0.1
    assert ((found[top] / values[top] - 1).abs() < 4 * 0.5 / levels / 0.1**0.25 + 1e-3).all()


def test_a_signed_state_keeps_signs_and_a_symmetric_error() -> None:
    torch.manual_seed(SEED)
    values = torch.randn(1024)
    assert torch.equal(through(values, is_signed=True), -through(-values, is_signed=True))


def test_only_zero_becomes_zero_in_an_unsigned_state() -> None:
    values = torch.cat([torch.tensor([1.0, 0.0]), torch.logspace(-38, -1, 254)])
    found = through(values, is_signed=False)
    assert found[1] == 0.0
    assert (found[values > 0] > 0).all()


@pytest.mark.parametrize("is_signed", [True, False])
def test_what_was_stored_once_is_stored_again_alike(is_signed: bool) -> None:
    torch.manual_seed(SEED)
    once = through(torch.rand(1000), is_signed=is_signed)
    assert torch.equal(through(once, is_signed=is_signed), once)


@pytest.mark.parametrize("wrong", [torch.nan, torch.inf])
@pytest.mark.parametrize("is_signed", [True, False])
def test_a_wrong_number_is_not_hidden_and_stays_in_its_block(wrong: float, is_signed: bool) -> None:
    values = torch.rand(512)
    values[300] = wrong
    found = through(values, is_signed=is_signed)
    assert not found[300].isfinite()
    assert found[:256].isfinite().all()


@pytest.mark.parametrize("is_signed", [True, False])
@pytest.mark.parametrize("scale", [1e-44, 1e-38, 2e-38, 1e38])
def test_the_smallest_and_the_largest_scales_work(scale: float, is_signed: bool) -> None:
    """Below the least normal number a block loses precision, and nothing worse."""
    values = torch.tensor([1.0, 0.5, 0.0]) * scale
    found = through(values, is_signed=is_signed)
    assert found.isfinite().all()
    assert (found <= values[0]).all()
    assert (found >= 0).all()
    assert found[0] == values[0] or scale < 2.0**-126


@pytest.mark.parametrize("state_dtype", ["float32", "bfloat16", "int8_blockwise"])
def test_states_are_kept_from_load_to_load_and_neighbours_are_left_alone(state_dtype: str) -> None:
    schema = Schema.adamw({"w": (3000,), "v": (10,)}, state_dtype=state_dtype)
    image = filled_record(schema, {"w": torch.zeros(3000), "v": torch.zeros(10)})
    before = bytes(image)
    sizes = chunks.chunk_sizes(1024, 3000, 1024)
    states = open_states(schema, image, 0, 1024, sizes, key=(1, 2), buffers=StateBuffers)
    for tensor in states.load(1):
        assert (tensor == 0).all()
        tensor.fill_(0.75)
    states.store(1, 1)
    assert all((tensor == 0).all() for tensor in states.load(0))
    assert all((tensor == 0.75).all() and tensor.numel() == 952 for tensor in states.load(1))
    changed = {
        field.name for field in schema.stored.fields
        if image[field.offset_bytes : field.offset_bytes + field.length_bytes]
        != before[field.offset_bytes : field.offset_bytes + field.length_bytes]
    }  # fmt: skip
    scales = {"exp_avg_scale/w", "exp_avg_sq_scale/w"} if state_dtype == "int8_blockwise" else set()
    assert changed == {"exp_avg/w", "exp_avg_sq/w"} | scales
