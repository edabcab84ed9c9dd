"""The byte model of guesses: its training goes on where it ended, a bad one is refused, and widening changes no router's choice."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from paramstore.demo.corpus import Corpus, DomainText
from paramstore.errors import ConfigError
from paramstore_bench.guesses import byte_model
from paramstore_bench.guesses.byte_model import Recipe, Shape, open_byte_model, widened

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]

SHAPE = Shape(layers=2, experts=4, hidden=16, inner=8, heads=2, top_k=2)
RECIPE = Recipe(shape=SHAPE, batch=2, context=12, steps=4, warmup_steps=1, bits_max=99.0)


@pytest.fixture
def corpus(monkeypatch: pytest.MonkeyPatch) -> Corpus:
    monkeypatch.setattr(byte_model, "HELD_OUT_BATCHES", 1)
    monkeypatch.setattr(byte_model, "SAVE_STEPS", 2)
    text = torch.frombuffer(bytearray(b"def forward(self, x):\n    return x\n" * 9), dtype=torch.uint8)
    return Corpus((DomainText("python", text, text),), sha256="made up")


def test_a_training_that_was_ended_goes_on_bit_for_bit(corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = open_byte_model(tmp_path / "whole.pt", corpus, RECIPE)
    train = byte_model._train_step
    steps: list[int] = []

    def ending(*given: object) -> float:
        steps.append(len(steps))
        if len(steps) == 4:
            raise KeyboardInterrupt
        return train(*given)  # type: ignore[arg-type]

    monkeypatch.setattr(byte_model, "_train_step", ending)
    with pytest.raises(KeyboardInterrupt):
        open_byte_model(tmp_path / "halved.pt", corpus, RECIPE)
    again = open_byte_model(tmp_path / "halved.pt", corpus, RECIPE)
    assert len(steps) == 6, "from the second step on"
    assert again.held_out_bits == whole.held_out_bits
    ours, theirs = again.model.state_dict(), whole.model.state_dict()
    assert all(torch.equal(ours[name], value) for name, value in theirs.items())


def test_a_model_that_knows_too_little_is_refused_and_its_state_kept(corpus: Corpus, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"\d+\.\d+ bits a byte of held-out text, below 0.5 are asked"):
        open_byte_model(tmp_path / "a.pt", corpus, replace(RECIPE, bits_max=0.5))
    assert (tmp_path / "a.pt").exists()


def test_a_wide_model_chooses_and_says_what_the_small_one_does(corpus: Corpus, tmp_path: Path) -> None:
    small = open_byte_model(tmp_path / "a.pt", corpus, RECIPE).model
    wide = widened(small, replace(SHAPE, hidden=64, inner=24, heads=6), dtype=torch.float32)
    chosen: list[list[torch.Tensor]] = []
    for model in (small, wide):
        ids: list[torch.Tensor] = []
        for layer in model.model.layers:
            layer.mlp.gate.register_forward_hook(lambda module, given, out, ids=ids: ids.append(out[-1]))
        text = torch.arange(40, 72)[None]
        with torch.no_grad():
            logits = model(input_ids=text).logits
        ids.append(logits)
        chosen.append(ids)
    *ours, our_logits = chosen[0]
    *theirs, their_logits = chosen[1]
    assert all(map(torch.equal, ours, theirs))
    assert torch.allclose(our_logits, their_logits, atol=1e-4)
    assert wide.get_parameter("model.layers.0.mlp.experts.gate_up_proj").shape == (4, 48, 64)
