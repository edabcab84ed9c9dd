"""Seeds draw different stores, the same one always."""

from __future__ import annotations

from paramstore_testkit.sim.plan import OPERATIONS, plan_of


def test_a_seed_draws_the_same_plan_and_others_draw_others() -> None:
    assert plan_of(5) == plan_of(5)
    plans = [plan_of(seed) for seed in range(100)]
    assert {plan.volume_count for plan in plans} == {1, 2}
    assert {plan.namespaces for plan in plans} == {1, 2}
    assert {plan.shuffles for plan in plans} == {True, False}
    assert max(plan.trainers + plan.readers + plan.strangers for plan in plans) <= 16


def test_without_these_requests_nothing_would_happen() -> None:
    for plan in map(plan_of, range(100)):
        assert all(plan.weights[name] > 0 for name in ("acquire", "release", "push", "apply", "commit"))
        assert set(plan.weights) == set(OPERATIONS)
