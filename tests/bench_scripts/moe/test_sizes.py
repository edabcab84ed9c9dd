"""Tokens that everyone draws alike: each prefers some experts, and no expert twice."""

from __future__ import annotations

import torch

from paramstore_bench.moe.sizes import RANKS, Batch, Sizes, weights_of

SIZES = Sizes(layers=2, experts=16, width=4, inner=6, tokens=500, top_k=4, skew=1.2)


def test_a_batch_is_the_same_each_time_and_another_for_each_rank_and_number() -> None:
    batches = [Batch.draw(SIZES, rank=rank, number=number) for number in range(2) for rank in range(RANKS)]
    assert torch.equal(batches[3].x, Batch.draw(SIZES, rank=3, number=0).x)
    assert torch.equal(batches[3].ids, Batch.draw(SIZES, rank=3, number=0).ids)
    assert len({batch.x.sum().item() for batch in batches}) == len({batch.ids.sum().item() for batch in batches}) == len(batches)


def test_tokens_choose_distinct_experts_and_the_same_ones_are_liked_by_all_ranks() -> None:
    batches = [Batch.draw(SIZES, rank=rank, number=0) for rank in range(RANKS)]
    for batch in batches:
        assert (batch.ids.sort(dim=-1)[0].diff(dim=-1) > 0).all()
        assert torch.allclose(batch.gates.sum(-1), torch.ones(SIZES.layers, SIZES.tokens))
    loads = [torch.bincount(batch.ids.flatten(), minlength=SIZES.experts) for batch in batches]
    assert len({int(load.argmax()) for load in loads}) == 1
    assert all(load.max() > 4 * load.min() for load in loads)


def test_experts_have_weights_of_their_own() -> None:
    drawn = [weights_of(SIZES, expert, layer=layer)["down"].sum().item() for layer in range(2) for expert in range(16)]
    assert len(set(drawn)) == 32
    assert weights_of(SIZES, 1)["down"].shape == (4, 6)
