"""Every call to a volume or the catalog fails once, and from there on, in every way, in every scenario; what must hold, holds.

Who asked gets a typed error that says where and why, or an answer where the store may repair; nobody hangs; other keys and
another namespace go on; what failed is not written again; and after a power cut the last acknowledged step is there, whole.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from paramstore.engine.planner.cuts import CutPlanner
from paramstore.engine.planner.waiting import WaitingRequests
from paramstore.engine.planner.working_copies import WorkingPlanner
from paramstore.engine.steps.proof import Prover
from paramstore.engine.steps.transactions import Transactions
from paramstore.engine.tables.copies import Cut
from paramstore.engine.tables.namespace import NamespaceState
from paramstore.errors import ParamStoreError, VolumeError
from paramstore.storage.space.extents import Space
from paramstore.storage.space.fences import Fences
from paramstore.storage.volume import backing_file
from paramstore.storage.volume.backing_file import BackingFile
from paramstore.testing.volumes import page_aligned
from paramstore_testkit.trials.faulty_os import OS_SITES, FaultyOs, FileDisks
from paramstore_testkit.trials.io_faults import KINDS, SITES, ForgetfulVolume, Script, ScriptedVolume, Strike
from paramstore_testkit.trials.io_scenarios import SCENARIOS, STARTS_THE_STORE, StartingPoint, live
from paramstore_testkit.trials.io_trial import Disks, Images, images_after

SEED = 1
"""Of the order in which workers do what waits together: the clean run and the failing ones must agree in it."""
APPLIES_MAX = 10
RUNS_MIN = 1500
"""Of the sweep over every call."""
EVERY = [pytest.param(8, id="1 of 8 calls"), pytest.param(1, marks=pytest.mark.soak, id="every call")]
FILE_SCENARIOS = ("create", "open", "commit", "evict", "load", "rollback")
"""Files are there already: making them is what `BackingFile.create` and `FileVolume.create` are swept for."""
FRESH_BYTES = 1 << 20

Cell = tuple[str, str, str, str]
"""Scenario, site, kind, and whether it fails once or for ever."""
Matrix = dict[Cell, Counter[str]]


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """Thousands of failures log nothing: the note on one that was not expected names its strike."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.fixture
def files() -> Iterator[Path]:
    """A directory in memory where there is one: disks have been tested, and thousands of flushes take long."""
    shared = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=shared if shared.is_dir() else None) as path:
        yield Path(path)


def chosen(count: int, every: int) -> list[int]:
    """Numbers of `count` calls: the first, the last and each `every`-th between them."""
    return [number for number in range(1, count + 1) if number in (1, count) or number % every == 0]


def single_strikes(calls: Counter[str], sites: dict[str, tuple[str, ...]], every: int = 1) -> Iterator[tuple[Strike, ...]]:
    """Each chosen call of the clean run in every way, once and from there on."""
    for site, kinds in sites.items():
        for nth, kind, forever in itertools.product(chosen(calls[site], every), kinds, (False, True)):
            yield (Strike(site, nth, kind, forever),)


def read_back_strikes(calls: Counter[str], every: int) -> Iterator[tuple[Strike, ...]]:
    """Each chosen transaction fails, and then the catalog cannot be read back."""
    for nth, site, kind, forever in itertools.product(chosen(calls["apply"], every), ("reopen", "load"), KINDS, (False, True)):
        yield Strike("apply", nth, kind), Strike(site, 1, kind, forever)


async def count_calls(scenario: str, disks: StartingPoint, images: Images) -> Counter[str]:
    clean = Script()
    assert await live(scenario, disks, clean, images, seed=SEED, variant=1) == "unharmed"
    return clean.calls


async def strike_all(
    scenario: str, disks: StartingPoint, images: Images, plans: list[tuple[Strike, ...]], matrix: Matrix
) -> None:
    for variant, strikes in enumerate(plans):
        script = Script(*strikes)
        backing_file.os = FaultyOs(script)  # type: ignore[attr-defined]  # the fixture `own_os` puts the real one back
        try:
            outcome = await live(scenario, disks, script, images, seed=SEED, variant=variant)
        except BaseException as error:
            error.add_note(f"{scenario}: {strikes}, variant {variant}, seed {SEED}; called: {dict(script.calls)}")
            raise
        last = strikes[-1]
        how_long = "for ever" if last.forever else "once"
        cell = scenario, "+".join(strike.site for strike in strikes), last.kind, how_long
        matrix.setdefault(cell, Counter())[outcome] += 1


