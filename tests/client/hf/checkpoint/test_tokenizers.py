"""A checkpoint that brings Python of its own is refused with the reason; nobody is asked, and nothing of it runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from paramstore.errors import CheckpointError, UnsupportedModel
from paramstore_client.hf.checkpoint.skeleton import skeleton
from paramstore_client.hf.checkpoint.tokenizers import load_tokenizer
from paramstore_testkit.training.small_tokenizer import save_tokenizer


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    def asked(prompt: str = "") -> str:
        pytest.fail(f"the user was asked {prompt!r}")  # an Exception would be taken for a No

    monkeypatch.setattr("builtins.input", asked)
    save_tokenizer(tmp_path)
    (tmp_path / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    return tmp_path


def change(file: Path, **values: Any) -> None:
    found = json.loads(file.read_bytes()) if file.exists() else {}
    file.write_text(json.dumps({**found, **values}))


def test_a_tokenizer_that_is_python_of_the_checkpoint_is_refused_with_the_reason(directory: Path) -> None:
    file = directory / "tokenizer_config.json"
    change(file, tokenizer_class="OwnTokenizer", auto_map={"AutoTokenizer": ["own.OwnTokenizer", "own.OwnTokenizer"]})
    with pytest.raises(UnsupportedModel, match=f"{file}: its auto_map names Python of the checkpoint's own, which is not run"):
        load_tokenizer(directory)
    assert not (directory / "ran").exists()


def test_a_model_that_is_python_of_the_checkpoint_is_refused_with_the_reason(directory: Path) -> None:
    file = directory / "config.json"
    change(file, model_type="own", auto_map={"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnModel"})
    with pytest.raises(UnsupportedModel, match=f"{file}: its auto_map names Python"):
        skeleton(directory)
    assert not (directory / "ran").exists()


def test_an_auto_map_beside_a_tokenizer_of_transformers_own_does_no_harm(directory: Path) -> None:
    change(directory / "tokenizer_config.json", auto_map={"AutoTokenizer": [None, "own.OwnTokenizer"]})
    assert load_tokenizer(directory)("ab")["input_ids"]
    assert not (directory / "ran").exists()


def test_a_directory_without_a_tokenizer_is_told(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=f"{tmp_path} has no tokenizer that can be loaded"):
        load_tokenizer(tmp_path)
