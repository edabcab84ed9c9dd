"""Batches depend on the seed and the position alone."""

import torch

from paramstore.demo.batches import BatchSampler, held_out_batches


def sampler(corpus, *, seed=3):
    return BatchSampler(corpus, batch=8, context=12, seed=seed)


def test_target_is_the_input_one_byte_later(corpus):
    batch = sampler(corpus).draw()
    assert batch.input_BT.shape == batch.target_BT.shape == (8, 12)
    assert torch.equal(batch.input_BT[:, 1:], batch.target_BT[:, :-1])


def test_rows_come_from_the_domains_in_turn(corpus):
    batch = sampler(corpus).draw()
    for row, values in enumerate(batch.input_BT):
        text = bytes(corpus.domains[row % 4].train.numpy())
        assert bytes(values.tolist()) in text


def test_equal_seeds_draw_equal_batches(corpus):
    one, other = sampler(corpus), sampler(corpus)
    assert all(torch.equal(one.draw().input_BT, other.draw().input_BT) for _ in range(5))
    assert not torch.equal(sampler(corpus, seed=4).draw().input_BT, sampler(corpus).draw().input_BT)


def test_restored_sampler_goes_on_where_it_was(corpus):
    one = sampler(corpus)
    for _ in range(3):
        one.draw()
    state = {name: value.clone() for name, value in one.state().items()}
    expected = [one.draw().input_BT for _ in range(3)]
    other = sampler(corpus, seed=99)
    other.restore(state)
    assert other.position == 3
    assert all(torch.equal(other.draw().input_BT, batch) for batch in expected)


def test_held_out_batches_are_of_held_out_files_and_always_the_same(corpus):
    first = held_out_batches(corpus, count=2, batch=4, context=12)
    again = held_out_batches(corpus, count=2, batch=4, context=12)
    assert all(torch.equal(one.input_BT, other.input_BT) for one, other in zip(first, again, strict=True))
    assert bytes(first[0].input_BT[0].tolist()) in bytes(corpus.domains[0].valid.numpy())
