"""The demo's directory is its own: nothing else is touched, and only one demo is in it."""

import errno
import os
import sys

import pytest

from paramstore.demo.acts import MARKER, _drawn, owned_directory
from paramstore.errors import ConfigError, StoreLocked, WaitTimeout


def test_missing_directory_is_made_and_marked(tmp_path):
    with owned_directory(tmp_path / "new" / "run"):
        assert (tmp_path / "new" / "run" / MARKER).exists()


def test_empty_directory_is_taken(tmp_path):
    with owned_directory(tmp_path):
        assert (tmp_path / MARKER).exists()


def test_directory_of_others_is_refused_and_untouched(tmp_path):
    (tmp_path / "thesis.tex").write_text("precious")
    with pytest.raises(ConfigError, match="not the demo's"), owned_directory(tmp_path):
        pass
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_own_directory_is_taken_again(tmp_path):
    with owned_directory(tmp_path):
        (tmp_path / "report.json").write_text("{}")
    with owned_directory(tmp_path):
        assert (tmp_path / "report.json").exists()


def test_second_demo_in_the_same_directory_is_refused(tmp_path):
    with owned_directory(tmp_path), pytest.raises(StoreLocked, match="another demo"), owned_directory(tmp_path):
        pass


@pytest.mark.parametrize("place", ["/proc/zz", "file/run", "file/run/deeper"])
def test_a_place_where_no_directory_can_be_is_refused(tmp_path, place):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"--dir .*: cannot be made or written: "), owned_directory(tmp_path / place):
        pass


def test_file_in_place_of_the_directory_is_refused(tmp_path):
    path = tmp_path / "file"
    path.write_text("")
    with pytest.raises(ConfigError), owned_directory(path):
        pass


def test_what_the_system_refuses_within_the_directory_names_it(tmp_path):
    with pytest.raises(OSError, match=f"No space left on device: '{tmp_path}'"), owned_directory(tmp_path):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    with pytest.raises(OSError, match="No space left on device: 'corpus'"), owned_directory(tmp_path):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "corpus")
    with pytest.raises(WaitTimeout, match="a push"), owned_directory(tmp_path):
        raise WaitTimeout("a push")


def test_without_matplotlib_the_demo_says_what_its_picture_needs(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "paramstore.demo.picture", None)
    assert "pip install matplotlib" in _drawn(None, tmp_path / "report.png")
    assert list(tmp_path.iterdir()) == []
