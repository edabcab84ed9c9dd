"""The sizes that the product promises."""

import pytest

from paramstore.demo.settings import full, quick
from paramstore.errors import ConfigError


def test_full_run_is_as_large_as_promised():
    settings = full()
    assert settings.shape.layers >= 6
    assert settings.shape.experts >= 32
    assert settings.shape.expert_parameters >= 50_000_000
    assert settings.tokens_per_step == 2048
    assert settings.steps >= 60
    assert settings.corpus_bytes >= 20_000_000


@pytest.mark.parametrize("settings", [full(), quick()])
def test_host_budget_is_an_eighth_of_the_training_state(settings):
    assert settings.host_budget_bytes * 8 == settings.shape.expert_state_bytes
    assert settings.shape.expert_state_bytes == 12 * settings.shape.expert_parameters


@pytest.mark.parametrize("settings", [full(), quick()])
def test_kill_falls_between_two_commits(settings):
    assert settings.resume_step < settings.kill_step < settings.resume_step + settings.commit_every <= settings.steps
    assert settings.reference_steps <= settings.kill_step
    assert settings.ring_slots < settings.shape.layers


def test_full_run_is_killed_after_57_and_resumes_at_50():
    assert (full().kill_step, full().resume_step) == (57, 50)


@pytest.mark.parametrize(("make", "steps"), [(full, 59), (quick, 29), (quick, -1)])
def test_too_few_steps_are_refused(make, steps):
    with pytest.raises(ConfigError, match=f"--steps {steps}: the demo needs at least 60 to tell its story, or 30 with --quick"):
        make(steps=steps)


def test_more_steps_are_taken():
    assert full(steps=100).steps == 100
