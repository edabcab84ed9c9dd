"""Random calls, faults and crashes against a model of what the calls mean: see `paramstore_testkit/trials/store_trial.py`."""

from __future__ import annotations

from collections import Counter

import pytest

from paramstore_testkit.trials.ranks_trial import RanksTrial
from paramstore_testkit.trials.store_trial import ACTS, run_seed


@pytest.mark.parametrize("seed", range(3))
def test_the_store_means_what_its_calls_mean(seed: int) -> None:
    assert run_seed(seed, updates="touched", rounds=2, acts=25).figures["checked"] > 50


@pytest.mark.slow
def test_the_store_means_what_its_calls_mean_over_many_seeds() -> None:
    figures = sum((run_seed(seed, updates="touched").figures for seed in range(100, 140)), Counter[str]())
    assert all(figures[act] > 20 for act in ACTS)
    assert figures["checked"] > 20_000


@pytest.mark.slow
def test_it_does_with_ranks_that_get_lost() -> None:
    figures = sum((run_seed(seed, updates="touched", kind=RanksTrial).figures for seed in range(10)), Counter[str]())
    assert figures["lost"] > 20
