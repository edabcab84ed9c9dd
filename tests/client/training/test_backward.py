"""The end of a backward is told once, whatever it ran through, and again after one that failed."""

from __future__ import annotations

import pytest
import torch

from paramstore_client.training.backward import BackwardEnd


def leaf(end: BackwardEnd) -> torch.Tensor:
    made = torch.zeros((), requires_grad=True)

    def watch(_: torch.Tensor) -> None:
        assert end.watch()

    made.register_post_accumulate_grad_hook(watch)
    return made


def test_several_leaves_of_one_backward_are_told_once_at_its_end() -> None:
    heard: list[bool] = []
    end = BackwardEnd(lambda: heard.append(torch.is_grad_enabled()))
    (leaf(end) * 2 + leaf(end)).backward()
    assert heard == [False]


def test_outside_of_a_backward_there_is_nothing_to_watch() -> None:
    assert not BackwardEnd(lambda: None).watch()


def test_what_the_function_raises_the_backward_raises_and_the_next_one_is_told_again() -> None:
    heard: list[int] = []

    def fail() -> None:
        heard.append(1)
        raise ValueError("boom")

    end = BackwardEnd(fail)
    for _ in range(2):
        with pytest.raises(ValueError, match="boom"):
            (leaf(end) * 2).backward()
    assert heard == [1, 1]
