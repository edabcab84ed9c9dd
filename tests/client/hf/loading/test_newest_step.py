"""A model is loaded with the dense weights of its experts' step, or says that they are of another one."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import paramstore as ps
from paramstore.errors import CheckpointError, StepMismatch
from paramstore_client.hf.compat import modeling
from paramstore_client.hf.loading.newest_step import names_none
from paramstore_client.training.dense_files import DenseFile, dense_tensors
from paramstore_testkit.processes.forked_daemon import ForkedDaemon
from paramstore_testkit.training.moe_families import tiny_config
from paramstore_testkit.training.moe_models import tokens

pytestmark = pytest.mark.slow


@pytest.fixture
def store(tmp_path: Path) -> Iterator[ps.Store]:
    options = ("--host-budget", "64MiB", "--gradient-budget", "32MiB")
    with ForkedDaemon(tmp_path / "store", *options) as daemon, ps.connect(daemon.address) as store:
        yield store


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    auto().from_config(tiny_config("qwen3_moe")).save_pretrained(tmp_path / "whole")
    return tmp_path / "whole"


def auto() -> Any:
    return modeling.transformers().AutoModelForCausalLM


def trained(store: ps.Store, checkpoint: Path, *, dense: Path | None) -> Any:
    """The model of a trainer that has made and committed a step."""
    model = ps.hf.from_pretrained(auto(), checkpoint, store=store, name="both", updates="touched")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    ps.hf.experts(model).attach(optimizer)
    model(input_ids=tokens(), labels=tokens()).loss.backward()
    optimizer.step()
    ps.hf.experts(model).commit(1, dense=dense).wait()
    return model


def served(store: ps.Store, checkpoint: Path, **options: Any) -> Any:
    return ps.hf.from_pretrained(auto(), checkpoint, store=store, mode="infer", **{"name": "both", **options})


def is_dense_part_of(model: Any, other: Any) -> bool:
    expected = dense_tensors(other)
    return all(torch.equal(tensor, expected[name]) for name, tensor in dense_tensors(model).items())


def test_a_model_is_loaded_with_the_dense_weights_of_its_experts_step(
    store: ps.Store, checkpoint: Path, tmp_path: Path
) -> None:
    trainer = trained(store, checkpoint, dense=tmp_path / "dense")
    model = served(store, checkpoint)
    assert ps.hf.namespace(model).view_step == 1
    assert is_dense_part_of(model, trainer)
    with torch.no_grad():
        assert torch.equal(model(tokens()).logits, trainer(tokens()).logits)
    assert ps.hf.follow(model) == ps.hf.Followed(1)


@pytest.mark.parametrize("damage", ["no note", "missing", "an older daemon"])
def test_a_model_whose_dense_weights_are_of_another_step_than_its_experts_says_so_once(
    store: ps.Store, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: str
) -> None:
    trained(store, checkpoint, dense=None if damage == "no note" else tmp_path / "dense")
    if damage == "missing":
        next((tmp_path / "dense").iterdir()).unlink()
    if damage == "an older daemon":
        monkeypatch.setattr(store._connection, "minor", 5)
    said = {"no note": "step 1 names no dense weights", "missing": "No such file", "an older daemon": "needs 1.6"}[damage]
    begin = f"the experts are of step 1, and the dense weights those of {checkpoint}, which are of another step: "
    with pytest.warns(UserWarning, match=re.escape(begin)) as told:
        model = served(store, checkpoint)
    (warning,) = told
    assert said in str(warning.message)
    assert warning.filename == __file__, "it is shown where the model is loaded"
    assert is_dense_part_of(model, auto().from_pretrained(checkpoint)), "and has what it was given"


def test_at_the_step_of_the_import_the_checkpoint_has_both(store: ps.Store, checkpoint: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        stock = auto().from_pretrained(checkpoint)
        for _ in range(2):
            model = served(store, checkpoint)
            assert is_dense_part_of(model, stock)
            assert ps.hf.follow(model) == ps.hf.Followed(0), "nothing is wrong"


def test_a_model_of_a_step_that_was_rolled_back_to_the_import_is_not_taken_for_that_of_the_import(
    store: ps.Store, checkpoint: Path
) -> None:
    trainer = trained(store, checkpoint, dense=None)
    with pytest.warns(UserWarning, match="step 1 names no dense weights"):
        model = served(store, checkpoint)
    ps.hf.experts(trainer).rollback(0)
    assert ps.hf.follow(model) == ps.hf.Followed(1, reason=names_none(0))


def test_who_gives_the_dense_part_alone_knows_of_which_step_it_is(store: ps.Store, checkpoint: Path, tmp_path: Path) -> None:
    trainer = trained(store, checkpoint, dense=None)
    trainer.save_pretrained(tmp_path / "part")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert is_dense_part_of(served(store, tmp_path / "part"), trainer)


def test_a_load_that_fails_at_the_dense_weights_leaves_no_handle(
    store: ps.Store, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained(store, checkpoint, dense=tmp_path / "dense")
    monkeypatch.setattr("paramstore_client.hf.loading.newest_step.opened", lambda *given: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        served(store, checkpoint)
    assert store.stats()["namespaces"]["both"]["views"] == 1, "the trainer's"


@pytest.mark.parametrize("cut_off_by", [KeyboardInterrupt, CheckpointError])
def test_a_model_that_was_cut_off_between_two_steps_computes_nothing_until_it_was_followed(
    store: ps.Store, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cut_off_by: type[BaseException]
) -> None:
    def load_half(file: DenseFile, model: Any) -> None:
        model.lm_head.weight.data.copy_(trainer.lm_head.weight)
        raise cut_off_by

    trainer = trained(store, checkpoint, dense=tmp_path / "dense")
    model = served(store, checkpoint)
    for parameter in trainer.parameters():
        parameter.data.mul_(2)
    ps.hf.experts(trainer).commit(2, dense=tmp_path / "dense").wait()
    with torch.no_grad():
        with monkeypatch.context() as patch:
            patch.setattr(DenseFile, "load", load_half)
            with pytest.raises(cut_off_by):
                ps.hf.follow(model)
        for _ in range(2):
            with pytest.raises(StepMismatch, match=re.escape("ps.hf.follow(model)")):
                model(tokens())
        assert ps.hf.follow(model).has_moved
        assert torch.equal(model(tokens()).logits, trainer(tokens()).logits)
