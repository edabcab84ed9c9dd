"""A directory that somebody has named wrongly: what is wrong, with the name it was given as."""

from __future__ import annotations

from pathlib import Path

import pytest

from paramstore.directories import check_directory, is_missing
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


def test_only_what_is_known_to_be_nowhere_is_missing(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to("nowhere")
    for place, expected in {"file": False, "link": False, "n" * 300: False, "none": True, "file/below": False}.items():
        assert is_missing(tmp_path / place) == expected, place
