"""Trainer's own loop, resuming and best model: dense weights and experts are always of one step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import paramstore as ps
from paramstore.errors import ConfigError, SchemaMismatch, StepDropped, StepFailed, StepOutOfOrder
from paramstore_client.handle.dense_part import DensePart
from paramstore_client.hf.compat import modeling
from paramstore_testkit.training.moe_families import tiny_config
from paramstore_testkit.training.moe_models import tokens

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("ignore")]  # of Trainer

STEPS = 6


class Sentences(torch.utils.data.Dataset[dict[str, Tensor]]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        ids = tokens(seed=index, batch=1)[0]
        return {"input_ids": ids, "labels": ids}


Train = Callable[..., Any]


@pytest.fixture
def train(store: ps.Store, tmp_path: Path) -> Iterator[Train]:
    """Trains the namespace's model in a process that has just started; gives the trainer."""

    def run(
        name: str = "moe", *, resume: str | None = None, folder: str = "", is_followed: bool = True, dies_at: int | None = None,
        dense: Path | None = None, **more: Any,
    ) -> Any:  # fmt: skip
        transformers = modeling.transformers()
        for known in opened:
            known.close()
        torch.manual_seed(0)
        model = ps.hf.from_config(
            transformers.AutoModelForCausalLM, tiny_config("qwen3_moe"), store=store, name=f"{name}-{tmp_path.name}"
        )
        opened[:] = [ps.hf.namespace(model)]
        output = tmp_path / (folder or name)
        options = {
            "output_dir": str(output), "use_cpu": True, "max_steps": STEPS, "per_device_train_batch_size": 2, "learning_rate": 1e-2,
            "report_to": [], "save_strategy": "steps", "save_steps": 3, "disable_tqdm": True, "seed": 3, "logging_steps": 1, **more,
        }  # fmt: skip

        class Dies(transformers.TrainerCallback):  # type: ignore[misc, name-defined]
            def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
                if state.global_step == dies_at:
                    raise InterruptedError

        trainer = transformers.Trainer(
            model=model, args=transformers.TrainingArguments(**options), train_dataset=Sentences(), eval_dataset=Sentences(),
            callbacks=[Dies(), *([ps.hf.trainer_callback(model, dense=dense)] if is_followed else [])],
        )  # fmt: skip
        trainer.create_optimizer()
        ps.hf.experts(model).attach(trainer.optimizer)
        try:
            trainer.train(resume_from_checkpoint=None if resume is None else str(output / resume))
        except InterruptedError:
            assert dies_at is not None
        return trainer

    opened: list[ps.Namespace] = []
    yield run
    for known in opened:
        known.close()


def weights_of(trainer: Any) -> dict[str, Tensor]:
    """All of them: dense weights, and the whole records of the experts."""
    namespace = ps.hf.namespace(trainer.model)
    records = {f"{key} {name}": value for key in namespace.space for name, value in namespace.read(key).items()}
    return {**{name: value.clone() for name, value in trainer.model.state_dict().items()}, **records}


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert [name for name, value in found.items() if not torch.equal(value, expected[name])] == []


@pytest.mark.parametrize("dies_at", [None, 5])
def test_a_resumed_run_is_bit_for_bit_the_uninterrupted_one(train: Train, dies_at: int | None) -> None:
    expected = weights_of(train("whole"))
    train(dies_at=dies_at)
    resumed = train(resume="checkpoint-3")
    assert_equal(weights_of(resumed), expected)
    assert ps.hf.namespace(resumed.model).committed_step == STEPS


def test_without_the_callback_a_resumed_run_ends_at_its_first_commit(train: Train) -> None:
    """That is what it is for."""
    train()
    trainer = train(resume="checkpoint-3", is_followed=False)
    with pytest.raises(StepOutOfOrder):
        ps.hf.experts(trainer.model).commit(STEPS).wait()


def test_a_checkpoint_whose_step_is_dropped_is_refused_before_training(train: Train) -> None:
    train(save_steps=1)
    with pytest.raises(StepDropped, match=r"step 1 of namespace .* is not kept; kept are 5, 6: .* raise retained_steps"):
        train(save_steps=1, resume="checkpoint-1")


def test_a_checkpoint_of_another_namespace_is_refused(train: Train) -> None:
    train("first", folder="shared")
    with pytest.raises(SchemaMismatch, match=r"experts are of namespace 'first-.*', this is 'second-"):
        train("second", folder="shared", resume="checkpoint-3")


def test_a_checkpoint_that_was_saved_without_the_callback_is_of_the_step_of_its_number(train: Train) -> None:
    constant = {"lr_scheduler_type": "constant"}
    expected = weights_of(train("whole", **constant))
    trainer = train(is_followed=False, max_steps=3, **constant)
    ps.hf.experts(trainer.model).commit(3).wait()
    assert_equal(weights_of(train(resume="checkpoint-3", **constant)), expected)


