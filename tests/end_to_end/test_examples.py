"""The README's example runs as it stands, against a daemon that it starts itself, and the figures it can ask for are documented."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

import paramstore as ps
from paramstore.sizes import parse_size

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
QUARTERS = {
    "bf16": "--host-budget 8MiB", "fp8": "--host-budget 2MiB --expert-memory 6", "mxfp4": "--host-budget 2MiB --expert-memory 1",
}  # fmt: skip
"""A format of `examples/tiny_chat.py` -> options of a run that give it a quarter of its experts' bytes. Quantized ones take memory
twice: packed in the daemon, which has 2 MiB at least, and unpacked in the process that computes."""
PLANNED = re.compile(
    r"paramstore: \S+: (\d+) experts, (.*?): (\d+) stay in memory of (.*?) host budget, the others stream from [^;,]*"
    r"(?:, \d+ of them unpacked in (.*?) of this process)?; up to"
)
"""The first line of a run: how many experts, their bytes; how many stay, the daemon's bytes, those unpacked."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the example runs."""
    return tmp_path_factory.mktemp("ex")


def surroundings() -> dict[str, str]:
    """The environment of a user, who has this checkout installed."""
    paths = [str(path) for path in (ROOT, ROOT / "client", ROOT / "native", ROOT / "testkit")]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PARAMSTORE_")}
    environment["PYTHONPATH"] = os.pathsep.join([*paths, *filter(None, [os.environ.get("PYTHONPATH")])])
    return environment


def run_example(folder: Path, example: Path = EXAMPLE, *arguments: str) -> subprocess.CompletedProcess[str]:
    """An example as a user runs it."""
    return run_python(folder, str(example), *arguments)


def run_python(folder: Path, *arguments: str, timeout_s: float = 100.0) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments], cwd=folder, env=surroundings(), stdin=subprocess.DEVNULL, capture_output=True, text=True,
        timeout=timeout_s, check=False,
    )  # fmt: skip


def interrupt_example(
    folder: Path, example: Path, *, at: str, arguments: Sequence[str] = (), number: signal.Signals = signal.SIGINT
) -> tuple[int, str]:
    """Sends Ctrl-C, or another signal, to an example once it has printed `at`; gives its exit code and what it wrote to stderr."""
    with (folder / "stderr").open("w+") as errors, subprocess.Popen(
        [sys.executable, str(example), *arguments], cwd=folder, env=surroundings(), stdout=subprocess.PIPE, stderr=errors
    ) as process:
        assert process.stdout is not None
        said = b""
        while at.encode() not in said:
            said += (piece := os.read(process.stdout.fileno(), 4096))
            assert piece, f"it ended before:\n{said.decode()}\n{(folder / 'stderr').read_text()}"
        process.send_signal(number)
        process.stdout.read()
        code = process.wait(END_TIMEOUT_S)
        errors.seek(0)
        return code, errors.read()


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
        assert lines[0] == "16 of 64 experts stand: 12 of 48 MiB, in a daemon of 14MiB"
        assert lines[-1] == "every token is that of the model in memory"
    assert sum(int(count) for count in re.findall(r"tokens, (\d+) MiB read", first.stdout)) > 12, "more than stands"
    assert re.findall(r"^'.*'$", first.stdout, re.MULTILINE) == re.findall(r"^'.*'$", again.stdout, re.MULTILINE)


def runs_in(folder: Path, argument: str) -> bool:
    """Whether a process runs in `folder` that has been given `argument`."""
    found = False
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended, or is another user's
            found |= (process / "cwd").resolve() == folder and argument in (process / "cmdline").read_text().split("\0")
    return found


@pytest.mark.slow
def test_decoding_through_a_buffer_gives_the_tokens_of_memory_counts_what_moved_and_ends_at_ctrl_c(folder: Path) -> None:
    example, directory = ROOT / "examples" / "decode_buffer.py", folder / "decode-run" / "store"
    try:
        assert interrupt_example(folder, example, at="experts stand", arguments=("--tokens", "2000"))[0] == 130
        done = run_example(folder, example)
    finally:
        end_daemon(directory)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == "16 of 64 experts stand: 12 of 48 MiB, in a daemon of 14MiB"
    assert lines[-1] == "every token is that of the model in memory"
    told = re.findall(r"  \d+\.\d tokens/s, (\d+) of (\d+) uses hit, (\d+) MiB moved into the buffer, (\d+) MiB read", done.stdout)
    assert len(told) == 3
    for hits, uses, moved, read in (map(int, numbers) for numbers in told):
        assert 0 < hits < uses
        assert moved > 12, "more than stands"
        assert 0 < read <= moved


@pytest.mark.slow
def test_a_model_that_is_trained_is_served_at_whole_steps_and_both_end_at_a_signal(folder: Path) -> None:
    example, directory = ROOT / "examples" / "train_and_serve.py", folder / "train-and-serve-run" / "store"
    try:
        for number in (signal.SIGINT, signal.SIGTERM):
            code, errors = interrupt_example(folder, example, at="[step ", arguments=("--steps", "1000"), number=number)
            assert (code, "Traceback" in errors) == (128 + number, False), errors
            assert not runs_in(folder, "--train"), "the trainer is gone"
        with ps.connect(directory) as store:
            (entry,) = store.namespaces()
        done = run_example(folder, example)
    finally:
        end_daemon(directory)
    assert done.returncode == 0, done.stderr
    line = "16 of 64 experts stand: 576 of 2304 KiB, in a daemon of 8MiB that trains 13 MiB"
    assert done.stdout.startswith(line), done.stdout.splitlines()[0]
    steps = [int(step) for step in re.findall(r"^\[step (\d+)\]", done.stdout, re.MULTILINE)]
    assert steps == sorted(steps)
    assert steps[-1] == entry["committed_step"] + 8
    ((tokens, count),) = re.findall(r"every token is that of its step in memory: (\d+) tokens of (\d+) steps\n$", done.stdout)
    assert int(count) == len(set(steps)) >= 3, done.stdout
    assert int(tokens) >= 24 * 2


@pytest.mark.soak
@pytest.mark.parametrize("kind", QUARTERS)
def test_a_checkpoint_that_is_made_on_the_spot_answers_with_a_quarter_of_its_experts_bytes(kind: str, folder: Path) -> None:
    made = run_python(folder, str(ROOT / "examples" / "tiny_chat.py"), f"tiny-{kind}", "--format", kind, timeout_s=600)
    assert made.returncode == 0, made.stderr
    command = f'run tiny-{kind} "What is a lease?" --temperature 0 --dir store-{kind} {QUARTERS[kind]}'
    assert f"$ paramstore {command}\n" in (ROOT / "docs" / "running.md").read_text()
    done = run_python(folder, "-m", "paramstore", *shlex.split(command))
    assert done.returncode == 0, done.stderr
    assert done.stdout == "A client's right to bytes in a slot; it ends with the client process.\n"
    planned = PLANNED.match(done.stderr)
    assert planned, done.stderr
    count, stay = map(int, planned.group(1, 3))
    experts_bytes, daemon_bytes, unpacked_bytes = (parse_size(size or "0") for size in planned.group(2, 4, 5))
    assert 0 < stay < count / 4
    assert 1 / 5 < (daemon_bytes + unpacked_bytes) / experts_bytes <= 1 / 4
    (read_mb,) = re.findall(r"; ([\d.]+) MB read from the volume; ", done.stderr)
    assert float(read_mb) * 1e6 > experts_bytes, "more than all experts once"
