"""Moves a model that is served to the newest step that a trainer commits: experts and dense weights together, or not at all.

It moves between two forwards, never within one, and only to a step whose dense file was found whole and of this model.
"""

from __future__ import annotations

import functools
import inspect
import os
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import nn

from paramstore.clock import MonotonicClock
from paramstore.core.arguments import path
from paramstore.errors import ConfigError, StepDropped, WaitTimeout
from paramstore_client.connection.answers import NewStep
from paramstore_client.connection.ticket import Ticket
from paramstore_client.hf.compat import caches
from paramstore_client.hf.loading.newest_step import Followed, Mover
from paramstore_client.hf.loading.stored_models import namespace as namespace_of


def follow(model: nn.Module, *, directory: str | os.PathLike[str] | None = None) -> Followed:
    """Moves `model`, loaded with mode="infer", to the newest committed step: its experts, and the dense weights that the step names
    (`experts.commit(step, dense=...)` of its trainer). Loading a model does so once.

    directory: where the files of the dense weights are, if not where the trainer has them. Where the newest step names none, or its
    file is missing, damaged or of another model, the model stays as it is, and `reason` says why. It is to be called by the thread
    that computes, between two forwards: one on another thread meanwhile would mix two steps. With `generate_batch`, which computes
    on a thread of its own, use `following`. A key/value cache from before stays, computed with older weights.

    Raises ConfigError for a model that is not served, or was copied (the copy shares its experts), StoreUnavailable,
    VersionMismatch with a daemon before protocol 1.6, and CheckpointError where the file goes bad while it is loaded. After that,
    and after an interrupt in between, the model's forwards raise StepMismatch until it was followed again.
    """
    return _mover(model, directory).move()


def following(model: nn.Module, *, directory: str | os.PathLike[str] | None = None) -> Following:
    """A block in which `model` moves between tokens: before each of its forwards, if there is a newer step by then.

        with ps.hf.following(model) as progress:
            model.generate(...)

    The key/value cache is kept: what it holds was computed with older weights. Where the step is dropped within a forward (older
    steps than `retained_steps` and `held_steps` go), the cache is cropped to what it was, the model moves to the newest step, and
    the forward is computed again. StepDropped is raised where the cache cannot be cropped (a sliding window that is full, a
    recurrent state), where the newest step has no whole dense file, and after `wait_timeout_s` of steps that do not live as long
    as a forward. One thread computes with the model inside the block, whichever it is. Errors are those of `follow`.
    """
    return Following(_mover(model, directory))


def _mover(model: nn.Module, directory: str | os.PathLike[str] | None) -> Mover:
    namespace = namespace_of(model)
    if namespace.mode != "read":
        raise ConfigError("follow: this model trains, and is at its newest state; follow one that was loaded with mode='infer'")
    return Mover(model, namespace, None if directory is None else Path(path("directory", directory)))


class Following:
    """A block in which a model moves between its forwards; see `following`. Owner of the wait for the next step.

    last: what the last look at a newer step has come to. move_count: moves so far. repeat_count: forwards that were computed again.
    """

    def __init__(self, mover: Mover) -> None:
        self.last: Followed | None = None
        self.move_count = 0
        self.repeat_count = 0
        self._mover = mover
        self._news: Ticket[NewStep] | None = None
        self._told: int | None = None
        """The sequence of the commit that was told last."""
        self._forward: Any = None

    def __enter__(self) -> Following:
        model: Any = self._mover.model
        if self._forward is not None:
            raise ConfigError("following: this block is entered already")
        self._move()
        self._forward, self._is_own = model.forward, "forward" in model.__dict__

        @functools.wraps(self._forward)  # transformers looks at its arguments
        def forward(*args: Any, **kwargs: Any) -> Any:
            return self._run(*args, **kwargs)

        model.forward = torch.compiler.disable(forward, recursive=False)  # type: ignore[no-untyped-call]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        model: Any = self._mover.model
        if self._is_own:
            model.forward = self._forward
        else:
            del model.forward
        self._forward = None
        if self._news is not None:
            self._news.abandon()
            self._news = None

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        """Computes one forward at the newest step."""
        if self._news is None or self._news.done():
            self._look()
        given = inspect.signature(self._forward).bind_partial(*args).arguments if len(args) > 1 else {}
        cache = caches.cache_of({**given, **kwargs})
        before, started_s = caches.lengths(cache), None
        while True:
            try:
                return self._forward(*args, **kwargs)
            except StepDropped as error:
                if (reason := caches.crop(cache, before)) is not None:
                    raise StepDropped(f"{error}. The token cannot be computed again: {reason}; generate again") from error
                clock = MonotonicClock()
                started_s = clock.now_s() if started_s is None else started_s
                followed = self._move()
                if not followed.has_moved:
                    raise StepDropped(f"{error}. The model cannot move on: {followed.reason}") from error
                if clock.now_s() - started_s > self._mover.namespace.wait_timeout_s:
                    raise StepDropped(f"{error}. No step lives as long as a forward: raise held_steps") from error
                self.repeat_count += 1

    def _look(self) -> None:
        """Takes the news of a step, if there are any; moves, and waits for the next."""
        if self._news is not None:
            with suppress(WaitTimeout):  # the daemon lives, and has no newer step yet
                self._told = self._news.wait().sequence
                self._move()
        namespace = self._mover.namespace
        self._news = namespace.begin_await_step(None, self._told, namespace.wait_timeout_s)

    def _move(self) -> Followed:
        self.last = self._mover.move()
        self.move_count += self.last.has_moved
        return self.last
