"""Where a checkpoint's store lies: one place for each place of a checkpoint and dtype, and nothing is made by asking."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from paramstore.errors import CheckpointError, ConfigError
from paramstore.run.home import Home, home_of


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/c")
    monkeypatch.chdir(tmp_path)
    for name in ("a/model", "b/model", "a/other"):
        (tmp_path / name).mkdir(parents=True)


def home(model: str, **given: object) -> Home:
    wanted: dict[str, object] = {"directory": None, "namespace": None, "dtype": None, **given}
    return home_of(model, **wanted)  # type: ignore[arg-type]


def test_checkpoints_of_one_name_and_dtypes_of_one_checkpoint_have_stores_of_their_own(tmp_path: Path) -> None:
    found = [home("a/model"), home("b/model"), home("a/model", dtype="float32"), home("a/other")]
    assert len({each.directory for each in found}) == len({each.namespace for each in found}) == 4
    assert all(each.directory.name == each.namespace and each.directory.parent == Path("/c/paramstore") for each in found)
    os.symlink(tmp_path / "a", tmp_path / "linked")
    assert home("linked/model").directory == home("a/../a/model/").directory == found[0].directory
    assert found[0].namespace.startswith("model-")


def test_what_a_caller_wants_instead_is_taken(tmp_path: Path) -> None:
    found = home("a/model", directory=tmp_path / "store", namespace="moe")
    assert (found.directory, found.namespace, found.is_default) == (tmp_path / "store", "moe", False)
    found.make_parent()
    assert not found.directory.exists()


def test_what_cannot_be_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(CheckpointError, match="no-model"):
        home("no-model")
    with pytest.raises(ConfigError, match="name"):
        home("a/model", namespace="not/a name")
    with pytest.raises(ConfigError, match=r"^--dir /s/store: it cannot be made, as there is no directory /s;"):
        home("a/model", directory=Path("/s/store"))
    with pytest.raises(ConfigError, match=r"^--dir /dev/null: it is not a directory"):
        home("a/model", directory=Path("/dev/null"))
    with pytest.raises(ConfigError, match="give a shorter --dir"):
        home("a/model", directory=Path("/" + "d" * 90))
    monkeypatch.setenv("XDG_CACHE_HOME", "/dev/null")
    with pytest.raises(ConfigError, match=r"cannot be made: .*; give a --dir for the store"):
        home("a/model").make_parent()


def test_a_path_without_a_name_has_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir("/")
    assert home(".").namespace.startswith("model-")
    monkeypatch.setenv("XDG_CACHE_HOME", "not/absolute")
    monkeypatch.setenv("HOME", "/h")
    assert home("/tmp").directory.parent == Path("/h/.cache/paramstore")
