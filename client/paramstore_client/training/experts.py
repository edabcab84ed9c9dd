"""The handle on a model's stored experts: what a training loop calls beside its optimizer."""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from torch import nn

from paramstore.core.arguments import choice, data, flag, path, whole_number
from paramstore.errors import ConfigError, StepOutOfOrder
from paramstore_client.connection.answers import Result
from paramstore_client.connection.ticket import Ticket
from paramstore_client.handle.dense_part import DensePart, callers_extra
from paramstore_client.handle.origin import Origin
from paramstore_client.namespace import Namespace
from paramstore_client.nn.sharded import sharded_modules
from paramstore_client.training.attachment import Attachment
from paramstore_client.training.checkpoint import Manifest, check_committed, roll_to
from paramstore_client.training.dense_files import DenseFiles, opened
from paramstore_client.training.options import MainGroup, options_class, trains_adapters, unwrapped
from paramstore_client.training.sentinel import ExpertSentinel
from paramstore_client.training.shards import HeldShards, check_shards
from paramstore_client.training.unattached import Unattached
from paramstore_client.training.updates import ExpertUpdates, Reduce
from paramstore_client.training.updates_in_backward import UpdatesInBackward

_log = logging.getLogger(__name__)


class Experts(ExpertUpdates):
    """A model's experts in one namespace, of which `namespace` is the writer's handle. Made by `training.bind`.

    With several ranks the gradients that they push are summed, and divided by their number where `reduce` is "mean", as DDP and
    FSDP do with the dense ones; `gradient_norm`, `step`, `abort`, `commit` and `rollback` are called by all of them.

    reduce: "mean" or "sum".
    commit_on_state_dict: `state_dict` commits what was applied since the last commit, as the next step, instead of refusing.
    """

    def __init__(self, namespace: Namespace, sentinel: ExpertSentinel, model: nn.Module) -> None:
        super().__init__(namespace)
        self._model = weakref.ref(model)
        self.commit_on_state_dict = False
        self.sentinel = sentinel
        sentinel.listener = Unattached(namespace, model)
        self._attachment: Attachment | None = None
        self._commit: Ticket[Result] | None = None
        self._dense_files: DenseFiles | None = None
        """Those in which a commit may have left old files."""
        self._origin: bytes | None = None
        """The `extra` bytes that commits without the caller's own carry on; None until it is looked up."""

    # --- the step

    def attach(
        self, optimizer: Any, *, reduce: Reduce = "mean", weight_decay: float | None = None, group: int | None = None,
        updates_in_backward: bool = False, experts: bool | None = None,
    ) -> None:  # fmt: skip
        """From here on `optimizer.step()` updates the experts too, with the options of its main parameter group at that moment.

        Whoever clips, unscales or looks at the norm of `model.parameters()` counts the experts. `zero_grad()` drops what is
        pending, a step that is skipped skips them. The optimizer takes the sentinel into its last group, unless it has it.

        optimizer: torch's AdamW, SGD or Adagrad, as the schema says, or a wrapper of it by accelerate or Lightning. weight_decay:
        the experts'; None: the main group's. group: the index of the main group; None: the one with the most elements.
        updates_in_backward: an expert is updated as soon as backward has its gradient, with the options that the group has at the
        forward; excludes clipping, a GradScaler, and several backwards for a step outside of `accumulate`. It takes upload memory
        for two layers' gradients at once; with a `gradient_budget`, backward waits for updates where this rank's share is full.
        experts: whether they train. False: they stay as they are and get no gradients, whatever the optimizer is. None: they train,
        unless PEFT's adapters are what the optimizer trains.
        Raises ConfigError where the experts cannot follow: another optimizer, groups that differ in more than weight decay,
        amsgrad, maximize, capturable, differentiable, FSDP1, or an optimizer that is attached already; CapacityError where the
        share is less; then nothing has changed.
        """
        if self._attachment is not None:
            raise ConfigError("attach: an optimizer is attached; call experts.detach() first")
        choice("reduce", reduce, ("mean", "sum"))
        flag("updates_in_backward", updates_in_backward)
        if experts is not None:
            flag("experts", experts)
        _check_ranks(self.namespace)
        inner, model = unwrapped(optimizer), self._model()
        if experts is None:
            experts = model is None or not trains_adapters(model, inner, sentinel=self.sentinel.sentinel)
        if not experts:
            self.sentinel.listener, self.sentinel.is_left_alone = None, True
            _log.info("the experts of %r are left alone: attach(optimizer, experts=True) trains them", self.namespace.name)
            return
        main = MainGroup(
            inner, self.namespace.schema, sentinel=self.sentinel.sentinel, index=group, weight_decay=weight_decay
        )
        tables = [] if model is None else sharded_modules(model)
        check_shards(tables, inner, reduce=reduce, sentinel=self.sentinel.sentinel)
        if updates_in_backward:
            self.namespace.reserve_room()
        self.reduce = reduce
        early = UpdatesInBackward(self, main) if updates_in_backward else None
        self._attachment = Attachment(self, self.sentinel, inner, main, early, None if updates_in_backward else HeldShards(tables))
        self.sentinel.is_left_alone = False

    def detach(self) -> None:
        """Ends `attach`; pending gradients stay pending. Does nothing where no optimizer is attached.

        Raises StepMismatch between a forward and its step where updates begin in backward, and there are pending gradients."""
        if self._attachment is not None:
            self._attachment.remove()
            self._attachment = None
        self.sentinel.is_left_alone = False

    @contextmanager
    def accumulate(self) -> Iterator[None]:
        """A block for the forward and backward of every micro-batch of a step but the last, where updates begin in backward: their
        gradients add up until those of the last one come. Elsewhere it does nothing."""
        early = None if self._attachment is None else self._attachment.early
        if early is None:
            yield
            return
        with early.held_back():
            yield

    def step(self, *, clip_coef: float = 1.0, **options: Any) -> Ticket[Result]:
        """Makes an optimizer step over every expert with pending gradients, which it consumes: the explicit path, without `attach`.

        clip_coef: factor for the gradients. options: lr, betas, eps, ... of the namespace's optimizer, by torch's
        names. Result and errors as of `Namespace.apply`; ConfigError for options it does not know, and while an optimizer is
        attached.
        """
        if self._attachment is not None:
            raise ConfigError("step: optimizer.step() does it, an optimizer is attached; call experts.detach() first")
        chosen = options_class(self.namespace.schema)
        try:
            made = chosen(**options)
        except TypeError as error:
            raise ConfigError(f"step: {error}; {chosen.__name__} takes {', '.join(f.name for f in fields(chosen))}") from error
        self.sentinel.listener = None  # who steps by hand has forgotten nothing
        return self.apply(made, clip_coef=clip_coef)

    def settle(self) -> None:
        """Waits for the update and the commit under way, and raises their errors."""
        super().settle()
        ticket, self._commit = self._commit, None
        if ticket is not None:
            ticket.wait()
        files, self._dense_files = self._dense_files, None
        if files is not None:
            files.remove_old()

    # --- checkpoints

    def commit(self, step: int, extra: bytes = b"", *, dense: str | os.PathLike[str] | None = None) -> Ticket[Result]:
        """Makes everything applied so far durable as `step`; as `Namespace.commit`, but the next call here waits for it.

        dense: a directory for files of the dense weights. The model's state dict, without experts, is written there and synced
        before the step is committed, which names the file: experts and dense weights are of one step, whatever happens in between.
        All ranks give it; rank 0 writes. Files of steps that are kept no more go from there once the commit is seen to be durable,
        by the next call here; those in a directory given before stay, to be removed when none of `namespace.steps()` names them
        any more. Without it, what is saved of the dense weights is to be saved after the commit.
        extra: what `namespace.extra(step)` gives later (`DensePart.from_extra(...).extra` of it, with `dense`); without it, where
        the experts were imported from stays noted.

        Raises CheckpointError where the file cannot be written; nothing is committed then.
        """
        step, extra = whole_number("step", step), data("extra", extra)
        directory = None if dense is None else Path(path("dense", dense))
        self.settle()
        if isinstance(watcher := self.sentinel.listener, Unattached | Attachment):
            watcher.before_commit(step)
        origin = self._origin_extra()  # before a first `extra` of the caller's hides it
        extra = extra or origin
        if directory is not None:
            files = DenseFiles(directory, self.namespace)
            extra = files.write(self._bound_model(), step, extra)
            self._dense_files = files
        self._commit = self.namespace.commit(step, extra)
        return self._commit

    def load_dense(self, directory: str | os.PathLike[str] | None = None) -> int | None:
        """Loads the dense weights of the committed step into the model, in place, and returns the step: so a training goes on.

        directory: where the file lies, if it was moved since. None is returned, and nothing has changed, where the step was
        committed without dense weights. Every rank reads the file, to check it and then to load it. Raises CheckpointError where
        it is missing, cut off or damaged, SchemaMismatch where it is of another model; then nothing has changed. Where the disk
        fails once the file was found whole, CheckpointError leaves some weights loaded: the call is to be made again.
        """
        moved = None if directory is None else Path(path("directory", directory))
        model, step = self._bound_model(), check_committed(self.namespace)
        found = DensePart.from_extra(self.namespace.extra(step))
        if found is None:
            return None
        with opened(found, moved) as file:
            file.check_fits(model)
            file.load(model)
        return step

    def _bound_model(self) -> nn.Module:
        model = self._model()
        if model is None:
            raise ConfigError("dense weights: the model of these experts is gone")
        return model

    def _origin_extra(self) -> bytes:
        if self._origin is None:
            step = self.namespace.committed_step
            extra = b"" if step is None else self.namespace.extra(step)
            self._origin = b"" if Origin.from_extra(extra) is None else callers_extra(extra)
        return self._origin

    def rollback(self, step: int | None = None) -> None:
        """Goes back to `step`, or to the committed one: what was pushed, applied and committed after it is gone.

        Raises StepDropped naming the steps that are kept; then nothing has changed.
        """
        step = None if step is None else whole_number("step", step)
        for ticket in (self._apply, self._commit):
            if ticket is not None and ticket.settled_within() and ticket.error is not None:
                _log.info("%s had failed, and is rolled back: %s", ticket.what, ticket.error)
        self._apply = self._commit = self._dense_files = None
        roll_to(self.namespace, check_committed(self.namespace) if step is None else step)

    def state_dict(self) -> dict[str, Any]:
        """A small manifest, plain values: which store, namespace and committed step the experts are at.

        Raises StepOutOfOrder where no commit covers what was applied, unless `commit_on_state_dict`, before the first commit, and
        between a backward that updates and its step.
        """
        self.settle()
        if self.namespace.is_applying and self.namespace.pending_count:
            raise StepOutOfOrder("state_dict: updates have begun in backward: call optimizer.step() and commit first")
        if self.commit_on_state_dict and (applied := self.namespace.uncommitted_applies):
            self.commit(check_committed(self.namespace) + applied).wait()
        return Manifest.of(self.namespace).to_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Takes the namespace back to the manifest's step; pending gradients are dropped.

        Raises SchemaMismatch for a manifest of another store, namespace or layout, StepDropped naming the kept steps; then nothing
        has changed.
        """
        manifest = Manifest.from_dict(state_dict)
        manifest.check(self.namespace)
        self.rollback(manifest.step)

    def __repr__(self) -> str:
        return f"<Experts of {self.namespace!r}{', attached' if self._attachment is not None else ''}>"

def _check_ranks(namespace: Namespace) -> None:
    """Raises ConfigError where ranks of torch.distributed are not in one group: they would not see each other's gradients."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return
    world, ranks = torch.distributed.get_world_size(), namespace.world_size
    if world != ranks:
        raise ConfigError(
            f"attach: torch.distributed has {world} ranks, namespace {namespace.name!r} was opened for {ranks}: open it with "
            "rank= and world_size=, as ps.training.launched() gives them"
        )
