"""The README's example runs as it stands, against a daemon that it starts itself, and the figures it can ask for are documented."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

import paramstore as ps

ROOT = Path(__file__).parent.parent.parent
EXAMPLE = ROOT / "examples" / "quickstart.py"
END_TIMEOUT_S = 30.0
OUTPUT = """\
step 0: [1.0, 2.0]
step 1: [0.494140625, 1.4921875]
the reader moves on to step 1
"""
NAMED_BY_USERS = {"volumes": "N", "queues": "LANE", "namespaces": "NAME"}
"""Mappings of the statistics whose keys are no words of ours, and what the document calls them."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the example runs."""
    return tmp_path_factory.mktemp("ex")


def run_example(folder: Path, example: Path = EXAMPLE) -> subprocess.CompletedProcess[str]:
    """An example as a user runs it."""
    paths = [str(path) for path in (ROOT, ROOT / "client", ROOT / "native")]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PARAMSTORE_")}
    environment["PYTHONPATH"] = os.pathsep.join([*paths, *filter(None, [os.environ.get("PYTHONPATH")])])
    return subprocess.run(
        [sys.executable, str(example)], cwd=folder, env=environment, capture_output=True, text=True, timeout=100, check=False
    )


@pytest.fixture
def run_again(folder: Path) -> Callable[[], str]:
    """Runs the example once more; gives what it printed."""

    def run() -> str:
        done = run_example(folder)
        assert (done.returncode, done.stderr) == (0, "")
        return done.stdout

    return run


@pytest.fixture(scope="module")
def example(folder: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """(what the example printed, the statistics of its daemon afterwards)."""
    done = run_example(folder)
    log = folder / "quickstart-data" / "daemon.log"
    try:
        assert done.returncode == 0, f"{done.stderr}\n{log.read_text() if log.exists() else 'no daemon log'}"
        with ps.connect(folder / "quickstart-data" / "run" / "paramstore.sock") as store:
            yield done.stdout, store.stats()
    finally:
        end_daemon(folder / "quickstart-data")


def end_daemon(directory: Path) -> None:
    """Ends the daemon of a store, if it runs, as the page says: it is gone on return."""
    command = [sys.executable, "-m", "paramstore", "stop", str(directory)]
    assert subprocess.run(command, timeout=END_TIMEOUT_S, check=False).returncode in (0, 3)


def test_the_readme_shows_the_example_as_it_is() -> None:
    blocks = re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), flags=re.DOTALL | re.MULTILINE)
    assert blocks == [EXAMPLE.read_text()]


@pytest.mark.slow
def test_the_readme_shows_what_the_example_prints(example: tuple[str, dict[str, Any]]) -> None:
    printed, _ = example
    assert printed == OUTPUT
    assert f"```\n{OUTPUT}```" in (ROOT / "README.md").read_text()


@pytest.mark.slow
def test_the_example_can_be_run_again(example: tuple[str, dict[str, Any]], run_again: Callable[[], str]) -> None:
    first, _ = example
    last_line = first.splitlines()[1]
    assert run_again().splitlines()[0] == last_line == "step 1: [0.494140625, 1.4921875]"
    assert run_again().splitlines()[2] == "the reader moves on to step 3"


@pytest.mark.slow
def test_every_figure_of_the_statistics_is_in_the_protocol(example: tuple[str, dict[str, Any]]) -> None:
    _, stats = example
    document = (ROOT / "docs" / "protocol.md").read_text().partition("\n## Stats\n")[2]
    missing = {key for key in names_in(stats) if f"`{key}`" not in document and f"`tiers.{key}`" not in document}
    assert missing - stats.keys() == set()
    assert [section for section in stats if f"`{section}" not in document] == []


def names_in(mapping: Mapping[str, Any], section: str = "") -> Iterator[str]:
    """Every key of nested mappings but those that users choose."""
    for key, value in mapping.items():
        if section not in NAMED_BY_USERS:
            yield key
        if isinstance(value, Mapping):
            yield from names_in(value, key)


@pytest.mark.slow
def test_serving_through_a_ring_gives_the_tokens_of_memory_and_reads_what_does_not_stand(folder: Path) -> None:
    try:
        first, again = (run_example(folder, ROOT / "examples" / "serve_ring.py") for _ in range(2))
    finally:
        end_daemon(folder / "serve-run" / "store")
    for done in (first, again):
        assert done.returncode == 0, done.stderr
        lines = done.stdout.splitlines()
        assert lines[0] == "16 of 64 experts stand: 12 of 48 MiB"
        assert lines[-1] == "every token is that of the model in memory"
    assert sum(int(count) for count in re.findall(r"tokens, (\d+) MiB read", first.stdout)) > 12, "more than stands"
    assert re.findall(r"^'.*'$", first.stdout, re.MULTILINE) == re.findall(r"^'.*'$", again.stdout, re.MULTILINE)
