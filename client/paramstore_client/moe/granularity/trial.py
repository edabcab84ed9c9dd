"""The search for one number of rows, as decisions over times: which pipeline the next call has, and which one stays.

First one part takes turns with some, and then what an exchange takes is measured: so a model knows computing in parts, and rows
alone. What it names best takes turns with one part in its turn, and stays only where the clock says that it wins.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, fields
from statistics import median

from paramstore_client.moe.granularity.clock import Times
from paramstore_client.moe.granularity.model import Curve, Estimate, passed
from paramstore_client.moe.pipeline_plan import Pipeline, PipelineSearch, pipelines_of

SOME = 4
"""Parts in which computing is measured beside one."""
CALLS = 3
"""How often a pipeline is timed before its median counts."""
TURNS = 7
"""How often the best one and one part take turns before the median of their ratios counts."""
GAIN = 1.05
"""How many times less time than one part a pipeline must take to be tried, and to stay."""
FAILURES = 2
"""How often a pipeline's calls fail before it is left out."""
MOST_BEGUN = 256
"""Calls that begin and none of which ends, after which nothing is tried until one does."""


@dataclass(frozen=True, slots=True)
class PipelineChoice:
    """The pipeline that was found for a number of rows of all ranks, and why. estimates: what the model expected of each."""

    rows: int
    pipeline: Pipeline
    why: str
    estimates: tuple[Estimate, ...]

    def __str__(self) -> str:
        return f"{self.rows} rows: {_named(self.pipeline)}: {self.why}"


