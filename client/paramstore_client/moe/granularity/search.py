"""Chooses the pipeline of each call of a model's layers, alike on all ranks: what one has measured, all hear with its headers.

MPMoE's Algorithm 1, whose numbers of rows are what a layer of the same kind had in its last call: ranks know them without asking.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from paramstore_client.moe.granularity.cache import GranularityCache, rows_class
from paramstore_client.moe.granularity.clock import Clock, Times
from paramstore_client.moe.granularity.model import Curve
from paramstore_client.moe.granularity.trial import PipelineChoice, Trial
from paramstore_client.moe.pipeline_plan import Pipeline, PipelineSearch, pipelines_of

_log = logging.getLogger(__name__)

MOST_UNDER_WAY = 1024
"""Calls that are planned and not ended, above which all are forgotten: there are some whose backward nobody runs."""
MOST_PROBED_BYTES = 1 << 25
"""What a rank sends at most when an exchange is measured: more takes as many times longer."""
TOLD = 6
"""Numbers that a rank tells with a header: its rows, and a call that it has ended, 0 or one more than its number, and its times,
0 where it has failed."""


class Plan(NamedTuple):
    """What a call does. rows: for how many it is tried; 0: it is no trial. sizes_bytes: those of which exchanges are measured
    first."""

    pipeline: Pipeline
    rows: int = 0
    sizes_bytes: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Kind:
    """Calls that take alike long for as many rows. row_bytes: of a row."""

    records: bool
    experts: int
    top_k: int
    row_bytes: int


class Search:
    """Owner of what was found for all layers of a model. Ranks whose calls are the same find the same: what they know changes only
    when they `hear`, after all of them have agreed on a call, as it may fail before that on one rank alone."""

    def __init__(self, options: PipelineSearch) -> None:
        self._options = options
        self._known: dict[Kind, GranularityCache] = {}
        self._heard: dict[Kind, int] = {}
        """The class of the rows of all ranks in the last call."""
        self._trials: dict[tuple[Kind, int], Trial] = {}
        self._under_way: dict[int, tuple[tuple[Kind, int], Pipeline]] = {}
        self._ended: deque[tuple[int, Clock | None]] = deque()
        self._curve: Curve | None = None

    @property
    def choices(self) -> tuple[PipelineChoice, ...]:
        """What was chosen, for each number of rows as it came."""
        return tuple(trial.choice for trial in self._trials.values() if trial.choice is not None)

    @property
    def host_bytes(self) -> int | None:
        return self._options.host_bytes

    @property
    def base(self) -> Plan:
        """One part, without a trial."""
        return Plan(pipelines_of(self._options, 1)[0])

    def word(self, plan: Plan) -> int:
        """What ranks compare before they begin: among what they search, and what they do."""
        return self._options.digest | (plan.rows % (1 << 30)) << 33 | bool(plan.sizes_bytes) << 32

    def next(self, kind: Kind) -> Plan:
        """The plan of the next call."""
        rows = self._heard.get(kind)
        if rows is None:
            return self.base
        found = self._known[kind].known(rows)
        if found is not None:
            return Plan(found)
        trial = self._trials[kind, rows]
        return Plan(trial.next(), rows, self._sizes_bytes(trial) if trial.awaits_curve else ())

    def hear(self, kind: Kind, call: int, plan: Plan, told: Sequence[Sequence[int]]) -> bool:
        """Notes what ranks tell with the headers of `call`, which all of them have planned so. Whether it is to be timed."""
        rows = rows_class(sum(numbers[0] for numbers in told))
        most = [max(each) for each in zip(*told, strict=True)]
        if rows:
            self._heard[kind] = rows
        self._note_ended({numbers[1] for numbers in told}, most)
        tried = self._trials.get((kind, plan.rows))
        if tried is not None:
            tried.begin(plan.pipeline)
        if len(self._under_way) == MOST_UNDER_WAY:
            self._under_way.clear()
        is_timed = tried is not None and plan.rows == rows  # else it has other rows than it was planned for
        if is_timed:
            self._under_way[call] = (kind, rows), plan.pipeline
        if rows:
            self._open(kind, rows, sent_bytes=most[0] * kind.row_bytes, ranks=len(told))
        return is_timed

    def note_exchanges(self, kind: Kind, plan: Plan, curve: Curve) -> None:
        """Notes what exchanges take that a plan asked for."""
        self._curve = curve if self._curve is None else self._curve.with_points(curve)
        trial = self._trials[kind, plan.rows]
        if trial.awaits_curve:
            trial.note_exchanges(self._curve)
        self._learn((kind, plan.rows))

    def telling(self, rows: int) -> tuple[int, ...]:
        """What this rank tells with its next header. rows: it has in that call."""
        if not self._ended:
            return (rows, *[0] * (TOLD - 1))
        call, clock = self._ended[0]
        return (rows, call + 1, *([0] * (TOLD - 2) if clock is None else clock.times().microseconds))

    def end(self, call: int, clock: Clock | None) -> None:
        """Notes that a call has ended on this rank; None: that it has failed."""
        if call in self._under_way:
            self._ended.append((call, clock))

    def _note_ended(self, told: set[int], most: Sequence[int]) -> None:
        """told: the calls that ranks have ended. most: of what they tell, the most of any."""
        if len(told) > 1:  # one rank has failed where others had ended theirs
            self._ended.clear()
            self._under_way.clear()
            return
        if self._ended:
            self._ended.popleft()  # it was told
        timed = self._under_way.pop(told.pop() - 1, None)
        if timed is not None:
            where, pipeline = timed
            trial = self._trials[where]
            if most[2] == 0:
                trial.note_failure(pipeline)
            else:
                trial.note_call(pipeline, Times.of_microseconds(most[2:]))
            if trial.awaits_curve and self._curve is not None and self._curve.covers(self._sizes_bytes(trial)):
                trial.note_exchanges(self._curve)
            self._learn(where)

    def _open(self, kind: Kind, rows: int, *, sent_bytes: int, ranks: int) -> None:
        """Begins a trial for a number of rows that is not known yet."""
        known = self._known.setdefault(kind, GranularityCache())
        if (kind, rows) in self._trials or known.known(rows) is not None:
            return
        most = self._options.most_parts
        if "tokens" not in self._options.splits:
            most = min(most, -(-kind.experts // ranks))
        least, most = known.bounds(rows, most=most)
        self._trials[kind, rows] = Trial(self._options, rows, least=least, most=most, sent_bytes=sent_bytes, records=kind.records)

    def _learn(self, where: tuple[Kind, int]) -> None:
        """Learns what a trial has chosen, if it has."""
        (kind, rows), choice = where, self._trials[where].choice
        if choice is not None and self._known[kind].known(rows) is None:
            self._known[kind].learn(rows, choice.pipeline)
            _log.info("%s", choice)

    def _sizes_bytes(self, trial: Trial) -> tuple[int, ...]:
        """Sizes of which exchanges are measured: all rows of a call, and those of its parts."""
        most = min(trial.sent_bytes, MOST_PROBED_BYTES)
        return tuple(max(1, most >> power) for power in range(trial.most_parts.bit_length()))