async def sweep_engine(scenarios: list[str], every: int) -> tuple[Matrix, int]:
    """The matrix, and how many runs the calls of the clean runs ask for."""
    matrix: Matrix = {}
    expected = 0
    prepared, images = await Disks.prepared(), await images_after(APPLIES_MAX)
    for scenario in scenarios:
        disks = Disks.blank() if scenario == "format" else prepared
        calls = await count_calls(scenario, disks, images)
        plans = list(single_strikes(calls, dict.fromkeys(SITES, KINDS), every))
        expected += sum(len(chosen(calls[site], every)) for site in SITES) * len(KINDS) * 2
        if scenario not in STARTS_THE_STORE:
            plans += read_back_strikes(calls, every)
            expected += len(chosen(calls["apply"], every)) * 2 * len(KINDS) * 2
        await strike_all(scenario, disks, images, plans, matrix)
    return matrix, expected


async def sweep_files(scenarios: list[str], directory: Path, every: int = 1) -> tuple[Matrix, int]:
    matrix: Matrix = {}
    expected = 0
    prepared, images = await Disks.prepared(), await images_after(APPLIES_MAX)
    disks = FileDisks(prepared, directory)
    for scenario in scenarios:
        clean = Script()
        backing_file.os = FaultyOs(clean)  # type: ignore[attr-defined]
        assert await live(scenario, disks, clean, images, seed=SEED, variant=1) == "unharmed"
        expected += sum(len(chosen(clean.calls[site], every)) * len(kinds) * 2 for site, kinds in OS_SITES.items())
        await strike_all(scenario, disks, images, list(single_strikes(clean.calls, OS_SITES, every)), matrix)
    disks.close()
    return matrix, expected


def print_matrix(title: str, matrix: Matrix) -> None:
    runs = sum(outcomes.total() for outcomes in matrix.values())
    print(f"\n{title}: {runs} runs, seed {SEED}, {time.process_time():.0f} s of CPU since the start")  # noqa: T201
    for (scenario, site, kind, how_long), outcomes in matrix.items():
        told = ", ".join(f"{count} {outcome}" for outcome, count in sorted(outcomes.items()))
        print(f"  {scenario:21} {site:15} {kind:7} {how_long:9} {told}")  # noqa: T201


def outcomes_of(matrix: Matrix, **wanted: str) -> Counter[str]:
    """All outcomes of the cells that have these coordinates."""
    names = ("scenario", "site", "kind", "how_long")
    total: Counter[str] = Counter()
    for cell, outcomes in matrix.items():
        if all(cell[names.index(name)] == value for name, value in wanted.items()):
            total += outcomes
    return total


@pytest.fixture
def own_os(monkeypatch: pytest.MonkeyPatch) -> None:
    """`backing_file` gets its `os` back at the end."""
    monkeypatch.setattr(backing_file, "os", backing_file.os)  # type: ignore[attr-defined]


# --- the sweeps


@pytest.mark.slow
@pytest.mark.usefixtures("own_os")
@pytest.mark.parametrize("every", EVERY)
def test_any_call_of_a_volume_or_the_catalog_may_fail_in_any_scenario(every: int, capsys: pytest.CaptureFixture[str]) -> None:
    matrix, expected = asyncio.run(sweep_engine(list(SCENARIOS), every))
    print_matrix("volumes and catalog", matrix)
    total = sum(outcomes.total() for outcomes in matrix.values())
    with capsys.disabled():
        sys.stdout.write(f"\nI/O errors of volumes and catalog: {total} runs in {len(SCENARIOS)} scenarios, seed {SEED}\n")
    assert total == expected >= RUNS_MIN / every
    assert set(outcomes_of(matrix, scenario="evict", site="write", how_long="once")) == {"repaired"}
    assert set(outcomes_of(matrix, site="apply", kind="short", how_long="once")) <= {"repaired", "refused: CatalogError"}
    for site in ("flush", "grow"):
        assert all(outcome.startswith("refused") for outcome in outcomes_of(matrix, site=site)), site
    refused = [outcome for outcome in outcomes_of(matrix, site="reserve") if outcome.startswith("refused")]
    assert refused, "room that is made ahead of the next commit may fail; what a commit asks for may not"
    for scenario in ("load", "scrub"):
        assert set(outcomes_of(matrix, scenario=scenario, site="read", how_long="once")) == {"refused: VolumeError"}
    assert any("stopped" in outcome for outcome in outcomes_of(matrix, site="apply+reopen"))


