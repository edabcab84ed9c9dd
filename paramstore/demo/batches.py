"""Draws the batches of training: they depend on the seed and on how many were drawn before, and on nothing else.

Every batch takes its rows from all domains in turn, so that each step asks for experts of each kind. Batches are a
pure function of (seed, position), so the position and the generator's state are all a checkpoint must keep.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from paramstore.demo.corpus import Corpus


@dataclass(frozen=True, slots=True)
class Batch:
    """input_BT and target_BT are int64 bytes; the target is the input one byte later."""  # B rows, T context

    input_BT: torch.Tensor  # noqa: N815
    target_BT: torch.Tensor  # noqa: N815


class BatchSampler:
    """Owner of the data position: draws random windows of the training bytes, row by row from the domains in turn."""

    def __init__(self, corpus: Corpus, *, batch: int, context: int, seed: int) -> None:
        self.position = 0
        self._texts = [domain.train for domain in corpus.domains]
        self._batch = batch
        self._context = context
        self._generator = torch.Generator().manual_seed(seed)

    def draw(self) -> Batch:
        """Draws the next batch; the position moves on by one."""
        batch = _windows(self._texts, rows=self._batch, context=self._context, generator=self._generator)
        self.position += 1
        return batch

    def state(self) -> dict[str, torch.Tensor]:
        """The state that `restore` needs to draw the same batches from here on."""
        return {"generator": self._generator.get_state(), "position": torch.tensor(self.position)}

    def restore(self, state: dict[str, torch.Tensor]) -> None:
        self._generator.set_state(state["generator"])
        self.position = int(state["position"])


def held_out_batches(corpus: Corpus, *, count: int, batch: int, context: int) -> list[Batch]:
    """Draws `count` batches of the held-out files, always the same ones."""
    generator = torch.Generator().manual_seed(0)
    texts = [domain.valid for domain in corpus.domains]
    return [_windows(texts, rows=batch, context=context, generator=generator) for _ in range(count)]


def _windows(texts: list[torch.Tensor], *, rows: int, context: int, generator: torch.Generator) -> Batch:
    windows = []
    for row in range(rows):
        text = texts[row % len(texts)]
        start = int(torch.randint(text.numel() - context, (1,), generator=generator))
        windows.append(text[start : start + context + 1])
    window_BT = torch.stack(windows).long()  # noqa: N806
    return Batch(window_BT[:, :-1].contiguous(), window_BT[:, 1:].contiguous())
