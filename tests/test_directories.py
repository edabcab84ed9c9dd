"""A directory that somebody has named wrongly: what is wrong, with the name it was given as."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from paramstore.directories import check_directory, check_parent, check_writable, flush_directory, is_missing, user_cache
from paramstore.errors import ConfigError


def test_a_directory_that_is_there_is_taken(tmp_path: Path) -> None:
    check_directory("--dir", tmp_path)


@pytest.mark.parametrize(
    ("place", "problem"),
    [("none", "there is no such directory"), ("file", "it is not a directory"), ("n" * 300, "File name too long")],
)
def test_what_is_no_directory_is_refused_with_what_it_is(place: str, problem: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=f"^--dir {tmp_path / place}: {problem}$"):
        check_directory("--dir", tmp_path / place)


def test_a_directory_may_be_missing_and_its_parent_may_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    for place in ("there", "file", "file/below", "file/below/deeper", "n" * 300):  # whoever makes it finds out
        check_parent("dir", tmp_path / place)
    check_parent("dir", Path("/"))
    told = f"it cannot be made, as there is no directory {tmp_path}/typo/below; the nearest one is {tmp_path}: mend the path"
    with pytest.raises(ConfigError, match=f"^dir {tmp_path}/typo/below/store: {told}"):
        check_parent("dir", tmp_path / "typo" / "below" / "store")
    monkeypatch.chdir(tmp_path)
    check_parent("dir", Path("store"))
    with pytest.raises(ConfigError, match=f"^dir typo/store: it cannot be made, as there is no directory {tmp_path}/typo; "):
        check_parent("dir", Path("typo/store"))


def test_only_what_is_known_to_be_nowhere_is_missing(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to("nowhere")
    for place, expected in {"file": False, "link": False, "n" * 300: False, "none": True, "file/below": False}.items():
        assert is_missing(tmp_path / place) == expected, place


def test_a_file_can_be_written_or_is_refused_and_is_as_it_was(tmp_path: Path) -> None:
    old = tmp_path / "old"
    old.write_bytes(b"kept")
    check_writable("--out", old)
    check_writable("--out", tmp_path / "new")
    assert (old.read_bytes(), os.listdir(tmp_path)) == (b"kept", ["old"])
    for place in (tmp_path, old / "in a file", tmp_path / "no" / "directory"):
        with pytest.raises(ConfigError, match=rf"--out {place}: cannot be written: "):
            check_writable("--out", place)


def test_names_become_durable_by_a_flush_of_the_directory_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flushed = list[os.stat_result]()
    monkeypatch.setattr(os, "fsync", lambda descriptor: flushed.append(os.fstat(descriptor)))
    before = len(os.listdir("/proc/self/fd"))
    flush_directory(tmp_path)
    assert [os.path.samestat(each, tmp_path.stat()) for each in flushed] == [True]
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError):
        flush_directory(tmp_path / "file")
    assert len(os.listdir("/proc/self/fd")) == before, "no descriptor is left open"


@pytest.mark.parametrize(("given", "place"), [("", "/h/.cache"), ("not/absolute", "/h/.cache"), ("/x", "/x")])
def test_the_cache_lies_where_the_user_has_it(given: str, place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/h")
    monkeypatch.setenv("XDG_CACHE_HOME", given)
    assert user_cache() == Path(place) / "paramstore"
