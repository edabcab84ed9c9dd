"""Which code runs: a native kernel where it can be had and gives torch's bits, else torch, and the log says which and why."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from paramstore_native.compiled import Unavailable, build
from paramstore_native.finder import SWITCH_VARIABLE, Finder

SOURCE = "int paramstore_answer(void) { return 42; }"


@pytest.fixture(autouse=True)
def log(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path) -> pytest.LogCaptureFixture:
    monkeypatch.delenv(SWITCH_VARIABLE, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    caplog.set_level(logging.INFO)
    return caplog


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "answer.c"
    path.write_text(SOURCE)
    if isinstance(made := build(path), Unavailable):
        pytest.skip(made.reason)
    return path


def answers(source: Path, objection: str = "") -> Finder[Path]:
    """A finder whose kernel is the library's path."""
    return Finder("the answer", source, lambda library: library, lambda _: objection)


def test_a_kernel_is_found_once(source: Path, log: pytest.LogCaptureFixture) -> None:
    finder = answers(source)
    assert finder.known_state() == ""
    first = finder.kernel()
    assert first is not None
    assert first.is_relative_to(source.parent / "cache")
    assert finder.kernel() is first
    assert finder.known_state() == "native"
    assert [record.message for record in log.records] == ["the answer runs in the native kernel"]


def test_it_can_be_left_out(source: Path, log: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SWITCH_VARIABLE, "0")
    finder = answers(source)
    assert finder.kernel() is None
    assert finder.known_state() == "torch (PARAMSTORE_NATIVE=0)"
    assert [record.message for record in log.records] == ["the answer runs in torch: PARAMSTORE_NATIVE=0"]


def test_a_kernel_that_differs_from_torch_is_not_used(source: Path) -> None:
    finder = answers(source, objection="3 of 5 elements differ")
    assert finder.kernel() is None
    assert finder.known_state() == "torch (3 of 5 elements differ)"


@pytest.mark.parametrize("error", [OSError("no library"), AttributeError("no function")])
def test_a_file_that_is_no_library_is_a_reason(source: Path, error: Exception) -> None:
    def make(library: Path) -> Path:
        raise error

    finder = Finder("the answer", source, make, lambda _: "")
    assert finder.kernel() is None
    assert "cannot be loaded: no " in finder.known_state()


def test_a_source_that_cannot_be_built_is_a_reason(source: Path) -> None:
    source.write_text("this is not C")
    finder = answers(source)
    assert finder.kernel() is None
    assert "refuses answer.c" in finder.known_state()
