"""Plans: equal seeds give equal lives, and no life asks for what a daemon must refuse."""

from __future__ import annotations

import pytest
import torch

from paramstore.core.schema import Schema
from paramstore.limits import RETAINED_STEPS
from paramstore_testkit.processes.life_plan import WEIGHTS, Operation, plan_life, values_of

KEYS = [(0, 0), (0, 1), (1, 0)]
SCHEMA = Schema.adamw({"w": (3, 2), "b": (1,)}, param_dtype="float32")


def plan(seed: int, openable: tuple[int, ...] = (4, 7), count: int = 200) -> list[Operation]:
    return list(plan_life(seed, KEYS, openable=openable, count=count))


def test_a_plan_depends_on_its_seed_alone() -> None:
    assert plan(1) == plan(1)
    assert plan(1) != plan(2)


def test_a_long_plan_has_operations_of_every_kind_and_ends_settled() -> None:
    assert {operation.kind for operation in plan(1)} == set(WEIGHTS)
    assert plan(1)[-1].kind == "settle"


@pytest.mark.parametrize("seed", range(20))
def test_steps_go_up_and_a_rollback_goes_to_a_step_that_is_open_when_no_commit_is_under_way(seed: int) -> None:
    openable, is_under_way = [4, 7], False
    for operation in plan(seed):
        if operation.kind in ("commit", "commit_later"):
            assert operation.step > openable[-1]
            openable = [*openable, operation.step][-RETAINED_STEPS:]
            is_under_way = operation.kind == "commit_later"
        elif operation.kind == "settle":
            is_under_way = False
        elif operation.kind == "rollback":
            assert not is_under_way
            assert operation.step in openable
            openable = [step for step in openable if step <= operation.step]


def test_values_differ_by_seed_and_key_and_are_the_same_again() -> None:
    first = values_of(SCHEMA, 1, (0, 0))
    assert {name: value.shape for name, value in first.items()} == {"w": (3, 2), "b": (1,)}
    assert torch.equal(first["w"], values_of(SCHEMA, 1, (0, 0))["w"])
    assert not any(torch.equal(first["w"], values_of(SCHEMA, seed, key)["w"]) for seed, key in ((2, (0, 0)), (1, (0, 1))))
