"""A model's dense part and its experts are of the same files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import paramstore as ps
from paramstore.errors import CheckpointError
from paramstore_client.hf.loading import checkpoint_source
from paramstore_client.hf.loading.checkpoint_source import Seen, directory_of
from paramstore_testkit.processes.forked_daemon import ForkedDaemon
from paramstore_testkit.training.moe_models import tokens
from paramstore_testkit.training.saved_models import save_stock


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["infer", "train"])
def test_a_checkpoint_that_is_replaced_between_its_dense_part_and_its_experts_is_refused(
    mode: str, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, other = (save_stock("qwen3_moe", tmp_path_factory.mktemp(name), seed=seed) for seed, name in enumerate("ab"))
    put = checkpoint_source.import_checkpoint

    def replace_and_import(*words: Any, **named: Any) -> Any:
        for file in other.glob("*.safetensors"):
            file.replace(path / file.name)
        return put(*words, **named)

    with (
        ForkedDaemon(tmp_path_factory.mktemp("d") / "s", "--host-budget", "64MiB", "--gradient-budget", "32MiB") as daemon,
        ps.connect(daemon.address) as store,
    ):

        def load() -> Any:
            return ps.hf.from_pretrained(AutoModelForCausalLM, path, store=store, mode=mode, name="moe", updates="touched")

        with monkeypatch.context() as patch:
            patch.setattr(checkpoint_source, "import_checkpoint", replace_and_import)
            with pytest.raises(CheckpointError, match=r"\.safetensors changed while it was read"):
                load()
        stock = AutoModelForCausalLM.from_pretrained(path, experts_implementation="eager").eval()
        model = load().eval()
        ids = tokens(batch=2)
        with torch.no_grad():
            assert torch.equal(model(input_ids=ids).logits, stock(input_ids=ids).logits)


def test_files_that_stay_are_no_change_and_a_checkpoint_that_is_nowhere_is_not_looked_at(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    file = tmp_path / "sub" / "model.safetensors"
    file.write_bytes(b"1")
    seen = Seen.of(tmp_path, {"subfolder": "sub"})
    seen.check()
    assert directory_of(tmp_path, {"subfolder": "sub"}) == file.parent
    assert Seen.of("nobody/nothing", {}).states == {}
    file.write_bytes(b"12")
    with pytest.raises(CheckpointError, match=r"model\.safetensors changed"):
        seen.check()
