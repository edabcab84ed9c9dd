"""A library is built once, appears whole, and what stands in the way is a reason, never an error."""

from __future__ import annotations

import ctypes
import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from paramstore_native import compiled
from paramstore_native.compiled import COMPILERS, Unavailable, build

SOURCE = '__attribute__((visibility("default"))) int answer(void) { return 42; }\n'
needs_compiler = pytest.mark.skipif(not any(map(shutil.which, COMPILERS)), reason=f"no C compiler is found: {', '.join(COMPILERS)}")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    file = tmp_path / "answer.c"
    file.write_text(SOURCE)
    return file


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache" / "paramstore"


def reason(source: Path, cache: Path) -> str:
    built = build(source, cache=cache)
    assert isinstance(built, Unavailable)
    return built.reason


@needs_compiler
def test_a_source_becomes_a_library_that_loads_and_nothing_else_is_left(source: Path, cache: Path) -> None:
    library = build(source, cache=cache)
    assert isinstance(library, Path)
    assert ctypes.CDLL(str(library)).answer() == 42
    assert list(cache.iterdir()) == [library]
    assert cache.stat().st_mode & 0o777 == 0o700


@needs_compiler
def test_what_is_built_is_not_built_again(source: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = build(source, cache=cache)
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CC", raising=False)
    assert build(source, cache=cache) == library


@needs_compiler
@pytest.mark.parametrize("change", ["source", "flags", "cpu"])
def test_another_source_flag_or_cpu_is_another_library(
    change: str, source: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = build(source, cache=cache)
    if change == "source":
        source.write_text(SOURCE + "\n")
    elif change == "flags":
        monkeypatch.setattr(compiled, "FLAGS", (*compiled.FLAGS, "-g"))
    else:
        monkeypatch.setattr(compiled, "_cpu", lambda: ["flags : sse2"])
    second = build(source, cache=cache)
    assert isinstance(first, Path)
    assert isinstance(second, Path)
    assert first != second


@needs_compiler
def test_many_may_build_at_once(source: Path, cache: Path) -> None:
    with ThreadPoolExecutor(4) as pool:
        built = set(pool.map(lambda _: build(source, cache=cache), range(4)))
    assert len(built) == 1
    assert set(cache.iterdir()) == built


def test_without_a_compiler_there_is_a_reason(source: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CC", raising=False)
    assert reason(source, cache).startswith("no C compiler is found")


@needs_compiler
def test_what_the_compiler_refuses_is_told_and_leaves_nothing(source: Path, cache: Path) -> None:
    source.write_text("int answer(void) { return; x }")
    assert "refuses answer.c" in reason(source, cache)
    assert list(cache.iterdir()) == []


@needs_compiler
def test_a_compiler_that_hangs_is_given_up(source: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slow = tmp_path / "slow"
    slow.write_text("#!/bin/sh\nexec tail -f /dev/null\n")
    slow.chmod(0o700)
    monkeypatch.setenv("CC", str(slow))
    monkeypatch.setattr(compiled, "BUILD_TIMEOUT_S", 0.05)
    assert "did not finish" in reason(source, cache)
    assert list(cache.iterdir()) == []


def test_no_code_is_loaded_from_where_others_may_write(source: Path, cache: Path) -> None:
    cache.mkdir(parents=True)
    cache.chmod(0o777)
    assert "can be written by others" in reason(source, cache)
    assert list(cache.iterdir()) == []


def test_no_code_is_loaded_from_another_users_directory(source: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache.mkdir(parents=True, mode=0o700)
    uid = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: uid + 1)
    assert f"belongs to user {uid}" in reason(source, cache)


def test_a_cache_that_cannot_be_made_is_a_reason(source: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert "cannot be built" in reason(source, tmp_path / "file" / "cache")


def test_the_cache_is_the_users(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert compiled._user_cache() == tmp_path / "paramstore"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert compiled._user_cache() == tmp_path / ".cache" / "paramstore"
