"""`paramstore`: its commands and exit codes; how little it loads before it is asked for something."""

from __future__ import annotations

import inspect
import re
import runpy
import signal
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

import paramstore as package
from paramstore import errors
from paramstore.cli import main as main_module
from paramstore.cli.address import ADDRESS_HELP
from paramstore.cli.exits import exit_code
from paramstore.cli.main import app
from paramstore.cli.signals import end_as_interrupt

Run = Callable[..., int]
HEAVY = {"torch", "numpy", "lmdb", "matplotlib", "transformers", "asyncio", "rich"}
HELP_MODULES_MAX = 400
"""A third more than there are, the interpreter's and typer's own among them. rich would bring 150."""
HELP_OF_ALL = """
import sys
from paramstore.cli.main import app, main
helps = [(), *((command.name,) for command in app.registered_commands)]
for group in app.registered_groups:
    helps += [(group.name,), *((group.name, command.callback.__name__) for command in group.typer_instance.registered_commands)]
for words in helps:
    sys.argv = ["paramstore", *words, "--help"]
    try:
        main()
    except SystemExit as ended:
        assert not ended.code, words
sys.stderr.write(" ".join(sys.modules))
"""


def test_version_is_the_packages(paramstore: Run, capsys: pytest.CaptureFixture[str]) -> None:
    assert paramstore("--version") == 0
    assert capsys.readouterr().out == f"{package.__version__}\n"


def test_help_names_every_command(paramstore: Run, capsys: pytest.CaptureFixture[str]) -> None:
    assert paramstore("--help") == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    names = [command.name for command in app.registered_commands] + [group.name for group in app.registered_groups]
    assert {"serve", "status", "demo", "bench"} <= set(names)
    assert all(str(name) in captured.out for name in names)


@pytest.mark.parametrize("name", ["status", "stop", "verify", "import", "export"])
def test_every_command_that_asks_a_daemon_takes_an_address_or_a_directory(
    name: str, paramstore: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    assert paramstore(name, "--help") == 0
    assert ADDRESS_HELP in " ".join(capsys.readouterr().out.split())


def test_serve_names_every_policy_and_the_default(paramstore: Run, capsys: pytest.CaptureFixture[str]) -> None:
    assert paramstore("serve", "--help") == 0
    assert "schedule (the default), decayed_lfu or lru" in " ".join(capsys.readouterr().out.split())


def test_every_option_that_is_a_number_has_its_range_in_the_help() -> None:
    groups = [app, *(group.typer_instance for group in app.registered_groups)]
    numbers = {
        f"{command.callback.__name__} --{name}": parameter.default
        for group in groups for command in group.registered_commands
        for name, parameter in inspect.signature(command.callback).parameters.items()
        if re.search(r"\b(int|float)\b", parameter.annotation)
    }  # fmt: skip
    assert "demo --steps" in numbers
    assert [name for name, option in numbers.items() if option.min is None] == []


@pytest.mark.parametrize("words", [(), ("nonsense",), ("--nonsense",), ("status", "a", "b"), ("serve", "--dir")])
def test_a_wrong_command_line_is_a_usage_error_on_stderr(
    words: tuple[str, ...], paramstore: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    assert paramstore(*words) == 2
    captured = capsys.readouterr()
    if words:
        assert captured.out == ""
        assert captured.err != ""


@pytest.mark.slow
@pytest.mark.parametrize("words", [("--help",), ("serve", "--help"), ("status", "--help"), ("--version",)])
def test_help_loads_nothing_heavy(words: tuple[str, ...], modules_of: Callable[..., set[str]]) -> None:
    modules = modules_of(*words)
    assert "paramstore.cli.main" in modules
    assert not modules & HEAVY
    assert not {module for module in modules if module.startswith(("paramstore.daemon", "paramstore.engine", "paramstore_client"))}


@pytest.mark.slow
def test_the_help_of_all_commands_together_loads_little() -> None:
    """So each starts in a fraction of a second: nearly all of that is imports."""
    done = subprocess.run([sys.executable, "-c", HELP_OF_ALL], check=True, capture_output=True, text=True, timeout=60)
    modules = set(done.stderr.split())
    assert all(f"Usage: paramstore {name} [OPTIONS]" in done.stdout for name in ("serve", "import", "bench", "bench tiers"))
    assert not modules & HEAVY
    assert len(modules) < HELP_MODULES_MAX


@pytest.mark.slow
def test_a_command_that_asks_the_daemon_loads_no_torch(modules_of: Callable[..., set[str]]) -> None:
    modules = modules_of("status", "unix:///nowhere/paramstore.sock", code=3)
    assert "paramstore_client.client" in modules
    assert "torch" not in modules


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.ConfigError, 2), (errors.StoreUnavailable, 3), (errors.VersionMismatch, 3), (errors.CorruptRecord, 4),
        (errors.CatalogError, 1), (errors.CorruptCatalog, 4),
        (errors.VolumeError, 1), (errors.StoreLocked, 1), (errors.CapacityError, 1),
        (errors.StepFailed, 1), (errors.ParamStoreError, 1),
    ],
)  # fmt: skip
def test_every_error_has_its_exit_code(error: type[errors.ParamStoreError], code: int) -> None:
    assert exit_code(error("message")) == code


def test_a_typed_error_is_one_line_and_no_traceback(
    paramstore: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail() -> None:
        raise errors.CorruptRecord("key (1, 2): checksum")

    monkeypatch.setattr(main_module, "app", fail)
    assert paramstore() == 4
    assert capsys.readouterr().err == "paramstore: CorruptRecord: key (1, 2): checksum\n"


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (PermissionError(13, "Permission denied", "priv/x"), "PermissionError: [Errno 13] Permission denied: 'priv/x'"),
        (OSError("two\n  lines"), "OSError: two lines"),
    ],
)
def test_what_the_system_refuses_is_one_line_and_no_traceback(
    paramstore: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: OSError, line: str
) -> None:
    def fail() -> None:
        raise error

    monkeypatch.setattr(main_module, "app", fail)
    assert paramstore() == 1
    assert capsys.readouterr().err == f"paramstore: {line}\n"


def test_what_an_interrupt_becomes_on_its_way_is_no_error_of_its_own(
    paramstore: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt() -> None:
        end_as_interrupt()
        try:
            signal.raise_signal(signal.SIGINT)
        except KeyboardInterrupt:
            raise errors.StoreUnavailable("the client was interrupted while it read an answer") from None

    monkeypatch.setattr(main_module, "app", interrupt)
    assert paramstore() == 130
    assert capsys.readouterr().err == ""


@pytest.mark.slow
def test_importing_the_package_leaves_signals_and_every_other_module_alone() -> None:
    source = (
        "import signal, sys; before = [signal.getsignal(number) for number in signal.valid_signals()]; known = set(sys.modules); "
        "import paramstore; assert set(sys.modules) - known == {'paramstore'}, set(sys.modules) - known; "
        "import paramstore_client, paramstore.cli.main; "
        "assert [signal.getsignal(number) for number in signal.valid_signals()] == before"
    )
    subprocess.run([sys.executable, "-c", source], check=True, timeout=60)


def test_the_command_of_the_package_begins_where_the_module_does() -> None:
    scripts = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]["scripts"]
    assert scripts == {"paramstore": "paramstore.__main__:main"}


def test_the_package_runs_as_a_module(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.argv", ["paramstore", "--version"])
    monkeypatch.delitem(sys.modules, "paramstore.__main__", raising=False)  # another test may have imported it
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("paramstore", run_name="__main__")
    assert not ended.value.code
    assert package.__version__ in capsys.readouterr().out
