"""The byte model whose decoding is traced: trained on the demo's corpus until it knows a byte of held-out text to `BITS_MAX` bits.

Its training state lies in a file, so that a training that was ended goes on, and a trained model is recorded again at once.
"""

from __future__ import annotations

import dataclasses
import math
import os
import sys
from pathlib import Path

import torch
from torch import Tensor

from paramstore.demo.batches import held_out_batches
from paramstore.demo.corpus import Corpus
from paramstore.demo.settings import DemoSettings, ModelShape, full
from paramstore.demo.training import ResidentPlace, Trainer
from paramstore.errors import ConfigError

SETTINGS = dataclasses.replace(
    full(), shape=ModelShape(layers=12, experts=64, hidden=64, inner=48, heads=4, context=128, top_k=4),
    batch=16, steps=2000, learning_rate=4e-3, expert_learning_rate=2e-3, warmup_steps=20, final_lr_share=0.1, threads=1,
)  # fmt: skip
BITS_MAX = 2.3
"""A model that knows less of a byte of held-out text is none whose routing is worth tracing."""
HELD_OUT_BATCHES = 16
SAVE_STEPS = 100
"""Steps between two writes of the training state: about a minute."""


@dataclasses.dataclass(frozen=True, slots=True)
class DecodeModel:
    """A trained model. weights: its parameters by name, fp32; held_out_bits: mean bits a byte of held-out text."""

    settings: DemoSettings
    weights: dict[str, Tensor]
    held_out_bits: float


def open_decode_model(file: Path, corpus: Corpus, *, settings: DemoSettings = SETTINGS, bits_max: float = BITS_MAX) -> DecodeModel:
    """Trains a model to the end of `settings.steps`, from the state in `file` on if it is of these settings and this corpus.

    Raises ConfigError if it knows held-out text worse than `bits_max` bits a byte then; the state stays in `file`.
    """
    torch.set_num_threads(settings.threads)
    place = ResidentPlace(settings.shape, seed=settings.seed)
    trainer = Trainer(settings, corpus, place)
    recipe = f"{settings}, corpus {corpus.sha256}"
    if file.exists() and (state := torch.load(file, weights_only=True))["recipe"] == recipe:
        trainer.restore(state["dense"])
        trainer.model.load_state_dict(state["weights"])
        place.optimizer.load_state_dict(state["moments"])
    while trainer.step < settings.steps:
        result = trainer.train_step()
        if result.step % 20 == 0:
            print(f"step {result.step}/{settings.steps}: {result.loss / math.log(2):.3f} bits a byte", file=sys.stderr, flush=True)
        if result.step % SAVE_STEPS == 0 or result.step == settings.steps:
            state = {"recipe": recipe, "dense": trainer.dense_state(), "weights": trainer.model.state_dict()}
            save(file, {**state, "moments": place.optimizer.state_dict()})
    shape = settings.shape
    held_out = held_out_batches(corpus, count=HELD_OUT_BATCHES, batch=settings.batch, context=shape.context)
    bits = trainer.evaluate(held_out) / math.log(2)
    if bits >= bits_max:
        raise ConfigError(f"steps={trainer.step}: {bits:.3f} bits a byte of held-out text, below {bits_max} are asked: give more")
    return DecodeModel(settings, trainer.model.state_dict(), bits)


def save(file: Path, state: dict[str, object]) -> None:
    """Replaces `file` at once, so that no crash leaves half of it."""
    temporary = file.with_suffix(".new")
    torch.save(state, temporary)
    os.replace(temporary, file)
