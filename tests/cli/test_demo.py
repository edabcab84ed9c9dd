"""`paramstore demo`: what it refuses, what it prints where, and how it ends."""

import json
import signal
import sys
from dataclasses import dataclass

import pytest

from paramstore.cli.main import main
from paramstore.cli.signals import ENDING


@pytest.fixture
def command(monkeypatch):
    """Runs `paramstore demo` with these words; returns the exit code."""

    def run(*words: str) -> int:
        monkeypatch.setattr(sys, "argv", ["paramstore", "demo", *words])
        with pytest.raises(SystemExit) as ended:
            main()
        return ended.value.code

    return run


@dataclass
class Told:
    """As much of a report as `--json` needs."""

    is_ok: bool

    def to_dict(self):
        return {"ok": self.is_ok}


@pytest.fixture
def told(monkeypatch):
    """Has the story told at once; remembers with what."""
    calls = []

    def answer(is_ok: bool):
        def tell(settings, directory, *, progress, keeps_daemon):
            calls.append((settings, directory, keeps_daemon))
            return Told(is_ok)

        monkeypatch.setattr("paramstore.demo.acts.tell", tell)
        return calls

    return answer


@pytest.mark.parametrize(
    "words", [("--steps", "5"), ("--quick", "--steps", "29"), ("--steps", "many"), ("--seed", "-1"), ("--nonsense",)]
)
def test_wrong_options_are_usage_errors(command, words, tmp_path):
    assert command(*words, "--dir", str(tmp_path / "run")) == 2
    assert not (tmp_path / "run").exists()


def test_directory_of_others_is_a_usage_error(command, capsys, tmp_path):
    (tmp_path / "thesis.tex").write_text("precious")
    assert command("--quick", "--dir", str(tmp_path)) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "not the demo's" in captured.err
    assert (tmp_path / "thesis.tex").read_text() == "precious"


@pytest.mark.parametrize("place", ["/proc/zz", "file/b", "file", "d" * 200, "d" * 300])
def test_a_directory_that_cannot_be_is_a_usage_error(command, capsys, tmp_path, place):
    (tmp_path / "file").write_text("")
    assert command("--quick", "--dir", str(tmp_path / place)) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(f"paramstore: ConfigError: --dir {tmp_path / place}: ")
    assert len(captured.err.splitlines()) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_json_alone_is_on_stdout(command, told, capsys, tmp_path):
    told(is_ok=True)
    assert command("--json", "--dir", str(tmp_path)) == 0
    assert json.loads(capsys.readouterr().out) == {"ok": True}


def test_a_difference_is_a_failure(command, told, tmp_path):
    told(is_ok=False)
    assert command("--json", "--dir", str(tmp_path)) == 1


def test_options_reach_the_story(command, told, tmp_path):
    calls = told(is_ok=True)
    command("--json", "--quick", "--steps", "40", "--seed", "7", "--keep-daemon", "--dir", str(tmp_path))
    ((settings, directory, keeps_daemon),) = calls
    assert (settings.steps, settings.seed, settings.shape.layers) == (40, 7, 4)
    assert directory == tmp_path
    assert keeps_daemon


@pytest.mark.parametrize("number", ENDING)
def test_every_signal_ends_it_as_ctrl_c_does(command, monkeypatch, tmp_path, number):
    tidied = []

    def tell(*args, **options):
        try:
            signal.raise_signal(number)
        finally:
            tidied.append(number)

    monkeypatch.setattr("paramstore.demo.acts.tell", tell)
    assert command("--json", "--dir", str(tmp_path)) == 128 + number
    assert tidied == [number]
