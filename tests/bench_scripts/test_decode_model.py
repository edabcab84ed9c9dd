"""The model of the decode traces: its training goes on where it was ended, and a bad one is refused."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from paramstore.demo.corpus import Corpus, DomainText
from paramstore.demo.settings import DemoSettings, ModelShape
from paramstore.demo.training import StepResult, Trainer, repeatable
from paramstore.errors import ConfigError
from paramstore_bench import decode_model
from paramstore_bench.decode_model import SETTINGS, DecodeModel, open_decode_model

SHAPE = ModelShape(layers=2, experts=4, hidden=16, inner=8, heads=2, context=12)
SMALL = replace(SETTINGS, shape=SHAPE, batch=2, steps=4)
ANY_BITS = 99.0


@pytest.fixture
def corpus() -> Corpus:
    text = torch.frombuffer(bytearray(b"def forward(self, x):\n    return x\n" * 9), dtype=torch.uint8)
    return Corpus((DomainText("python", text, text),), sha256="made up")


@pytest.fixture(autouse=True)
def _saves_every_second_step(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(decode_model, "SAVE_STEPS", 2)
    monkeypatch.setattr(decode_model, "HELD_OUT_BATCHES", 1)
    with repeatable(threads=1):  # the number of threads is the process's own
        yield


def trained(file: Path, corpus: Corpus, settings: DemoSettings = SMALL) -> DecodeModel:
    return open_decode_model(file, corpus, settings=settings, bits_max=ANY_BITS)


def steps_counted(monkeypatch: pytest.MonkeyPatch, *, crash_at: int | None = None) -> list[int]:
    """The steps that are trained from here on; one of them raises first."""
    steps: list[int] = []
    train_step = Trainer.train_step

    def counted(trainer: Trainer) -> StepResult:
        if trainer.step + 1 == crash_at:
            raise KeyboardInterrupt
        result = train_step(trainer)
        steps.append(result.step)
        return result

    monkeypatch.setattr(Trainer, "train_step", counted)
    return steps


@pytest.mark.slow
def test_a_training_that_was_ended_goes_on_bit_for_bit(corpus: Corpus, tmp_path: Path) -> None:
    whole = trained(tmp_path / "whole.pt", corpus)
    with pytest.MonkeyPatch.context() as patch:
        steps_counted(patch, crash_at=4)
        with pytest.raises(KeyboardInterrupt):
            trained(tmp_path / "halved.pt", corpus)
    with pytest.MonkeyPatch.context() as patch:
        steps = steps_counted(patch)
        again = trained(tmp_path / "halved.pt", corpus)
        assert steps == [3, 4]
        trained(tmp_path / "halved.pt", corpus)
        assert steps == [3, 4], "a trained model is not trained again"
    assert again.held_out_bits == whole.held_out_bits
    assert whole.weights.keys() == again.weights.keys()
    assert all(torch.equal(value, again.weights[name]) for name, value in whole.weights.items())
    assert [file.name for file in sorted(tmp_path.iterdir())] == ["halved.pt", "whole.pt"]


@pytest.mark.slow
def test_a_state_of_other_settings_or_another_corpus_is_none(
    corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained(tmp_path / "a.pt", corpus)
    steps = steps_counted(monkeypatch)
    trained(tmp_path / "a.pt", corpus, replace(SMALL, seed=1))
    trained(tmp_path / "a.pt", replace(corpus, sha256="another"), replace(SMALL, seed=1))
    assert steps == [1, 2, 3, 4] * 2


def test_a_model_that_knows_too_little_is_refused_and_its_state_kept(corpus: Corpus, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"steps=4: \d+\.\d+ bits a byte of held-out text, below 0.5 are asked"):
        open_decode_model(tmp_path / "a.pt", corpus, settings=SMALL, bits_max=0.5)
    assert (tmp_path / "a.pt").exists()
