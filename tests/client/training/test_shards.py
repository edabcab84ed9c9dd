"""Gradients of spread weights are held from a backward to the step, which gets them scaled as the sentinel's was."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

import paramstore_client as ps
from paramstore.errors import ConfigError, StepMismatch
from paramstore_client.nn.sharded import ShardedModule
from paramstore_client.training import bind
from paramstore_client.training.shards import HeldShards, before_step, check_shards
from paramstore_testkit.training.toy_moe import Pair, adamw, batch, make_resident, make_stored, plain_loop

SQUARE_OF_OTHERS = 9.0


class Part(ShardedModule):
    """This rank's part; the others' gradients have squares of SQUARE_OF_OTHERS together."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([[1.0, 2.0]]))
        self.reduce = options.get("reduce", "mean")

    def norm_of(self, gradient: Tensor | None) -> float:
        return math.sqrt(SQUARE_OF_OTHERS + (0.0 if gradient is None else float(gradient.square().sum())))


def backward(part: Part) -> None:
    (part.weight * torch.tensor([[4.0, 0.0]])).sum().backward()


def test_gradients_are_taken_add_up_and_are_given_back_scaled() -> None:
    part = Part()
    shards = HeldShards([part])
    backward(part)
    assert shards.take() == 5.0
    assert part.weight.grad is None
    backward(part)
    assert shards.take() == pytest.approx(math.sqrt(64 + SQUARE_OF_OTHERS))
    assert shards.take() == pytest.approx(math.sqrt(64 + SQUARE_OF_OTHERS))  # a backward that did not reach it
    shards.give(0.25)
    assert torch.equal(part.weight.grad, torch.tensor([[2.0, 0.0]]))
    part.weight.grad = None
    shards.give(1.0)
    assert part.weight.grad is None


def test_a_gradient_that_no_norm_counts_is_refused_and_nothing_is_lost() -> None:
    part = Part()
    shards = HeldShards([part])
    backward(part)
    shards.take()
    backward(part)
    with pytest.raises(StepMismatch, match=r"through none of the experts has added"):
        shards.give(1.0)
    shards.give_back()
    assert torch.equal(part.weight.grad, torch.tensor([[8.0, 0.0]]))


def test_dropped_gradients_are_gone() -> None:
    part = Part()
    shards = HeldShards([part])
    backward(part)
    shards.take()
    shards.drop()
    shards.give(1.0)
    assert part.weight.grad is None


@pytest.mark.parametrize("how", ["argument", "name"])
def test_a_step_with_a_closure_gets_them_after_the_closure(how: str) -> None:
    parameter = nn.Parameter(torch.ones(()))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    held: list[Tensor] = []

    def closure() -> float:
        held.append(torch.tensor(0.25))
        return 7.0

    def give() -> None:
        parameter.grad = held.pop()

    optimizer.register_step_pre_hook(lambda _, arguments, named: before_step(give, arguments, named))
    assert (optimizer.step(closure) if how == "argument" else optimizer.step(closure=closure)) == 7.0
    assert parameter.item() == 0.75
    held.append(torch.tensor(0.5))
    optimizer.step()
    assert parameter.item() == 0.25


def test_weights_that_do_not_fit_the_optimizer_are_refused() -> None:
    part, sentinel = Part(), torch.zeros(())
    own = torch.optim.SGD([part.weight], lr=1.0)
    check_shards([part], own, reduce="mean", sentinel=sentinel)
    with pytest.raises(ConfigError, match="has reduce='mean', attach reduce='sum'"):
        check_shards([part], own, reduce="sum", sentinel=sentinel)
    other = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0)
    with pytest.raises(ConfigError, match="is in another optimizer"):
        check_shards([part], other, reduce="mean", sentinel=sentinel)
    part.requires_grad_(False)
    check_shards([part], other, reduce="mean", sentinel=sentinel)
    among = nn.Parameter(torch.ones(1))
    among.device_mesh = "a mesh"  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match="plain tensor among DTensors"):
        check_shards([part], torch.optim.SGD([among], lr=1.0), reduce="mean", sentinel=sentinel)


# --- with a store, alone


def pair_with_columns(namespace: ps.Namespace) -> Pair:
    stored, resident = make_stored(namespace), make_resident()
    stored.embedding = ps.moe.ColumnEmbedding.from_embedding(stored.embedding, parallel=ps.moe.ExpertParallel())
    experts = bind(stored, namespace)
    pair = Pair(namespace, stored, experts, resident, adamw(stored.parameters()), adamw(resident.parameters()))
    experts.attach(pair.stored_optimizer)
    return pair


def test_a_loop_trains_the_table_as_it_trains_any_weight(namespace: ps.Namespace) -> None:
    pair_with_columns(namespace).run_equal(plain_loop)


def test_a_loop_that_accumulates_clips_skips_and_zeroes_in_place_trains_it_too(namespace: ps.Namespace) -> None:
    def loop(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
        norms = []
        for step in range(5):
            for micro in range(2):
                model(batch(2 * step + micro)).backward()
            norms.append(float(clip_grad_norm_(model.parameters(), 0.1)))
            if step != 2:  # a step that is left out leaves nothing behind
                optimizer.step()
            optimizer.zero_grad(set_to_none=step % 2 == 0)
        return norms

    pair = pair_with_columns(namespace)
    seen, expected = pair.run(loop)
    assert seen == pytest.approx(expected, rel=1e-6)
    assert pair.differences(rtol=1e-4, atol=1e-6) == []


def test_a_closure_trains_it_too(namespace: ps.Namespace) -> None:
    def loop(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for step in range(3):

            def closure(step: int = step) -> Tensor:
                optimizer.zero_grad()
                loss: Tensor = model(batch(step))
                loss.backward()
                return loss

            optimizer.step(closure)

    pair_with_columns(namespace).run_equal(loop)


def test_what_is_held_is_given_back_where_the_optimizer_is_detached(namespace: ps.Namespace) -> None:
    pair = pair_with_columns(namespace)
    pair.stored(batch(0)).backward()
    assert pair.stored.embedding.weight.grad is None
    pair.experts.detach()
    pair.resident(batch(0)).backward()
    assert torch.equal(pair.stored.embedding.weight.grad, pair.resident.embedding.weight.grad)