@pytest.mark.slow
@pytest.mark.usefixtures("own_os")
@pytest.mark.parametrize("every", EVERY)
def test_any_call_of_the_system_on_a_volume_s_file_may_fail_in_any_scenario(every: int, files: Path) -> None:
    matrix, expected = asyncio.run(sweep_files(list(FILE_SCENARIOS), files, every))
    print_matrix("system calls of files", matrix)
    assert sum(outcomes.total() for outcomes in matrix.values()) == expected > 0
    assert set(outcomes_of(matrix, kind="short")) == {"repaired"}  # the rest is asked for
    assert set(outcomes_of(matrix, scenario="evict", site="pwritev", how_long="once")) == {"repaired"}
    assert all(outcome.startswith("refused") for outcome in outcomes_of(matrix, site="fdatasync"))


def make_file(directory: Path) -> None:
    BackingFile.create(directory, index=0, size_bytes=FRESH_BYTES).close()


def open_file(directory: Path) -> None:
    BackingFile.open(directory, index=0).close()


def transfer(directory: Path) -> None:
    """Writes, flushes, grows and reads back: what comes back is what was written."""
    file = BackingFile.open(directory, index=0)
    try:
        data, found = page_aligned(1 << 16, seed=SEED), page_aligned(1 << 16)
        file.write(8192, [data[:4096], data[4096:]])
        file.sync()
        size_bytes = file.size_bytes
        try:
            file.allocate(size_bytes + FRESH_BYTES)
        except VolumeError:
            assert file.size_bytes == size_bytes
            raise
        file.read(8192, [found[:12288], found[12288:]])
        assert found == data, "a short count was taken for the whole"
    finally:
        file.close()


@pytest.mark.parametrize("call", [make_file, open_file, transfer])
@pytest.mark.usefixtures("own_os")
def test_a_file_is_made_opened_and_moved_whole_or_the_error_says_where_and_why(call: object, files: Path) -> None:
    assert callable(call)
    outcomes: Counter[str] = Counter()
    runs = itertools.count()

    def once(*strikes: Strike) -> Script:
        directory = files / str(next(runs))
        directory.mkdir()
        script = Script(*strikes)
        if call is not make_file:
            make_file(directory)
        backing_file.os = FaultyOs(script)  # type: ignore[attr-defined]
        script.arm()
        try:
            call(directory)
            outcome, message = "done", ""
        except VolumeError as error:
            outcome, message = "refused", str(error)
        finally:
            backing_file.os = FaultyOs(Script())  # type: ignore[attr-defined]
        assert outcome == "done" or "volume 0" in message, message
        assert outcome == "done" or call is not make_file or not list(directory.iterdir()), "a file is left behind"
        outcomes[f"{strikes[0].kind}: {outcome}" if strikes else outcome] += 1
        return script

    calls = once().calls
    plans = list(single_strikes(calls, OS_SITES))
    for plan in plans:
        assert once(*plan).fired, plan
    assert outcomes.total() == len(plans) + 1
    assert outcomes["short: refused"] == 0
    assert outcomes["EIO: done"] == outcomes["ENOSPC: done"] == outcomes["zero: done"] == 0


# --- that the sweeps fail where they should


async def strike_site(scenario: str, site: str) -> None:
    """The part of the sweep in which the calls of one site fail."""
    disks, images = await Disks.prepared(), await images_after(APPLIES_MAX)
    calls = Counter({site: (await count_calls(scenario, disks, images))[site]})
    await strike_all(scenario, disks, images, list(single_strikes(calls, {site: KINDS})), {})


