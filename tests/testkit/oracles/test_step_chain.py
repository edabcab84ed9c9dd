"""The model of a namespace's steps: what it takes for a kept promise, and what for a broken one."""

from __future__ import annotations

import pytest
import torch

from paramstore_testkit.oracles.experts import Expert, Tensors
from paramstore_testkit.oracles.step_chain import StepChain

KEY = (0, 0)
ONE = {"w": torch.ones(4)}


def add(expert: Expert, gradients: Tensors) -> Expert:
    fields = {**expert.fields, "master/w": expert.fields["master/w"] + gradients["w"]}
    return Expert(fields, expert.updates + 1)


@pytest.fixture
def chain() -> StepChain:
    """Steps 1 to 3 acknowledged, 4 and 5 started."""
    chain = StepChain(add, retained=2)
    chain.initialize({KEY: {"w": torch.zeros(4)}})
    for step in (1, 2, 3, 4, 5):
        chain.apply({KEY: ONE})
        chain.start(step, b"%d" % step)
        if step == 3:
            chain.acknowledge(step)
    return chain


@pytest.mark.parametrize(("found", "openable"), [(3, [2, 3]), (4, [3, 4]), (5, [4, 5])])
def test_a_store_may_come_back_at_what_was_acknowledged_or_started(found: int, openable: list[int], chain: StepChain) -> None:
    chain.reopen(found)
    assert (chain.acknowledged, chain.openable, chain.started) == (found, openable, [])
    assert chain.working[KEY].fields["master/w"].tolist() == [found] * 4
    assert chain.working[KEY].updates == found


@pytest.mark.parametrize("found", [None, 1, 2, 6])
def test_a_store_may_not_come_back_before_the_acknowledged_step_or_after_the_last_started(
    found: int | None, chain: StepChain
) -> None:
    with pytest.raises(AssertionError, match="acknowledged 3, started"):
        chain.reopen(found)


@pytest.mark.parametrize("found", [2, 3])
def test_a_rollback_that_nobody_answered_may_have_happened(found: int, chain: StepChain) -> None:
    chain.reopen(3)
    chain.start_rollback(2)
    chain.reopen(found)
    assert chain.committed == [1, 2, 3][:found]
    assert chain.working is chain.states[found]


def test_a_step_that_was_rolled_back_is_started_anew_and_holds_something_else(chain: StepChain) -> None:
    chain.reopen(3)
    chain.start_rollback(2)
    chain.acknowledge_rollback()
    assert chain.openable == [2]
    chain.apply({KEY: {"w": 9 * ONE["w"]}})
    chain.start(3, b"")
    chain.acknowledge(3)
    assert chain.states[3][KEY].fields["master/w"].tolist() == [11.0] * 4


@pytest.mark.parametrize("found", [[3], [1, 2, 3, 4], [3, 2]])
def test_steps_that_are_missing_or_too_many_are_noticed(found: list[int], chain: StepChain) -> None:
    chain.reopen(3)
    chain.check_steps([2, 3])
    chain.check_steps([1, 2, 3])
    with pytest.raises(AssertionError):
        chain.check_steps(found)
