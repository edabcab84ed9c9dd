"""Keeps the experts at the step of the dense weights that transformers' Trainer saves and loads.

A run begins at a committed step; its checkpoint N is that step plus N. The manifest of the beginning lies in each checkpoint's
trainer_state.json, so that a checkpoint is never loaded beside experts of another step, store or namespace.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from torch import nn

from paramstore.core.arguments import path
from paramstore_client.hf.compat import modeling
from paramstore_client.hf.loading.stored_models import experts
from paramstore_client.training.experts import Experts

NAME = "paramstore"
"""The manifest's name among the `stateful_callbacks` of a trainer's state."""


def trainer_callback(model: nn.Module, *, dense: str | os.PathLike[str] | None = None) -> Any:
    """A callback for the Trainer of `model`, which commits the experts when it saves and takes them back to what it loads.

    dense: a directory for files of the dense weights, as for `Experts.commit`: each step that is committed names one, so that a
    served model can follow it. Default: none, since Trainer's checkpoints have the dense weights already; a file takes the bytes
    of the dense part, for as long as its step is kept.

    - A checkpoint is committed once its dense part is saved; what was trained after the last one, at the end of training.
    - `resume_from_checkpoint` raises StepDropped before any training where the step is not kept (`retained_steps` says how many
      are), SchemaMismatch where the checkpoint is of another namespace.
    - With `load_best_model_at_end` the best step is a snapshot until training ends at it; steps after it are gone then.

    The optimizer is attached as ever: `trainer.create_optimizer()`, then `ps.hf.experts(model).attach(trainer.optimizer)`.
    Raises ConfigError for a model whose experts are not trained.
    """
    directory = None if dense is None else Path(path("dense", dense))
    return type("ExpertsCallback", (_Checkpoints, modeling.transformers().TrainerCallback), {})(experts(model), directory)


class _Checkpoints:
    """Handles the events of a Trainer that concern the experts; every rank gets all of them."""

    def __init__(self, experts: Experts, dense: Path | None) -> None:
        self._experts = experts
        self._dense = dense
        self._namespace = experts.namespace
        self._kept: int | None = None
        """The step of the best checkpoint, a snapshot."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == 0:
            state.stateful_callbacks[NAME] = self._experts.state_dict()
            return
        if NAME not in state.stateful_callbacks:  # the run had no callback: it will have committed its own steps
            state.stateful_callbacks[NAME] = {**self._experts.state_dict(), "step": 0}
        self._kept, step = _best(args, state), _step(state, state.global_step)
        for later in self._namespace.snapshots():
            if later > step and _was_best(Path(args.output_dir, f"checkpoint-{later - _step(state, 0)}")):
                self._drop(later)  # it would keep the step from being rolled back
        self._go_to(state, step)

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._commit(state)
        best = _best(args, state)
        if best is None or self._namespace.rank != 0:
            return
        if best not in self._namespace.snapshots():
            self._experts.settle()  # a step can be kept once it is committed
            self._namespace.snapshot(best).close()
        if self._kept != best:
            self._drop(self._kept)
        self._kept = best

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        best = _best(args, state)
        if best is None:
            self._commit(state)
        else:
            self._go_to(state, best)
            self._drop(best)
        self._experts.settle()

    def _commit(self, state: Any) -> None:
        self._experts.settle()
        step = _step(state, state.global_step)
        if step != self._namespace.committed_step:
            self._experts.commit(step, dense=self._dense)

    def _go_to(self, state: Any, step: int) -> None:
        self._experts.load_state_dict({**state.stateful_callbacks[NAME], "step": step})

    def _drop(self, step: int | None) -> None:
        if self._namespace.rank == 0 and step in self._namespace.snapshots():
            self._namespace.drop_snapshot(step)


def _step(state: Any, global_step: int) -> int:
    """The namespace's step for the Trainer's `global_step`."""
    return int(state.stateful_callbacks[NAME]["step"]) + global_step


def _best(args: Any, state: Any) -> int | None:
    """The namespace's step for the checkpoint that Trainer loads at the end; None if it loads none."""
    folder = state.best_model_checkpoint if args.load_best_model_at_end else None
    return None if folder is None or not Path(folder).is_dir() else _step(state, int(Path(folder).name.rpartition("-")[2]))


def _was_best(folder: Path) -> bool:
    """Whether a checkpoint was the best one when it was saved: then it is this callback that has made its step a snapshot."""
    saved = folder / "trainer_state.json"
    return saved.is_file() and Path(json.loads(saved.read_text())["best_model_checkpoint"] or "").name == folder.name