def fails(scenario: str, site: str) -> str:
    """What the sweep says of a product with a bug in it."""
    with pytest.raises((AssertionError, TimeoutError, ParamStoreError)) as caught:
        asyncio.run(strike_site(scenario, site))
    assert f"site='{site}'" in str(caught.value.__notes__)
    print(repr(caught.value)[:200])  # noqa: T201
    return str(caught.value)


@pytest.mark.slow
@pytest.mark.usefixtures("own_os")
class TestTheSweepFinds:
    def test_a_flush_that_is_tried_again_and_believed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        flush = ScriptedVolume.flush

        def stubborn(volume: ScriptedVolume) -> None:
            try:
                flush(volume)
            except VolumeError:
                flush(volume)

        monkeypatch.setattr(ScriptedVolume, "flush", stubborn)
        assert "another record lies there" in fails("commit", "flush")

    def test_a_failed_flush_that_breaks_nobody(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(Prover, "_distrust", lambda *_: None)
        assert "were written after" in fails("commit", "flush")

    def test_a_failed_flush_that_fences_no_volume(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(Fences, "fail_flush", lambda *_: None)
        assert "fenced no volume" in fails("commit", "flush")

    def test_a_step_that_is_committed_after_a_failed_flush(self, monkeypatch: pytest.MonkeyPatch) -> None:
        begin = CutPlanner.begin

        def careless(planner: CutPlanner, namespace: NamespaceState) -> Cut:
            with monkeypatch.context() as patch:
                patch.setattr(Fences, "check_provable", lambda _: None)
                return begin(planner, namespace)

        monkeypatch.setattr(CutPlanner, "begin", careless)
        assert "committed after a failed flush" in fails("commit", "flush")

    def test_a_fenced_volume_that_gives_extents(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(Space, "_usable", lambda space: list(space._volumes.values()))
        assert "written to a fenced volume" in fails("commit", "flush")

    def test_an_extent_that_is_written_again_after_it_failed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(Space, "quarantine", Space.release)
        assert "were written after" in fails("evict", "write")

    def test_a_failed_write_that_is_taken_for_done(self, monkeypatch: pytest.MonkeyPatch) -> None:
        settle = WorkingPlanner.settle_write
        monkeypatch.setattr(
            WorkingPlanner, "settle_write",
            lambda planner, namespace, working, located, error: settle(planner, namespace, working, located, None),
        )  # fmt: skip
        assert "record" in fails("evict", "write")

    def test_a_transaction_whose_outcome_is_guessed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        async def guess(*_: object) -> bool:
            return True

        monkeypatch.setattr(Transactions, "_happened", guess)
        assert "acknowledged" in fails("commit", "apply")

    def test_a_caller_that_waits_for_ever(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("paramstore_testkit.trials.io_trial.LIMIT_S", 0.2)
        monkeypatch.setattr(WaitingRequests, "fail", lambda *_: None)
        assert "hung" in fails("evict", "read")

    def test_an_error_without_a_place(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("paramstore_testkit.trials.io_faults.ScriptedVolume._failure", lambda *_: VolumeError("it failed"))
        assert "no place" in fails("load", "read")

    def test_a_short_count_that_is_taken_for_the_whole(self, files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def hasty(file: BackingFile, offset_bytes: int, data: list[memoryview]) -> None:
            backing_file.os.pwritev(file.descriptor, data, offset_bytes)  # type: ignore[attr-defined]

        monkeypatch.setattr(BackingFile, "write", hasty)
        with pytest.raises((AssertionError, VolumeError)):
            asyncio.run(sweep_files(["evict"], files))


def test_a_forgetful_disk_keeps_what_a_later_flush_covered_and_nothing_else() -> None:
    disk = ForgetfulVolume(1 << 16)
    old, lost, again = (page_aligned(4096, seed=seed) for seed in range(3))
    disk.write(0, [old])
    disk.write(4096, [old])
    disk.flush()
    disk.write(0, [lost])
    disk.write(4096, [lost])
    assert len(disk.lose(kept_share=0.0)) == 2
    disk.write(4096, [again])
    disk.flush()
    found = page_aligned(8192)
    disk.read(0, [found])
    assert (found[:4096], found[4096:]) == (lost, again)  # as the cache has it
    disk.crash()
    disk.read(0, [found])
    assert (found[:4096], found[4096:]) == (old, again)
