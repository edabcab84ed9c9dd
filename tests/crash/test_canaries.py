"""Every planted bug is found by the suite that is there for it, within 10 s of one core; without one the same suite passes."""

from __future__ import annotations

import importlib.util
import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import ModuleType

import pytest

from paramstore.config import BUG_VARIABLE, load
from paramstore.errors import ConfigError
from paramstore_testkit.bugs.canaries import CANARIES, CRASH_STATES, DAMAGE, PLAIN_ACTS, STORE_MODEL, Canary, canary, planted
from paramstore_testkit.crash.states import Plan, enumerate_seed
from paramstore_testkit.disks.crash_disk import SMALL
from paramstore_testkit.trials.store_trial import run_seed

ROOT = Path(__file__).parents[2]
LIMIT_S = 10.0
SEEDS = range(1, 4)

found: list[tuple[Canary, str, float]] = []
"""What the table shows."""


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL, logger="paramstore")


@pytest.fixture(scope="module", autouse=True)
def _table(request: pytest.FixtureRequest) -> Iterator[None]:
    """Printed at the end, whatever was found."""
    yield
    capture = request.config.pluginmanager.getplugin("capturemanager")
    rows = [f"{bug.name:<24}{bug.suite.split('::')[0]:<40}{seconds:5.1f} s  {how[:140]}" for bug, how, seconds in found]
    with capture.global_and_fixture_disabled():
        sys.stdout.write("\n" + "\n".join(rows) + "\n")


def module(path: str) -> ModuleType:
    """A test module of the tree, loaded anew."""
    spec = importlib.util.spec_from_file_location(f"canary_{Path(path).stem}", ROOT / path)
    assert spec is not None
    assert spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


def crash_states(acts: tuple[str, ...] = PLAIN_ACTS) -> None:
    plan = Plan(acts=acts, depth=SMALL, resume_share=0.01, with_creation=False)
    for seed in SEEDS:
        enumerate_seed(seed, plan)


def store_model() -> None:
    for seed in range(100, 106):
        run_seed(seed, updates="touched")


def damage() -> None:
    module("tests/crash/test_damage.py").refuses_all()


SUITES: dict[str, Callable[[], None]] = {CRASH_STATES: crash_states, STORE_MODEL: store_model, DAMAGE: damage}
TESTS = sorted({bug.suite for bug in CANARIES} - SUITES.keys())


def core_s() -> float:
    """Processor time of this process and its children so far: on a busy machine the clock says little."""
    return sum(os.times()[:4])


def pytest_of(test: str, bug: str | None) -> subprocess.CompletedProcess[str]:
    """The test, alone in a process in which the bug is planted before anything is imported."""
    environment = {name: value for name, value in os.environ.items() if name != BUG_VARIABLE}
    if bug is not None:
        environment[BUG_VARIABLE] = bug
    command = [sys.executable, "-m", "pytest", "-q", "-p", "paramstore_testkit.bugs.canaries", "-p", "no:cacheprovider", test]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60, check=False)


def failure_of(bug: Canary) -> str:
    """What the suite says; empty if it passes."""
    if bug.suite in SUITES:
        suite = partial(crash_states, bug.acts) if bug.suite == CRASH_STATES else SUITES[bug.suite]
        with planted(bug.name):  # a bug that cannot be planted any more is not found
            try:
                suite()
            except (Exception, pytest.fail.Exception) as error:  # noqa: BLE001 - whatever it is, the suite failed
                failure: BaseException = error
            else:
                return ""
        is_crash = any("crash after event" in note for note in getattr(failure, "__notes__", ()))
        assert is_crash or bug.suite != CRASH_STATES, f"the life itself fails: {failure!r}"  # that would prove less
        return f"{type(failure).__name__}: {failure}".splitlines()[0]
    result = pytest_of(bug.suite, bug.name)
    assert result.returncode in (0, 1), result.stdout + result.stderr  # 1: tests ran, and some failed
    return next((line for line in result.stdout.splitlines() if line.startswith("FAILED")), "")


@pytest.mark.slow
@pytest.mark.parametrize("bug", CANARIES, ids=lambda bug: str(bug.name))
def test_a_planted_bug_is_found_in_time(bug: Canary) -> None:
    started_s = core_s()
    how = failure_of(bug)
    seconds = core_s() - started_s
    found.append((bug, how or "NOT FOUND", seconds))
    assert how, f"{bug.suite} passes although {bug.what}"
    assert seconds < LIMIT_S


@pytest.mark.slow
@pytest.mark.parametrize("suite", [STORE_MODEL, DAMAGE])
def test_without_a_bug_the_suite_passes(suite: str) -> None:
    SUITES[suite]()


@pytest.mark.slow
@pytest.mark.parametrize("acts", sorted({bug.acts for bug in CANARIES}))
def test_without_a_bug_every_crash_state_is_right(acts: tuple[str, ...]) -> None:
    crash_states(acts)


@pytest.mark.slow
@pytest.mark.parametrize("test", TESTS)
def test_without_a_bug_the_test_passes(test: str) -> None:
    result = pytest_of(test, None)
    assert result.returncode == 0, result.stdout + result.stderr


def test_there_are_enough_of_them_and_no_two_have_one_name() -> None:
    assert len(CANARIES) >= 12
    assert len({bug.name for bug in CANARIES}) == len(CANARIES)


@pytest.mark.parametrize("bug", CANARIES, ids=lambda bug: str(bug.name))
def test_a_bug_is_gone_when_the_block_ends(bug: Canary) -> None:
    patches = bug.patches()
    before = [vars(owner)[name] for owner, name, _ in patches]
    with planted(bug.name):
        assert all(vars(owner)[name] is not old for (owner, name, _), old in zip(patches, before, strict=True))
    assert [vars(owner)[name] for owner, name, _ in patches] == before


def test_a_bug_that_is_not_there_names_those_that_are() -> None:
    with pytest.raises(ConfigError, match="skip_flush"):
        canary("nonsense")


@pytest.mark.parametrize("value", ["skip_flush", "nonsense", ""])
def test_whoever_serves_refuses_while_the_variable_is_set(value: str) -> None:
    with pytest.raises(ConfigError, match="plants a bug"):
        load({}, environ={BUG_VARIABLE: value})


@pytest.mark.slow
def test_a_real_daemon_refuses_to_start_with_a_bug(tmp_path: Path) -> None:
    environment = {**os.environ, BUG_VARIABLE: "skip_flush"}
    command = [sys.executable, "-c", "from paramstore.cli.main import main; main()", "serve", "--dir", str(tmp_path / "store")]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 2, result.stdout + result.stderr
    assert BUG_VARIABLE in result.stderr
    assert "ready" not in result.stdout
    assert not (tmp_path / "store").exists()
