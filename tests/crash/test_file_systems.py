"""The real engine on real file systems: every crash of a recorded life, shutdowns under a running daemon, devices without space.

Each scenario runs in a process of its own with mounts of its own (`paramstore_testkit/blocks/run.py`), with a deadline. Where root,
/dev/fuse, loop devices or mkfs are missing, all of it is skipped, and the reason is what the probe met. The figures below are
promises: a run that tries less fails.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from paramstore_testkit.blocks.mounts import PREFIX
from paramstore_testkit.blocks.run import refusal, run_apart

pytestmark = pytest.mark.slow

LIMIT_S = 420.0
HANG_S = 6.0
LIVES = ((1, 1), (2, 2))
"""(seed, volumes), of the lives that are replayed in full."""
STATES_PER_EVENT = 3
RESUME_EVERY = 50
STATES_LEAST = 3000
DISTINCT_LEAST = 1500
KIND_LEAST = 20
"""Distinct states of each kind; `none kept` is nearly always what an earlier state was. These figures are those of both lives; of
one they are halves."""
KINDS = ("all kept", "one kept", "one lost", "one torn", "last torn at 512", "one volume kept", "random sectors", "random writes")
RESUMED_LEAST = 20
REFUSED_MOST = 0.02
"""Of the distinct states: ext4's superblock and its journal's are larger than a sector."""
CYCLES = 30
SEED = 7

Tell = Callable[[str], None]


@pytest.fixture
def tell(capsys: pytest.CaptureFixture[str]) -> Tell:
    def show(text: str) -> None:
        with capsys.disabled():
            sys.stdout.write(f"\n{text.strip()}\n")

    return show


@pytest.fixture(scope="module")
def ext4(request: pytest.FixtureRequest) -> None:
    need("ext4", request.config)


@pytest.fixture(scope="module")
def xfs(request: pytest.FixtureRequest) -> None:
    need("xfs", request.config)


def need(kind: str, config: pytest.Config) -> None:
    """Skips, and says aloud why, where no file system of that kind can be had."""
    reason = refusal(kind)
    if reason:
        capture = config.pluginmanager.getplugin("capturemanager")
        with capture.global_and_fixture_disabled():
            sys.stdout.write(f"\nnot on {kind}: {reason}\n")
        pytest.skip(f"no {kind} of our own can be mounted here: {reason}")


def passed(result: subprocess.CompletedProcess[str], tell: Tell) -> Any:
    """What the scenario found, from the last line it said; the rest is shown."""
    report, _, found = result.stdout.strip().rpartition("\n")
    tell(report)
    assert result.returncode == 0, f"{result.stdout}\n{result.stderr}"
    return json.loads(found)


def replay(*arguments: str) -> subprocess.CompletedProcess[str]:
    return run_apart("replay", *arguments, limit_s=LIMIT_S)


@pytest.mark.usefixtures("ext4")
@pytest.mark.parametrize(
    "lives", [pytest.param(LIVES[1:], id="1 of 2 lives"), pytest.param(LIVES, marks=pytest.mark.soak, id="both lives")]
)
def test_every_crash_on_ext4_leaves_a_whole_committed_step(lives: tuple[tuple[int, int], ...], tell: Tell) -> None:
    depth = ("--states", str(STATES_PER_EVENT), "--resume-every", str(RESUME_EVERY))
    found = [passed(replay("--seed", str(seed), "--volumes", str(volumes), *depth), tell) for seed, volumes in lives]
    share = len(lives) / len(LIVES)
    assert sum(figures["states"] for figures in found) >= share * STATES_LEAST
    distinct = sum(figures["distinct"] for figures in found)
    assert distinct >= share * DISTINCT_LEAST
    assert sum(figures["resumed"] for figures in found) >= share * RESUMED_LEAST
    assert sum(figures["refused"] for figures in found) <= REFUSED_MOST * distinct
    assert not [kind for kind in KINDS if sum(figures["kinds"].get(kind, 0) for figures in found) < share * KIND_LEAST]


@pytest.mark.usefixtures("xfs")
def test_every_crash_on_xfs_leaves_a_whole_committed_step(tell: Tell) -> None:
    found = passed(replay("--kind", "xfs", "--seed", "3", "--states", "1", "--resume-every", str(RESUME_EVERY)), tell)
    assert found["distinct"] > 100


@pytest.mark.usefixtures("ext4")
def test_without_a_bug_the_short_life_is_right(tell: Tell) -> None:
    found = passed(replay("--short", "--states", "1"), tell)
    assert found["distinct"] > 100


@pytest.mark.usefixtures("ext4")
@pytest.mark.parametrize(
    ("bug", "said"),
    [
        ("skip_flush", "CorruptRecord"),
        ("acknowledge_early", "was acknowledged"),
        ("forget_growth", "was truncated"),
        ("forget_creation", "is missing: give its path"),
    ],
)
def test_a_planted_bug_is_found_in_a_crash(bug: str, said: str, tell: Tell) -> None:
    result = replay("--short", "--states", "2", "--bug", bug)
    assert result.returncode != 0, result.stdout
    assert "crash after event" in result.stderr, result.stderr
    assert said in result.stderr
    tell(f"{bug}: {next(line for line in result.stderr.splitlines() if said in line)[:200]}")


@pytest.mark.usefixtures("ext4")
def test_a_shut_down_file_system_is_an_error_and_every_acknowledged_step_is_there_after_it(tell: Tell) -> None:
    result = run_apart("shutdown", "--cycles", str(CYCLES), "--seed", str(SEED), limit_s=LIMIT_S)
    counts = passed(result, tell)
    tell(f"shutdowns, seed {SEED}: " + ", ".join(f"{number} {what}" for what, number in sorted(counts.items())))
    assert sum(number for what, number in counts.items() if what.startswith("ended by ")) == CYCLES
    assert counts["cycles"] == CYCLES + 1
    assert counts["steps checked"] >= CYCLES


@pytest.mark.usefixtures("ext4")
def test_shutdowns_find_a_commit_that_is_acknowledged_early() -> None:
    cycles = ("--cycles", str(CYCLES), "--seed", str(SEED))
    result = run_apart("shutdown", *cycles, "--bug", "acknowledge_early", limit_s=LIMIT_S)
    assert result.returncode != 0, result.stdout
    assert f"seed {SEED}; acts so far: cycle" in result.stderr, result.stderr


@pytest.mark.usefixtures("ext4")
@pytest.mark.parametrize(
    ("place", "said"),
    [
        ("volume", "volume 0"),
        ("buffered", "flush failed: No space left on device"),
        ("catalog", "the outcome of the transaction is unknown"),
    ],
)
def test_a_device_that_runs_out_of_space_it_promised_stops_the_store(place: str, said: str, tell: Tell) -> None:
    result = run_apart("thin", "--place", place, limit_s=LIMIT_S)
    assert result.returncode == 0, f"{result.stdout}\n{result.stderr}"
    assert said in result.stdout
    assert "No space left on device" in result.stdout
    tell(result.stdout)


@pytest.mark.usefixtures("ext4")
def test_a_store_that_believes_the_second_flush_is_found_on_a_device_without_space() -> None:
    result = run_apart("thin", "--place", "buffered", "--bug", "believe_second_flush", limit_s=LIMIT_S)
    assert result.returncode != 0, result.stdout
    assert "there was room for everything" in result.stderr, result.stderr


@pytest.mark.usefixtures("ext4")
def test_a_process_that_waits_for_a_dead_device_is_ended_and_leaves_nothing() -> None:
    with pytest.raises(AssertionError, match="waiting"):
        run_apart("hang", limit_s=HANG_S)
    mine = f"{PREFIX}{os.getpid()}"
    assert mine not in Path("/proc/self/mounts").read_text()
    for file in Path("/sys/block").glob("loop*/loop/backing_file"):
        with suppress(OSError):  # a device that goes while it is looked at
            assert mine not in file.read_text()
