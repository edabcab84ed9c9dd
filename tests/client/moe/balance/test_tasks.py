"""Shares of tasks: each row of each task is one rank's, and gradients are those of whole batches."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paramstore.errors import ConfigError
from paramstore_client.moe.balance.tasks import TaskRows, split_tasks


@given(batches=st.lists(st.integers(1, 40), max_size=6), world_size=st.integers(1, 7))
def test_each_row_of_each_task_is_one_ranks_and_no_rank_has_more_than_the_mean(batches: list[int], world_size: int) -> None:
    ranks = [split_tasks(batches, rank=rank, world_size=world_size) for rank in range(world_size)]
    found = sorted((own.task, row) for mine in ranks for own in mine for row in range(own.rows.start, own.rows.stop))
    assert found == [(task, row) for task, rows in enumerate(batches) for row in range(rows)]
    most = max(sum(own.rows.stop - own.rows.start for own in mine) for mine in ranks)
    assert most <= -(-sum(batches) // world_size)
    for mine in ranks:
        assert [own.task for own in mine] == sorted(own.task for own in mine)


def test_the_heaviest_task_has_several_ranks_and_the_lightest_share_one() -> None:
    assert [split_tasks((512, 256, 128, 128), rank=rank, world_size=4) for rank in range(4)] == [
        [TaskRows(0, slice(0, 256), 2.0)],
        [TaskRows(0, slice(256, 512), 2.0)],
        [TaskRows(1, slice(0, 256), 4.0)],
        [TaskRows(2, slice(0, 128), 4.0), TaskRows(3, slice(0, 128), 4.0)],
    ]


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
def test_the_mean_of_ranks_gradients_is_that_of_whole_batches(world_size: int) -> None:
    """Of shared weights, and of the heads that only one task has."""
    batches = (23, 6, 11, 1)
    torch.manual_seed(0)
    tokens = [torch.randn(rows, 5, dtype=torch.float64) for rows in batches]

    def gradients(rows: list[TaskRows]) -> list[torch.Tensor]:
        torch.manual_seed(1)
        body = torch.randn(5, 5, dtype=torch.float64, requires_grad=True)
        heads = torch.randn(len(batches), 5, dtype=torch.float64, requires_grad=True)
        for own in rows:
            y = (tokens[own.task][own.rows] @ body).tanh() @ heads[own.task]
            (own.weight * y.square().mean()).backward()
        return [torch.zeros_like(each) if each.grad is None else each.grad for each in (body, heads)]

    whole = gradients([TaskRows(task, slice(None), 1.0) for task in range(len(batches))])
    ranks = [gradients(split_tasks(batches, rank=rank, world_size=world_size)) for rank in range(world_size)]
    for expected, *of_ranks in zip(whole, *ranks, strict=True):
        torch.testing.assert_close(sum(of_ranks) / world_size, expected, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ({"batches": 3}, "batches"), ({"batches": [1.5]}, "batches"), ({"batches": [0]}, "tasks of"), ({"rank": 4}, "rank"),
        ({"rank": -1}, "rank"), ({"world_size": 0}, "world_size"),
    ],
)  # fmt: skip
def test_what_says_no_tasks_or_ranks_is_refused(arguments: dict[str, Any], name: str) -> None:
    given: dict[str, Any] = {"batches": [4, 2], "rank": 0, "world_size": 4} | arguments
    with pytest.raises(ConfigError, match=name):
        split_tasks(given.pop("batches"), **given)
