"""Which files are ours to write."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from paramstore.storage.ownership import objection_to, objection_to_tree

NAMES = ("data", "lock")


def test_a_file_of_ours_is_ours(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert objection_to((tmp_path / "file").stat()) == ""


def test_a_second_name_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "other").hardlink_to(tmp_path / "file")
    assert "2 names" in objection_to((tmp_path / "file").stat())


@pytest.mark.skipif(os.geteuid() != 0, reason="needs another user's file")
def test_another_users_file_is_not_ours(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    os.chown(tmp_path / "file", 65534, -1)
    assert "belongs to user 65534" in objection_to((tmp_path / "file").stat())


def test_roots_file_is_taken_by_everybody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    status = list((tmp_path / "file").stat())
    status[4] = 0
    monkeypatch.setattr("paramstore.storage.ownership.os.geteuid", lambda: 1000)
    assert objection_to(os.stat_result(status)) == ""


def test_what_is_not_there_is_no_objection(tmp_path: Path) -> None:
    assert objection_to_tree(tmp_path / "nowhere", NAMES) == ""
    assert objection_to_tree(tmp_path, NAMES) == ""


def test_a_link_is_looked_at_and_not_followed(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    assert "not a directory" in objection_to_tree(tmp_path / "link", NAMES)
    (tmp_path / "real" / "lock").symlink_to(tmp_path / "nowhere")
    assert "lock: it is not a regular file" in objection_to_tree(tmp_path / "real", NAMES)
