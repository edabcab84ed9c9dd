"""Sizes of a run."""

from __future__ import annotations

from math import prod

import pytest

from paramstore.bench.pairs import ROUNDS_MIN
from paramstore.bench.plan import LARGE, MIB, SMALL, Plan, RecordSize, shuffled


@pytest.mark.parametrize("size", [LARGE, SMALL])
@pytest.mark.parametrize("bytes_per_parameter", [2, 12])
def test_expert_takes_about_the_nominal_bytes(size: RecordSize, bytes_per_parameter: int) -> None:
    elements = sum(prod(shape) for shape in size.fields(bytes_per_parameter).values())
    assert elements * bytes_per_parameter == pytest.approx(size.nominal_bytes, rel=0.005)


@pytest.mark.parametrize("plan", [Plan(), Plan.quick()])
def test_plans_take_enough_rounds_and_bounded_space(plan: Plan) -> None:
    assert min(plan.rounds, plan.write_rounds, plan.peer_rounds, plan.apply_rounds) >= ROUNDS_MIN
    assert plan.disk_bytes <= 6 << 30
    assert plan.record_count(57 * MIB) >= 2


def test_shuffled_order_has_all_and_repeats_with_its_seed() -> None:
    assert sorted(shuffled(20, seed=3)) == list(range(20))
    assert shuffled(20, seed=3) == shuffled(20, seed=3)
    assert shuffled(20, seed=3) != shuffled(20, seed=4)
