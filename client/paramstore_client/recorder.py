"""Records what a program asks of its experts, so that it can be replayed against other policies and sizes of memory."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from paramstore.core.arguments import listed, whole_number, wrong
from paramstore.core.key import ExpertKey
from paramstore.core.optimizers import AdamW
from paramstore.core.schema import Schema
from paramstore.core.trace import TOKENS_MAX, Trace, TraceEvent, TraceEventKind, TraceHeader, split_by_layer
from paramstore.errors import CapacityError
from paramstore_client.source import AheadTicket, ArrivingLease, ExpertSource, WeightLease

LOG_BYTES_MAX = 1 << 30
"""Most memory of one recorder's events, by EVENT_BYTES and so on: a file of them can be read again."""
EVENT_BYTES, EXPERT_BYTES = 150, 50
"""What an event takes at most in memory, and each expert that it names, with its count, and as much for each rank's count."""

COUNTS = "a number of tokens for each expert of the layer"


class TrainedSource(ExpertSource, Protocol):
    """An `ExpertSource` that takes optimizer steps too, as a writer's handle does."""

    def apply(self, options: AdamW, /, *, grad_scale: float = 1.0) -> Any:
        """Makes one optimizer step over what is pending; the type of its ticket is the handle's affair."""
        ...


class TraceLog:
    """Owner of the events of a trace that is being recorded, in LOG_BYTES_MAX of memory."""

    def __init__(self, schema: Schema, layers: Sequence[int], experts: int) -> None:
        self.schema = schema
        self.layers = layers
        self.experts = experts
        self._events: list[TraceEvent] = []
        self._bytes = 0

    @property
    def is_full(self) -> bool:
        return self._bytes >= LOG_BYTES_MAX

    def trace(self, name: str, *, how: str) -> Trace:
        """The trace of the calls so far. how: what ran, in words."""
        header = TraceHeader(name, self.schema.describe(), list(self.layers), self.experts, how)
        return Trace(header, tuple(self._events))

    def save(self, file: Path, name: str, *, how: str) -> None:
        """Writes the trace to `file`."""
        file.write_bytes(self.trace(name, how=how).pack())

    def _mark(self, kind: TraceEventKind) -> None:
        self._add([TraceEvent(kind, self.layers[0], ())])

    def _add(self, events: Iterable[TraceEvent]) -> None:
        for event in events:
            self._events.append(event)
            counts = len(event.experts) * (1 + len(event.sources))
            self._bytes += EVENT_BYTES + EXPERT_BYTES * counts + self.experts // 8  # the bitmap in its file


class TraceRecorder(TraceLog):
    """An `ExpertSource` in front of another that keeps every call. Give it to `StoredExperts`, a ring or a training loop.

    It changes nothing of what it passes on. A call that raises is not kept. Not safe from several threads at once.
    """

    def __init__(self, source: ExpertSource) -> None:
        super().__init__(source.schema, source.layers, source.experts)
        self._source = source
        self._step_start = 0
        """Index of the first event of the step under way."""

    @property
    def lease_slots(self) -> int:
        return self._source.lease_slots

    def acquire(self, keys: Sequence[ExpertKey], /, part: str = "param", timeout_s: float | None = None) -> WeightLease:
        lease = self._source.acquire(keys, part, timeout_s)
        self._keep(TraceEventKind.ACQUIRE, keys)
        return lease

    def acquire_arriving(
        self, keys: Sequence[ExpertKey], /, timeout_s: float | None = None, *, may_pass: bool = False
    ) -> ArrivingLease:
        lease = self._source.acquire_arriving(keys, timeout_s, may_pass=may_pass)
        self._keep(TraceEventKind.ACQUIRE, keys)
        return lease

    def prefetch(self, keys: Sequence[ExpertKey], /, part: str = "param") -> AheadTicket:
        ticket = self._source.prefetch(keys, part)
        if part == "param":
            self._keep(TraceEventKind.PREFETCH, keys)
        return ticket

    def push(self, gradients: Mapping[ExpertKey, Mapping[str, Tensor]], /) -> Any:
        answer = self._source.push(gradients)
        self._keep(TraceEventKind.PUSH, gradients)
        return answer

    def apply(self, options: AdamW, *, grad_scale: float = 1.0) -> Any:
        """Makes one optimizer step over everything pushed, where the source is a writer's handle."""
        source: Any = self._source  # a `TrainedSource`, or the call fails as it would without a recorder
        ticket = source.apply(options, grad_scale=grad_scale)
        self._keep_mark(TraceEventKind.APPLY)
        return ticket

    def end_step(self, tokens: Mapping[int, Sequence[int] | Sequence[Sequence[int]]] | None = None) -> None:
        """Marks the end of a training step, or of a token: traces are cut and counted there.

        tokens: for each layer that acquired in this step, how many tokens went to each of its experts, 0 to TOKENS_MAX; or such a
        list of each rank that they came from. The step's acquires keep those of the experts that they name. Raises ConfigError on
        other counts, and then keeps nothing.
        """
        self._check_room()
        if tokens is not None:
            counted = [self._counted(event, tokens) for event in self._events[self._step_start :]]
            self._events[self._step_start :] = counted
            self._bytes += EXPERT_BYTES * sum(len(event.experts) * len(event.sources) for event in counted)
        self._keep_mark(TraceEventKind.STEP)
        self._step_start = len(self._events)

    def _keep_mark(self, kind: TraceEventKind) -> None:
        self._check_room()
        self._mark(kind)

    def _keep(self, kind: TraceEventKind, keys: Iterable[ExpertKey]) -> None:
        self._check_room()
        self._add(split_by_layer(kind, keys))

    def _counted(self, event: TraceEvent, tokens: Mapping[int, Sequence[int] | Sequence[Sequence[int]]]) -> TraceEvent:
        if event.kind is not TraceEventKind.ACQUIRE:
            return event
        name = f"tokens[{event.layer}]"
        given = listed(name, tokens.get(event.layer) if isinstance(tokens, Mapping) else None, COUNTS)
        is_by_source = bool(given) and all(isinstance(row, list | tuple) for row in given)
        rows = [self._row(name, row, event.experts) for row in (given if is_by_source else [given])]
        return event._replace(tokens=tuple(map(sum, zip(*rows, strict=True))), sources=tuple(rows) if is_by_source else ())

    def _row(self, name: str, given: Any, experts: Iterable[int]) -> tuple[int, ...]:
        """The counts of `experts` among those of all."""
        counts = [whole_number(name, count, most=TOKENS_MAX) for count in listed(name, given, COUNTS)]
        if len(counts) != self.experts:
            raise wrong(name, given, COUNTS)
        return tuple(counts[expert] for expert in experts)

    def _check_room(self) -> None:
        if self.is_full:
            raise CapacityError(f"a trace holds no more than these {len(self._events)} events: save it, and begin another recorder")
