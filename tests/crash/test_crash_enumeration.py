"""Crash states at scale: every event of many lives, everything a power cut may leave. See `paramstore_testkit/crash/states.py`.

The figures below are promises: a run that tries fewer fails.
"""

from __future__ import annotations

import asyncio
import logging
import sys

import pytest

from paramstore_testkit.crash.life import ACTS
from paramstore_testkit.crash.states import Enumeration, Plan, enumerate_seed, enumerate_seeds
from paramstore_testkit.disks.crash_disk import SMALL

SEEDS = range(1, 13)
DISTINCT_LEAST = 200_000
"""(image, catalog) pairs, all different."""
AFTER_RECOVERY_LEAST = 100_000
"""States of crashes while a daemon recovers, or goes on after it has."""
DAEMONS_LEAST = 100
DRAFT_DISTINCT_LEAST = 2000
"""States of crashes in a short life: most of it is its namespace's initialization."""
KIND_LEAST = 100
"""States of each kind."""
ACT_LEAST = 3
"""How often each act of a life happens."""
KINDS = (
    "all kept", "none kept", "one volume kept", "one lost", "one kept", "one torn", "last torn at 512", "garbage in a torn 512",
    "garbage in a torn 4096", "random writes", "random sectors", "transaction lost", "transaction lost, all kept",
)  # fmt: skip
AFTER_RECOVERY = [f"after recovery: {kind}" for kind in KINDS if "512" not in kind and "4096" not in kind]
SHORT = Plan(acts=("train", "commit", "train few", "rollback further", "commit"), depth=SMALL, with_creation=False)


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL, logger="paramstore")


@pytest.mark.slow
def test_two_hundred_thousand_crashes_leave_a_whole_committed_step(capsys: pytest.CaptureFixture[str]) -> None:
    def tell(text: str) -> None:
        with capsys.disabled():
            sys.stdout.write(f"\n{text}\n")

    figures = enumerate_seeds(SEEDS, Plan(), tell=tell)
    assert figures.total_distinct >= DISTINCT_LEAST
    assert figures.crashes_during_recovery >= AFTER_RECOVERY_LEAST
    assert figures.resumed >= DAEMONS_LEAST
    missing = [kind for kind in (*KINDS, *AFTER_RECOVERY) if figures.states[kind] < KIND_LEAST]
    assert not missing
    assert not [act for act in ACTS if figures.acts[act] < ACT_LEAST]


@pytest.mark.slow
@pytest.mark.parametrize("volume_count", [1, 3])
def test_the_promise_does_not_depend_on_the_number_of_volumes(volume_count: int) -> None:
    figures = enumerate_seed(77, Plan(volume_count=volume_count, depth=SMALL))
    assert figures.total_distinct > 1000


@pytest.mark.slow
@pytest.mark.parametrize("volume_count", [1, 2])
def test_a_crash_while_a_namespace_is_initialised_leaves_a_draft_that_was_saved_and_no_step(volume_count: int) -> None:
    plan = Plan(acts=("train few", "commit"), volume_count=volume_count, resume_share=0.2, with_drafts=True)
    figures = enumerate_seed(79, plan)
    assert figures.total_distinct > DRAFT_DISTINCT_LEAST
    assert figures.resumed > 8
    assert figures.crashes_during_recovery > 1000


@pytest.mark.slow
@pytest.mark.parametrize("seed", [79, pytest.param(80, marks=pytest.mark.soak)])
def test_the_promise_holds_of_an_exact_namespace_whose_records_miss_steps(seed: int) -> None:
    figures = enumerate_seed(seed, Plan(depth=SMALL, updates="exact"))
    assert figures.total_distinct > 1000
    assert figures.resumed > 0


@pytest.mark.slow
def test_a_crash_of_who_recovers_from_a_crash_during_recovery_is_survived() -> None:
    figures = enumerate_seed(78, Plan(acts=("train few", "commit"), depth=SMALL, resume_levels=2, resume_share=0.15))
    assert figures.resumed > 10
    assert figures.crashes_during_recovery > 1000


@pytest.mark.slow
def test_a_seed_repeats_itself() -> None:
    def trace(seed: int) -> str:
        enumeration = Enumeration(seed, SHORT)
        asyncio.run(enumeration.run())
        return enumeration.trace.hexdigest()

    assert trace(5) == trace(5)
    assert trace(5) != trace(6)
