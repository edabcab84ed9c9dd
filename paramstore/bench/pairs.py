"""Paired sampling: each of our samples is taken next to a sample of the limit, in alternating order.

A disk and its host drift by tens of percent within minutes; a ratio of neighbours does not. The reported figure is the
median of the paired ratios, with the least and the greatest as its spread; never a ratio of two medians.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import ceil
from statistics import median

ROUNDS_MIN = 5


@dataclass(frozen=True, slots=True)
class Sample:
    """One timed piece of work. work: bytes or parameters; cpu_s: what the working process used of the cores."""

    work: float
    seconds: float
    cpu_s: float = 0.0
    parts: dict[str, float] = field(default_factory=dict)

    @property
    def rate(self) -> float:
        """Work a second."""
        return self.work / self.seconds


@dataclass(frozen=True, slots=True)
class Pair:
    """Two samples taken one after the other: ours and the limit's."""

    ours: Sample
    limit: Sample

    @property
    def ratio(self) -> float:
        """Our rate over the limit's: 1.0 is as fast."""
        return self.ours.rate / self.limit.rate


@dataclass(frozen=True, slots=True)
class Pairs:
    """The pairs of one row, at least one."""

    pairs: tuple[Pair, ...]

    @property
    def ratio(self) -> float:
        return median(pair.ratio for pair in self.pairs)

    @property
    def ratio_min(self) -> float:
        return min(pair.ratio for pair in self.pairs)

    @property
    def ratio_max(self) -> float:
        return max(pair.ratio for pair in self.pairs)

    @property
    def rate(self) -> float:
        return median(pair.ours.rate for pair in self.pairs)

    @property
    def limit_rate(self) -> float:
        return median(pair.limit.rate for pair in self.pairs)

    @property
    def cpu_s_per_gb(self) -> float:
        """Core-seconds per 10^9 bytes of work, over all our samples, since a single one is too short for the kernel's clock."""
        return _cpu_s_per_gb([pair.ours for pair in self.pairs])

    @property
    def limit_cpu_s_per_gb(self) -> float:
        return _cpu_s_per_gb([pair.limit for pair in self.pairs])

    def parts(self) -> dict[str, float]:
        """Medians of the parts that our samples are made of; a part missing from a sample counts as 0.

        extra_s: seconds beyond those that the limit takes for the same amount of work.
        """
        names = sorted({name for pair in self.pairs for name in pair.ours.parts})
        made_of = {name: median(pair.ours.parts.get(name, 0.0) for pair in self.pairs) for name in names}
        return {
            "ours_s": median(pair.ours.seconds for pair in self.pairs),
            "limit_s": median(pair.limit.seconds for pair in self.pairs),
            "extra_s": median(pair.ours.seconds - pair.limit.seconds * pair.ours.work / pair.limit.work for pair in self.pairs),
            "ours_cpu_s": median(pair.ours.cpu_s for pair in self.pairs),
            "limit_cpu_s": median(pair.limit.cpu_s for pair in self.pairs),
            **made_of,
        }


def sample_pairs(
    rounds: int, ours: Callable[[int], Sample], limit: Callable[[int], Sample], *, warm_up_rounds: int = 1
) -> Pairs:
    """Takes `rounds` pairs, after untimed warm-up rounds. Both sides get the round's number, to work in equal order."""
    for number in range(warm_up_rounds):
        ours(-1 - number)
        limit(-1 - number)
    pairs = []
    for number in range(rounds):
        if number % 2 == 0:
            our_sample, limit_sample = ours(number), limit(number)
        else:
            limit_sample, our_sample = limit(number), ours(number)
        pairs.append(Pair(our_sample, limit_sample))
    return Pairs(tuple(pairs))


def percentile(values: Sequence[float], percent: float) -> float:
    """The least of `values` that at least `percent` of them do not exceed (nearest rank). `values` must not be empty."""
    ranked = sorted(values)
    return ranked[max(0, ceil(len(ranked) * percent / 100) - 1)]


def _cpu_s_per_gb(samples: list[Sample]) -> float:
    return sum(sample.cpu_s for sample in samples) / (sum(sample.work for sample in samples) / 1e9)
