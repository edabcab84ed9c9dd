from __future__ import annotations

import sys
from pathlib import Path

import pytest

from paramstore.errors import CheckpointError
from paramstore_client.checkpoint_directory import checkpoint_directory


def test_a_directory_is_taken_as_it_is_and_a_wrong_path_is_refused_where_transformers_is_not_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    assert checkpoint_directory(tmp_path) == tmp_path
    with pytest.raises(CheckpointError, match=r"'none' is no directory, .* need transformers.*: pip install transformers"):
        checkpoint_directory("none")


@pytest.mark.parametrize("path", ["./no/model", "../none", "~/model", "/no/model", "no/such/model", "none/"])
def test_what_can_be_no_id_of_the_hub_is_not_looked_for_there(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(CheckpointError, match=f"^'{path}': there is no such directory: give the directory that has"):
        checkpoint_directory(path)
