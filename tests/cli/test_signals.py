"""Signals end every command, at any moment from its first line on: never lost, never a traceback, and nothing left behind."""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

import paramstore_client as ps
from paramstore.cli import signals
from paramstore.cli.main import app
from paramstore_client.connection.inbox import Inbox
from paramstore_testkit.processes.forked_daemon import ForkedDaemon

TRIES = int(os.environ.get("PARAMSTORE_SIGNAL_TRIES", "3"))
SEED = int(os.environ.get("PARAMSTORE_SIGNAL_SEED", "1"))
NUMBERS = (signal.SIGINT, signal.SIGTERM)
FIRST_LINE = b" paramstore.cli\n"
"""The first import of `paramstore/__main__.py` is over: what ran before it is Python's, and a look for a file."""
END_S = 60.0
SLOW_S, QUICK_S = 4.0, 0.4
"""The moments lie between the first line and this: commands that import torch, and those that do not."""
TRACE = str(Path(__file__).parents[2] / "bench" / "traces" / "decode-1.trace")


def names_of(commands: typer.Typer, *before: str) -> Iterator[str]:
    """Every command line that there is, without its arguments."""
    for command in commands.registered_commands:
        assert command.callback is not None
        yield " ".join((*before, command.name or command.callback.__name__))
    for group in commands.registered_groups:
        assert group.typer_instance is not None
        yield from names_of(group.typer_instance, *before, str(group.name))


COMMANDS = {
    "serve": (("--dir", "{new}", "--host-budget", "32MiB"), QUICK_S),
    "status": (("{store}",), QUICK_S),
    "stop": (("{new}",), QUICK_S),
    "verify": (("{store}", "--rate", "1B"), QUICK_S),
    "fsck": (("--dir", "{new}"), QUICK_S),
    "plan": (("--layers", "48", "--experts", "128", "--field", "w=64x64"), QUICK_S),
    "import": (("{checkpoint}", "--namespace", "moe", "--socket", "{store}"), SLOW_S),
    "export": (("moe", "--model", "{checkpoint}", "--out", "{new}", "--socket", "{store}"), SLOW_S),
    "demo": (("--quick", "--dir", "{new}"), SLOW_S),
    "run": (("{checkpoint}", "hello", "--dir", "{new}/s"), SLOW_S),
    "serve-model": (("{checkpoint}", "--port", "0", "--dir", "{new}/s"), SLOW_S),
    "trace record": (("{checkpoint}", "{new}/t.trace", "--socket", "{store}"), SLOW_S),
    "trace replay": ((TRACE,), SLOW_S),
    "trace plot": ((TRACE, "--out", "{new}/p.png"), SLOW_S),
    "bench tiers": (("--quick", "--dir", "{new}"), SLOW_S),
}
"""Arguments with which each does what it is for, and when it is told to end."""
ENDS_WITH = {
    "serve": 0, "status": 0, "stop": 3, "fsck": 2, "plan": 0, "import": 1, "export": 1, "run": 1, "serve-model": 1,
    "trace record": 1,
}  # fmt: skip
"""How those end that are over so soon: a signal that comes while the process is being taken down is nobody's. `serve` ends so
by one."""
TALKATIVE = {*ENDS_WITH, "demo"}
"""Those that may have said something before; what the others say, they say of the signal."""


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A store that is served."""
    with ForkedDaemon(tmp_path_factory.mktemp("s") / "store", "--host-budget", "32MiB") as daemon:
        yield daemon.directory


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As much of one as is looked at while transformers is imported."""
    directory = tmp_path_factory.mktemp("checkpoint")
    (directory / "config.json").write_text(json.dumps({"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"]}))
    return directory


