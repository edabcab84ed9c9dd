"""HF Trainer, accelerate and Lightning train stored experts by one line more, and compute what they do in memory."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import paramstore_client as ps
from paramstore_client.training import Experts, bind
from paramstore_testkit.processes.daemon_process import QUIET, DaemonProcess
from paramstore_testkit.processes.forked_daemon import ForkedDaemon
from paramstore_testkit.training.toy_moe import ToyMoE, adamw, batch, different_weights, make_namespace, make_resident, make_stored

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore"),  # of the frameworks, each of its own
]

CLOSE = {"rtol": 1e-4, "atol": 1e-6}
STEPS = 4


class Batches(Dataset[Tensor]):
    """Two micro-batches a step."""

    def __len__(self) -> int:
        return 2 * STEPS

    def __getitem__(self, index: int) -> Tensor:
        return batch(index)


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    directory = tmp_path_factory.mktemp("frameworks") / "store"
    with ForkedDaemon(directory, "--host-budget", "64MiB", environment=QUIET) as daemon:
        yield daemon


@pytest.fixture
def namespace(daemon: DaemonProcess, request: pytest.FixtureRequest) -> Iterator[ps.Namespace]:
    with ps.connect(daemon.address) as store, warnings.catch_warnings():
        yield make_namespace(store, request.node.name.replace("[", "-").strip("]")[:60])


def assert_same(namespace: ps.Namespace, stored: nn.Module, resident: nn.Module) -> None:
    assert different_weights(stored, resident, namespace, **CLOSE) == []
    assert namespace.pending_count == 0


def test_accelerate_accumulates_clips_and_schedules(namespace: ps.Namespace) -> None:
    accelerate = pytest.importorskip("accelerate")

    def train(model: ToyMoE, experts: Experts | None) -> list[float]:
        accelerator = accelerate.Accelerator(gradient_accumulation_steps=2, cpu=True)
        optimizer = adamw(model.parameters())
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        model, optimizer, scheduler, loader = accelerator.prepare(
            model, optimizer, scheduler, DataLoader(Batches(), batch_size=None)
        )
        if experts is not None:
            experts.attach(optimizer)
        norms = []
        for tokens in loader:
            with accelerator.accumulate(model):
                accelerator.backward(model(tokens))
                if accelerator.sync_gradients:
                    norms.append(float(accelerator.clip_grad_norm_(model.parameters(), 0.1)))
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
        return norms

    stored, resident = make_stored(namespace), make_resident()
    experts = bind(stored, namespace)
    assert train(stored, experts) == pytest.approx(train(resident, None), rel=1e-5)
    assert_same(namespace, stored, resident)


@pytest.mark.parametrize("when", ["on_train_begin", "before"])
def test_hf_trainer_logs_clips_and_accumulates(namespace: ps.Namespace, tmp_path: Path, when: str) -> None:
    transformers = pytest.importorskip("transformers")

    class Config(transformers.PretrainedConfig):  # type: ignore[misc, name-defined]
        model_type = "toy"

    class Model(transformers.PreTrainedModel):  # type: ignore[misc, name-defined]
        config_class = Config

        def __init__(self, toy: ToyMoE) -> None:
            super().__init__(Config())
            self.toy = toy

        def forward(self, tokens: Tensor) -> dict[str, Tensor]:
            return {"loss": self.toy(tokens[0])}

    class Attach(transformers.TrainerCallback):  # type: ignore[misc, name-defined]
        def on_train_begin(self, *arguments: Any, optimizer: Any, **others: Any) -> None:
            if experts is not None and when == "on_train_begin":
                experts.attach(optimizer)

    def train(model: nn.Module) -> list[float]:
        arguments = transformers.TrainingArguments(
            output_dir=str(tmp_path), use_cpu=True, max_steps=STEPS, per_device_train_batch_size=1, gradient_accumulation_steps=2,
            max_grad_norm=0.1, learning_rate=1e-2, weight_decay=0.1, logging_steps=1, report_to=[], save_strategy="steps",
            save_steps=STEPS, disable_tqdm=True, seed=3, lr_scheduler_type="linear", optim="adamw_torch_fused",
        )  # fmt: skip
        trainer = transformers.Trainer(
            model=model, args=arguments, train_dataset=Batches(), callbacks=[Attach()],
            data_collator=lambda rows: {"tokens": torch.stack(rows)},
        )  # fmt: skip
        if experts is not None and when == "before":
            trainer.create_optimizer()
            experts.attach(trainer.optimizer)
        trainer.train()
        return [row["grad_norm"] for row in trainer.state.log_history if "grad_norm" in row]

    stored, resident = Model(make_stored(namespace)), Model(make_resident())
    experts: Experts | None = bind(stored, namespace)
    seen = train(stored)
    saved = torch.load(tmp_path / f"checkpoint-{STEPS}" / "optimizer.pt")
    assert len(saved["param_groups"]) == 2
    assert not any("paramstore" in name for name in stored.state_dict())
    experts = None
    assert seen == pytest.approx(train(resident), rel=1e-4)
    assert len(seen) == STEPS
    assert_same(namespace, stored.toy, resident.toy)


def test_lightning_clips_and_accumulates(namespace: ps.Namespace, tmp_path: Path) -> None:
    lightning = pytest.importorskip("pytorch_lightning")

    class Module(lightning.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self, toy: ToyMoE, experts: Experts | None) -> None:
            super().__init__()
            self.toy = toy
            self.handle = SimpleNamespace(experts=experts)

        def training_step(self, tokens: Tensor, index: int) -> Tensor:
            loss: Tensor = self.toy(tokens)
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            optimizer = adamw(self.parameters())
            if self.handle.experts is not None:
                self.handle.experts.attach(optimizer)
            return optimizer

    def train(module: nn.Module) -> None:
        trainer = lightning.Trainer(
            max_epochs=1, accelerator="cpu", devices=1, gradient_clip_val=0.1, accumulate_grad_batches=2, logger=False,
            enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, default_root_dir=tmp_path,
        )  # fmt: skip
        trainer.fit(module, DataLoader(Batches(), batch_size=None))

    stored, resident = make_stored(namespace), make_resident()
    train(Module(stored, bind(stored, namespace)))
    train(Module(resident, None))
    assert_same(namespace, stored, resident)
