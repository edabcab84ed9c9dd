"""Takes down what the routers of a model decide, for a routing trace: which experts each layer's tokens chose, and how many tokens.

A dispatch is kept once its layer has computed; a backward as one more use of the same experts, and the push of their gradients. A
step ends where the experts were updated, as the namespace's count of applies says; of a model that does not train, where a layer
that has had its turn comes again: with a prompt, or a token.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Iterable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

from paramstore.core.schema import Schema
from paramstore.core.trace import Trace, TraceEvent, TraceEventKind
from paramstore.errors import ConfigError
from paramstore_client.hf.model.layer_call import Fields, Supply, WeightsOf
from paramstore_client.recorder import TraceLog
from paramstore_client.source import ExpertSource

Counts = Iterable[int] | Iterable[tuple[int, ...]]
"""For each expert the rows of tokens that it had; or, of ranks that share experts, those of each rank."""

_log = logging.getLogger(__name__)


class Recordable(Protocol):
    """The part of a model's experts that a recording needs: their source, and the place where it is looked for."""

    source: ExpertSource
    recording: Recording | None


class Recording(TraceLog):
    """A block in which a model's routing is taken down; see `ps.hf.recording`, which makes one.

    What was kept stays when the block ends, however that is, and is in the file then. Forwards of several threads at once are kept
    in the order in which their layers end. A trace that is full keeps no more, and the log says so.

    applies: counts the updates of the experts; None for a model that does not train.
    """

    def __init__(
        self, experts: Recordable, schema: Schema, *, applies: Callable[[], int] | None, file: Path | None, name: str, how: str
    ) -> None:
        super().__init__(schema, experts.source.layers, experts.source.experts)
        self.file = file
        self._experts = experts
        self._applies = applies
        self._apply_count = 0
        self._name, self._how = name, how
        self._has_warned = False
        self._turn: set[int] = set()
        """Layers that have dispatched in the step under way."""

    def recorded(self) -> Trace:
        """The trace so far (`paramstore.core.trace.Trace`); `pack()` gives the bytes of its file."""
        return self.trace(self._name, how=self._how)

    def __enter__(self) -> Recording:
        if self._experts.recording is not None:
            raise ConfigError("recording: one of this model is on already; end its block first")
        self._apply_count = self._applies() if self._applies is not None else 0
        self._experts.recording = self
        return self

    def __exit__(self, *error: object) -> None:
        self._experts.recording = None
        self._end_step()
        if self.file is not None:
            self.save(self.file, self._name, how=self._how)

    def keep_dispatch(self, layer: int, experts: Iterable[int], counts: Counts) -> None:
        """Keeps that a layer has computed with these experts, each for so many rows of tokens."""
        if self._applies is not None or layer in self._turn:
            self._end_step()
        self._turn.add(layer)
        self._keep(TraceEventKind.ACQUIRE, layer, experts, counts)

    def keep_backward(self, layer: int, experts: Iterable[int], counts: Counts) -> None:
        self._keep(TraceEventKind.ACQUIRE, layer, experts, counts)

    def keep_push(self, layer: int, experts: Iterable[int]) -> None:
        """Keeps that the gradients of these experts were pushed: they are all there, and no update has taken them."""
        pushed = list(experts)
        self._keep(TraceEventKind.PUSH, layer, pushed, [0] * len(pushed))

    def _keep(self, kind: TraceEventKind, layer: int, experts: Iterable[int], counts: Counts) -> None:
        if self._experts.recording is not self:
            return  # a backward after the block, whose forward was recorded
        if self.is_full:
            if not self._has_warned:
                self._has_warned = True
                _log.warning("the trace %r holds %d events, and takes no more: record shorter runs", self._name, len(self._events))
            return
        rows: dict[int, Any] = dict(zip(experts, counts, strict=True))
        event = TraceEvent(kind, layer, tuple(sorted(rows)))
        if kind is TraceEventKind.ACQUIRE:
            counted = [rows[expert] for expert in event.experts]
            by_source = [each for each in counted if isinstance(each, tuple)]
            tokens = tuple(sum(each) if isinstance(each, tuple) else each for each in counted)
            event = event._replace(tokens=tokens, sources=tuple(zip(*by_source, strict=True)))
        self._add([event])

    def _end_step(self) -> None:
        """Marks a step that has ended, if one has."""
        if self.is_full:
            return
        if self._applies is None:
            if self._turn:
                self._mark(TraceEventKind.STEP)
        elif (count := self._applies()) != self._apply_count:
            self._apply_count = count
            self._mark(TraceEventKind.APPLY)
            self._mark(TraceEventKind.STEP)
        self._turn.clear()


class RecordedSupply(Supply):
    """A supply in front of another that tells a recording when a backward has begun, and when it has pushed."""

    def __init__(
        self, supply: Supply, recording: Recording, layer: int, experts: Iterable[int], counts: Counts
    ) -> None:  # fmt: skip
        self._supply = supply
        self._recording = recording
        self._layer = layer
        self._experts, self._counts = experts, counts

    def forward_pass(self) -> AbstractContextManager[WeightsOf]:
        return self._supply.forward_pass()

    def begin_backward(self) -> None:
        self._supply.begin_backward()
        self._recording.keep_backward(self._layer, self._experts, self._counts)

    def backward_weights(self, holder: Any, /) -> Fields:
        return self._supply.backward_weights(holder)

    def push(self, holder: Hashable, gradients: Fields, /) -> None:
        self._supply.push(holder, gradients)

    def let_go(self) -> None:
        self._supply.let_go()

    def finish_backward(self) -> None:
        self._supply.finish_backward()
        self._recording.keep_push(self._layer, self._experts)
