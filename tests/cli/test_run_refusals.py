"""What `paramstore run` refuses by its words alone: at once, before anything that takes seconds is imported."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

Run = Callable[..., int]
SLOW = {"torch", "transformers"}


def test_help_and_a_wrong_path_load_no_torch(modules_of: Callable[..., set[str]]) -> None:
    assert not modules_of("run", "--help") & {*SLOW, "numpy"}
    assert not modules_of("run", "/no/such/model", "hi", code=1) & SLOW


@pytest.fixture
def words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[str, ...]:
    """A run of a model whose directory is there, beside a file."""
    monkeypatch.chdir(tmp_path)
    Path("model").mkdir()
    Path("README.md").touch()
    return "run", "./model", "hi"


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        (("--dir", "README.md"), "ConfigError: --dir README.md: it is not a directory"),
        (("--dir", "none/store"), "ConfigError: --dir none/store: it cannot be made, as there is no directory "),
        (("--follow",), "ConfigError: --follow without --dir: "),
    ],
)
def test_a_wrong_option_is_told(
    given: tuple[str, ...], problem: str, words: tuple[str, ...], paramstore: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    assert paramstore(*words, *given) == 2
    assert problem in capsys.readouterr().err


@pytest.mark.slow
def test_a_file_in_place_of_the_store_is_told_before_torch_is_loaded(
    words: tuple[str, ...], modules_of: Callable[..., set[str]]
) -> None:
    assert not modules_of(*words, "--dir", "README.md", code=2) & SLOW


def test_a_path_that_is_not_there_is_none_of_the_hubs_models(
    words: tuple[str, ...], paramstore: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    assert paramstore("run", "./nosuch/path", "hi") == 1
    assert "CheckpointError: './nosuch/path': there is no such directory: give the directory that has " in capsys.readouterr().err