class Trial:
    """Owner of what was measured for one number of rows. least, most: parts among which it searches. sent_bytes: what the rank with
    the most sends there in a call. records: whether calls have a backward."""

    def __init__(
        self, options: PipelineSearch, rows: int, *, least: int, most: int, sent_bytes: int, records: bool
    ) -> None:
        self._base = pipelines_of(options, 1)[0]
        self._rows = rows
        self._records = records
        self._some = min(SOME, most)
        self.sent_bytes = sent_bytes
        self.most_parts = most
        counts = [parts for parts in (1 << power for power in range(most.bit_length())) if least <= parts <= most]
        self._candidates = [pipeline for parts in counts for pipeline in pipelines_of(options, parts)]
        self._wanted: dict[Pipeline, int] = dict.fromkeys((self._base, *pipelines_of(options, self._some)), CALLS)
        self._begun: Counter[Pipeline] = Counter()
        self._failed: Counter[Pipeline] = Counter()
        self._begun_since = 0
        """Calls that have begun since one has ended."""
        self._times: defaultdict[Pipeline, list[Times]] = defaultdict(list)
        self._curve: Curve | None = None
        self._tried: Estimate | None = None
        self._estimates: tuple[Estimate, ...] = ()
        self.choice: PipelineChoice | None = None

    @property
    def awaits_curve(self) -> bool:
        """Whether only the times of exchanges are missing."""
        return self.choice is None and self._curve is None and not self._waiting() and len(self._wanted) > 1

    def next(self) -> Pipeline:
        """The next call's: of those that were not timed often enough, the one that was begun least often."""
        if self.choice is not None:
            return self.choice.pipeline
        if self._begun_since >= MOST_BEGUN:
            return self._base
        return min(self._waiting() or [self._base], key=self._begun.__getitem__)

    def begin(self, pipeline: Pipeline) -> None:
        """Notes that a call has begun."""
        self._begun[pipeline] += 1
        self._begun_since += 1

    def note_exchanges(self, curve: Curve) -> None:
        """Notes what exchanges take, when it awaits that."""
        self._curve = curve
        self._decide()

    def note_call(self, pipeline: Pipeline, times: Times) -> None:
        """Notes what a call took, of the rank that took longest."""
        self._begun_since = 0
        if pipeline in self._wanted and self.choice is None:
            self._times[pipeline].append(times)
            if not self._waiting() and not self.awaits_curve:
                self._decide()

    def note_failure(self, pipeline: Pipeline) -> None:
        """Notes that a call has failed on all ranks: one whose copies do not fit, say."""
        self._begun_since = 0
        self._failed[pipeline] += 1
        if pipeline == self._base or self._failed[pipeline] < FAILURES or self.choice is not None:
            return
        way = pipeline.split, pipeline.reuse
        self._candidates = [each for each in self._candidates if each == self._base or (each.split, each.reuse) != way]
        self._wanted.pop(pipeline, None)
        if self._tried is not None:
            self._choose(self._base, f"{_named(pipeline)} failed")
        elif not self._waiting() and not self.awaits_curve:
            self._decide()

    def estimates(self) -> Iterator[Estimate]:
        """What the model expects of each candidate, once all was measured that it needs."""
        assert self._curve is not None
        base = self._typical(self._base)
        sends = 2 + self._base.sends_again
        factors = [  # times longer than when all send alike, and nothing else is to be done
            max(0.0, took_s - computing_s) / (times * self._curve.at(self.sent_bytes))
            for took_s, computing_s, times in (
                (base.forward_s, base.forward_computing_s, 2), (base.backward_s, base.backward_computing_s, sends)
            )
        ]  # fmt: skip
        for pipeline in self._candidates:
            exchange_s = self._curve.at(self.sent_bytes / pipeline.parts)
            forward_s, backward_s = self._computing(pipeline)
            forward = passed(
                pipeline.parts, there_s=factors[0] * exchange_s, computing_s=forward_s, back_s=factors[0] * exchange_s
            )
            backward = passed(
                pipeline.parts, there_s=factors[1] * exchange_s * (1 + pipeline.sends_again), computing_s=backward_s,
                back_s=factors[1] * exchange_s,
            )  # fmt: skip
            yield Estimate(pipeline, forward, backward if self._records else None)

    def _computing(self, pipeline: Pipeline) -> tuple[float, float]:
        """Seconds in which one part of `pipeline` is computed, forward and backward: what its strategy takes in some parts, less
        what each further part adds."""
        some = self._typical(Pipeline(self._some, pipeline.split, pipeline.reuse, pipeline.host_bytes))
        first = self._typical(Pipeline(self._some, pipeline.split, self._base.reuse, pipeline.host_bytes))
        base = self._typical(self._base)
        each = []
        for name in ("forward_computing_s", "backward_computing_s"):
            added_s = max(0.0, getattr(first, name) - getattr(base, name)) / max(1, self._some - 1)
            whole_s = getattr(some, name) - added_s * (self._some - 1)
            each.append((whole_s + added_s * (pipeline.parts - 1)) / pipeline.parts)
        return each[0], each[1]

    def _typical(self, pipeline: Pipeline) -> Times:
        """The median of what its calls took, each time by itself; that of one part where none was timed."""
        times = self._times[pipeline] or self._times[self._base]
        return Times(*(median(getattr(each, field.name) for each in times) for field in fields(Times)))

    def _waiting(self) -> list[Pipeline]:
        return [pipeline for pipeline, wanted in self._wanted.items() if len(self._times[pipeline]) < wanted]

    def _decide(self) -> None:
        """Chooses, or wants what must be timed before."""
        if self._tried is not None:
            self._choose_by_clock(self._tried)
            return
        if self._curve is None or not self._candidates:
            self._choose(self._base, "nothing else can be chosen")
            return
        self._estimates = tuple(self.estimates())
        of_base = next((each for each in self._estimates if each.pipeline == self._base), None)
        best = min(self._estimates, key=lambda each: each.seconds)
        if best is of_base or (of_base is not None and best.seconds * GAIN > of_base.seconds):
            self._choose(self._base, f"no pipeline is expected to be {GAIN:g} times as fast; it is mostly {best.bound}")
            return
        self._tried = best
        self._wanted = dict.fromkeys((self._base, best.pipeline), TURNS)
        self._times.clear()
        self._begun.clear()

    def _choose_by_clock(self, tried: Estimate) -> None:
        taken = [[each.seconds for each in self._times[pipeline]] for pipeline in (self._base, tried.pipeline)]
        ratio, (base_s, tried_s) = median(base / other for base, other in zip(*taken, strict=False)), map(median, taken)
        told = f"{1e3 * tried_s:.1f} ms, expected {1e3 * tried.seconds:.1f}, beside {1e3 * base_s:.1f} ms of {_named(self._base)}"
        if ratio >= GAIN:
            self._choose(tried.pipeline, f"{told}; it is mostly {tried.bound}")
        else:
            self._choose(self._base, f"{_named(tried.pipeline)} took {told}")

    def _choose(self, pipeline: Pipeline, why: str) -> None:
        self.choice = PipelineChoice(self._rows, pipeline, why, self._estimates)


def _named(pipeline: Pipeline) -> str:
    parts = "one part" if pipeline.parts == 1 else f"{pipeline.parts} parts of {pipeline.split}"
    return parts if pipeline.reuse == "keep" else f"{parts}, {pipeline.reuse}"
