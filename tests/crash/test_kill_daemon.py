"""The real daemon on real files is killed: at every point of its commits, at named points of all its work, at random times,
while a client trains; and so is the trainer. Each time what comes back is what was promised.

PARAMSTORE_KILL_CYCLES and PARAMSTORE_KILL_SEED ask `make soak` for more cycles, or others; `tell` shows what a run did.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import paramstore_client as ps
from paramstore.core.key import ExpertKey
from paramstore_testkit.processes.kill_cycles import KillCycles
from paramstore_testkit.processes.kill_points import NAMES
from paramstore_testkit.processes.killable_trainer import KillableTrainers
from paramstore_testkit.processes.trainer import adamw_rule, plain_rule
from paramstore_testkit.processes.trainer_kills import TrainerKills

pytestmark = pytest.mark.slow

SHAPE = (64, 64)
EXPERTS = 3
OPTIONS = ps.AdamW(lr=0.1)
POINTS_MAX = 400
CYCLES = int(os.environ.get("PARAMSTORE_KILL_CYCLES", "500"))
"""0.07 s each on two idle cores."""
FEWER_CYCLES = 3 * len(NAMES)
"""Those of every run: two kills at each named point, where the daemon comes there in that life, and as many at random times."""
SEED = int(os.environ.get("PARAMSTORE_KILL_SEED", "20"))
ADAMW_CYCLES = TRAINER_CYCLES = 20
BUG_CYCLES = 60

State = dict[ExpertKey, dict[str, torch.Tensor]]


def tensor(seed: int) -> dict[str, torch.Tensor]:
    return {"w": torch.randn(SHAPE, generator=torch.Generator().manual_seed(seed))}


def state_of(namespace: ps.Namespace) -> State:
    return {key: namespace.read(key) for key in namespace.keys()}  # noqa: SIM118 - not a mapping


class Promises:
    """What one life of a trainer was promised, and what every step must hold. Fed by `made`, asked by `check`."""

    def __init__(self, states: dict[int, State]) -> None:
        self.states = states
        self.acknowledged: int | None = None
        self.started: int | None = None

    def commit(self, namespace: ps.Namespace, step: int) -> None:
        self.started = step
        namespace.commit(step).wait()
        self.acknowledged = step

    def check(self, store: ps.Store) -> int | None:
        """The step at which the store came back; every record of every step that can be opened is whole and of it."""
        found = {entry["name"]: entry["committed_step"] for entry in store.namespaces()}
        step: int | None = found.get("moe")
        assert self.acknowledged is None or (step is not None and step >= self.acknowledged), (step, self.acknowledged)
        assert step is None or (self.started is not None and step <= self.started), (step, self.started)
        if step is not None:
            with store.open_namespace("moe") as reader:
                steps = reader.steps()
            for retained in steps:
                with store.open_namespace("moe", at=retained) as reader:
                    assert_equal(state_of(reader), self.states[retained])
        return step


def assert_equal(found: State, expected: State) -> None:
    assert found.keys() == expected.keys()
    for key, fields in expected.items():
        for name, value in fields.items():
            assert torch.equal(found[key][name], value), (key, name)


def create(namespace: ps.Namespace) -> None:
    namespace.initialize(lambda key: tensor(key[1]))


def train(namespace: ps.Namespace, step: int, keys: list[ExpertKey]) -> None:
    namespace.push({key: tensor(1000 * step + key[1]) for key in keys})
    namespace.apply(OPTIONS).wait()


def first_life(store: ps.Store, promises: Promises) -> None:
    with store.create_namespace("moe", ps.adamw_schema({"w": SHAPE}, param_dtype="float32"), layers=1, experts=EXPERTS) as ns:
        create(ns)
        promises.commit(ns, 1)


def second_life(store: ps.Store, promises: Promises) -> None:
    with store.open_namespace("moe", mode="write") as ns:
        train(ns, 2, [(0, 0), (0, 1)])
        promises.commit(ns, 2)
        train(ns, 3, [(0, 1), (0, 2)])
        promises.commit(ns, 3)  # drops step 1, whose extents may be written again
        train(ns, 4, ns.keys())
        promises.commit(ns, 4)


def copy_store(source: Path, target: Path) -> None:
    shutil.copytree(source, target, ignore=shutil.ignore_patterns("run"))  # a socket cannot be copied


def states_after(store: ps.Store, steps: list[int]) -> dict[int, State]:
    states = {}
    for step in steps:
        with store.open_namespace("moe", at=step) as reader:
            states[step] = state_of(reader)
    return states


@pytest.fixture(scope="module")
def trained(daemons: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[int, State]]:
    """A store at step 1, and what every later step of the second life holds, from one life without a kill."""
    directory = tmp_path_factory.mktemp("stores")
    address = daemons.start(directory / "first")
    with ps.connect(address) as store:
        first_life(store, Promises({}))
        states = states_after(store, [1])
    daemons.kill()
    copy_store(directory / "first", directory / "whole")
    address = daemons.start(directory / "whole")
    with ps.connect(address) as store, store.open_namespace("moe", mode="write") as ns:
        for step, keys in ((2, [(0, 0), (0, 1)]), (3, [(0, 1), (0, 2)]), (4, ns.keys())):
            train(ns, step, keys)
            states[step] = state_of(ns)
            ns.commit(step).wait()
    daemons.kill()
    return directory / "first", states


Life = Callable[[ps.Store, Promises], None]


def lived_through(daemons: Any, directory: Path, promises: Promises, life: Life, *, kill_at: int) -> bool:
    """Whether no point ended the daemon before the life was over."""
    address = daemons.start(directory, kill_at=kill_at)
    if address is None:
        return False
    try:
        with ps.connect(address) as store:
            life(store, promises)
    except ps.StoreUnavailable:
        daemons.wait_ended()
        return False
    daemons.kill()
    return True


def check_reopened(daemons: Any, directory: Path, promises: Promises) -> int | None:
    address = daemons.start(directory)
    assert address is not None
    with ps.connect(address) as store:
        step = promises.check(store)
    daemons.kill()
    return step


def test_a_daemon_killed_at_any_point_of_its_commits_comes_back_at_a_whole_step(
    daemons: Any, trained: tuple[Path, dict[int, State]], tmp_path: Path
) -> None:
    first, states = trained
    reopened = []
    for kill_at in range(1, POINTS_MAX):
        directory = tmp_path / str(kill_at)
        copy_store(first, directory)
        promises = Promises(states)
        promises.acknowledged = promises.started = 1
        is_over = lived_through(daemons, directory, promises, second_life, kill_at=kill_at)
        try:
            reopened.append(check_reopened(daemons, directory, promises))
        except BaseException as error:
            error.add_note(f"killed at point {kill_at}")
            raise
        shutil.rmtree(directory)
        if is_over:
            break
    assert reopened[-1] == 4
    assert set(reopened) == {1, 2, 3, 4}
    assert reopened == sorted(reopened)
    assert len(reopened) > 40


def test_a_daemon_killed_while_it_makes_a_store_can_be_started_again(
    daemons: Any, trained: tuple[Path, dict[int, State]], tmp_path: Path
) -> None:
    _, states = trained
    reopened = []
    for kill_at in [*range(1, 8), *range(8, POINTS_MAX, 5)]:
        directory = tmp_path / str(kill_at)
        promises = Promises(states)
        is_over = lived_through(daemons, directory, promises, first_life, kill_at=kill_at)
        reopened.append(check_reopened(daemons, directory, promises))
        if reopened[-1] is None and kill_at % 2:
            assert lived_through(daemons, directory, Promises(states), first_life, kill_at=0)
        shutil.rmtree(directory)
        if is_over:
            break
    assert reopened[-1] == 1
    assert reopened[0] is None


Tell = Callable[..., None]


@pytest.mark.parametrize(
    "count",
    [
        pytest.param(FEWER_CYCLES, id=f"{FEWER_CYCLES} of {CYCLES} kills"),
        pytest.param(CYCLES, marks=pytest.mark.soak, id=f"all {CYCLES} kills"),
    ],
)
def test_a_daemon_killed_at_any_time_while_a_client_trains_keeps_every_acknowledged_step(
    count: int, plain_daemons: Any, tmp_path: Path, tell: Tell
) -> None:
    cycles, started_s = KillCycles(plain_daemons, tmp_path / "store", plain_rule, seed=SEED), time.monotonic()
    try:
        cycles.repeat(count)
    finally:
        tell(f"kills of daemons, seed {SEED}, {time.monotonic() - started_s:.0f} s", cycles.figures)
    counts = cycles.figures
    assert counts["killed before it served"]
    assert counts["killed while it served"]
    assert counts["reopened beyond the last acknowledged step"]
    assert counts["reopened at the last acknowledged step, a later one started"]
    assert counts["lives resumed and committed"] > count / 10
    missed = [name for name in NAMES if not counts[f"killed at {name}"]]
    assert len(missed) <= (0 if count >= 8 * len(NAMES) else len(NAMES) // 4), missed


def test_a_daemon_that_runs_adamw_is_killed_and_resumes_bitwise(daemons: Any, tmp_path: Path, tell: Tell) -> None:
    cycles = KillCycles(daemons, tmp_path / "store", adamw_rule, seed=SEED, names=("update.after", "publish", "published", "flush"))
    try:
        cycles.repeat(ADAMW_CYCLES)
    finally:
        tell(f"kills of daemons that run AdamW, seed {SEED}", cycles.figures)
    assert cycles.figures["lives resumed and committed"]
    assert cycles.figures["steps checked"]


@pytest.mark.parametrize("bug", ["acknowledge_early", "lose_second_record"])
def test_the_kills_find_a_planted_bug(bug: str, plain_daemons: Any, tmp_path: Path) -> None:
    cycles = KillCycles(plain_daemons, tmp_path / "store", plain_rule, seed=SEED, bugs=[bug])
    with pytest.raises(AssertionError, match=r"came back at step|elements differ|the store cannot be opened"):
        cycles.repeat(BUG_CYCLES)
    plain_daemons.kill()


@pytest.fixture(scope="module")
def trainers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KillableTrainers]:
    with KillableTrainers(tmp_path_factory.mktemp("trainers") / "log") as trainers:
        yield trainers


def test_after_a_killed_trainer_the_next_begins_at_the_committed_step(
    plain_daemons: Any, trainers: KillableTrainers, tmp_path: Path, tell: Tell
) -> None:
    with ps.connect(plain_daemons.start(tmp_path / "store")) as store:
        kills = TrainerKills(trainers, store, seed=SEED)
        try:
            kills.repeat(TRAINER_CYCLES)
        finally:
            tell(f"kills of trainers, seed {SEED}", kills.figures)
        assert kills.figures["trainers killed"] == TRAINER_CYCLES
        assert kills.figures["train"] > TRAINER_CYCLES
    plain_daemons.kill()


def test_the_kills_of_trainers_find_updates_that_outlive_them(
    plain_daemons: Any, trainers: KillableTrainers, tmp_path: Path
) -> None:
    with ps.connect(plain_daemons.start(tmp_path / "store", bugs=["keep_dead_updates"])) as store:
        with pytest.raises(AssertionError, match=r"elements differ|came back at step"):
            TrainerKills(trainers, store, seed=SEED).repeat(TRAINER_CYCLES)
        trainers.kill()
    plain_daemons.kill()