def processes_of(directory: Path) -> list[str]:
    """Command lines that name a place in `directory`."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                line = (entry / "cmdline").read_bytes()
            except OSError:
                continue  # it has ended
            if os.fsencode(directory) in line:
                found.append(line.decode().replace("\0", " "))
    return found


def told_to_end(words: list[str], number: signal.Signals, *, after_s: float) -> tuple[int | None, str]:
    """(how the signal ended the command, None if it came too late; what was said on stderr). It comes `after_s` behind the
    first line."""
    command = [sys.executable, "-X", "importtime", "-m", "paramstore", *words]
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, bufsize=0)
    try:
        assert process.stderr is not None
        while not (line := process.stderr.readline()).endswith(FIRST_LINE):
            assert line, "it ended before its first line"
        is_over = True
        try:
            _, said = process.communicate(timeout=after_s)
        except subprocess.TimeoutExpired:
            is_over = process.poll() is not None
            process.send_signal(number)
            _, said = process.communicate(timeout=END_S)
    finally:
        process.kill()
        process.wait()
    lines = (line for line in said.decode().splitlines(keepends=True) if not line.startswith("import time:"))
    return None if is_over else process.returncode, "".join(lines)


def test_every_command_has_a_line_here() -> None:
    assert set(COMMANDS) == set(names_of(app))


@pytest.mark.slow
@pytest.mark.parametrize("name", COMMANDS)
def test_a_signal_at_any_moment_ends_a_command(
    name: str, store: Path, checkpoint: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    rng = random.Random(f"{name} {SEED}")
    words, until_s = COMMANDS[name]
    for count in range(TRIES):
        new = tmp_path_factory.mktemp("n")
        number, after_s = rng.choice(NUMBERS), rng.uniform(0.0, until_s)
        line = [*name.split(), *(word.format(store=store, checkpoint=checkpoint, new=new) for word in words)]
        code, said = told_to_end(line, number, after_s=after_s)
        shown = f"try {count} of seed {SEED}: {number.name} after {after_s:.3f} s gave {code} and\n{said}"
        assert "Traceback" not in said, shown
        assert "Exception ignored" not in said, shown
        assert code in (None, -number, ENDS_WITH.get(name)), shown
        assert code != -number or said == "" or name in TALKATIVE, shown
        assert processes_of(new) == [], shown
        assert not [path for path in new.iterdir() if path.name.startswith("bench-")], shown


def told_here(number: signal.Signals = signal.SIGINT) -> None:
    """The signal comes in this process: what it raises is raised out of here, or later."""
    signal.raise_signal(number)


def wait_for_interrupt() -> None:
    """Returns after END_S, if nothing is raised before."""
    threading.Event().wait(END_S)


@pytest.mark.parametrize("number", signals.ENDING)
def test_a_signal_is_an_interrupt_and_the_next_one_nothing(number: signal.Signals) -> None:
    signals.end_as_interrupt()
    with pytest.raises(KeyboardInterrupt):
        told_here(number)
    told_here(signal.SIGTERM)
    told_here(signal.SIGINT)
    assert signals.told() == number


class Made:
    """Something that would have no owner if its making were interrupted."""

    def __init__(self) -> None:
        told_here()
        self.is_whole = True


def test_an_interrupt_waits_until_what_is_being_made_is_whole() -> None:
    signals.end_as_interrupt()
    made = []
    with pytest.raises(KeyboardInterrupt):  # noqa: PT012 - it comes while nothing is done
        made.append(Made())
        wait_for_interrupt()
    assert made[0].is_whole


def test_an_interrupt_waits_for_no_making_that_takes_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signals, "PUT_OFFS_MAX", 2)

    class Slow:
        def __init__(self) -> None:
            told_here()
            wait_for_interrupt()

    signals.end_as_interrupt()
    with pytest.raises(KeyboardInterrupt):
        Slow()


def test_an_interrupt_that_a_callback_swallows_comes_again() -> None:
    class Referent:
        pass

    referent = Referent()
    reference = weakref.ref(referent, lambda _: told_here())
    signals.end_as_interrupt()
    with pytest.raises(KeyboardInterrupt):  # noqa: PT012 - it comes while nothing is done
        del referent
        wait_for_interrupt()
    assert reference() is None


@pytest.mark.slow
@pytest.mark.parametrize(("owner", "name"), [(socket.socket, "sendmsg"), (Inbox, "read")])
def test_an_interrupt_breaks_no_connection(store: Path, owner: type, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    act, told = getattr(owner, name), list[str]()

    def told_before_it(*arguments: Any) -> Any:
        told.append(name)
        told_here()
        return act(*arguments)

    with ps.connect(str(store)) as client:
        monkeypatch.setattr(owner, name, told_before_it)
        signals.end_as_interrupt()
        with pytest.raises(KeyboardInterrupt):  # noqa: PT012 - it comes while nothing is done
            client.stats()
            assert told, f"the client does not use {name}: no signal came"
            wait_for_interrupt()
        assert client.stats()["namespaces"] == {}


def test_what_is_under_way_is_stopped_once_and_then_the_command() -> None:
    stopped: list[str] = []
    signals.end_as_interrupt()
    with signals.stopping(lambda: stopped.append("first")):
        told_here()
    with pytest.raises(KeyboardInterrupt), signals.stopping(lambda: stopped.append("second")):  # noqa: PT012 - the second signal
        told_here()
        assert signals.told() is None
        told_here()
    assert stopped == ["first", "second"]
    assert signals.told() == signal.SIGINT


@pytest.mark.parametrize("is_over", [True, False])
def test_what_is_over_is_not_stopped_nor_by_another_signal_than_ctrl_c(is_over: bool) -> None:
    stopped: list[str] = []
    signals.end_as_interrupt()
    with pytest.raises(KeyboardInterrupt):  # noqa: PT012 - one of two signals
        with signals.stopping(lambda: stopped.append("it")):
            if not is_over:
                told_here(signal.SIGTERM)
        told_here()
    assert stopped == []


def test_what_is_ignored_stays_so() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signals.end_as_interrupt()
    told_here(signal.SIGHUP)
    assert signals.told() is None


def test_without_a_signal_all_is_as_before() -> None:
    hook = sys.unraisablehook
    signals.end_as_interrupt()
    signals.end_as_told()
    assert {signal.getsignal(number) for number in (*signals.ENDING, signal.SIGALRM)} == {signal.SIG_DFL}
    assert sys.unraisablehook is hook
