"""A training run out of the store that can stop anywhere and go on at its last committed step.

Order at a commit: the dense checkpoint is synced, the store commits the step and names the checkpoint
in `extra`. Step 0 is committed too, so that there is always a step to go back to.
"""

from __future__ import annotations

from pathlib import Path

import paramstore as ps
from paramstore.demo.checkpoint import CheckpointFolder, CheckpointName
from paramstore.demo.corpus import Corpus
from paramstore.demo.model import initial_expert
from paramstore.demo.settings import DemoSettings
from paramstore.demo.training import StepResult, StoredPlace, Trainer, expert_schema
from paramstore.errors import CorruptRecord

NAMESPACE = "moe"


class StoredRun:
    """One trainer at work on a namespace. Owner of the trainer; `begin` or `resume` makes it."""

    def __init__(self, namespace: ps.Namespace, settings: DemoSettings, corpus: Corpus, checkpoints: CheckpointFolder) -> None:
        self.namespace = namespace
        self.place = StoredPlace(namespace)
        self.trainer = Trainer(settings, corpus, self.place)
        self._settings = settings
        self._checkpoints = checkpoints

    @classmethod
    def begin(cls, store: ps.Store, settings: DemoSettings, corpus: Corpus, *, directory: Path) -> StoredRun:
        """Starts a run at step 0, committed, with experts as `initial_expert` makes them. directory: for the checkpoints."""
        shape = settings.shape
        namespace = store.create_namespace(NAMESPACE, expert_schema(shape), layers=shape.layers, experts=shape.experts)
        namespace.initialize(lambda key: initial_expert(shape, key, seed=settings.seed))
        run = cls(namespace, settings, corpus, CheckpointFolder(directory))
        run.commit()
        return run

    @classmethod
    def resume(cls, store: ps.Store, settings: DemoSettings, corpus: Corpus, *, directory: Path) -> StoredRun:
        """Continues the run from the namespace's committed step. Raises UnknownNamespace, CorruptRecord, VolumeError."""
        namespace = store.open_namespace(NAMESPACE, mode="write")
        run = cls(namespace, settings, corpus, CheckpointFolder(directory))
        step = namespace.committed_step
        assert step is not None, "begin() commits step 0 before it returns"
        run.trainer.restore(run._checkpoints.load(CheckpointName.from_extra(namespace.extra(step))))
        if run.trainer.step != step:
            raise CorruptRecord(f"the store is at step {step}, its dense checkpoint at step {run.trainer.step}")
        return run

    @property
    def step(self) -> int:
        return self.trainer.step

    def train_step(self) -> StepResult:
        """Trains one step; every `commit_every`-th and the last are durable on return."""
        result = self.trainer.train_step()
        if self.is_commit_due:
            self.commit()
        return result

    @property
    def is_commit_due(self) -> bool:
        return self.step % self._settings.commit_every == 0 or self.step == self._settings.steps

    def commit(self) -> None:
        """Makes the trainer's step durable."""
        name = self._checkpoints.save(self.step, self.trainer.dense_state())
        self.namespace.commit(self.step, extra=name.to_extra()).wait()
        self._checkpoints.prune()
