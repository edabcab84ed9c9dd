"""The model is causal, repeatable, and the same whether it sees its bytes at once or one by one."""

import math

import pytest
import torch

from paramstore.demo.model import (
    ByteTransformer,
    KeyValueCache,
    balance_loss,
    dense_parameters,
    distance_bias,
    expert_fields,
    initial_expert,
)
from paramstore.demo.training import ResidentPlace
from paramstore_client.nn import StoredExperts


@pytest.fixture
def model(settings):
    made = ByteTransformer(settings.shape, ResidentPlace(settings.shape, seed=0).layer, seed=0)
    torch.nn.init.normal_(made.head.weight, generator=torch.Generator().manual_seed(1))
    return made


def some_bytes(length: int) -> torch.Tensor:
    return torch.randint(256, (2, length), generator=torch.Generator().manual_seed(0))


def test_no_byte_sees_a_later_one(model):
    values = some_bytes(12)
    changed = values.clone()
    changed[:, 8] += 1
    before, after = model(values)[0], model(changed % 256)[0]
    torch.testing.assert_close(before[:, :8], after[:, :8], rtol=1e-4, atol=1e-4)
    assert (before[:, 8:] - after[:, 8:]).abs().amax() > 0.1


@pytest.mark.parametrize("splits", [[1] * 12, [5, 7], [2, 1, 1, 8]])
def test_cached_calls_equal_one_call(model, splits):
    values = some_bytes(12)
    whole, _ = model(values)
    cache = KeyValueCache(2)
    pieces = [model(piece, cache)[0] for piece in torch.split(values, splits, dim=1)]
    torch.testing.assert_close(torch.cat(pieces, dim=1), whole, rtol=1e-4, atol=1e-5)


def test_every_position_sees_the_bytes_just_before_it(model):
    """The embedding reaches three bytes back: without attention and experts the fourth byte before makes no difference."""
    values = some_bytes(8)
    near, far = values.clone(), values.clone()
    near[:, 4] = (near[:, 4] + 1) % 256
    far[:, 3] = (far[:, 3] + 1) % 256
    embedded = [model._embed(seen, None)[:, 7] for seen in (values, near, far)]
    assert not torch.equal(embedded[0], embedded[1])
    assert torch.equal(embedded[0], embedded[2])


def test_equal_seeds_give_equal_dense_weights(settings):
    one, other = (ByteTransformer(settings.shape, ResidentPlace(settings.shape, seed=0).layer, seed=5) for _ in range(2))
    for name, value in dense_parameters(one).items():
        assert torch.equal(value, dense_parameters(other)[name]), name


def test_dense_parameters_are_all_but_the_experts(settings, model, namespace):
    stored = ByteTransformer(settings.shape, lambda layer: StoredExperts(namespace, layer), seed=0)
    assert set(dense_parameters(model)) == set(dict(stored.named_parameters()))
    assert "blocks.0.router.weight" in dense_parameters(model)
    assert not any("weights" in name for name in dense_parameters(model))


def test_initial_experts_differ_by_key_and_repeat_by_seed(settings):
    shape = settings.shape
    keys = [(layer, expert) for layer in range(shape.layers) for expert in range(shape.experts)]
    values = {key: initial_expert(shape, key, seed=0)["gate_up"] for key in keys}
    assert len({float(value.sum()) for value in values.values()}) == len(keys)
    assert torch.equal(initial_expert(shape, (1, 2), seed=0)["down"], initial_expert(shape, (1, 2), seed=0)["down"])
    assert not torch.equal(initial_expert(shape, (1, 2), seed=1)["down"], initial_expert(shape, (1, 2), seed=0)["down"])
    assert {name: tuple(value.shape) for name, value in initial_expert(shape, (0, 0), seed=0).items()} == expert_fields(shape)


def test_balance_loss_is_one_when_even_and_the_expert_count_when_not():
    even = torch.full((8, 4), 0.25)
    assert balance_loss(even, torch.tensor([4, 4, 4, 4])) == pytest.approx(1.0)
    one = torch.tensor([[1.0, 0.0, 0.0, 0.0]]).repeat(8, 1)
    assert balance_loss(one, torch.tensor([16, 0, 0, 0])) == pytest.approx(4.0)


def test_routed_tokens_count_each_token_once_per_choice(settings, model):
    model(some_bytes(12))
    routed = model.routed_tokens()
    assert routed.shape == (2, 4)
    assert routed.sum(dim=1).tolist() == [2 * 12 * settings.shape.top_k] * 2


def test_bias_falls_with_distance_and_forbids_the_future():
    bias = distance_bias(2, 3, 5)
    assert bias.shape == (2, 3, 5)
    assert bias[0, 0].tolist() == [-0.125, -0.0625, 0.0, -math.inf, -math.inf]
    assert bias[0, 2, 4] == 0.0


def test_untrained_model_predicts_the_corpus_frequencies(settings, corpus):
    model = ByteTransformer(settings.shape, ResidentPlace(settings.shape, seed=0).layer, seed=0)
    model.set_byte_frequencies(corpus.byte_frequencies())
    chance = model(some_bytes(4))[0][0, 0].softmax(dim=0)
    torch.testing.assert_close(chance, corpus.byte_frequencies(), rtol=1e-2, atol=1e-3)
