"""Finds the prompt under which a ring hides its loads: a layer computes it `LEAST` times as long as the next one's experts load."""

from __future__ import annotations

import time
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor

from paramstore_bench.decode.rows import Work
from paramstore_bench.decode.runs import Models, prompt_of

LEAST = 1.5
FIRST, LONGEST = 512, 16384
"""Tokens of the first prompt that is tried, and of the last: the length doubles."""


@dataclass(frozen=True, slots=True)
class LongPrompt:
    """What was found. compute_s: of a layer in memory, the median; load_s: of a layer's experts, by raw reads of the same round."""

    tokens: int
    compute_s: float
    load_s: float

    @property
    def is_enough(self) -> bool:
        return self.compute_s >= LEAST * self.load_s

    def facts(self) -> dict[str, float]:
        """What a row names."""
        return {"layer_compute_s": self.compute_s, "layer_load_s": self.load_s}


def find_long_prompt(models: Models) -> LongPrompt:
    """The first length that is enough, or LONGEST if none is; with as many threads as torch has now."""
    layer_bytes = models.slots.experts * models.raw.record_bytes
    tokens = FIRST
    while True:
        prompt = prompt_of(Work(tokens), -1)
        layer_seconds(models.memory, prompt)  # the first run of a length makes its buffers
        compute_s = median(layer_seconds(models.memory, prompt))
        found = LongPrompt(tokens, compute_s, layer_bytes / models.raw_rate(models.slots.experts))
        if found.is_enough or 2 * tokens > LONGEST:
            return found
        tokens *= 2


@torch.no_grad()
def layer_seconds(model: Any, prompt: Tensor) -> list[float]:
    """Seconds that each layer of the model computes for the prompt."""
    marks: list[float] = []

    def mark(*_: Any) -> None:
        marks.append(time.perf_counter())

    layers = model.model.layers
    hooks = [hook for layer in layers for hook in (layer.register_forward_pre_hook(mark), layer.register_forward_hook(mark))]
    try:
        model(input_ids=prompt, use_cache=True, logits_to_keep=1)
    finally:
        for hook in hooks:
            hook.remove()
    return [ended_s - began_s for began_s, ended_s in zip(marks[::2], marks[1::2], strict=True)]
