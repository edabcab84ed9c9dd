"""Applies that begin before their gradients are there leave the records of plain ones, whatever happens to them: see
`paramstore_testkit/trials/early_trial.py`.
"""

from __future__ import annotations

from collections import Counter

import pytest

from paramstore_testkit.trials.early_trial import run_seed

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("seed", range(12))
def test_early_applies_leave_the_records_of_plain_ones(seed: int) -> None:
    run_seed(seed)


def test_early_applies_leave_the_records_of_plain_ones_over_many_seeds() -> None:
    figures = sum((run_seed(seed, steps=10).figures for seed in range(100, 140)), Counter[str]())
    assert min(figures[name] for name in ("claimed seen", "unclaimed seen", "abort refused", "rollback", "reopen", "refused")) > 10