def test_what_no_checkpoint_covers_is_committed_at_the_end(train: Train) -> None:
    trainer = train(save_strategy="no")
    namespace = ps.hf.namespace(trainer.model)
    assert (namespace.committed_step, namespace.uncommitted_applies) == (STEPS, 0)
    assert namespace.steps() == [0, STEPS]


def test_a_second_run_over_the_same_experts_counts_on_and_resumes(train: Train) -> None:
    train(folder="one")
    expected = weights_of(train(folder="two"))
    trainer = train(folder="two", resume="checkpoint-3")
    assert ps.hf.namespace(trainer.model).committed_step == 2 * STEPS
    assert_equal(weights_of(trainer), expected)


@pytest.mark.parametrize("dies_at", [None, 4])
def test_the_best_model_has_the_experts_of_its_step(train: Train, dies_at: int | None) -> None:
    """The best one is the worst here, as it is sure to be the first: beyond the steps that are kept."""
    best = {"load_best_model_at_end": True, "eval_strategy": "steps", "eval_steps": 1, "save_steps": 1, "greater_is_better": True}
    trainer = train(metric_for_best_model="eval_loss", dies_at=dies_at, **best)
    if dies_at is not None:
        trainer = train(metric_for_best_model="eval_loss", resume="checkpoint-3", **best)
    namespace = ps.hf.namespace(trainer.model)
    assert trainer.state.best_model_checkpoint.endswith("checkpoint-1")
    assert trainer.evaluate()["eval_loss"] == trainer.state.best_metric
    assert namespace.committed_step == 1
    assert namespace.snapshots() == []


@pytest.mark.parametrize("resumed", [2, 3])
def test_a_run_that_died_with_a_best_step_resumes_before_or_after_it(train: Train, resumed: int) -> None:
    """Each step is better than the one before: the third is kept when the process dies."""
    best = {"load_best_model_at_end": True, "eval_strategy": "steps", "eval_steps": 1, "save_steps": 1}
    expected = weights_of(train("whole", **best))
    ps.hf.namespace(train(dies_at=1).model).snapshot(0).close()  # the user's own
    assert ps.hf.namespace(train(dies_at=4, **best).model).snapshots() == [0, 3]
    trainer = train(resume=f"checkpoint-{resumed}", **best)
    assert_equal(weights_of(trainer), expected)
    assert ps.hf.namespace(trainer.model).snapshots() == [0]


def test_a_later_snapshot_of_the_users_own_is_not_dropped(train: Train) -> None:
    ps.hf.namespace(train().model).snapshot(STEPS).close()
    with pytest.raises(StepFailed, match="snapshot"):
        train(resume="checkpoint-3")


@pytest.mark.parametrize("is_best", [False, True])
def test_a_served_model_follows_a_run_that_commits_its_dense_weights(
    train: Train, store: ps.Store, tmp_path: Path, is_best: bool
) -> None:
    best = {"load_best_model_at_end": True, "eval_strategy": "steps", "eval_steps": 3, "greater_is_better": True} if is_best else {}
    train("served", max_steps=3)
    trainer = train("served", folder="more", dense=tmp_path / "dense", metric_for_best_model="eval_loss", **best)
    namespace = ps.hf.namespace(trainer.model)
    with ps.connect(store.address) as other:
        served = ps.hf.from_config(
            modeling.transformers().AutoModelForCausalLM, tiny_config("qwen3_moe"), store=other, name=namespace.name, mode="infer"
        )
        moved = ps.hf.follow(served)
        assert (moved.step, moved.reason) == (3 + (3 if is_best else STEPS), None)
        for name, value in served.state_dict().items():
            assert torch.equal(value, trainer.model.state_dict()[name]), name
        with torch.no_grad():
            assert torch.equal(served(tokens()).logits, trainer.model.eval()(tokens()).logits)
    kept = {int(file.name.split(".")[-4]) for file in (tmp_path / "dense").iterdir()}
    assert kept <= {*namespace.steps(), 3 + STEPS}, "files go with their steps; what is above the newest one is left alone"


def test_a_run_commits_no_dense_weights_unless_it_is_asked_to(train: Train) -> None:
    trainer = train()
    namespace = ps.hf.namespace(trainer.model)
    assert DensePart.from_extra(namespace.extra(STEPS)) is None


def test_a_model_that_does_not_train_is_refused(store: ps.Store, train: Train) -> None:
    with pytest.raises(ConfigError, match="trains no stored experts"):
        ps.hf.trainer_callback(torch.nn.Linear(1, 1))
