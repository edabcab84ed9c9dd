"""`paramstore serve`: which settings reach the daemon, what is refused, how it starts and ends."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from paramstore.config import Config
from paramstore.daemon import server
from paramstore.errors import StoreLocked
from paramstore.storage.format.structures import SUPERBLOCK_BYTES, SUPERBLOCK_COPIES
from paramstore.storage.lock import StoreLock
from paramstore.storage.volume.backing_file import volume_path
from paramstore_testkit.processes.daemon_process import QUIET, DaemonProcess

Run = Callable[..., int]


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Config]]:
    """The settings that `serve` would have served; nothing is."""
    configs: list[Config] = []
    monkeypatch.setattr(server, "run", configs.append)
    root = logging.getLogger()
    before = root.level, list(root.handlers)
    yield configs
    root.setLevel(before[0])
    root.handlers[:] = before[1]


def test_every_flag_reaches_its_setting(paramstore: Run, served: list[Config], tmp_path: Path) -> None:
    words = (
        "--dir", str(tmp_path), "--volume", "a", "--volume", "pmem:b", "--add-volume", "c", "--volume-size", "2TiB",
        "--host-budget", "1.5GiB", "--gradient-budget", "8MB", "--socket", "s", "--policy", "lru",
    )  # fmt: skip
    assert paramstore("serve", *words) == 0
    (config,) = served
    assert config == Config(
        dir=tmp_path, volumes=(Path("a"), Path("pmem:b")), add_volumes=(Path("c"),), volume_size_bytes=2 << 40,
        host_budget_bytes=3 << 29, gradient_budget_bytes=8_000_000, socket=Path("s"), policy=type(config.policy)(name="lru"),
    )  # fmt: skip


def test_what_is_not_given_has_its_default(paramstore: Run, served: list[Config]) -> None:
    assert paramstore("serve") == 0
    assert served == [Config()]


def test_flags_come_before_variables_and_those_before_the_file(
    paramstore: Run, served: list[Config], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "settings.toml"
    file.write_text('host_budget = "1GiB"\nvolume_size = "1GiB"\ngradient_budget = "1GiB"\n[policy]\nbeta = 0.25\n')
    monkeypatch.setenv("PARAMSTORE_HOST_BUDGET", "2GiB")
    monkeypatch.setenv("PARAMSTORE_VOLUME_SIZE", "2GiB")
    assert paramstore("serve", "--config", str(file), "--host-budget", "3GiB", "--policy", "lru") == 0
    (config,) = served
    assert (config.host_budget_bytes, config.volume_size_bytes, config.gradient_budget_bytes) == (3 << 30, 2 << 30, 1 << 30)
    assert (config.policy.name, config.policy.beta) == ("lru", 0.25)


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (("--host-budget", "lots"), "flag --host-budget: host_budget_bytes: size 'lots': write a number"),
        (("--host-budget", "0"), "flag --host-budget: host_budget_bytes='0': must be a size of at least 2 MiB"),
        (("--volume-size", "10 cm"), "flag --volume-size: volume_size"),
        (("--dir", ""), "flag --dir: dir='': must be a path, and not empty"),
        (("--socket", ""), "flag --socket: socket='': must be a path, and not empty"),
        (("--volume", ""), "flag --volume: volumes=['']: must be a list of paths, none of them empty"),
        (("--volume", "pmem:"), "flag --volume: volumes=['pmem:']: must be"),
        (("--volume", "a", "--volume", "pmem:./a"), "flag --volume: volumes: a and pmem:./a are one directory"),
        (("--add-volume", "a", "--add-volume", "./a"), "flag --add-volume: add_volumes: a and a are one directory"),
        (("--gradient-budget", "-1GiB"), "gradient_budget"),
        (("--policy", "clever"), "policy.name='clever'"),
        (("--config", "/nowhere/settings.toml"), "/nowhere/settings.toml"),
        (("--log-level", "loud"), "--log-level 'loud': use debug"),
        (("--nonsense",), "--nonsense"),
        (("surplus",), "surplus"),
    ],
)
def test_a_wrong_setting_is_a_usage_error_that_names_it(
    words: tuple[str, ...], reason: str, paramstore: Run, served: list[Config], capsys: pytest.CaptureFixture[str]
) -> None:
    assert paramstore("serve", *words) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert reason in captured.err
    assert served == []


def test_a_wrong_variable_is_a_usage_error(
    paramstore: Run, served: list[Config], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PARAMSTORE_IO_WORKERS", "many")
    assert paramstore("serve") == 2
    assert "variable PARAMSTORE_IO_WORKERS: io_workers='many': must be an integer from 1 to 64" in capsys.readouterr().err


def test_a_directory_that_is_a_file_is_a_usage_error(
    paramstore: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(server, "harden", lambda: None)
    (tmp_path / "file").touch()
    for place in ("file", "file/below"):
        assert paramstore("serve", "--dir", str(tmp_path / place)) == 2
        assert f"ConfigError: dir {tmp_path / place}: it is not a directory" in capsys.readouterr().err


@pytest.mark.slow
def test_damage_ends_it_with_4_and_what_is_missing_or_foreign_with_1(
    tmp_path: Path, paramstore: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(server, "harden", lambda: None)
    monkeypatch.setattr(server, "_serve_until", _serve_nothing)
    monkeypatch.setenv("PARAMSTORE_PREFILL", "0")
    words = ("serve", "--log-level", "error", "--host-budget", "32MiB", "--dir")
    assert paramstore(*words, str(tmp_path / "a")) == 0
    assert paramstore(*words, str(tmp_path / "b")) == 0
    file = volume_path(tmp_path / "a" / "volume", 0)
    whole = file.read_bytes()

    def ending(data: bytes) -> tuple[int, str]:
        file.write_bytes(data)
        code = paramstore(*words, str(tmp_path / "a"))
        return code, capsys.readouterr().err.partition(": ")[2].partition(":")[0]

    zeroed = bytearray(whole)
    for offset_bytes in SUPERBLOCK_COPIES:
        zeroed[offset_bytes : offset_bytes + SUPERBLOCK_BYTES] = bytes(SUPERBLOCK_BYTES)
    assert ending(bytes(zeroed)) == (4, "CorruptRecord")
    assert ending(whole[:-4096]) == (4, "CorruptRecord")
    assert ending(whole[:100]) == (4, "CorruptRecord")
    assert ending(volume_path(tmp_path / "b" / "volume", 0).read_bytes()) == (1, "VolumeError")
    file.unlink()
    assert paramstore(*words, str(tmp_path / "a")) == 1
    file.write_bytes(whole)
    assert paramstore(*words, str(tmp_path / "a")) == 0


async def _serve_nothing(*args: object) -> None:
    """The store opened: that is all that is asked for."""


def test_a_locked_directory_ends_with_the_holder_named(
    paramstore: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(config: Config) -> None:
        raise StoreLocked("store directory d is in use by process 7: connect to that daemon")

    monkeypatch.setattr(server, "run", run)
    assert paramstore("serve", "--dir", str(tmp_path), "--log-level", "error") == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "StoreLocked: store directory d is in use by process 7" in captured.err


@pytest.mark.slow
def test_a_path_that_the_locale_has_no_letters_for_is_served_and_shown(tmp_path: Path) -> None:
    ascii_only = {"LC_ALL": "C", "PYTHONUTF8": "0"}
    directory = tmp_path / "störe"
    with DaemonProcess(directory, "--host-budget", "32MiB", environment={**QUIET, **ascii_only}) as daemon:
        assert "st\\udcc3\\udcb6re" in daemon.stdout
        calls = {"status": "volume-000.data", "status --json": "st\\u00f6re", "verify": "none damaged", "stop": "stopped daemon"}
        for words, shown in calls.items():
            command = [sys.executable, "-m", "paramstore", *words.split(), str(directory)]
            environment = {**os.environ, **ascii_only, "COLUMNS": "300"}
            done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=environment)
            assert (done.returncode, done.stderr) == (0, ""), words
            assert shown in done.stdout
        assert daemon.wait() == 0
    assert "Traceback" not in daemon.stderr


@pytest.mark.slow
def test_ctrl_c_ends_it_quietly_and_gives_the_directory_back(tmp_path: Path) -> None:
    with DaemonProcess(tmp_path / "store", "--log-level", "warning") as daemon:
        daemon.signal(signal.SIGINT)
        assert daemon.wait(20.0) == 0
    assert daemon.stdout == f"ready {daemon.address}\n"
    assert not [line for line in daemon.stderr.splitlines() if "pages:" not in line]
    assert not daemon.socket.exists()
    StoreLock.take(daemon.directory).release()
