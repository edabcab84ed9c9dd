"""A soak tells what it tried, and which seed to repeat."""

from __future__ import annotations

import logging

import pytest

from paramstore_testkit import soak
from paramstore_testkit.bugs.canaries import planted
from paramstore_testkit.crash.states import Plan
from paramstore_testkit.disks.crash_disk import SMALL

SHORT = Plan(acts=("train few", "commit"), depth=SMALL, resume_share=0.0)


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(soak, "PLAN", SHORT)
    monkeypatch.setattr(soak, "SIMULATED_SEEDS", 1)
    caplog.set_level(logging.CRITICAL, logger="paramstore")


@pytest.mark.slow
def test_one_seed_is_tried_however_short_the_time(capsys: pytest.CaptureFixture[str]) -> None:
    assert soak.soak(first_seed=5, hours=0) == 0
    said = capsys.readouterr().out
    assert "seed 5:" in said
    assert "1 seeds (5 to 5)" in said
    assert "one lost" in said
    assert "1 seeds, 20" in said, "the simulation ran too"


@pytest.mark.slow
def test_a_violation_ends_it_and_says_how_to_repeat_it(capsys: pytest.CaptureFixture[str]) -> None:
    with planted("skip_flush"):
        assert soak.soak(first_seed=5, hours=1) == 1
    said = capsys.readouterr().out
    assert "--seed 5 --hours 0" in said
    assert "crash after event" in said


def test_no_seed_of_the_simulation_is_tried_twice() -> None:
    assert set(soak.simulated_seeds(7)).isdisjoint(soak.simulated_seeds(8))


def test_the_same_seed_has_the_same_plan_and_others_have_other_volumes() -> None:
    assert soak.plan_of(7) == soak.plan_of(7)
    assert {soak.plan_of(seed).volume_count for seed in range(6)} == {1, 2, 3}
    assert soak.plan_of(16).with_creation
    assert not soak.plan_of(17).with_creation
