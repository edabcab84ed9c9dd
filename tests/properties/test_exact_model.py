"""An exact namespace is torch's dense optimizer over all experts, bit for bit, whatever happens to it: see
`paramstore_testkit/trials/store_trial.py`, and `ranks_trial.py` for two ranks.
"""

from __future__ import annotations

from collections import Counter

import pytest

from paramstore_testkit.trials.ranks_trial import RanksTrial
from paramstore_testkit.trials.store_trial import ACTS, run_seed

pytestmark = pytest.mark.slow

FEW = 6
"""Missed steps of a record at most: few, so that records catch up and logs are cut in every run."""


@pytest.fixture(autouse=True)
def _few_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paramstore.core.apply_log.MISSED_MAX", FEW)
    monkeypatch.setattr("paramstore.engine.planner.apply_order.LATE_AFTER", FEW // 2)


@pytest.mark.parametrize("seed", range(3))
def test_an_exact_namespace_is_torchs_dense_optimizer(seed: int) -> None:
    assert run_seed(seed, updates="exact", rounds=2, acts=30).figures["checked"] > 50


@pytest.mark.parametrize(
    "count", [pytest.param(25, id="25 of 150 seeds"), pytest.param(150, marks=pytest.mark.soak, id="all 150 seeds")]
)
def test_an_exact_namespace_is_torchs_dense_optimizer_over_many_seeds(count: int) -> None:
    figures = sum((run_seed(seed, updates="exact").figures for seed in range(100, 100 + count)), Counter[str]())
    assert all(figures[act] > 0.4 * count for act in ACTS)
    assert figures["checked"] > 333 * count
    assert figures["records_advanced"] > 33 * count
    assert figures["records_caught_up"] > 3 * count


@pytest.mark.parametrize("seed", [3, 4])
def test_it_is_with_ranks_that_get_lost(seed: int) -> None:
    assert run_seed(seed, updates="exact", rounds=2, acts=30, kind=RanksTrial).figures["checked"] > 50


@pytest.mark.parametrize(
    "count", [pytest.param(20, id="20 of 50 seeds"), pytest.param(50, marks=pytest.mark.soak, id="all 50 seeds")]
)
def test_it_is_with_ranks_that_get_lost_over_many_seeds(count: int) -> None:
    seeds = range(500, 500 + count)
    figures = sum((run_seed(seed, updates="exact", kind=RanksTrial).figures for seed in seeds), Counter[str]())
    assert figures["checked"] > 500 * count
    assert figures["lost"] > 3 * count
    assert figures["records_caught_up"] > 5 * count


def test_records_may_miss_as_many_steps_as_the_log_is_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paramstore.core.apply_log.MISSED_MAX", 128)
    monkeypatch.setattr("paramstore.engine.planner.apply_order.LATE_AFTER", 64)
    figures = sum((run_seed(seed, updates="exact", rounds=2, acts=60).figures for seed in range(400, 420)), Counter[str]())
    assert figures["missed_steps_made"] > 2 * figures["records_advanced"]
