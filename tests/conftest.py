"""What tests of every folder may ask for, in which order workers take the files, and what is left to `make soak`."""

from __future__ import annotations

import os
import signal
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from paramstore.cli import signals
from paramstore.cli.main import main
from paramstore_testkit import trial

os.environ.setdefault("OMP_WAIT_POLICY", "passive")
"""Before torch is loaded, here and in processes that tests start: its threads sleep while they wait for each other. Beside another
worker they would spin on a core that the one they wait for needs, ten times as long as they compute."""

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A job that a shell's script runs in the background ignores Ctrl-C, as would every process that tests start to interrupt it.
    signal.signal(signal.SIGINT, signal.default_int_handler)

HANDLERS = {number: signal.getsignal(number) for number in (*signals.ENDING, signal.SIGALRM)}
"""What the test process does with the signals that a command takes over."""

LONG_FILES = (
    "tests/crash/test_file_systems.py", "tests/properties/test_simulation.py", "tests/crash/test_crash_enumeration.py",
    "tests/end_to_end/test_demo.py", "tests/end_to_end/test_attach_ranks.py", "tests/faults/test_io_errors.py",
    "tests/crash/test_kill_daemon.py", "tests/faults/test_corruption.py", "tests/end_to_end/test_client_page.py",
    "tests/end_to_end/test_examples.py",
    "tests/bench/test_tiers.py", "tests/end_to_end/test_finetune.py", "tests/properties/test_exact_model.py",
    "tests/crash/test_canaries.py", "tests/end_to_end/test_torture.py", "tests/cli/test_import.py", "tests/cli/test_signals.py",
    "tests/crash/test_crash_states.py", "tests/client/hf/test_import_kills.py", "tests/client/hf/test_versions.py",
    "tests/crash/test_pmem_states.py", "tests/end_to_end/test_wrong_arguments.py",
)  # fmt: skip
"""Those that take more than 15 s, longest first. Workers take them in this order and then all others, so that none works alone at
the end."""

left_out: Counter[str] = Counter()
"""File -> its tests that only `make soak` runs."""
collected: Counter[str] = Counter()
"""File -> its tests."""


@pytest.fixture(autouse=True)
def _signals_of_a_command() -> Iterator[None]:
    """What a command that ran in the test's own process did with signals ends with the test, as it ends with a process."""
    yield
    signals._ending.give_back()
    signals._ending = signals._Ending()
    for number, handler in HANDLERS.items():
        if signal.getsignal(number) != handler:
            signal.signal(number, handler)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """torch computes on one thread: those of small tensors only wait for each other, and some sums depend on how many there are."""
    with trial.one_thread():
        yield


@pytest.fixture
def paramstore(monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """Runs `paramstore` with these words in this process; gives the exit code."""

    def run(*words: str) -> int:
        monkeypatch.setattr(sys, "argv", ["paramstore", *words])
        try:
            main()
        except SystemExit as ended:
            return int(ended.code or 0)
        return 0

    return run


@pytest.hookimpl(tryfirst=True)  # before what is left out is gone
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        collected[_file(item)] += 1
        left_out[_file(item)] += item.get_closest_marker("soak") is not None
    if hasattr(config, "workerinput"):
        places = {file: place for place, file in enumerate(LONG_FILES)}
        items.sort(key=lambda item: places.get(_file(item), len(places)))


def pytest_sessionfinish(session: pytest.Session) -> None:
    output = getattr(session.config, "workeroutput", None)
    if output is not None:
        output["left_out"], output["collected"] = dict(left_out), dict(collected)


@pytest.hookimpl(optionalhook=True)  # of xdist
def pytest_testnodedown(node: Any) -> None:
    """Every worker has collected the same."""
    output = getattr(node, "workeroutput", {})
    left_out.update({file: count for file, count in output.get("left_out", {}).items() if file not in left_out})
    collected.update({file: count for file, count in output.get("collected", {}).items() if file not in collected})


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Says how many tests of how many ran, where a file is a sample of what `make soak` runs."""
    if config.option.markexpr != "not soak" or not left_out.total():
        return
    terminalreporter.write_line(f"left to `make soak`: {left_out.total()} of {collected.total()} tests")
    for file, count in sorted(left_out.items()):
        if count:
            terminalreporter.write_line(f"  {file}: {collected[file] - count} of {collected[file]} ran")


def _file(item: pytest.Item) -> str:
    return item.nodeid.partition("::")[0]
